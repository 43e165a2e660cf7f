"""Chi-square tests: scipy's, over bins that are wide enough for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

LEAST_EXPECTED = 5.0
"""Bins with a smaller expected count are merged, as the approximation needs (Cochran's rule)."""


def p_value(observed: ArrayLike, expected: ArrayLike) -> float:
    """How likely counts as uneven as these are; 0 where something came that has no probability."""
    counts, means = np.asarray(observed, dtype=np.float64).ravel(), np.asarray(expected, dtype=np.float64).ravel()
    means = means * (counts.sum() / means.sum())  # float32 probabilities do not sum to 1 exactly
    if counts[means == 0].any():
        return 0.0
    order = np.argsort(means)
    counts, means = counts[order], means[order]
    # From the smallest on, a bin ends as soon as enough is expected in it; what is left over joins the last one.
    starts, total = [0], 0.0
    for place, mean in enumerate(means):
        total += mean
        if total >= LEAST_EXPECTED:
            starts.append(place + 1)
            total = 0.0
    starts = starts[:-1]
    assert len(starts) > 1, "too little is expected for a test"
    return float(stats.chisquare(np.add.reduceat(counts, starts), np.add.reduceat(means, starts)).pvalue)


def independence_p_value(first: ArrayLike, second: ArrayLike) -> float:
    """The same for the independence of two small whole numbers, seen together again and again."""
    table = np.zeros((np.max(first) + 1, np.max(second) + 1))
    np.add.at(table, (np.asarray(first), np.asarray(second)), 1)
    table = table[table.sum(axis=1) > 0][:, table.sum(axis=0) > 0]
    assert stats.contingency.expected_freq(table).min() >= LEAST_EXPECTED, "too few observations"
    return float(stats.chi2_contingency(table).pvalue)
