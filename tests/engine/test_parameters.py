"""Everything that a request can ask for, with drafts: what plain decoding gives, at T=0 and sampled with a seed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.engine.common import (
    GREEDY,
    PROMPTS,
    SEED,
    SEEDED,
    Counters,
    SideBySide,
    assert_same,
    script,
)
from tests.support.engine import EngineError, Result
from tests.support.tiny import EOS

K = 3
NUM_TOKENS = 12
MODES = ["oracle", "half_oracle", "constant", "empty"]  # of the rows of a batch
ROWS = PROMPTS[:4]

ASKED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.4},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
    "top_k_top_p": {"top_k": 7, "top_p": 0.5, "temperature": 0.8},
    "min_p": {"min_p": 0.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty_down": {"frequency_penalty": -2.0},
    "frequency_penalty_up": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "all_penalties": {"presence_penalty": -0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {65: 4.0, 66: -3.0, 210: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [65, 66, 67, 68, 210]},
    "bad_words": {"allowed_token_ids": [65, 66, 67], "bad_words": ["AB", "CC", "BAC"]},
    "logprobs": {"logprobs": 5},
    "logprobs_of_the_token_alone": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 5, "logprobs": 2},
    "logprobs_after_penalties": {"logprobs": 3, "repetition_penalty": 1.3, "top_p": 0.9},
    "min_tokens": {"min_tokens": 7, "ignore_eos": False, "logit_bias": {EOS: 8.0}},
    "eos": {"ignore_eos": False, "logit_bias": {EOS: 4.0}},
    "max_tokens": {"max_tokens": 2},
    "everything": {
        "temperature": 0.9,
        "top_k": 9,
        "top_p": 0.7,
        "min_p": 0.12,
        "presence_penalty": 0.6,
        "frequency_penalty": 1.1,
        "repetition_penalty": 1.2,
        "logit_bias": {65: 5.0, 154: 2.0},
        "bad_words": ["A"],
        "logprobs": 2,
        "min_tokens": 5,
        "stop_token_ids": [65, 154, 35],
    },
}

SAMPLED = {"greedy": GREEDY, "seeded": SEEDED}


@pytest.fixture
def engines_open(engines: SideBySide) -> SideBySide:
    engines.open(K)
    return engines


def asking(name: str, how: str) -> dict[str, Any]:
    """Sampling parameters of one case; a temperature of its own counts only where there is one."""
    asked = SAMPLED[how] | {"max_tokens": NUM_TOKENS} | ASKED[name]
    return asked | {"temperature": 0.0} if how == "greedy" else asked


def check(
    engines: SideBySide, prompts: list[list[int]], params: list[dict[str, Any]], modes: list[str]
) -> tuple[list[Result], Counters]:
    """Results are plain decoding's, and metrics are as they must be."""
    results, counters, plan = engines.draft_as_planned(prompts, params, modes)
    plan.check(counters)
    return results, counters


@pytest.mark.parametrize("how", SAMPLED)
@pytest.mark.parametrize("name", ASKED)
def test_as_plain_decoding(engines_open: SideBySide, name: str, how: str) -> None:
    asked = asking(name, how)
    results, counters = check(engines_open, ROWS, [asked] * len(ROWS), MODES)
    assert len(results[0].token_ids) == 1 or counters.accepted > 0, "nothing was accepted, so nothing is tested"


@pytest.mark.parametrize("how", SAMPLED)
def test_a_batch_in_which_every_request_asks_for_something_else(engines_open: SideBySide, how: str) -> None:
    names = list(ASKED)
    # Not the prompt of one token: vLLM fills its first pass up with drafts when it joins others (see test_scheduling).
    prompts = [PROMPTS[1 + place % (len(PROMPTS) - 1)] for place in range(len(names))]
    modes = [("oracle", "half_oracle", "random")[place % 3] for place in range(len(names))]
    _, counters = check(engines_open, prompts, [asking(name, how) for name in names], modes)
    assert 0 < counters.accepted < counters.draft_tokens


