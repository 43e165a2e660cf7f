"""Suffix decoding in the engine: the tokens of plain decoding, and more of them per pass once a question has been answered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, SideBySide

SUFFIX = {"proposer": "suffix", "options": {"max_cached_tokens": 8192}}
K, NUM_TOKENS = 6, 24
ASKED = PROMPTS[2:5]


@pytest.mark.parametrize("asked", [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")])
def test_the_second_time_the_answer_is_known(engines: SideBySide, asked: dict[str, Any]) -> None:
    engines.open(K, plugin=SUFFIX)
    params = asked | {"max_tokens": NUM_TOKENS}
    known = [result.token_ids for result in engines.baseline(ASKED, params)]
    first, _ = engines.draft(ASKED, params)
    second, counters = engines.draft(ASKED, params)
    assert [result.token_ids for result in first] == known
    assert [result.token_ids for result in second] == known
    # A first token by itself, then up to K + 1 per pass; a pass or two may be lost to a context that had other sequels too.
    assert counters.accepted >= len(ASKED) * (NUM_TOKENS - 1) * 2 // 3


def test_an_edit_of_the_prompt(engines: SideBySide) -> None:
    """A target that is paid to repeat its prompt is drafted for from the prompt alone."""
    engines.open(K, plugin=SUFFIX)
    params = GREEDY | {"max_tokens": NUM_TOKENS, "frequency_penalty": -2.0}
    prompts = [PROMPTS[7] * 2, PROMPTS[5]]
    known = [result.token_ids for result in engines.baseline(prompts, params)]
    results, counters = engines.draft(prompts, params)
    assert [result.token_ids for result in results] == known
    assert counters.accepted > 0
