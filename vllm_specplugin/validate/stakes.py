"""What a gambler may stake on 1{x in A}: a fixed mixture of bets, none of which can lose everything.

Three exposures, each of mean 0 when x follows p and of at least -1:
- `1{x in A} - p` for both signs: a bias that shifts the odds of A, a wrong temperature say;
- `1{x in A} / p - 1`: a bug that now and then forces a token of A, an unearned acceptance say;
- `1{x not in A} / (1 - p) - 1`: one that forces a token outside A.
The last two are worth the more, the less likely the token was: they make a token of probability 1e-9 overwhelming evidence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TILTS = np.geomspace(0.006, 0.8, 8)
FORCED = np.geomspace(0.001, 0.5, 8)
"""Shares of the wealth, log-spaced over what biases of 0.1 % to half call for (the best tilt is bias / p (1 - p)). Neighbours
are near enough that the best of them grows at 85 % or more of the best rate of all (Kelly's)."""

COUNT = 2 * len(TILTS) + 2 * len(FORCED)
"""Bets per set."""

LEAST_INSIDE = 1e-30
"""Below this a float32 probability loses digits. Taking p for larger than it is makes the bet on A worse, never unfair."""
LEAST_OUTSIDE = 1e-6
"""The same for 1 - p, where p is a sum of float32 probabilities that rounds near 1."""


def log_factors(p: Floats, hits: NDArray[np.bool_]) -> Floats:
    """The logarithm of what each bet multiplies the wealth by, `[tokens, COUNT]`, for p(A) and 1{x in A}, `[tokens]` each."""
    odds = np.where(hits, 1 - p, -p)
    inside = np.where(hits, 1 / np.maximum(p, LEAST_INSIDE) - 1, -1.0)
    outside = np.where(hits, -1.0, 1 / np.maximum(1 - p, LEAST_OUTSIDE) - 1)
    tilted = np.outer(odds, TILTS)
    return np.log1p(np.hstack([tilted, -tilted, np.outer(inside, FORCED), np.outer(outside, FORCED)]))


def log_mean(values: Floats, axis: int) -> Floats:
    """log of the mean of exp(values) along an axis, without overflow: the log of a mixture's wealth."""
    highest = values.max(axis=axis, keepdims=True)
    mean = np.exp(values - highest).mean(axis=axis)
    return np.log(mean) + highest.squeeze(axis)


def running_sums(start: Floats, values: Floats) -> Floats:
    """`start` plus the sums of the first 1, 2, ... rows of `values`; `[rows, ...]` like `values`.

    Added one by one, so that rows fed in two parts give the same bits as rows fed at once.
    """
    return np.cumsum(np.concatenate([start[None], values]), axis=0)[1:]