# -- that the parameters above bite ------------------------------------------------------------------------


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_each_parameter_changes_something(engines_open: SideBySide) -> None:
    """A parameter that plain decoding does not notice would prove nothing above."""

    def outputs(asked: dict[str, Any]) -> list[Any]:
        each = [SAMPLED[how] | {"max_tokens": NUM_TOKENS} | asked for how in SAMPLED]
        each[0]["temperature"] = 0.0
        return [result.token_ids for params in each for result in engines_open.baseline(ROWS, params)]

    for name, asked in ASKED.items():
        for key, value in asked.items():
            rest = {other: kept for other, kept in asked.items() if other != key}
            if "logprobs" not in key and (key, value) != ("ignore_eos", False):
                assert outputs(asked) != outputs(rest), f"{name}: {key} makes no difference"


PROMPT = list(b"tell me")  # whole characters, so that the text of the output starts with the output


def plain(engines: SideBySide, **asked: Any) -> tuple[int, ...]:
    return engines.baseline([PROMPT], GREEDY | {"max_tokens": NUM_TOKENS} | asked)[0].token_ids


def drafted(engines: SideBySide, draft: tuple[int, ...], **asked: Any) -> tuple[int, ...]:
    params = GREEDY | {"max_tokens": NUM_TOKENS} | asked
    return engines.draft([PROMPT], params | script("oracle", PROMPT, draft))[0][0].token_ids


def test_a_banned_token_appears_at_no_position(engines_open: SideBySide) -> None:
    """Case 5: the drafts are what the target wants to say, and contain the token that a bias of -100 bans."""
    wanted = plain(engines_open)
    for place in (1, 2, 3, 4, 5):  # whether drafted at any position or as the bonus token
        bias = {wanted[place]: -100.0}
        output = drafted(engines_open, wanted, logit_bias=bias)
        assert output == plain(engines_open, logit_bias=bias)
        assert wanted[place] not in output


def test_min_p_bars_what_is_unlikely(engines_open: SideBySide) -> None:
    """Case 5: with min_p=0.3 every sampled token has at least 0.3 of the likeliest one's probability."""
    temperature = 1.3
    known = engines_open.baseline(ROWS, GREEDY | {"max_tokens": NUM_TOKENS})
    places = [place for place in range(len(ROWS)) for _ in range(4)]
    prompts = [ROWS[place] for place in places]
    asked = SEEDED | {"temperature": temperature, "max_tokens": NUM_TOKENS, "logprobs": 1}  # of the raw logits
    params = [asked | {"seed": seed} for seed in range(len(prompts))]

    def unlikely(results: list[Result]) -> int:
        gaps = [
            max(entry.logprob for entry in entries.values()) - entries[token].logprob
            for result in results
            for token, entries in zip(result.token_ids, result.logprobs or (), strict=True)
        ]
        return sum(gap / temperature > -math.log(0.3) for gap in gaps)

    assert unlikely(engines_open.baseline(prompts, params)) > NUM_TOKENS, "it has nothing to do here"
    drafts = [script("oracle", ROWS[place], known[place].token_ids) for place in places]
    results, counters = engines_open.draft(
        prompts, [each | {"min_p": 0.3} | draft for each, draft in zip(params, drafts, strict=True)]
    )
    assert unlikely(results) == 0
    assert counters.accepted > 0


def test_penalties_up_and_down(engines_open: SideBySide) -> None:
    """Case 6: two different outputs, each that of its baseline, whichever of the two was drafted."""
    down, up = ({"frequency_penalty": penalty} for penalty in (-2.0, 2.0))
    outputs = plain(engines_open, **down), plain(engines_open, **up)
    assert outputs[0] != outputs[1]
    assert len(set(outputs[0])) < len(set(outputs[1]))
    for draft in outputs:
        assert drafted(engines_open, draft, **down) == outputs[0]
        assert drafted(engines_open, draft, **up) == outputs[1]


# -- where a request ends ----------------------------------------------------------------------------------


