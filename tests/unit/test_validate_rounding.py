"""A lossless engine that rounds as bfloat16 does is not called biased, and one that is biased is found all the same.

The plain engine says what is expected; the engine under test has logits that differ by Gaussian noise, another one at each place,
and samples from those. The noise is measured as `validate` does, from log-probabilities of greedy outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from vllm_specplugin.validate.betting import Martingale
from vllm_specplugin.validate.chisquare import ChiSquare, chi_square
from vllm_specplugin.validate.distribution import distribution
from vllm_specplugin.validate.first_tokens import cells
from vllm_specplugin.validate.greedy import Greedy, Output, compare
from vllm_specplugin.validate.outcome import rounding
from vllm_specplugin.validate.sampling import Sampling
from vllm_specplugin.validate.verdict import Levels, Verdict, decide

NOISE = 0.05  # nats
PLACES, VOCAB, SAMPLES = 60, 500, 100_000
SEEDS = range(5)
ALPHA = 1e-3  # of the run; a lossless engine fails here with probability 1e-4 per seed, and each seed is always the same
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "all, warm": {"top_p": 0.95, "top_k": 80, "min_p": 0.01, "temperature": 1.3},
}
PREFIXES: list[tuple[int, tuple[int, ...]]] = [(place, ()) for place in range(PLACES)]
Shift = Callable[[np.ndarray, np.ndarray], np.ndarray]


def logits(seed: int) -> np.ndarray:
    """`[PLACES, VOCAB]`: the i-th likeliest token has a probability of about 1 / i."""
    rng = np.random.default_rng(seed)
    zipf = -np.log(np.arange(1, VOCAB + 1))
    return np.array([rng.permutation(zipf + 0.3 * rng.normal(size=VOCAB)) for _ in range(PLACES)])


@cache
def greedy(seed: int, noise: float) -> Greedy:
    """Log-probabilities of the 20 likeliest tokens, 480 positions, by the two engines."""
    rng = np.random.default_rng([seed, 1])
    plain: list[dict[int, float]] = []
    tested: list[dict[int, float]] = []
    for row in np.concatenate([logits(more) for more in range(100, 108)]):
        rows = [values - np.logaddexp.reduce(values) for values in (row, row + noise * rng.normal(size=VOCAB))]
        likeliest = np.argsort(-row)[:20]
        for said, values in zip((plain, tested), rows, strict=True):
            said.append({int(token): float(values[token]) for token in likeliest})
    return compare([("a", Output([0] * len(plain), plain), Output([0] * len(plain), tested))], "bfloat16")


def one_run(
    seed: int, sampling: Sampling, noise: float = NOISE, shift: Shift | None = None, heed: bool = True
) -> tuple[ChiSquare, int]:
    """The chi-square of one run and the samples that it left out.

    `shift` makes the engine biased; `heed` false is the test as it was before: it takes no heed of rounding.
    """
    rng, raw = np.random.default_rng([seed, 2]), logits(seed)
    values = raw / sampling.temperature
    moved = torch.from_numpy(raw + noise * rng.normal(size=raw.shape))
    p = distribution(moved, sampling).probabilities.double().numpy()
    p = p if shift is None else shift(p, values)
    counts = [
        [place, int(token), int(row[token])]
        for place, row in enumerate(rng.multinomial(SAMPLES // PLACES, p / p.sum(axis=1, keepdims=True)))
        for token in np.flatnonzero(row)
    ]
    slack, spread = rounding(sampling, greedy(seed, noise)) if heed else (0.0, 0.0)
    found, left_out = cells(PREFIXES, values, sampling, slack, counts)
    return chi_square(found, Levels.of(ALPHA).chi_square, 0.01, spread=spread), left_out


def biased(square: ChiSquare) -> bool:
    return decide(Martingale(Levels.of(ALPHA).martingale).evidence(0.01), square, None).verdict is Verdict.BIASED


@pytest.mark.parametrize("case", CASES)
def test_a_lossless_engine_that_rounds_is_not_biased(case: str) -> None:
    sampling = Sampling(**CASES[case])
    for seed in SEEDS:
        square, left_out = one_run(seed, sampling)
        assert not biased(square), seed
        assert square.impossible == ()
        assert square.samples + left_out == PLACES * (SAMPLES // PLACES)
        assert left_out < 0.3 * SAMPLES  # most is tested; a flat tail has many tokens near the cut
        assert square.noncentrality > 1


@pytest.mark.parametrize("case", CASES)
def test_it_would_be_called_biased_if_rounding_were_not_heeded(case: str) -> None:
    sampling = Sampling(**CASES[case])
    # Where nothing is cut there is only the drift of p. It takes more of it to be seen in 100,000 samples.
    noise = 2 * NOISE if case == "none" else NOISE
    for seed in SEEDS:
        assert biased(one_run(seed, sampling, noise, heed=False)[0])
        assert not biased(one_run(seed, sampling, noise)[0])


@pytest.mark.parametrize("case", [case for case in CASES if case != "none"])
def test_a_token_far_from_the_cut_is_impossible(case: str) -> None:
    def one_in_a_thousand(p: np.ndarray, values: np.ndarray) -> np.ndarray:
        moved = 0.999 * p
        moved[np.arange(PLACES), values.argmin(axis=1)] += 0.001
        return moved

    for seed in SEEDS:
        square, _ = one_run(seed, Sampling(**CASES[case]), shift=one_in_a_thousand)
        assert biased(square)
        assert sum(item.observed for item in square.impossible) > 50


def moved_to(rank: int, share: float) -> Shift:
    """At each place `share` of mass goes to the token of this rank, from all others in proportion."""

    def shift(p: np.ndarray, values: np.ndarray) -> np.ndarray:
        at = np.arange(PLACES), np.argsort(-values, axis=1)[:, rank]
        moved = p * ((1 - p[at] - share) / (1 - p[at]))[:, None]
        moved[at] = p[at] + share
        return moved

    return shift


@pytest.mark.parametrize("case", CASES)
def test_two_per_cent_of_mass_moved_to_an_ordinary_token_are_found(case: str) -> None:
    for seed in SEEDS:
        assert biased(one_run(seed, Sampling(**CASES[case]), shift=moved_to(9, 0.02))[0])


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_to_be_detectable_is_found(case: str) -> None:
    """To the likeliest token, of which rounding moves most: there a bias must be larger, and the report says so."""
    for seed in SEEDS:
        said = one_run(seed, Sampling(**CASES[case]))[0].detectable
        assert said is not None
        assert 0.02 < said < 0.05
        assert biased(one_run(seed, Sampling(**CASES[case]), shift=moved_to(0, 0.05))[0])


@pytest.mark.parametrize("case", CASES)
def test_rounding_of_float32_grants_nothing(case: str) -> None:
    for seed in SEEDS:
        square, left_out = one_run(seed, Sampling(**CASES[case]), noise=1e-6)
        assert square.noncentrality == 0
        assert square.p_value == pytest.approx(chi2.sf(square.statistic, square.degrees), abs=1e-6)
        assert left_out < 1e-3 * SAMPLES  # now and then two tokens are as good as equal at the cut
        assert not biased(square)
        if case == "none":
            assert square == one_run(seed, Sampling(), noise=1e-6, heed=False)[0]
