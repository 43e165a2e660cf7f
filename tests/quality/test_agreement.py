"""The tensor code equals the rules of `scorers/exact.py` on the same numbers, over thousands of random batches."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.quality.agreement import Comparison, compare, random_batch
from vllm_specplugin.scorers import exact
from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.scorers.block import BlockVerifier
from vllm_specplugin.scorers.drawing import BLOCK
from vllm_specplugin.scorers.exact import Rule
from vllm_specplugin.scorers.one_hot import OneHotVerifier
from vllm_specplugin.scorers.token import TokenVerifier
from vllm_specplugin.scorers.typical import TypicalVerifier

PAIRS: dict[str, tuple[Verifier, Rule]] = {
    "one_hot": (OneHotVerifier(), exact.walk),
    "token": (TokenVerifier(), exact.token),
    "block": (BlockVerifier(), exact.block),
    "typical": (TypicalVerifier(), exact.typical),
}
CONCLUDES = ["token", "block"]
"""Those that end in `drawing.conclude`, and so draw from residuals."""

AROUND_BLOCKS = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 2500, 3000]


def played(name: str, examples: int, rows: int, vocabularies: st.SearchStrategy[int]) -> Comparison:
    """Many random batches, each also without probabilities."""
    verifier, rule = PAIRS[name]
    seen = Comparison()

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        seed=st.integers(0, 2**40),
        k=st.integers(0, 5),
        vocab=vocabularies,
        zeros=st.sampled_from([0.0, 0.3, 0.95]),
        one_hot=st.booleans(),
    )
    def play(seed: int, k: int, vocab: int, zeros: float, one_hot: bool) -> None:
        arguments = random_batch(seed, rows, k, vocab, zeros, one_hot)
        if one_hot:
            arguments["draft_probs"] = None
        compare(verifier, rule, arguments, seen)
        assert not seen.far()

    play()
    return seen


@pytest.mark.parametrize("name", PAIRS)
def test_small_vocabularies(name: str) -> None:
    seen = played(name, examples=200, rows=20, vocabularies=st.integers(2, 40))
    check(name, seen, at_least=3000)


@pytest.mark.parametrize("name", PAIRS)
def test_vocabularies_around_the_blocks_of_the_draw(name: str) -> None:
    seen = played(name, examples=60, rows=12, vocabularies=st.sampled_from(AROUND_BLOCKS))
    check(name, seen, at_least=500)


def check(name: str, seen: Comparison, at_least: int) -> None:
    assert seen.rows >= at_least
    assert seen.accepted > seen.rows / 50, "hardly a draft was accepted"
    assert seen.refused > seen.rows / 50, "hardly a draft was refused"
    # Chance puts about NEAR times the number of thresholds in a row's draw, some thousands at most, near one of them.
    assert len(seen.differing) <= 3 + seen.rows / 100, seen.differing
    assert bool(seen.residuals) == (name in CONCLUDES)
    assert max(seen.residuals, default=0.0) <= 1.0
