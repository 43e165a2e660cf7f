"""Sums of what objectives say about batches, and the figures that are shown of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_specplugin.train.objective import Losses, acceptance, acceptance_length


@dataclass(slots=True)
class Tally:
    """Losses and right drafts over several batches, each weighted by the places that count in it."""

    places: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """By name, 'loss' and the parts: nats summed over places."""
    right: list[float] = field(default_factory=list)
    tested: list[float] = field(default_factory=list)

    def add(self, losses: Losses, places: int) -> None:
        """Add a batch in which so many places count."""
        self.places += places
        for name, value in {"loss": losses.total, **losses.parts}.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach()) * places
        self.right = _sum(self.right, losses.right.tolist())
        self.tested = _sum(self.tested, losses.tested.tolist())

    def merge(self, other: Tally) -> None:
        """Add all that another one has seen."""
        self.places += other.places
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.right = _sum(self.right, other.right)
        self.tested = _sum(self.tested, other.tested)

    @property
    def rates(self) -> list[float]:
        """`[depth]`: acceptance of each draft, given those before it."""
        return acceptance(torch.tensor(self.right), torch.tensor(self.tested))

    @property
    def length(self) -> float:
        """The estimated acceptance length."""
        return acceptance_length(self.rates)

    def figures(self) -> dict[str, float]:
        """What is written and shown: means of the losses, acceptance_1, acceptance_2, ..., acceptance_length."""
        means = {name: value / max(1, self.places) for name, value in self.sums.items()}
        rates = {f"acceptance_{depth}": rate for depth, rate in enumerate(self.rates, 1)}
        return {**means, **rates, "acceptance_length": self.length}

    def dump(self) -> dict[str, Any]:
        return {"places": self.places, "sums": dict(self.sums), "right": list(self.right), "tested": list(self.tested)}


def _sum(sums: list[float], more: list[float]) -> list[float]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else [float(value) for value in more]
