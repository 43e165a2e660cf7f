"""Pearson's chi-square over several distributions: right under losslessness, and as powerful as it says."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, chisquare, ncx2

from vllm_specplugin.validate.chisquare import LEAST_EXPECTED, Cell, chi_square


def cell(probabilities: object, observed: object, label: str = "cell") -> Cell:
    return Cell(label, np.asarray(probabilities, np.float64), np.asarray(observed, np.int64))


def sampled(rng: np.random.Generator, n: int = 400, cells: int = 3, tv: float = 0.0, vocab: int = 64) -> list[Cell]:
    """Counts from wide distributions; `tv` of mass goes to the likeliest token of each."""
    made = []
    for index in range(cells):
        p = np.random.default_rng(index).dirichlet(np.full(vocab, 0.3))  # the same ones in every run
        shifted = p * (1 - p.max() - tv) / (1 - p.max())
        shifted[p.argmax()] = p.max() + tv
        made.append(Cell(f"cell {index}", p, rng.multinomial(n, shifted)))
    return made


def test_equals_scipy_where_nothing_is_merged() -> None:
    first, second = [0.5, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]
    result = chi_square([cell(first, [60, 25, 15]), cell(second, [50, 60, 40, 50])], 0.01, 0.05)
    a, b = chisquare([60, 25, 15], [50, 30, 20]), chisquare([50, 60, 40, 50])
    assert result.statistic == pytest.approx(a.statistic + b.statistic)
    assert (result.degrees, result.cells, result.samples) == (2 + 3, 2, 300)
    assert chi_square([cell(second, [50, 60, 40, 50])], 0.01, 0.05).p_value == pytest.approx(b.pvalue)


def test_rare_tokens_share_a_bin() -> None:
    result = chi_square([cell([0.5, 0.4, 0.04, 0.03, 0.02, 0.01], [55, 34, 5, 2, 3, 1])], 0.01, 0.05)
    assert [(item.token, item.expected, item.observed) for item in result.bins] == [(0, 50, 55), (1, 40, 34), (None, 10, 11)]
    assert result.degrees == 2
    assert result.bins[2].deviation == pytest.approx((100 * 0.1 * 0.9) ** 0.5)


def test_a_rest_too_small_for_a_bin_takes_another_in() -> None:
    result = chi_square([cell([0.5, 0.46, 0.02, 0.02], [50, 45, 2, 3])], 0.01, 0.05)
    assert [(item.token, item.expected, item.observed) for item in result.bins] == [(0, 50, 50), (None, 50, 50)]
    assert result.degrees == 1


def test_what_expects_just_enough_stays_alone() -> None:
    result = chi_square([cell([0.5, 0.4, 0.05, 0.03, 0.02], [50, 40, 5, 3, 2])], 0.01, 0.05)
    assert [item.token for item in result.bins] == [0, 1, 2, None]


def test_every_bin_expects_enough() -> None:
    result = chi_square(sampled(np.random.default_rng(0)), 0.01, 0.05, largest_bins=1000)
    assert len(result.bins) == result.degrees + result.cells
    assert min(item.expected for item in result.bins) >= LEAST_EXPECTED
    assert sum(item.observed for item in result.bins) == result.samples
    assert [item.expected for item in result.bins] == sorted((item.expected for item in result.bins), reverse=True)
    assert len(chi_square(sampled(np.random.default_rng(0)), 0.01, 0.05, largest_bins=7).bins) == 7


def test_p_values_of_a_lossless_engine_are_uniform() -> None:
    runs = 600
    p_values = [chi_square(sampled(np.random.default_rng(seed)), 0.01, 0.05).p_value for seed in range(runs)]
    for level in (0.01, 0.05, 0.2, 0.5, 0.8):
        # A right test leaves this interval once in 1,000 (and chi-square itself is off by a few per cent of the level).
        low, high = binom.ppf(0.0005, runs, 0.9 * level), binom.ppf(0.9995, runs, 1.1 * level)
        assert low <= sum(p < level for p in p_values) <= high


@pytest.mark.parametrize("tv", [0.04, 0.08])
def test_the_power_said_is_the_power_seen(tv: float) -> None:
    runs, alpha = 300, 0.01
    results = [chi_square(sampled(np.random.default_rng(seed), tv=tv), alpha, tv) for seed in range(runs)]
    found = sum(result.p_value < alpha for result in results) / runs
    said = results[0].power
    assert 0.05 < said < 0.99
    assert found == pytest.approx(said, abs=4 * (said * (1 - said) / runs) ** 0.5 + 0.03)  # 0.03: the statistic is discrete


def test_the_detectable_bias_has_the_power_asked_for() -> None:
    cells = sampled(np.random.default_rng(0))
    detectable = chi_square(cells, 0.01, 0.05, power=0.9).detectable
    assert detectable is not None
    assert chi_square(cells, 0.01, detectable).power == pytest.approx(0.9, abs=1e-3)
    more = chi_square(sampled(np.random.default_rng(0), n=4000), 0.01, 0.05, power=0.9).detectable
    assert more is not None
    assert more < detectable / 2


def test_verification_md_sample_sizes() -> None:
    """Uniform cells: 45,000 samples (2 bins), 89,000 (16), 147,000 (64) see a total variation of 0.01 at 0.01 with 0.95."""
    for bins, samples in ((2, 45_000), (16, 89_000), (64, 147_000)):
        # There the shift is spread over half of the bins: the same noncentrality as sum (p' - p)^2 / p = 4 tv^2.
        top = 1 / bins
        tv = 2 * 0.01 * (top * (1 - top)) ** 0.5
        counts = np.full(bins, samples // bins)
        assert chi_square([cell(np.full(bins, top), counts)], 0.01, tv).power == pytest.approx(0.95, abs=0.01)


def test_an_impossible_token_is_reported_by_itself() -> None:
    result = chi_square([cell([0.6, 0.4, 0.0, 0.0], [60, 38, 0, 2], "after 'a'")], 0.01, 0.05)
    assert [(item.label, item.token, item.observed) for item in result.impossible] == [("after 'a'", 3, 2)]
    assert np.isfinite(result.statistic)
    assert chi_square([cell([0.6, 0.4, 0.0], [60, 40, 0])], 0.01, 0.05).impossible == ()


def test_too_few_samples_detect_nothing() -> None:
    result = chi_square([cell([0.5, 0.5], [7, 3])], 1e-9, 0.05)
    assert result.degrees == 1
    assert result.detectable is None


@pytest.mark.parametrize(
    "cells",
    [[], [cell([0.5, 0.5], [0, 0])], [cell([0.9, 0.1], [3, 1])], [cell([1.0, 0.0], [100, 0])]],
    ids=["none", "no samples", "few samples", "one token"],
)
def test_nothing_to_compare_is_no_evidence(cells: list[Cell]) -> None:
    result = chi_square(cells, 0.01, 0.05)
    assert (result.statistic, result.degrees, result.p_value, result.detectable) == (0.0, 0, 1.0, None)
    assert result.power == 0.01


def test_a_cell_without_samples_does_not_count() -> None:
    both = chi_square([cell([0.5, 0.5], [0, 0]), cell([0.5, 0.5], [40, 60])], 0.01, 0.05)
    assert both.cells == 1
    assert both.p_value == pytest.approx(chisquare([40, 60]).pvalue)


def test_what_is_no_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cell: not a distribution"):
        chi_square([cell([0.5, 0.4], [5, 5])], 0.01, 0.05)
    with pytest.raises(ValueError, match="not a distribution"):
        chi_square([cell([0.5, 0.5], [5, 5, 5])], 0.01, 0.05)


def test_a_sum_that_rounding_moved_is_taken_for_1() -> None:
    result = chi_square([cell([0.50002, 0.50002], [50, 50])], 0.01, 0.05)
    assert [item.expected for item in result.bins] == [50, 50]


def test_no_bias_can_move_more_than_there_is() -> None:
    cells = [cell([0.98, 0.02], [980, 20])]
    assert chi_square(cells, 0.01, 0.5).power == pytest.approx(chi_square(cells, 0.01, 0.02).power)
    assert chi_square(cells, 0.01, 0.5).power > chi_square(cells, 0.01, 0.01).power


# -- rounding ------------------------------------------------------------------------------------------------


def test_what_is_granted_to_rounding() -> None:
    cells = [cell([0.5, 0.3, 0.2], [60, 25, 15]), cell([0.25] * 4, [500, 500, 500, 500]), cell([1.0, 0.0], [100, 0])]
    granted = chi_square(cells, 0.01, 0.05, spread=0.1)
    assert granted.noncentrality == pytest.approx(2 * 0.1**2 * (100 * (1 - 0.38) + 2000 * 0.75))
    plain = chi_square(cells, 0.01, 0.05)
    assert (plain.noncentrality, plain.statistic) == (0, granted.statistic)
    assert granted.p_value == pytest.approx(ncx2.sf(plain.statistic, plain.degrees, granted.noncentrality))
    assert granted.p_value > plain.p_value
    assert granted.power < plain.power
    assert granted.detectable is not None
    assert plain.detectable is not None
    assert granted.detectable > plain.detectable
    assert chi_square(cells, 0.01, granted.detectable, spread=0.1).power == pytest.approx(0.95, abs=1e-3)


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-5])
def test_rounding_of_float32_changes_nothing(spread: float) -> None:
    cells = sampled(np.random.default_rng(3), n=5000, cells=10)
    assert chi_square(cells, 0.01, 0.05, spread=spread) == chi_square(cells, 0.01, 0.05)


def test_a_cell_of_which_nothing_is_known_holds_impossible_tokens_only() -> None:
    known = cell([0.5, 0.5], [40, 60])
    result = chi_square([known, cell([0.0, 0.0], [0, 3])], 0.01, 0.05)
    assert (result.cells, result.p_value) == (1, chi_square([known], 0.01, 0.05).p_value)
    assert [(item.token, item.observed) for item in result.impossible] == [(1, 3)]
