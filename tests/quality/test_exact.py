"""The rules proven exactly: every outcome enumerated with fractions, drafting included, and the law of the output equal to the
target's. The rules are those of `scorers/exact.py`; `test_exact_tensors.py` and `test_agreement.py` carry it to the tensor code.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.quality.cases import CASES, CONTROLS, ONE_HOT
from tests.quality.laws import Way, distance, extended, law
from vllm_specplugin.scorers import exact
from vllm_specplugin.scorers.exact import Rule

LOSSLESS: dict[str, Rule] = {"walk": exact.walk, "token": exact.token, "block": exact.block}


@pytest.fixture(params=LOSSLESS)
def rule(request: pytest.FixtureRequest) -> Rule:
    return LOSSLESS[request.param]


def way_of(case: str, rule: Rule, k: int, control: str = "always", one_hot: bool = False) -> Way:
    target, drafter = CASES[case]
    return Way(target, drafter, rule, k, CONTROLS[control], one_hot=one_hot)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_one_pass(rule: Rule, case: str, k: int) -> None:
    for prompt in [(), (1,), (0, 2)]:
        assert distance(way_of(case, rule, k), tokens=k + 1, passes=1, prompt=prompt) == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("control", CONTROLS)
def test_one_pass_of_a_length_decided_on_the_way(rule: Rule, case: str, control: str) -> None:
    assert distance(way_of(case, rule, 3, control), tokens=4, passes=1) == 0


@pytest.mark.parametrize("case", ONE_HOT)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_pass_over_drafts_without_probabilities(rule: Rule, case: str, k: int) -> None:
    way = way_of(case, rule, k, one_hot=True)
    assert distance(way, tokens=k + 1, passes=1) == 0
    assert law(way, k + 1, passes=1) == law(way_of(case, rule, k), k + 1, passes=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("k", "tokens", "control"), [(1, 4, "always"), (2, 4, "always"), (3, 3, "stop_after_low_confidence")])
def test_several_passes(rule: Rule, case: str, k: int, tokens: int, control: str) -> None:
    assert distance(way_of(case, rule, k, control), tokens) == 0


@pytest.mark.parametrize("case", CASES)
def test_drafts_that_pass_for_chosen_without_chance(case: str) -> None:
    # Why one_hot is safe with any proposer: not knowing q costs acceptance, never the law.
    for rule in LOSSLESS.values():
        assert distance(way_of(case, rule, 2, one_hot=True), tokens=3) == 0


def test_typical_is_told_apart() -> None:
    target, drafter = CASES["soft"]
    assert distance(Way(target, drafter, exact.typical, 2), tokens=3) > Fraction(1, 10)


def test_where_the_target_is_followed_some_other_model_is_not() -> None:
    # The harness would see it if a law were compared with itself.
    target, drafter = CASES["soft"]
    ours = law(Way(target, drafter, exact.token, 2), tokens=3)
    assert ours != extended(drafter, {(): Fraction(1)}, 3)


def expected_accepted(way: Way) -> Fraction:
    """Drafts that a pass accepts on average."""
    one_pass = exact.outcomes(lambda chance: len(way.one_pass((), chance)) - 1)
    return sum((accepted * probability for accepted, probability in one_pass), Fraction(0))


@pytest.mark.parametrize("case", CASES)
def test_block_accepts_at_least_as_much_as_token(case: str) -> None:
    for control in CONTROLS:
        for k in (1, 2, 3):
            token, block, walk = (
                expected_accepted(way_of(case, rule, k, control)) for rule in (exact.token, exact.block, exact.walk)
            )
            assert block >= token >= walk, (control, k)
            if case in ONE_HOT or k == 1:
                assert block == token
            if case in ONE_HOT:
                assert token == walk


def test_block_accepts_more_where_a_likely_draft_follows_an_unlikely_one() -> None:
    gains = {}
    for case in CASES:
        token, block = (expected_accepted(way_of(case, rule, 3)) for rule in (exact.token, exact.block))
        gains[case] = block - token
    assert {case for case, gain in gains.items() if gain > 0} >= {"soft", "decided_drafter", "ties"}, gains
