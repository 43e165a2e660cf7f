"""Do the engine's first tokens after fixed prompts follow the model's own distribution? Pearson's chi-square, with its power.

The martingale takes p from the passes that it judges; here p comes from plain decoding, so logits that speculation itself
changed show as well. Plain decoding and the engine under test round differently, so the null hypothesis is not that the
samples follow p to the last bit: a noncentrality is granted to rounding. One test with a fixed number of samples: look at its
p-value once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

LEAST_EXPECTED = 5.0
"""Bins that expect fewer samples are merged; below that, the statistic is far from chi-square distributed."""

NEGLIGIBLE = 0.01
"""A noncentrality below this moves no p-value that matters; it is not granted."""

ALTERNATIVE = "the mass moves from all other tokens, in proportion, to each prompt's likeliest token"
"""For which kind of bias the power is stated."""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """Samples of one next token after one fixed prefix."""

    label: str
    probabilities: NDArray[np.float64]
    """`[vocab]`, sums to 1: the model's own, sampling parameters applied. All 0 where none is known: the test leaves the
    cell out but for its samples, which are impossible."""
    observed: NDArray[np.int64]
    """`[vocab]`, how often each token was sampled."""


@dataclass(frozen=True, slots=True)
class Bin:
    """A token of a cell, or several merged (`token` None)."""

    label: str
    token: int | None
    expected: float
    observed: int
    deviation: float
    """Standard deviation of the count, sqrt(n p (1 - p))."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """A sampled token that has probability 0."""

    label: str
    token: int
    observed: int


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """The test over all cells."""

    samples: int
    cells: int
    statistic: float
    degrees: int
    """Of freedom: bins less one, summed over the cells."""
    p_value: float
    """The probability of such a statistic, or a larger one, of a lossless engine: noncentral chi-square, see `noncentrality`."""
    alpha: float
    tv: float
    """The bias, as total variation, that `power` is stated for."""
    power: float
    """Probability of p_value < alpha at the bias `tv` (noncentral chi-square)."""
    power_asked: float
    detectable: float | None
    """The smallest total variation that is found with the probability `power_asked`; None where none is."""
    alternative: str
    bins: tuple[Bin, ...]
    """The largest by expected count."""
    impossible: tuple[Impossible, ...]
    noncentrality: float = 0.0
    """What is granted to rounding between the engines; 0 where it is negligible."""


@dataclass(frozen=True, slots=True, eq=False)
class _Merged:
    """A cell with its rare tokens merged; columns are `[bins]`, the likeliest token first, what was merged last."""

    label: str
    tokens: list[int | None]
    expected: NDArray[np.float64]
    observed: NDArray[np.int64]


def chi_square(
    cells: Sequence[Cell], alpha: float, tv: float, power: float = 0.95, largest_bins: int = 24, spread: float = 0.0
) -> ChiSquare:
    """Test all cells at once: statistics and degrees of freedom add up.

    Args:
        cells: the samples and what is expected.
        alpha: this test's own share.
        tv: the bias, as total variation, that the power is stated for.
        power: the one that `detectable` is stated for.
        largest_bins: how many bins to report.
        spread: nats, the root mean square by which rounding moves the logits that the probabilities are made of.
    """
    merged = [_merge(cell) for cell in cells if cell.observed.sum() and cell.probabilities.any()]
    statistic = float(sum((((m.observed - m.expected) ** 2) / m.expected).sum() for m in merged))
    degrees = sum(len(m.expected) - 1 for m in merged)
    granted = _granted(merged, spread)
    critical = _critical(degrees, alpha, granted)
    return ChiSquare(
        samples=int(sum(m.observed.sum() for m in merged)),
        cells=len(merged),
        statistic=statistic,
        degrees=degrees,
        p_value=_tail(statistic, degrees, granted) if degrees else 1.0,
        alpha=alpha,
        tv=tv,
        power=_power(merged, degrees, critical, alpha, tv),
        power_asked=power,
        detectable=_detectable(merged, degrees, critical, alpha, power),
        alternative=ALTERNATIVE,
        bins=_largest(merged, largest_bins),
        impossible=tuple(
            Impossible(cell.label, int(token), int(cell.observed[token]))
            for cell in cells
            for token in np.flatnonzero((cell.probabilities <= 0) & (cell.observed > 0))
        ),
        noncentrality=granted,
    )


def _granted(merged: Sequence[_Merged], spread: float) -> float:
    """The noncentrality that rounding may give the statistic of a lossless engine.

    Samples come from p' ~ p exp(e), where e is by how much rounding moved each logit. Then the sum of n (p' - p)^2 / p is n times
    the variance of e under p, on average n s^2 (1 - sum p^2) for independent e of variance s^2; merging bins makes it no larger.
    """
    variance = 2 * spread**2  # twice what was measured: at other places it may be larger
    shares = (cell.expected / cell.expected.sum() for cell in merged)
    total = float(sum(cell.expected.sum() * (1 - (p**2).sum()) for cell, p in zip(merged, shares, strict=True)))
    return total * variance if total * variance >= NEGLIGIBLE else 0.0


def _tail(statistic: float, degrees: int, noncentrality: float) -> float:
    """The probability of such a statistic or a larger one."""
    from scipy.stats import chi2, ncx2

    return float(ncx2.sf(statistic, degrees, noncentrality) if noncentrality else chi2.sf(statistic, degrees))


def _critical(degrees: int, alpha: float, noncentrality: float) -> float:
    """The statistic above which the test rejects; infinite where there is nothing to compare."""
    from scipy.stats import chi2, ncx2

    if not degrees:
        return inf
    return float(ncx2.isf(alpha, degrees, noncentrality) if noncentrality else chi2.isf(alpha, degrees))


def _merge(cell: Cell) -> _Merged:
    """Tokens that expect fewer than `LEAST_EXPECTED` samples, impossible ones among them, make one bin together."""
    probabilities = np.asarray(cell.probabilities, np.float64)
    observed = np.asarray(cell.observed, np.int64)
    if probabilities.shape != observed.shape or abs(probabilities.sum() - 1) > 1e-3:  # a float32 softmax sums to 1 +- 1e-5
        raise ValueError(f"{cell.label}: not a distribution and its counts: {probabilities.shape}, sum {probabilities.sum():.6g}")
    expected = probabilities / probabilities.sum() * observed.sum()
    order = np.argsort(-expected, kind="stable")
    alone = int((expected >= LEAST_EXPECTED).sum())
    rest = expected[order[alone:]].sum()
    if alone and 0 < rest < LEAST_EXPECTED:
        alone -= 1  # the rest is too small for a bin of its own: it takes the smallest of the others in
    kept, others = order[:alone], order[alone:]
    tokens: list[int | None] = [int(token) for token in kept]
    columns = expected[kept], observed[kept]
    if expected[others].sum() > 0 or not alone:
        tokens.append(None)
        columns = np.append(columns[0], expected[others].sum()), np.append(columns[1], observed[others].sum())
    return _Merged(cell.label, tokens, *columns)


def _power(merged: Sequence[_Merged], degrees: int, critical: float, alpha: float, tv: float) -> float:
    """Probability of a statistic above `critical` when `tv` of mass moves as `ALTERNATIVE` says, and rounding moves none."""
    noncentrality = 0.0
    for cell in merged:
        samples = cell.expected.sum()
        if len(cell.expected) > 1:
            top = cell.expected[0] / samples
            # Sum of n (p' - p)^2 / p over the bins; the others shrink in proportion, which makes the sum this one term.
            noncentrality += samples * min(tv, 1 - top) ** 2 / (top * (1 - top))
    return _tail(critical, degrees, noncentrality) if degrees and noncentrality else alpha


def _detectable(merged: Sequence[_Merged], degrees: int, critical: float, alpha: float, power: float) -> float | None:
    """The total variation at which `_power` is `power`."""
    from scipy.optimize import brentq

    def missing(tv: float) -> float:
        return _power(merged, degrees, critical, alpha, tv) - power

    if not degrees or missing(1.0) < 0:
        return None
    return float(brentq(missing, 1e-9, 1.0, xtol=1e-6))


def _largest(merged: Sequence[_Merged], count: int) -> tuple[Bin, ...]:
    """The bins with the largest expected counts, largest first."""
    bins = [
        Bin(cell.label, token, float(expected), int(observed), float(np.sqrt(expected * (1 - expected / cell.expected.sum()))))
        for cell in merged
        for token, expected, observed in zip(cell.tokens, cell.expected, cell.observed, strict=True)
    ]
    return tuple(sorted(bins, key=lambda item: -item.expected)[:count])
