"""How many tokens the martingale needs to find a bias, from the probabilities p(A) that the run met.

Under a bias b, x falls into A with min(1, p(A) + b) at every drafted place. The log-wealth of each bet is then a sum of
independent terms whose mean and variance follow from the values of p(A); all winning bets rise and fall together, so that the
wealth at a normal quantile z is the mixture of their wealths at z. That leaves out that the wealth may have crossed earlier and
fallen back, so the true power is a little higher.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import log, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from vllm_specplugin.validate.stakes import Floats, log_factors, log_mean

EDGES = 1 / (1 + np.exp(-np.linspace(-14, 14, 85)))
"""Bins of p(A), even in its logit: fine where a bet is sensitive to it. 1e-6 to 1 - 1e-6, and beyond."""

MOST_TOKENS = 10**15
STEPS = 10_000
"""A bias, or a z, is found to one part in so many."""


class Spread:
    """Which probabilities p(A) came up: per bin their number and sum."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(EDGES) + 1, np.int64)
        self.sums = np.zeros(len(EDGES) + 1)

    def add(self, p: Floats) -> None:
        """Count p(A), `[tokens]`."""
        bins = np.searchsorted(EDGES, p)
        self.counts += np.bincount(bins, minlength=len(self.counts))
        np.add.at(self.sums, bins, p)  # in order, so that a resumed run has the same bits

    @property
    def total(self) -> int:
        """Tokens counted."""
        return int(self.counts.sum())

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"counts": self.counts.tolist(), "sums": self.sums.tolist()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Spread:
        """From `state`."""
        spread = cls()
        spread.counts, spread.sums = np.asarray(state["counts"], np.int64), np.asarray(state["sums"], np.float64)
        return spread


class PowerModel:
    """Power of a mixture of bets that stands for `share` of the overall e-value, to reach 1/alpha."""

    def __init__(self, spread: Spread, alpha: float, share: float) -> None:
        met = spread.counts > 0
        self.weights = spread.counts[met] / max(1, spread.total)
        self.p = spread.sums[met] / spread.counts[met]
        self.goal = log(1 / alpha) - log(share)
        ones = np.ones(len(self.p), np.bool_)
        self.win, self.lose = log_factors(self.p, ones), log_factors(self.p, ~ones)

    def tokens_needed(self, bias: float, power: float) -> int | None:
        """Drafted places needed to find `bias` with probability `power`; None where no number is enough."""
        z = -NormalDist().inv_cdf(power)
        needed = 1 + bisect_left(range(1, MOST_TOKENS), True, key=lambda tokens: self._found(bias, tokens, z))
        return needed if needed < MOST_TOKENS else None

    def probability(self, bias: float, tokens: int) -> float:
        """With which `bias` is found in so many drafted places."""
        # _found is monotone in z: the share of the normal distribution above the lowest z that is enough.
        lowest = bisect_left(range(STEPS), True, key=lambda step: self._found(bias, tokens, 16 * step / STEPS - 8))
        return 1 - NormalDist().cdf(16 * lowest / STEPS - 8) if tokens else 0.0

    def detectable(self, tokens: int, power: float) -> float | None:
        """The smallest bias that is found with probability `power` in so many drafted places; None where none is."""
        z = -NormalDist().inv_cdf(power)
        step = bisect_left(range(1, STEPS), True, key=lambda step: self._found((step / STEPS) ** 2, tokens, z))
        return ((step + 1) / STEPS) ** 2 if tokens and step < STEPS - 1 else None

    def _found(self, bias: float, tokens: int, z: float) -> bool:
        """Whether the wealth reaches the goal when luck is `z` standard deviations above the mean."""
        if not len(self.p):
            return False
        hit = np.minimum(self.p + bias, 1.0)[:, None]
        mean = self.weights @ (hit * self.win + (1 - hit) * self.lose)
        square = self.weights @ (hit * self.win**2 + (1 - hit) * self.lose**2)
        deviation = np.sqrt(np.maximum(square - mean**2, 0.0))
        return bool(log_mean(tokens * mean + z * sqrt(tokens) * deviation, axis=0) >= self.goal)
