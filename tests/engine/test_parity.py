"""With drafts of every quality the tokens are those of plain decoding, and the metrics say exactly what was accepted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, Forecast, SideBySide, absent_token, forecast, prompt_of, script
from tests.support import steps
from tests.support.engine import Result
from tests.support.tiny import VOCAB_SIZE

KS = [1, 2, 3, 5, 8]
MODES = ["oracle", "half_oracle", "constant", "random", "empty", "over_long"]
NUM_TOKENS = 14
AHEAD = max(KS)  # baselines go on, so that it is known what is accepted at the end

NGRAM = {"proposer": "ngram", "options": {"min_n": 2, "max_n": 5}}


def scripts(mode: str, prompts: list[list[int]], known: list[Result]) -> list[dict[str, Any]]:
    wrong = absent_token(*(result.token_ids for result in known))
    return [script(mode, prompt, result.token_ids, token=wrong) for prompt, result in zip(prompts, known, strict=True)]


def check(
    engines: SideBySide, prompts: list[list[int]], asked: dict[str, Any], modes: list[str], num_tokens: int = NUM_TOKENS
) -> Forecast:
    """Tokens and metrics of one batch; what the metrics were."""
    known = engines.baseline(prompts, asked | {"max_tokens": num_tokens + AHEAD})
    params = [asked | {"max_tokens": num_tokens} | scripts(mode, prompts, known)[row] for row, mode in enumerate(modes)]
    results, counters = engines.draft(prompts, params)
    assert [result.token_ids for result in results] == [result.token_ids[:num_tokens] for result in known]
    assert {result.finish_reason for result in results} == {"length"}
    expected = Forecast()
    for prompt, result, said in zip(prompts, known, params, strict=True):
        expected += forecast(prompt, result.token_ids, said, engines.k, emitted=num_tokens)
    expected.check(counters)
    assert counters.generated == num_tokens * len(prompts)
    return expected


@pytest.mark.parametrize("asked", [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", KS, scope="module")
def test_scripted(engines: SideBySide, k: int, mode: str, asked: dict[str, Any]) -> None:
    engines.open(k)
    batches = (1, 2, 8) if asked is GREEDY else (8,)
    for batch in batches:
        expected = check(engines, PROMPTS[:batch], asked, [mode] * batch)
        if mode == "oracle":  # a pass emits k + 1 tokens, but for the last one
            passes = -(-(NUM_TOKENS - 1) // (k + 1))
            assert (expected.drafts, expected.accepted) == (passes * batch, passes * batch * k)
        if mode == "half_oracle":
            assert 0 < expected.accepted < expected.draft_tokens
        if mode == "constant":
            assert expected.accepted == 0 < expected.draft_tokens
        if mode == "empty":
            assert expected.draft_tokens == 0


@pytest.mark.parametrize("k", KS, scope="module")
def test_neighbours_with_other_drafts(engines: SideBySide, k: int) -> None:
    """Rows of one batch whose drafts differ in quality and number, greedy and sampled ones side by side."""
    engines.open(k)
    modes = ["oracle", "empty", "constant", "half_oracle", "over_long", "oracle", "random", "half_oracle"]
    asked = [GREEDY, SEEDED] * (len(PROMPTS) // 2)
    known = engines.baseline(PROMPTS, [each | {"max_tokens": NUM_TOKENS + AHEAD} for each in asked])
    wrong = absent_token(*(result.token_ids for result in known))
    params = [
        each | {"max_tokens": NUM_TOKENS} | script(mode, prompt, result.token_ids, token=wrong)
        for each, mode, prompt, result in zip(asked, modes, PROMPTS, known, strict=True)
    ]
    results, counters = engines.draft(PROMPTS, params)
    assert [result.token_ids for result in results] == [result.token_ids[:NUM_TOKENS] for result in known]
    expected = Forecast()
    for prompt, result, said in zip(PROMPTS, known, params, strict=True):
        expected += forecast(prompt, result.token_ids, said, k, emitted=NUM_TOKENS)
    expected.check(counters)
    assert 0 < expected.accepted < expected.draft_tokens


def test_the_first_draft_is_verified_too(engines: SideBySide) -> None:
    """Case 2: a draft that only repeats the prompt is refused where the target disagrees."""
    engines.open(1)
    prompt = [1, 1, 1]
    known = engines.baseline([prompt], GREEDY | {"max_tokens": 2})[0].token_ids
    assert 1 not in known, "the target agrees with the draft, so nothing is tested"
    engines.inside("forget_seen")
    results, counters = engines.draft([prompt], GREEDY | {"max_tokens": 2} | script("constant", token=1))
    assert results[0].token_ids == known
    assert (counters.draft_tokens, counters.accepted) == (1, 0)


def test_constant_wrong_drafts_for_twenty_prompts(engines: SideBySide) -> None:
    """Case 3: more requests than fit into a batch, nothing ever accepted, no counter below zero."""
    engines.open(5)
    prompts = [prompt_of(length, salt=length) for length in range(1, 98, 5)]
    params = GREEDY | {"max_tokens": 6}
    known = engines.baseline(prompts, params)
    wrong = absent_token(*(result.token_ids for result in known))
    results, counters = engines.draft(prompts, params | script("constant", token=wrong))
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    assert (counters.drafts, counters.draft_tokens, counters.accepted) == (20 * 5, 20 * 5 * 5, 0)
    for name, value in engines.drafting.metrics().items():
        for number in value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else [value]:
            assert number >= 0, name


# -- n-gram ------------------------------------------------------------------------------------------------

WORD = list(b"again ")


def ngram_of(k: int) -> Any:
    """The proposer itself, for forecasts."""
    ngram = pytest.importorskip("vllm_specplugin.proposers.ngram")
    proposer = ngram.NgramProposer
    host = steps.host(vocab_size=VOCAB_SIZE, max_model_len=NGRAM_MAX_MODEL_LEN, k=k)
    return proposer(host, proposer.Options(**NGRAM["options"]))


NGRAM_MAX_MODEL_LEN = 512


def check_ngram(engines: SideBySide, prompts: list[list[int]], params: dict[str, Any], num_tokens: int) -> Forecast:
    known = engines.baseline(prompts, params | {"max_tokens": num_tokens + AHEAD})
    results, counters = engines.draft(prompts, params | {"max_tokens": num_tokens})
    assert [result.token_ids for result in results] == [result.token_ids[:num_tokens] for result in known]
    expected = Forecast()
    proposer = ngram_of(engines.k)
    for prompt, result in zip(prompts, known, strict=True):
        expected += forecast(
            prompt, result.token_ids, {}, engines.k, emitted=num_tokens, proposer=proposer, max_model_len=NGRAM_MAX_MODEL_LEN
        )
    expected.check(counters)
    return expected


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("k", KS, scope="module")
def test_one_word_repeated(engines: SideBySide, k: int, batch: int) -> None:
    """Case 1, with n-grams of 2 to 5 tokens; whether the target goes on repeating the word is its own affair."""
    ngram_of(k)
    engines.open(k, plugin=NGRAM, max_model_len=NGRAM_MAX_MODEL_LEN)
    prompts = [(WORD * 48)[place:] for place in range(batch)]
    expected = check_ngram(engines, prompts, GREEDY, 32)
    assert expected.draft_tokens > 0


@pytest.mark.parametrize("k", KS, scope="module")
def test_ngram_where_it_pays(engines: SideBySide, k: int) -> None:
    """A target that is paid to repeat itself: most drafts are accepted, so parity means something."""
    ngram_of(k)
    engines.open(k, plugin=NGRAM, max_model_len=NGRAM_MAX_MODEL_LEN)
    for asked in (GREEDY | {"frequency_penalty": -2.0}, SEEDED | {"frequency_penalty": -2.0}):
        expected = check_ngram(engines, PROMPTS[:4], asked, 24)
        assert expected.accepted > expected.draft_tokens / 3
