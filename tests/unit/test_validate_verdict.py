"""The verdict and its sentence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.validate_tokens import bets, plain, sampled
from vllm_specplugin.validate.betting import Martingale
from vllm_specplugin.validate.chisquare import Cell, ChiSquare, chi_square
from vllm_specplugin.validate.evidence import Evidence
from vllm_specplugin.validate.greedy import Greedy, Output, compare
from vllm_specplugin.validate.records import Tokens
from vllm_specplugin.validate.verdict import Decision, Levels, Verdict, decide, e_value, percent, probability


def evidence_of(*parts: Tokens) -> Evidence:
    martingale = Martingale(Levels.of(1e-3).martingale)
    for part in parts:
        martingale.add(part)
    return martingale.evidence(0.05)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def lossless() -> Evidence:
    return evidence_of(sampled(rng(), np.full(20_000, 0.4)))


def first_tokens(observed: list[int], probabilities: tuple[float, ...] = (0.5, 0.5, 0.0)) -> ChiSquare:
    return chi_square([Cell("a", np.array(probabilities), np.array(observed))], Levels.of(1e-3).chi_square, 0.05)


def greedy(margin: float) -> Greedy:
    return compare([("a", Output([5], [{5: -0.1, 6: -0.1 - margin}]), Output([6], [{6: -0.1, 5: -0.2}]))])


def test_the_levels_add_up_to_alpha() -> None:
    levels = Levels.of(0.01)
    assert levels.martingale + levels.chi_square == pytest.approx(0.01)
    assert levels.chi_square == pytest.approx(0.001)


def test_exit_codes() -> None:
    assert [(v.value, v.exit_code) for v in Verdict] == [("LOSSLESS", 0), ("BIASED", 1), ("INCONCLUSIVE", 2)]


def test_lossless_says_at_which_power(lossless: Evidence) -> None:
    assert decide(lossless, first_tokens([500, 500, 0]), greedy(0.0)) == Decision(
        Verdict.LOSSLESS,
        "no evidence of a bias in 20,000 tokens (20,000 with a draft tested), "
        "where a bias of 5% would have been found with probability over 0.99.",
    )
    assert decide(lossless, None, None).verdict is Verdict.LOSSLESS


def test_the_martingale_alone_is_enough() -> None:
    decision = decide(evidence_of(sampled(rng(), np.full(20_000, 0.4), bias=0.05)), None, None)
    assert decision.verdict is Verdict.BIASED
    assert decision.reason.startswith("the e-value reached 1,111 after ")
    assert "most of it at draft 1, set 'draft': 8,8" in decision.reason
    assert "8,000 expected, +1" in decision.reason


def test_hits_as_many_as_expected_but_in_the_wrong_places() -> None:
    # As many hits as p(A) promises in all, but half of them where A was next to impossible.
    p = np.tile([0.5, 1e-4], 200)
    hits = np.zeros(400, np.bool_)
    hits[:200:2] = True
    hits[1], hits[0] = True, False
    decision = decide(evidence_of(bets(p, hits), bets(p, hits)), None, None)
    assert decision.verdict is Verdict.BIASED
    assert "hits, 200 expected, -0.0 sd, but they came where they were least likely" in decision.reason


def test_an_impossible_token_alone_is_enough() -> None:
    decision = decide(evidence_of(bets(np.array([0.5, 0.0]), np.array([True, True]))), None, None)
    assert decision == Decision(Verdict.BIASED, "1 token of probability 0 came out of the engine.")


def test_a_greedy_bug_alone_is_enough_and_a_tie_is_not(lossless: Evidence) -> None:
    decision = decide(lossless, None, greedy(0.5))
    assert decision == Decision(Verdict.BIASED, "1 of 1 greedy outputs part from plain decoding by more than rounding.")
    assert decide(lossless, None, greedy(1e-6)).verdict is Verdict.LOSSLESS


def test_the_chi_square_alone_is_enough(lossless: Evidence) -> None:
    decision = decide(lossless, first_tokens([600, 400, 0]), None)
    assert decision.verdict is Verdict.BIASED
    assert "p = 2.5e-10, below 0.0001" in decision.reason
    # Below alpha, but not below the share of it that this test may spend.
    suspicious = first_tokens([555, 445, 0])
    assert 1e-4 < suspicious.p_value < 1e-3
    assert decide(lossless, suspicious, None).verdict is Verdict.LOSSLESS
    decision = decide(lossless, first_tokens([500, 498, 2]), None)
    assert decision == Decision(Verdict.BIASED, "2 first tokens had probability 0.")


def test_a_verifier_that_calls_itself_lossy_is_believed(lossless: Evidence) -> None:
    decision = decide(lossless, None, None, lossy="typical")
    assert decision == Decision(Verdict.BIASED, "the verifier 'typical' is lossy by its own account.")


def test_all_reasons_are_given() -> None:
    evidence = evidence_of(sampled(rng(), np.full(20_000, 0.4), bias=0.05))
    reason = decide(evidence, first_tokens([600, 400, 0]), greedy(0.5), lossy="typical", interrupted=True).reason
    assert reason.count(";") == 4  # four reasons, and the place inside one
    assert reason.endswith(".")


def test_too_few_tokens_are_inconclusive() -> None:
    decision = decide(evidence_of(sampled(rng(), np.full(1000, 0.4))), None, None)
    assert decision.verdict is Verdict.INCONCLUSIVE
    assert decision.reason.startswith("no evidence of a bias so far, but ")
    assert " more tokens are needed to find a bias of 5% with probability 0.95 (1,000 seen, which find it" in decision.reason


def test_what_no_number_of_tokens_shows_is_inconclusive() -> None:
    decision = decide(evidence_of(bets(np.ones(500), np.ones(500, np.bool_))), None, None)
    assert decision.verdict is Verdict.INCONCLUSIVE
    assert "more tokens than can be told are needed" in decision.reason


def test_nothing_drafted_is_inconclusive() -> None:
    decision = decide(evidence_of(plain(rng(), 5000)), first_tokens([500, 500, 0]), None)
    assert decision.verdict is Verdict.INCONCLUSIVE
    assert decision.reason == "no evidence of a bias so far, but nothing was drafted, so nothing was tested."


def test_an_interrupted_run_is_inconclusive_unless_it_is_biased(lossless: Evidence) -> None:
    decision = decide(lossless, None, None, interrupted=True)
    assert decision == Decision(Verdict.INCONCLUSIVE, "no evidence of a bias so far, but the run was interrupted.")
    assert decide(replace(lossless, crossed_at=7), None, None, interrupted=True).verdict is Verdict.BIASED


@pytest.mark.parametrize(
    ("log10", "text"),
    [
        (0, "1"),
        (0.3010299957, "2"),
        (-2, "0.01"),
        (3.1, "1.26e+03"),
        (8.5315, "3.4e+08"),
        (1204.01, "1.0e+1204"),
        (-7.5, "3.2e-08"),
    ],
)
def test_e_values_of_any_size_are_readable(log10: float, text: str) -> None:
    assert e_value(log10) == text


def test_a_mantissa_that_rounds_to_ten_is_carried() -> None:
    assert e_value(6.9999) == "1.0e+07"


def test_shares_and_probabilities() -> None:
    assert [percent(value) for value in (0.01, 0.00162, 0.5)] == ["1%", "0.162%", "50%"]
    assert [probability(value) for value in (0.0, 0.009, 0.5, 0.991, 1.0)] == [
        "under 0.01",
        "under 0.01",
        "0.50",
        "over 0.99",
        "over 0.99",
    ]
