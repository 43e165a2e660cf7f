"""Wrong rules, and right rules driven wrongly, are told from right ones by the exact law of what they emit."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.quality.laws import distance
from tests.quality.mutants import HARMLESS, PAIRS, Pair

TOKENS = 3
"""More than one pass of two drafts is sure to emit, so that what one pass leaves behind for the next shows."""

KILLED_ABOVE = Fraction(1, 100)
"""Total variation of the first `TOKENS` tokens, exactly computed: the lossless ways have 0."""


@pytest.mark.parametrize("name", PAIRS)
def test_is_killed(name: str) -> None:
    found = {case: distance(mutant, TOKENS) for case, (_, mutant) in PAIRS[name].ways().items()}
    assert max(found.values()) > KILLED_ABOVE, found


@pytest.mark.parametrize("name", PAIRS)
def test_the_right_way_beside_it_is_lossless(name: str) -> None:
    assert all(distance(right, TOKENS) == 0 for right, _ in PAIRS[name].ways().values())


@pytest.mark.parametrize("pair", HARMLESS.values(), ids=HARMLESS)
def test_a_harmless_change_passes(pair: Pair) -> None:
    assert all(distance(changed, TOKENS) == 0 for _, changed in pair.ways().values())


@pytest.mark.parametrize("name", ["block_noise_keyed_by_position", "draft_noise_keyed_by_position_under_block"])
def test_noise_that_is_met_again_shows_in_the_second_pass_only(name: str) -> None:
    # Whoever looks at single passes does not find it: vLLM 0.32 keys block verification's uniforms by (seed, position).
    for _, mutant in PAIRS[name].ways().values():
        assert distance(mutant, TOKENS, passes=1) == 0