def ending(engines: SideBySide, draft: tuple[int, ...], **asked: Any) -> tuple[Result, Counters]:
    """A request through the plugin that has to end as its baseline does."""
    params = GREEDY | {"max_tokens": NUM_TOKENS} | asked
    results, counters = engines.draft([PROMPT], params | script("oracle", PROMPT, draft))
    assert_same(results, engines.baseline([PROMPT], params))
    # vLLM looks for stop strings after it has counted what a pass emitted.
    assert counters.generated == len(results[0].token_ids) or "stop" in asked
    return results[0], counters


@pytest.mark.parametrize("place", range(1, 8))
def test_a_stop_token_inside_the_drafts(engines_open: SideBySide, place: int) -> None:
    """Case 7: what lies after it is dropped, wherever in the drafts it is."""
    wanted = plain(engines_open)
    stop = wanted[place]
    result, counters = ending(engines_open, wanted, stop_token_ids=[stop])
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.token_ids == wanted[: wanted.index(stop) + 1]
    assert counters.draft_tokens > 0 or place == 0


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6])
def test_eos_inside_the_drafts(engines_open: SideBySide, place: int) -> None:
    """Case 7: EOS ends the request at its place, is the last token, and min_tokens holds it back."""
    asked = {"ignore_eos": False, "min_tokens": place, "logit_bias": {EOS: 100.0}}
    draft = (*plain(engines_open, min_tokens=place, logit_bias={EOS: 100.0}, ignore_eos=False), EOS, 5, 5, 5)
    result, counters = ending(engines_open, draft, **asked)
    assert result.finish_reason == "stop"
    assert result.token_ids.index(EOS) == place == len(result.token_ids) - 1
    assert counters.accepted > 0


def test_eos_at_every_place_is_held_back_by_min_tokens(engines_open: SideBySide) -> None:
    """Case 7: drafts of nothing but EOS, and a target that wants nothing else."""
    result, _ = ending(engines_open, (EOS,) * NUM_TOKENS, min_tokens=10, ignore_eos=False, logit_bias={EOS: 100.0})
    assert EOS not in result.token_ids[:10]
    assert result.token_ids[10:] == (EOS,)


def test_eos_that_is_ignored_ends_nothing(engines_open: SideBySide) -> None:
    result, counters = ending(engines_open, (EOS,) * NUM_TOKENS, logit_bias={EOS: 100.0})
    assert result.token_ids == (EOS,) * NUM_TOKENS
    assert result.finish_reason == "length"
    assert counters.accepted > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 8])
def test_max_tokens_inside_the_drafts(engines_open: SideBySide, max_tokens: int) -> None:
    """Case 7: exactly as many, whatever was accepted in the last pass."""
    wanted = plain(engines_open)
    result, counters = ending(engines_open, wanted, max_tokens=max_tokens)
    assert (len(result.token_ids), result.finish_reason) == (max_tokens, "length")
    assert (counters.accepted > 0) == (max_tokens > 1)


