"""Counts beside the martingale: where tokens came from, and how often each set came up at each place of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.validate.evidence import Family, Place
from vllm_specplugin.validate.records import Kind, Tokens
from vllm_specplugin.validate.stakes import COUNT, Floats, log_mean, running_sums

CEILING = 308 * log(10)
"""An impossible token is infinite evidence; as a log-wealth of at least this, it stays a number in JSON."""


@dataclass(slots=True)
class Tally:
    """One set at one place of a pass."""

    tokens: int = 0
    observed: int = 0
    impossible: int = 0
    sums: Floats = field(default_factory=lambda: np.zeros(2))
    """Of p(A) and of p(A) (1 - p(A))."""
    log_wealth: Floats = field(default_factory=lambda: np.zeros(COUNT))

    def add(self, p: Floats, hits: NDArray[np.bool_], log_factors: Floats) -> None:
        """Count tokens: p(A) and 1{x in A} `[tokens]`, what each bet won `[tokens, COUNT]`."""
        self.tokens += len(p)
        self.observed += int(hits.sum())
        self.impossible += int((hits & (p <= 0)).sum())
        self.sums = running_sums(self.sums, np.stack([p, p * (1 - p)], axis=1))[-1]
        self.log_wealth = running_sums(self.log_wealth, log_factors)[-1]

    def place(self, family: Family, name: str, draft_position: int, kind: str) -> Place:
        """As it is reported."""
        expected, variance = self.sums.tolist()
        deviation = sqrt(max(variance, 0.0))
        log_e = float(log_mean(self.log_wealth, axis=0))
        return Place(
            family=family,
            set=name,
            place=f"draft {draft_position}" if draft_position else kind,
            draft_position=draft_position,
            tokens=self.tokens,
            observed=self.observed,
            expected=expected,
            deviation=deviation,
            z=(self.observed - expected) / deviation if deviation else 0.0,
            log10_e=(max(log_e, CEILING) if self.impossible else log_e) / log(10),
        )

    def state(self) -> list[Any]:
        """JSON values."""
        return [self.tokens, self.observed, self.impossible, self.sums.tolist(), self.log_wealth.tolist()]

    @classmethod
    def from_state(cls, state: list[Any]) -> Tally:
        """From `state`."""
        tokens, observed, impossible, sums, log_wealth = state
        return cls(tokens, observed, impossible, np.asarray(sums, np.float64), np.asarray(log_wealth, np.float64))


class Passes:
    """Tokens by kind, and drafts accepted by their position."""

    def __init__(self) -> None:
        self.kinds = np.zeros(len(Kind), np.int64)
        self.accepted: dict[int, int] = {}
        self.drafted_passes = 0

    def add(self, tokens: Tokens) -> None:
        """Count tokens."""
        self.kinds += np.bincount(tokens.kind, minlength=len(Kind))
        self.drafted_passes += int((tokens.draft_position == 1).sum())  # a pass with drafts always tests the first
        positions, counts = np.unique(tokens.draft_position[tokens.kind == Kind.ACCEPTED], return_counts=True)
        for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
            self.accepted[position] = self.accepted.get(position, 0) + count

    @property
    def drafted(self) -> int:
        """Tokens at places where a draft was tested."""
        return int(self.kinds[Kind.ACCEPTED] + self.kinds[Kind.RESIDUAL])

    @property
    def passes(self) -> int:
        """Target passes: every one ends in a token that is no accepted draft."""
        return int(self.kinds.sum() - self.kinds[Kind.ACCEPTED])

    def acceptance_length(self) -> float:
        """Tokens per pass."""
        return float(self.kinds.sum() / self.passes) if self.passes else 0.0

    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of the passes with drafts that accepted at least 1, 2, ... of them."""
        return tuple(self.accepted.get(i, 0) / self.drafted_passes for i in range(1, max(self.accepted, default=0) + 1))

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"kinds": self.kinds.tolist(), "accepted": sorted(self.accepted.items()), "drafted_passes": self.drafted_passes}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Passes:
        """From `state`."""
        passes = cls()
        passes.kinds = np.asarray(state["kinds"], np.int64)
        passes.accepted = dict(state["accepted"])
        passes.drafted_passes = state["drafted_passes"]
        return passes
