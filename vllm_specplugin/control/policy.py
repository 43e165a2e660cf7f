"""Which drafts to verify in one step: those that bring the most tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.control import kernels


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Draft lengths for one step, and what they are expected to bring."""

    lengths: NDArray[np.int64]
    """`[rows]`"""
    requests: int
    """Requests that emit at least a token in the step."""
    tokens: float
    """Tokens expected of the step."""
    seconds: float
    """What the step is expected to take."""
    plain_seconds: float
    """What it would take without drafts."""

    @property
    def speedup(self) -> float:
        """Tokens per second, as a multiple of the same step's without drafts."""
        return self.tokens / self.requests * self.plain_seconds / self.seconds


def choose(
    acceptance: NDArray[np.float64],
    lengths: NDArray[np.int64],
    requests: int,
    seconds: Callable[[int], NDArray[np.float64]],
    margin: float = 0.0,
) -> Choice:
    """The draft lengths with the most expected tokens per second for the whole batch.

    A draft counts if all before it in its row are accepted, so its gain is the product of acceptances up to it. Gains fall along
    a row; so the best choice of any number of drafts is that of the largest gains, and one sort finds the best number.

    Args:
        acceptance: `[rows, k]`, how probably each draft is accepted once those before it are.
        lengths: `[rows]`, how many drafts there are.
        requests: how many of the rows emit a token in any case; the others are still prefilling, and without drafts.
        seconds: for a number n, what steps with 0, 1, ... n drafts in all take: `[n + 1]`.
        margin: by what part the gain must exceed the costs, or there are no drafts at all.
    """
    gains, owners = kernels.ranked(acceptance, lengths)
    costs = seconds(len(gains))
    tokens = requests + np.concatenate([[0.0], gains.cumsum()])
    rates = tokens / costs
    best = int(rates.argmax())
    if rates[best] < rates[0] * (1 + margin):
        best = 0
    chosen = np.bincount(owners[:best], minlength=len(lengths))
    return Choice(chosen, requests, float(tokens[best]), float(costs[best]), float(costs[0]))