@pytest.mark.parametrize("include", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("place", [1, 2, 3, 5])
def test_a_stop_string_inside_the_drafts(engines_open: SideBySide, place: int, include: bool) -> None:
    """The text ends there, and so do the tokens; strings of one character and of two, across passes."""
    letters = {"allowed_token_ids": list(b"ABCDEFGH")}
    wanted = plain(engines_open, **letters)
    text = bytes(wanted).decode()
    for width in (1, 2):
        stop = text[place : place + width]
        asked = {"stop": [stop, "never"], "include_stop_str_in_output": include, "logprobs": 1}
        result, counters = ending(engines_open, wanted, **letters, **asked)
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.text == text[: text.index(stop) + (width if include else 0)]
        assert counters.draft_tokens > 0 or text.index(stop) == 0


# -- n > 1 -------------------------------------------------------------------------------------------------


def test_several_completions(engines_open: SideBySide) -> None:
    """n=3 with a seed: three streams of one request, the drafts right for one of them."""
    params = SEEDED | {"n": 3, "max_tokens": NUM_TOKENS, "logprobs": 2}
    known = engines_open.baseline(ROWS, params)
    assert len({completion.token_ids for completion in known[0].completions}) == 3
    for right in range(3):
        asked = [
            params | script("oracle", prompt, result.completions[right].token_ids)
            for prompt, result in zip(ROWS, known, strict=True)
        ]
        results, counters = engines_open.draft(ROWS, asked)
        assert_same(results, known)
        assert len(ROWS) * (NUM_TOKENS // 2) < counters.accepted < counters.draft_tokens


# -- grammar -----------------------------------------------------------------------------------------------

REGEX = {"structured_outputs": {"regex": r"(foo|bar){2,4}-[a-c]{3}\."}}
SCHEMA = {
    "structured_outputs": {
        "json": {
            "type": "object",
            "properties": {"name": {"enum": ["xy", "zzz"]}, "size": {"type": "integer", "minimum": 10, "maximum": 99}},
            "required": ["name", "size"],
            "additionalProperties": False,
        },
    },
    "logit_bias": dict.fromkeys(b" \t\n\r", -100.0),  # of which the tiny model would never tire
}


@pytest.mark.parametrize("how", SAMPLED)
@pytest.mark.parametrize("grammar", [pytest.param(REGEX, id="regex"), pytest.param(SCHEMA, id="json")])
def test_grammar(engines_open: SideBySide, grammar: dict[str, Any], how: str) -> None:
    """Case 9: drafts that are valid, then are not, and go on past the end; an invalid tail is cut off, not refused."""
    engines = engines_open
    params = SAMPLED[how] | grammar | {"max_tokens": 60, "ignore_eos": False}
    prompts = PROMPTS[:3]
    known = engines.baseline(prompts, params)
    assert {result.finish_reason for result in known} == {"stop"}
    logged = len(engines.drafting.log())
    right = [result.token_ids for result in known]
    drafts = [
        [*right[0], 5, 5, 5, 5],  # right, and past the end
        [token if place % 5 else 7 for place, token in enumerate(right[1])],  # four valid ones, then one that is not
        [7] * len(right[2]),  # never valid
    ]
    asked = [params | script("oracle", prompt, draft) for prompt, draft in zip(prompts, drafts, strict=True)]
    results, counters = engines.draft(prompts, asked)
    assert_same(results, known)
    assert counters.draft_tokens == counters.accepted > len(right[0]) // 2, "an invalid draft was counted as refused"
    assert "ERROR" not in engines.drafting.log()[logged:]


def test_grammar_beside_others(engines_open: SideBySide) -> None:
    """The bitmask lies at the rows of the constrained request alone."""
    params = [
        SEEDED | {"max_tokens": NUM_TOKENS, "logprobs": 3},
        GREEDY | REGEX | {"max_tokens": NUM_TOKENS, "ignore_eos": False},
        GREEDY | {"max_tokens": NUM_TOKENS},
        SEEDED | SCHEMA | {"max_tokens": NUM_TOKENS, "ignore_eos": False, "min_p": 0.05},
    ]
    _, counters = check(engines_open, ROWS, params, ["half_oracle", "oracle", "constant", "oracle"])
    assert counters.accepted > NUM_TOKENS


# -- what is refused ---------------------------------------------------------------------------------------


def test_thinking_token_budget(engines_open: SideBySide) -> None:
    """Refused on V1 with a message that names it; nothing of the engine is harmed."""
    params = GREEDY | {"max_tokens": 4}
    if engines_open.runner == "v1":
        with pytest.raises(EngineError, match="thinking_token_budget") as error:
            engines_open.draft([ROWS[0]], params | {"thinking_token_budget": 8})
        assert error.value.kind == "VLLMValidationError"
    assert_same(engines_open.draft([ROWS[0]], params | script("empty"))[0], engines_open.baseline([ROWS[0]], params))


def test_seeds_differ(engines_open: SideBySide) -> None:
    """Two seeds, two outputs; and the same seed again gives the same."""
    params = [SEEDED | {"seed": SEED + place // 2, "max_tokens": NUM_TOKENS} for place in range(4)]
    prompts = [ROWS[1]] * 4
    results, counters = check(engines_open, prompts, params, ["oracle", "half_oracle", "oracle", "random"])
    tokens = [result.token_ids for result in results]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
    assert counters.accepted > 0
