"""Asynchronous scheduling: the scheduler runs ahead of what was sampled, and every pass has k drafts. V2 alone has it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, SideBySide, prompt_of, script

pytestmark = pytest.mark.parametrize("engines", ["v2"], indirect=True)

K = 3
NUM_TOKENS = 12
EDGE = 100  # max_model_len
BLOCK = 32

BOTH = [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")]
# Rows are filled up with this token, so that a filler that is taken for a draft would be right.
ALWAYS_ZERO = GREEDY | {"allowed_token_ids": [0]}

MODES = ["oracle", "half_oracle", "constant", "random", "empty", "over_long"]


@pytest.mark.parametrize("asked", BOTH)
@pytest.mark.parametrize("mode", [*MODES, "mixed"])
def test_asynchronous_scheduling(engines: SideBySide, mode: str, asked: dict[str, Any]) -> None:
    """V2 with k drafts in every pass, of which those that only fill a row up are refused."""
    engines.open(K, force_async=True)
    assert engines.inside("scheduler") == "AsyncScheduler"
    modes = MODES if mode == "mixed" else [mode] * 4
    prompts = PROMPTS[1 : 1 + len(modes)]
    _, counters, plan = engines.draft_as_planned(prompts, asked | {"max_tokens": NUM_TOKENS}, modes, padded=True)
    plan.check(counters)
    assert mode in ("constant", "random", "empty", "over_long") or counters.accepted > NUM_TOKENS


def test_fillers_are_no_drafts(engines: SideBySide) -> None:
    """Under asynchronous scheduling a row without drafts is filled up, here with what the target wants to say."""
    engines.open(K, force_async=True)
    modes = ["empty", "constant", "oracle"]
    _, counters, plan = engines.draft_as_planned(PROMPTS[1:4], ALWAYS_ZERO | {"max_tokens": NUM_TOKENS}, modes, padded=True)
    plan.check(counters)
    assert counters.accepted < counters.draft_tokens / 2


@pytest.mark.parametrize("name", ["stop_token_ids", "min_p", "logprobs", "grammar", "edge"])
def test_asynchronous_scheduling_with(engines: SideBySide, name: str) -> None:
    """What ends requests inside drafts, and what acts on rows, while the scheduler runs ahead."""
    engines.open(K, force_async=True, max_model_len=EDGE)
    prompts = PROMPTS[1:5] if name != "edge" else [prompt_of(length) for length in (EDGE - 1, EDGE - 2, EDGE - 5, 4)]
    params = SEEDED | {"max_tokens": NUM_TOKENS}
    stops = (
        [result.token_ids[place] for place, result in zip((5, 4, 6, 1), engines.baseline(prompts, params), strict=True)]
        if name == "stop_token_ids"
        else []
    )
    asked: dict[str, dict[str, Any]] = {
        "stop_token_ids": {"stop_token_ids": stops},
        "min_p": {"min_p": 0.2, "logit_bias": {65: 2.0}, "repetition_penalty": 1.2},
        "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
        "grammar": {"structured_outputs": {"regex": "(foo|bar){2}[a-c]{3}"}, "ignore_eos": False},
        "edge": {},
    }
    modes = ["oracle", "half_oracle", "constant", "oracle"]
    _, counters, _ = engines.draft_as_planned(prompts, params | asked[name], modes, max_model_len=EDGE)
    assert counters.accepted > 0


@pytest.mark.parametrize("asked", BOTH)
def test_preemption(engines: SideBySide, asked: dict[str, Any]) -> None:
    """Tokens that are still on their way when a request loses its blocks."""
    engines.open(K, force_async=True, num_gpu_blocks_override=8, block_size=BLOCK, max_model_len=128)
    prompts = [prompt_of(20 + place, place) for place in range(6)]
    modes = ["oracle", "half_oracle", "constant", "oracle", "half_oracle", "oracle"]
    _, counters, plan = engines.draft_as_planned(prompts, asked | {"max_tokens": 40}, modes, max_model_len=128)
    assert counters.preemptions > 0, "nothing was preempted, so nothing is tested"
    assert plan.accepted / 2 < counters.accepted <= plan.accepted + plan.unknown


@pytest.mark.parametrize("asked", BOTH)
def test_chunks_and_cached_prefixes(engines: SideBySide, asked: dict[str, Any]) -> None:
    engines.open(K, force_async=True, max_num_batched_tokens=64, enable_prefix_caching=True, block_size=BLOCK)
    prompts = [prompt_of(length, length) for length in (3, 150, 64, 65, 20, 97)]
    modes = ["oracle", "half_oracle", "oracle", "constant", "oracle", "half_oracle"]
    for time in range(2):
        _, counters, plan = engines.draft_as_planned(prompts, asked | {"max_tokens": NUM_TOKENS}, modes)
        assert plan.accepted / 2 < counters.accepted <= plan.accepted
        assert time == 0 or counters.cache_hits > 0


def test_abort(engines: SideBySide) -> None:
    """A request goes while a pass with its drafts is under way."""
    engines.open(K, force_async=True)
    params = GREEDY | {"max_tokens": 24}
    prompts = dict(zip(("r0", "r1", "r2"), PROMPTS[1:4], strict=True))
    known = dict(zip(prompts, engines.baseline(list(prompts.values()), params), strict=True))
    for name, prompt in prompts.items():
        engines.inside("add", name, prompt, params | script("half_oracle", prompt, known[name].token_ids))
    for _ in range(4):
        engines.inside("step_once")
    engines.inside("abort", "r1")
    assert engines.inside("run_to_the_end") == {name: (known[name].token_ids, "length") for name in ("r0", "r2")}
    engines.draft([PROMPTS[1]], GREEDY | {"max_tokens": 1})
    assert len(engines.inside("known_requests")) <= 1


def test_verdicts_tell_of_drafts_alone(engines: SideBySide) -> None:
    """What fills a row up is counted by the engine as drafted, but the proposer did not draft it."""
    engines.open(K, force_async=True)
    prompts = PROMPTS[1:5]
    params = GREEDY | {"max_tokens": NUM_TOKENS}
    modes = ["oracle", "half_oracle", "constant", "empty"]
    engines.inside("forget_seen")
    _, counters, plan = engines.draft_as_planned(prompts, params, modes, padded=True)
    plan.check(counters)
    verdicts = engines.inside("seen")["verdicts"]
    tested = [(name, test) for ids, tests, _ in verdicts for name, test in zip(ids, tests, strict=True)]
    last = max(int(name.partition("-")[0]) for name, _ in tested)
    assert sum(test for name, test in tested if name.startswith(f"{last}-")) == 0  # the empty one
    assert 0 < sum(test for _, test in tested) < counters.draft_tokens
    assert sum(accepted for *_, each in verdicts for accepted in each) >= counters.accepted
