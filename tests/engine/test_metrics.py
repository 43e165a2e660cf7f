"""The plugin's metrics in a real engine: what they say of requests that end in all the ways there are.

That they agree with vLLM's own and with the outputs is checked with every batch of the engine tests (`SideBySide.draft`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SideBySide, absent_token, prompt_of, script
from tests.support.engine import EngineWorker
from tests.support.tiny import EOS
from vllm_specplugin.alarm import FIRST_DRAFTS

K = 5
NUM_TOKENS = 18
PROMPT = PROMPTS[3]


def faults(engines: SideBySide, name: str) -> dict[str, int]:
    """Kind or reason -> number, of the counters `faults` or `fallbacks`."""
    start = f"vllm:specplugin_{name}{{"
    return {
        re.findall(r"(?:kind|reason)=(\w+)", each)[0]: number
        for each, number in engines.drafting.metrics().items()
        if each.startswith(start)
    }


def added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: number - before[name] for name, number in after.items() if number > before[name]}


# -- where a request ends ----------------------------------------------------------------------------------


def test_a_pass_that_is_on_its_way_when_its_request_ends(engines: SideBySide) -> None:
    """At a stop string, which the front end finds: what it does not hand on was not emitted."""
    engines.open(K)
    assert engines.drafting.call("tests.engine.inside:emitted_after_the_end", "ngram", 3) == [1, 0, 0, 0]


@pytest.mark.parametrize("end", ["eos", "stop_token", "stop_string", "max_tokens"])
def test_an_end_inside_accepted_drafts(engines: SideBySide, end: str) -> None:
    """Case 7: of five drafts, all accepted, the third ends the request: three tokens are emitted, not six."""
    engines.open(K)
    asked: dict[str, Any] = GREEDY | {"max_tokens": NUM_TOKENS, "allowed_token_ids": [*b"ABCDEFGH", EOS]}
    if end == "eos":  # which the target says as soon as it may, and for ever
        asked |= {"min_tokens": 3, "logit_bias": {EOS: 100.0}}
    tokens = engines.baseline([PROMPT], asked)[0].token_ids
    # The prompt goes on to three tokens before the one that shall end the request, which is not among these three.
    place = next(place for place in range(3, 12) if tokens[place] not in tokens[place - 3 : place])
    prompt, rest = [*PROMPT, *tokens[: place - 3]], tokens[place - 3 :]
    assert (rest[3] == EOS) == (end == "eos")
    stop = rest[3]
    ends: dict[str, dict[str, Any]] = {
        "eos": {"ignore_eos": False},
        "stop_token": {"stop_token_ids": [stop]},
        "stop_string": {"stop": [chr(stop)]},
        "max_tokens": {"max_tokens": 4},
    }
    params = asked | ends[end] | script("oracle", prompt, rest)
    (result,), counters = engines.draft([prompt], params)
    assert result.token_ids == rest[:4]
    assert result.finish_reason == ("length" if end == "max_tokens" else "stop")
    counted = engines.counted
    assert (counted.passes, counted.plain) == (1, 1)  # the other is the prompt's
    assert (counted.total("verified"), counted.total("accepted")) == (5, 5) == (counters.draft_tokens, counters.accepted)
    assert (counted.total("emitted"), counted.tokens["emitted"][:3]) == (3, (1, 1, 1))
    speculation = result.completions[0].speculation
    assert speculation is not None
    assert (speculation["passes"], speculation["emitted"], speculation["histogram"]) == (2, 4, [0, 0, 0, 0, 0, 1])
    assert speculation["by_source"] == {"scripted": {"passes": 1, "drafted": 5, "verified": 5, "accepted": 5, "emitted": 3}}


def test_min_tokens_and_two_tokens(engines: SideBySide) -> None:
    """Drafts of nothing but EOS, which the target wants, too, but may not say yet; and a request that is over at once."""
    engines.open(K)
    asked = GREEDY | {"ignore_eos": False, "logit_bias": {EOS: 100.0}, "min_tokens": 10, "max_tokens": NUM_TOKENS}
    (known,) = engines.baseline([PROMPT], asked)
    drafts = [*known.token_ids[:10], *[EOS] * 8]
    (late,), _ = engines.draft([PROMPT], asked | script("oracle", PROMPT, drafts))
    assert late.token_ids == (*known.token_ids[:10], EOS)
    assert engines.counted.total("emitted") == 10
    params = GREEDY | {"max_tokens": NUM_TOKENS}
    (known,) = engines.baseline([PROMPT], params)
    (short,), _ = engines.draft([PROMPT], params | {"max_tokens": 2} | script("oracle", PROMPT, known.token_ids))
    assert short.token_ids == known.token_ids[:2]
    assert (engines.counted.total("accepted"), engines.counted.total("emitted")) == (K, 1)


# -- where drafts end --------------------------------------------------------------------------------------


def test_a_grammar_trims(engines: SideBySide) -> None:
    """Case 9: what the grammar refuses was drafted, and neither verified nor refused."""
    engines.open(K)
    asked = GREEDY | {"structured_outputs": {"regex": "(foo|bar){2}[a-c]{3}"}, "ignore_eos": False, "max_tokens": 30}
    (known,) = engines.baseline([PROMPT], asked)
    assert known.finish_reason == "stop"
    drafts = [token if place % 4 else 7 for place, token in enumerate(known.token_ids)]  # 7 is never valid
    engines.draft([PROMPT, PROMPT], [asked | script("oracle", PROMPT, drafts), GREEDY | {"max_tokens": 4}])
    total = engines.counted.total
    assert total("drafted") == total("scheduled") + total("trimmed")
    assert total("verified") == total("accepted") > 0
    assert total("trimmed") > 0


def test_faults_and_fallbacks_are_counted(engines: SideBySide) -> None:
    engines.open(K, again=True)
    assert set(faults(engines, "faults").values()) == set(faults(engines, "fallbacks").values()) == {0}  # shown, for all that
    params = GREEDY | {"max_tokens": 6}
    known = engines.baseline(PROMPTS[1:3], params)
    asked = [params | script("raise"), params | script("oracle", PROMPTS[2], known[1].token_ids)]
    engines.draft(PROMPTS[1:3], asked)
    assert faults(engines, "faults")["exception"] == 1
    # In the first step, and in the five after it in which the request at fault is left out: six tokens, one by one.
    assert added(dict.fromkeys(faults(engines, "fallbacks"), 0), faults(engines, "fallbacks")) == {"failed": 1, "excluded": 5}
    assert engines.counted.total("accepted") >= 5  # its neighbour keeps its drafts
    before = faults(engines, "faults")
    engines.draft([PROMPT], params | script("over_long"))
    assert set(added(before, faults(engines, "faults"))) == {"too_long"}


def test_time_and_draft_length(engines: SideBySide) -> None:
    engines.open(K)
    before = engines.drafting.metrics()
    engines.draft([PROMPT], GREEDY | {"max_tokens": 8} | script("constant"))
    after = engines.drafting.metrics()
    spent = {}
    for name in ("drafting", "verification"):
        was, now = (each[f"vllm:specplugin_{name}_seconds"] for each in (before, after))
        spent[name] = now["count"] - was["count"], now["sum"] - was["sum"]
    # Eight steps draft, the prompt's among them; a pass of each of the others has drafts, but the first.
    assert (spent["drafting"][0], spent["verification"][0]) == (8, engines.counted.passes)
    assert all(seconds > 0 for _, seconds in spent.values())
    assert (after["vllm:specplugin_draft_length"], after["vllm:specplugin_paused"]) == (K, 0)


# -- what comes between ------------------------------------------------------------------------------------


def test_preempted_and_aborted_requests(engines: SideBySide) -> None:
    """What a request lost with its blocks is not counted as verified; nothing is counted for one that is gone."""
    engines.open(K, num_gpu_blocks_override=8, block_size=32, max_model_len=128)
    prompts = [prompt_of(20 + place, place) for place in range(6)]
    params = GREEDY | {"max_tokens": 30}
    _, counters, _ = engines.draft_as_planned(prompts, params, ["oracle", "half_oracle", "constant"] * 2, max_model_len=128)
    assert counters.preemptions > 0
    assert engines.counted.total("drafted") > engines.counted.total("verified")

    (known,) = engines.baseline([PROMPT], params)
    engines.inside("add", "gone", PROMPT, params | script("oracle", PROMPT, known.token_ids))
    for _ in range(2):
        engines.inside("step_once")
    engines.inside("abort", "gone")
    engines.draft([PROMPT], params | script("oracle", PROMPT, known.token_ids))
    assert engines.inside("counted_requests") == []


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_asynchronous_scheduling(engines: SideBySide) -> None:
    """A pass has k places for drafts then, whether somebody drafted or not; only drafts are counted."""
    engines.open(K, force_async=True)
    params = GREEDY | {"max_tokens": 8}
    _, counters, plan = engines.draft_as_planned(PROMPTS[1:5], params, ["oracle", "half_oracle", "empty", "constant"])
    assert counters.draft_tokens > engines.counted.total("verified") >= plan.draft_tokens - plan.unknown > 0
    assert engines.counted.plain >= 4 + 7  # prompts, and the request without drafts
    assert engines.counted.tokens["emitted"][0] == engines.counted.passes
    grammar = params | {"structured_outputs": {"regex": "(foo|bar){2}"}, "ignore_eos": False}
    engines.draft([PROMPT], grammar | script("constant", token=7))
    assert engines.counted.total("trimmed") == engines.counted.total("scheduled") > 0 == engines.counted.total("verified")


# -- without statistics --------------------------------------------------------------------------------------


def test_requests_and_the_alarm_need_no_statistics(drafting_v1: EngineWorker, tiny_model: Path) -> None:
    """Case 13: drafts that are always wrong are noticed, and said once."""
    drafting_v1.open(tiny_model, {"proposer": "scripted", "num_speculative_tokens": K}, disable_log_stats=True)
    params = GREEDY | {"max_tokens": 30, "seed": None}
    logged = len(drafting_v1.log())
    drafting_v1.generate(PROMPTS, params)  # drafts nothing
    known = drafting_v1.generate(PROMPTS, params)
    wrong = absent_token(*(result.token_ids for result in known))
    results = drafting_v1.generate(PROMPTS, params | script("constant", token=wrong))
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    for result in results:
        speculation = result.completions[0].speculation
        assert speculation is not None
        part = speculation["by_source"]["scripted"]
        assert (speculation["passes"], speculation["emitted"], part["accepted"]) == (30, 30, 0)
        assert part["verified"] > 28 * (K - 1) > 0
    lines = [line for line in drafting_v1.log()[logged:].splitlines() if "Drafting does not pay" in line]
    assert len(lines) == 1
    assert len(PROMPTS) * 28 * K > FIRST_DRAFTS
    assert "'scripted'" in lines[0]
    assert "WARNING" in lines[0]
