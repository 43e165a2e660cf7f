"""What the scheduler does to requests while they are drafted for: chunks, caches, preempts, aborts, ends at the edge."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.common import (
    GREEDY,
    PROMPTS,
    SEEDED,
    SideBySide,
    assert_same,
    check_that_padding_is_refused,
    prompt_of,
    script,
)
from tests.support.engine import EngineError

K = 3
NUM_TOKENS = 12

BOTH = [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")]


# -- prefill -----------------------------------------------------------------------------------------------

CHUNK = 64


@pytest.mark.parametrize("asked", BOTH)
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": 3, "prompt_logprobs": 3}], ids=["", "logprobs"])
def test_chunked_prefill(engines: SideBySide, asked: dict[str, Any], logprobs: dict[str, Any]) -> None:
    """Case 10: prompts longer and shorter than a chunk, some decoding with drafts while others still prefill."""
    if engines.runner == "v1" and asked is SEEDED:
        pytest.skip("stock V1 on the CPU dies of it; see the next test")
    engines.open(K, max_num_batched_tokens=CHUNK)
    prompts = [prompt_of(length, length) for length in (3, 150, CHUNK, CHUNK + 1, 20, CHUNK - 1)]
    modes = ["oracle", "half_oracle", "oracle", "constant", "oracle", "half_oracle"]
    _, counters, plan = engines.draft_as_planned(prompts, asked | logprobs | {"max_tokens": NUM_TOKENS}, modes)
    # A pass that shares its budget with a chunk may get fewer drafts scheduled than were made.
    assert 0 < counters.accepted <= plan.accepted
    assert counters.accepted > plan.accepted / 2


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_chunked_prefill_with_a_seed_is_beyond_stock_v1(engines: SideBySide) -> None:
    """Why the test above has a gap: without any speculation, too, V1 wants to rewind a generator that CPUs do not have.

    When this fails, the gap can be closed.
    """
    engines.open(K, max_num_batched_tokens=CHUNK)
    with pytest.raises(EngineError, match="CPU Generator does not use offset"):
        engines.plain.generate([prompt_of(2 * CHUNK)], SEEDED | {"max_tokens": 2})
    engines.open(K, again=True)


def test_chunked_prefill_alone(engines: SideBySide) -> None:
    """No drafts before the prompt is done, exactly the planned ones afterwards."""
    engines.open(K, max_num_batched_tokens=CHUNK)
    for length in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1):
        _, counters, plan = engines.draft_as_planned([prompt_of(length)], GREEDY | {"max_tokens": NUM_TOKENS}, ["oracle"])
        plan.check(counters)


BLOCK = 32
CACHING = {"enable_prefix_caching": True, "block_size": BLOCK}


@pytest.mark.parametrize("asked", BOTH)
def test_prefix_caching(engines: SideBySide, asked: dict[str, Any]) -> None:
    """The second run starts from the first one's blocks, drafts accepted there included, and says the same."""
    engines.open(K, **CACHING, again=True)
    prompts = [prompt_of(length, length) for length in (3 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK + 9)]
    asked = asked | {"max_tokens": 2 * BLOCK}
    first, counters, plan = engines.draft_as_planned(prompts, asked, ["oracle", "half_oracle", "oracle"])
    plan.check(counters)
    again, counters, _ = engines.draft_as_planned(prompts, asked, ["half_oracle", "oracle", "constant"])
    assert counters.cache_hits >= 3 * BLOCK + 5 * BLOCK
    assert counters.accepted > 0
    # What was generated is in the cache as well: a prompt that goes on after it must see the right keys and values.
    longer = [[*prompt, *result.token_ids[:-3]] for prompt, result in zip(prompts, first, strict=True)]
    _, counters, _ = engines.draft_as_planned(longer, asked | {"max_tokens": NUM_TOKENS}, ["oracle"] * 3)
    assert counters.cache_hits >= sum(len(prompt) // BLOCK for prompt in longer) * BLOCK - 3 * BLOCK
    assert [result.token_ids for result in first] == [result.token_ids for result in again]


# Rows are filled up with this token, so that a filler that is taken for a draft would be right.
ALWAYS_ZERO = GREEDY | {"allowed_token_ids": [0]}


def test_a_request_of_one_new_token_joins_a_batch(engines: SideBySide) -> None:
    """vLLM fills the first pass of such a request up with k drafts that nobody made; none of them may be believed.

    They are refused, and the proposer does not hear of them, although the slot held accepted drafts a moment ago.
    """
    engines.open(K)
    params = ALWAYS_ZERO | script("constant", token=0)
    engines.inside("forget_seen")
    engines.inside("add", "long", [3, 4, 5], params | {"max_tokens": 40})
    engines.inside("add", "gone", [9], params | {"max_tokens": 8})
    for _ in range(3):
        engines.inside("step_once")
    engines.inside("forget_seen")
    check_that_padding_is_refused(engines, ALWAYS_ZERO | {"max_tokens": 2})
    ids, tested, accepted = engines.inside("seen")["verdicts"][0]
    new = [place for place, name in enumerate(ids) if name.startswith("new")]
    assert [(tested[place], accepted[place]) for place in new] == [(0, 0)]
    ended = engines.inside("run_to_the_end")
    assert sorted(ended.values()) == [((0,) * 2, "length"), ((0,) * 40, "length")]


# -- preemption, abort -------------------------------------------------------------------------------------

SCARCE = {"num_gpu_blocks_override": 8, "block_size": BLOCK, "max_model_len": 128}


@pytest.mark.parametrize("asked", BOTH)
def test_preemption(engines: SideBySide, asked: dict[str, Any]) -> None:
    """Too few blocks for all: requests lose theirs while decoding, start over, and say the same; drafts go on."""
    engines.open(K, **SCARCE)
    prompts = [prompt_of(20 + place, place) for place in range(6)]
    engines.inside("forget_seen")
    modes = ["oracle", "half_oracle", "constant", "oracle", "half_oracle", "oracle"]
    _, counters, plan = engines.draft_as_planned(prompts, asked | {"max_tokens": 40}, modes, max_model_len=128)
    assert counters.preemptions > 0, "nothing was preempted, so nothing is tested"
    assert plan.accepted / 2 < counters.accepted <= plan.accepted + plan.unknown
    seen = engines.inside("seen")
    forgotten = [name.partition("-")[0] for name in seen["forgotten"]]
    assert len(forgotten) - len(set(forgotten)) > 0, "the proposer was not told of those that were preempted"


def test_abort(engines: SideBySide) -> None:
    """Requests go in the middle of their drafts; the others do not notice, and everything about the gone is dropped."""
    engines.open(K)
    params = GREEDY | {"max_tokens": 30}
    names = [f"r{place}" for place in range(5)]
    known = dict(zip(names, engines.baseline(PROMPTS[1:6], params), strict=True))
    engines.inside("forget_seen")
    for name, prompt in zip(names, PROMPTS[1:6], strict=True):
        engines.inside("add", name, prompt, params | script("half_oracle", prompt, known[name].token_ids))
    for _ in range(4):
        assert engines.inside("step_once") == []
    for name in ("r1", "r4"):
        engines.inside("abort", name)
    ended = engines.inside("run_to_the_end")
    assert ended == {name: (known[name].token_ids, "length") for name in ("r0", "r2", "r3")}
    seen = engines.inside("seen")
    assert sum(map(sum, (accepted for _, _, accepted in seen["verdicts"]))) > 0
    # The end of the last request arrives at the runner with the next step, whichever request has it.
    engines.draft([PROMPTS[1]], GREEDY | {"max_tokens": 1})
    forgotten = [name.partition("-")[0] for name in engines.inside("seen")["forgotten"]]
    assert sorted(forgotten) == names
    assert len(engines.inside("known_requests")) <= 1


# -- what a proposer is told -------------------------------------------------------------------------------


def test_verdicts_add_up(engines: SideBySide) -> None:
    """What the proposer observes is what the engine counts, request by request."""
    engines.open(K)
    params = SEEDED | {"max_tokens": NUM_TOKENS}
    engines.inside("forget_seen")
    before = set(engines.inside("known_requests"))
    prompts = PROMPTS[1:]
    modes = ["oracle", "half_oracle", "constant", "empty", "random", "over_long", "half_oracle"]
    _, counters, plan = engines.draft_as_planned(prompts, params, modes)
    seen = engines.inside("seen")
    tested: dict[str, int] = {}
    accepted: dict[str, int] = {}
    for ids, tests, accepts in seen["verdicts"]:
        for name, test, accept in zip(ids, tests, accepts, strict=True):
            tested[name] = tested.get(name, 0) + test
            accepted[name] = accepted.get(name, 0) + accept
            assert accept <= test <= K
    assert sum(accepted.values()) == counters.accepted
    assert sum(tested.values()) == counters.draft_tokens == plan.draft_tokens
    by_arrival = sorted(tested, key=lambda name: int(name.partition("-")[0]))
    assert [accepted[name] > 0 for name in by_arrival[:3]] == [True, True, False]
    assert tested[by_arrival[3]] == 0
    # Everything is forgotten but the very last ones, whose end arrives with the next step.
    gone = before | {name for name in tested if name in seen["forgotten"]}
    assert set(seen["forgotten"]) == gone
    engines.draft([PROMPTS[1]], GREEDY | {"max_tokens": 1})
    assert set(engines.inside("seen")["forgotten"]) == before | set(tested)


# -- the edge of max_model_len -----------------------------------------------------------------------------

EDGE = 100


@pytest.mark.parametrize("asked", BOTH)
@pytest.mark.parametrize("mode", ["over_long", "oracle", "constant"])
def test_the_edge_of_max_model_len(engines: SideBySide, mode: str, asked: dict[str, Any]) -> None:
    """Case 8: nothing at or beyond the edge, and a short neighbour keeps its drafts."""
    engines.open(K, max_model_len=EDGE)
    lengths = list(range(EDGE - 1, EDGE - K - 3, -1))
    prompts = [*(prompt_of(length, length) for length in lengths), prompt_of(5)]
    engines.inside("forget_seen")
    results, counters, plan = engines.draft_as_planned(
        prompts, asked | {"max_tokens": 20}, [mode] * len(lengths) + ["oracle"], max_model_len=EDGE
    )
    assert [len(result.token_ids) for result in results] == [*(EDGE - length for length in lengths), 20]
    assert {result.finish_reason for result in results} == {"length"}
    plan.check(counters)
    for ids, counts, known, limits in engines.inside("seen")["rows"]:
        for name, count, length, limit in zip(ids, counts, known, limits, strict=True):
            assert limit == max(0, min(K, EDGE - 1 - length))
            if name.startswith(str(max(int(each.partition("-")[0]) for each in ids))):
                assert limit == K  # the short one is the last to come
                assert count == max(0, min(K, 20 - (length - 5)))


# -- how many drafts ---------------------------------------------------------------------------------------


def test_rows_of_other_lengths(engines: SideBySide) -> None:
    """Under synchronous scheduling a pass verifies just what was drafted: from none to k, row by row."""
    engines.open(K)
    params = GREEDY | {"max_tokens": NUM_TOKENS}
    known = engines.baseline(PROMPTS, params)
    # An oracle that knows only so many tokens drafts ever fewer, then none.
    asked = [
        params | script("oracle", prompt, result.token_ids[: 2 + place])
        for place, (prompt, result) in enumerate(zip(PROMPTS, known, strict=True))
    ]
    engines.inside("forget_seen")
    results, counters = engines.draft(PROMPTS, asked)
    assert_same(results, known)
    assert counters.draft_tokens == counters.accepted == sum(draft_counts(2 + place) for place in range(len(PROMPTS)))
    assert {count for _, counts, *_ in engines.inside("seen")["rows"] for count in counts} == set(range(K + 1))
    assert engines.inside("scheduler") == "Scheduler"


def draft_counts(knows: int) -> int:
    """How many drafts an oracle makes in all that knows so many tokens of the output."""
    total, done = 0, 1
    while done < knows:
        drafts = min(K, knows - done)
        total += drafts
        done += drafts + 1
    return total


def test_what_one_request_says_about_its_drafts(engines: SideBySide) -> None:
    """`enabled` and `max_draft_tokens` bound the drafts of one request, whatever the proposer makes; a neighbour's stay."""
    engines.open(K)
    params = GREEDY | {"max_tokens": NUM_TOKENS}
    says: list[dict[str, Any]] = [{"enabled": False}, {"max_draft_tokens": 1}, {"max_draft_tokens": 0}, {}]
    prompts = PROMPTS[1:5]
    known = engines.baseline(prompts, params)
    asked = [params | script("oracle", prompt, result.token_ids) for prompt, result in zip(prompts, known, strict=True)]
    asked += [params | script("over_long") for _ in prompts]
    for place, each in enumerate(asked):
        each["extra_args"]["specplugin"] |= says[place % len(says)]
    engines.inside("forget_seen")
    results, counters = engines.draft(prompts * 2, asked)
    assert_same(results, [*known, *known])
    tested: dict[int, list[int]] = {}
    for ids, tests, _ in engines.inside("seen")["verdicts"]:
        for name, test in zip(ids, tests, strict=True):
            tested.setdefault(int(name.partition("-")[0]), []).append(test)
    most = [max(tested[name]) for name in sorted(tested)]
    assert most == [0, 1, 0, K] * 2
    assert counters.accepted >= NUM_TOKENS // 2 + NUM_TOKENS * K // (K + 1) - K


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_asynchronous_scheduling_on_v1_is_refused(engines: SideBySide) -> None:
    """Asked for by name it is an error at start that says what to do."""
    with pytest.raises(EngineError, match=r"Asynchronous scheduling with a proposer needs .* V2 .* --no-async-scheduling"):
        engines.open(K, force_async=True, again=True)
    engines.open(K, again=True)
    engines.draft_as_planned(PROMPTS[1:3], GREEDY | {"max_tokens": 4}, ["oracle"] * 2)
