"""Estimates with their uncertainty. Whole texts are resampled, since the tokens of one text are not independent of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST_UNITS = 6
"""For an interval by resampling: if all of 5 units agree, chance alone may do that in 6 % of cases (2 / 2^5), of 6 in 3 %."""
_NORMAL_QUANTILE = 1.959963984540054
"""Of `CONFIDENCE`, both sides."""


class Estimate(BaseModel):
    """A figure with its 95 % confidence interval, which it has none of where it rests on too few units (`FEWEST_UNITS`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float | None
    high: float | None
    units: int
    """Independent pieces that it rests on: texts, or questions."""

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of a monotonous function of it."""
        if self.low is None or self.high is None:
            return self.model_copy(update={"value": function(self.value)})
        low, high = sorted((function(self.low), function(self.high)))
        return Estimate(value=function(self.value), low=low, high=high, units=self.units)

    @property
    def settled(self) -> bool:
        """Of a difference: whether there is an interval, and it leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Estimate:
    """sum(numerators) / sum(denominators) over units, by the percentile bootstrap over units.

    Raises:
        ValueError: no unit has a positive denominator, so that nothing was measured.
    """
    above, below = _measured(numerators, denominators)
    picks = _picks(len(above), seed)
    return _estimate(above.sum() / below.sum(), _ratios(above, below, picks), len(above))


def difference(
    numerators: Sequence[float],
    denominators: Sequence[float],
    other_numerators: Sequence[float],
    other_denominators: Sequence[float],
    seed: int = 0,
) -> Estimate:
    """The first ratio minus the second, over the same units in the same order: each resample picks the same units for both."""
    above, below, other_above, other_below = _measured(numerators, denominators, other_numerators, other_denominators)
    picks = _picks(len(above), seed)
    value = above.sum() / below.sum() - other_above.sum() / other_below.sum()
    return _estimate(value, _ratios(above, below, picks) - _ratios(other_above, other_below, picks), len(above))


def share(successes: int, trials: int) -> Estimate:
    """A share of independent trials with Wilson's score interval, which stays sensible near 0 and 1."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes of {trials} trials")
    z2 = _NORMAL_QUANTILE**2
    rate = successes / trials
    middle = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _NORMAL_QUANTILE * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return Estimate(value=rate, low=max(0.0, middle - half), high=min(1.0, middle + half), units=trials)


def _measured(*columns: Sequence[float]) -> list[NDArray[np.float64]]:
    """Numerators and denominators in turn, without the units in which a denominator is 0: nothing was tried there."""
    if len({len(column) for column in columns}) != 1:
        raise ValueError(f"columns of {', '.join(str(len(column)) for column in columns)} units")
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    kept = np.all([below > 0 for below in arrays[1::2]], axis=0)
    if not kept.any():
        raise ValueError("no unit has anything measured in it")
    return [array[kept] for array in arrays]


def _picks(units: int, seed: int) -> NDArray[np.int64]:
    """`[RESAMPLES, units]`"""
    return np.random.default_rng(seed).integers(0, units, size=(RESAMPLES, units))


def _ratios(above: NDArray[np.float64], below: NDArray[np.float64], picks: NDArray[np.int64]) -> NDArray[np.float64]:
    ratios: NDArray[np.float64] = above[picks].sum(axis=1) / below[picks].sum(axis=1)
    return ratios


def _estimate(value: float, resampled: NDArray[np.float64], units: int) -> Estimate:
    if units < FEWEST_UNITS:
        return Estimate(value=float(value), low=None, high=None, units=units)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value=float(value), low=float(low), high=float(high), units=units)
