"""The tensor code itself proven exactly, over probabilities that float32 holds exactly (see `tensor_laws.py`)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.quality.cases import CASES, CONTROLS, ONE_HOT
from tests.quality.laws import Way
from tests.quality.tensor_laws import tensor_distance
from vllm_specplugin.scorers import exact
from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.scorers.block import BlockVerifier
from vllm_specplugin.scorers.exact import Rule
from vllm_specplugin.scorers.one_hot import OneHotVerifier
from vllm_specplugin.scorers.token import TokenVerifier
from vllm_specplugin.scorers.typical import TypicalVerifier

VERIFIERS: dict[str, tuple[Verifier, Rule]] = {
    "one_hot": (OneHotVerifier(), exact.walk),
    "token": (TokenVerifier(), exact.token),
    "block": (BlockVerifier(), exact.block),
}


@pytest.fixture(params=VERIFIERS)
def pair(request: pytest.FixtureRequest) -> tuple[Verifier, Rule]:
    return VERIFIERS[request.param]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [1, 2])
def test_chains(pair: tuple[Verifier, Rule], case: str, k: int) -> None:
    verifier, rule = pair
    target, drafter = CASES[case]
    assert tensor_distance(verifier, Way(target, drafter, rule, k)) == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("control", [name for name in CONTROLS if name not in ("always", "never")])
def test_ragged_batches_with_nonsense_past_each_length(pair: tuple[Verifier, Rule], case: str, control: str) -> None:
    verifier, rule = pair
    target, drafter = CASES[case]
    # Three drafts multiply the walk's intervals, which are one per position and token, beyond use.
    k = 2 if rule is exact.walk else 3
    assert tensor_distance(verifier, Way(target, drafter, rule, k, CONTROLS[control])) == 0


@pytest.mark.parametrize("case", ["soft", "decided_drafter", "zeros_in_q", "refused_after_an_unlikely_one"])
@pytest.mark.parametrize("name", ["token", "block"])
def test_chains_of_three(name: str, case: str) -> None:
    verifier, rule = VERIFIERS[name]
    target, drafter = CASES[case]
    assert tensor_distance(verifier, Way(target, drafter, rule, 3)) == 0


@pytest.mark.parametrize("case", ONE_HOT)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_drafts_without_probabilities(pair: tuple[Verifier, Rule], case: str, k: int) -> None:
    verifier, rule = pair
    target, drafter = CASES[case]
    assert tensor_distance(verifier, Way(target, drafter, rule, k, one_hot=True)) == 0


@pytest.mark.parametrize("case", ["soft", "zeros"])
def test_sampled_drafts_that_pass_for_chosen_without_chance(pair: tuple[Verifier, Rule], case: str) -> None:
    verifier, rule = pair
    target, drafter = CASES[case]
    assert tensor_distance(verifier, Way(target, drafter, rule, 2, one_hot=True)) == 0


def test_typical_is_told_apart() -> None:
    target, drafter = CASES["soft"]
    assert tensor_distance(TypicalVerifier(), Way(target, drafter, exact.typical, 2)) > Fraction(1, 10)


@pytest.mark.parametrize(("ours", "theirs"), [("token", "block"), ("block", "token"), ("one_hot", "token")])
def test_thresholds_of_another_rule_are_found_out(ours: str, theirs: str) -> None:
    # The intervals come from the exact rule; were they believed blindly, any verifier would pass.
    target, drafter = CASES["soft"]
    assert tensor_distance(VERIFIERS[ours][0], Way(target, drafter, VERIFIERS[theirs][1], 2)) > Fraction(1, 100)
