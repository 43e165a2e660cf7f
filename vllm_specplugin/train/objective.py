"""The contract of a training objective: what it is given, what it returns. It knows no files, optimiser or progress bars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from vllm_specplugin.train.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """What an objective makes of a batch."""

    total: torch.Tensor
    """Scalar, to be minimised: a sum over places **divided by `batch.num_counted`**, whatever the number of places that a
    depth really has. So batches weighted by that number add up to the loss of the one big batch that they are parts of."""
    parts: Mapping[str, torch.Tensor]
    """Scalars to be shown, detached, by name; divided like `total`."""
    right: torch.Tensor
    """`[depth]`: places where draft d, and every draft before it, is the token that the target wrote."""
    tested: torch.Tensor
    """`[depth]`: places where every draft before d is right, and there is a token to compare draft d with."""


class Objective(nn.Module, ABC):
    """Heads and what they are trained for. Parameters with `requires_grad` are trained, everything else is left alone.

    The loop calls `schedule` before each step, `loss` for each batch (under autocast where the run is in bfloat16, without
    gradients where it evaluates), and in the end `export`. Randomness must come from torch's global generator: it is saved with
    the state of a run, so that an interrupted one goes on as if nothing had happened.
    """

    name: ClassVar[str]
    """As users call it: 'medusa'."""
    states: ClassVar[Literal["none", "last", "aux"]] = "last"
    """Which of the target's states its batches carry."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many drafts are judged: the length of `Losses.right`."""

    @abstractmethod
    def loss(self, batch: Batch) -> Losses:
        """The loss of a batch and how many of its drafts are right."""

    @abstractmethod
    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write a checkpoint that the proposer of this name loads."""

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether weight decay pulls at a parameter: at matrices, not at norms, gates, scales and biases."""
        return parameter.ndim >= 2

    def schedule(self, share: float) -> None:
        """Adapt to the share of the run that is done, in [0, 1]: a hook for weights that change while training."""


def acceptance(right: torch.Tensor, tested: torch.Tensor) -> list[float]:
    """`[depth]`: the share of drafts that are accepted once those before them were; 0 where none was tested."""
    return [float(r) / float(t) if t else 0.0 for r, t in zip(right.tolist(), tested.tolist(), strict=True)]


def acceptance_length(rates: list[float]) -> float:
    """Tokens per target pass that these rates come to: 1 + a_1 + a_1 a_2 + ..., the token after the drafts included."""
    length, reach = 1.0, 1.0
    for rate in rates:
        reach *= rate
        length += reach
    return length


def chained(right: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Losses.right` and `Losses.tested` from what each draft is by itself.

    Args:
        right: `[places, depth]` bool: draft d at this place is the target's token.
        known: `[places, depth]` bool: there is a token to compare it with.
    """
    # A draft is reached if all before it were right; one that cannot be compared ends the chain.
    good = right & known
    alive = torch.cumprod(good.int(), dim=1).bool()
    reached = torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], dim=1)
    return alive.sum(0), (reached & known).sum(0)
