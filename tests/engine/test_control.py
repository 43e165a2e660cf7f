"""Control in real engines: tokens stay those of plain decoding, drafts that do not pay are no longer verified, nor asked for.

What passes cost is pretended: how long they take on the machine that runs the tests must not decide what is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.common import GREEDY, PATIENCE_MS, PROMPTS, SEEDED, Counters, SideBySide, absent_token, assert_same, script
from tests.engine.test_native import MAKE
from tests.support.engine import EngineWorker
from tests.support.mixtures import mixture
from tests.support.tiny import tiny_model

K = 4
FLAT = ([1, 512], [0.010, 0.011])
"""Rows, and seconds of a pass over them: verifying costs next to nothing."""
STEEP = ([1, 512], [0.010, 5.120])
"""Verifying a draft costs as much as a token."""
DEAR = ([1, 512], [0.010, 10.240])
"""It costs more than one."""
NUM_TOKENS = {"v1": 60, "v2": 20}  # V2's interpreter is slow


def open_adaptive(engines: SideBySide, costs: tuple[list[int], list[float]], asking: float = 1e-5, **plugin: Any) -> None:
    engines.open(K, plugin={"control": "adaptive", **plugin})
    engines.drafting.call("tests.engine.inside:pretend_costs", *costs, asking)


def state(engines: SideBySide) -> Any:
    return engines.drafting.call("tests.engine.inside:control")


def scripts(engines: SideBySide, modes: Sequence[str], num_tokens: int) -> list[dict[str, Any]]:
    prompts = PROMPTS[: len(modes)]
    asked = [(GREEDY, SEEDED)[row % 2] | {"max_tokens": num_tokens} for row in range(len(modes))]
    known = engines.baseline(prompts, [each | {"max_tokens": num_tokens + K} for each in asked])
    wrong = absent_token(*(result.token_ids for result in known))
    return [
        each | script(mode, prompt, result.token_ids, token=wrong)
        for each, mode, prompt, result in zip(asked, modes, prompts, known, strict=True)
    ]


def draft(engines: SideBySide, modes: Sequence[str]) -> Counters:
    """The metrics of one batch; its tokens are those of plain decoding."""
    num_tokens = NUM_TOKENS[engines.runner]
    params = scripts(engines, modes, num_tokens)
    results, counters = engines.draft(PROMPTS[: len(modes)], params)
    known = engines.baseline(PROMPTS[: len(modes)], [{**each, "extra_args": {}} for each in params])
    assert_same(results, known)
    return counters


def test_each_request_is_drafted_for_as_far_as_it_pays(engines: SideBySide) -> None:
    open_adaptive(engines, FLAT)
    free = draft(engines, ["oracle", "constant", "oracle", "constant"])
    assert free.draft_tokens > 2 * free.accepted > 0  # what costs nothing is verified, right or wrong

    engines.drafting.call("tests.engine.inside:change_costs", [1, 512], [0.010, 2.0], 1e-5)
    dear = draft(engines, ["oracle", "constant", "oracle", "constant"])
    assert dear.accepted > 0
    assert dear.accepted > 0.8 * dear.draft_tokens  # the others had their first drafts refused, and no more
    assert state(engines).regime == "drafting"


def test_nothing_is_verified_past_the_end_of_a_request(engines: SideBySide) -> None:
    open_adaptive(engines, FLAT)
    requests, num_tokens = 4, 3
    params = scripts(engines, ["oracle"] * requests, num_tokens)  # who knows more than may be answered
    _, counters = engines.draft(PROMPTS[:requests], params)
    assert 0 < counters.accepted == counters.draft_tokens <= requests * (num_tokens - 2)


def test_drafts_that_do_not_pay_are_not_verified(engines: SideBySide) -> None:
    if engines.runner == "v1":
        engines.replaced()  # the alarm is about the first drafts of an engine
    open_adaptive(engines, STEEP, asking=1e-3)
    first = draft(engines, ["constant"] * 4)
    second = draft(engines, ["constant"] * 4)
    assert (first.accepted, second.accepted) == (0, 0)
    assert first.draft_tokens <= 4 * K
    assert second.draft_tokens == 0
    if engines.runner == "v1":  # whose requests are long enough for a verdict on the proposer as a whole
        assert (state(engines).regime, state(engines).changes) == ("paused", 1)
        lines = [line for line in engines.drafting.log().splitlines() if "does not pay now and is paused" in line]
        assert lines
        assert "Drafting by 'scripted'" in lines[-1]
        assert "0% agreed with the answers" in lines[-1]
        warnings = [line for line in engines.drafting.log().splitlines() if "WARNING" in line and "does not pay: 0 of" in line]
        assert "drafts by 'scripted' agreed with the answers (0.0%)" in warnings[-1]


def test_a_native_drafter_is_paused_and_comes_back(engines: SideBySide, pytestconfig: pytest.Config) -> None:
    """The target drafts for itself, so its drafts are right wherever its KV cache is whole."""
    target = tiny_model(pytestconfig.cache.mkdir("tiny"))
    open_adaptive(engines, STEEP, asking=0.050, proposer="draft_model", model=str(target))
    engines.drafting.call("tests.engine.inside:watch_native_passes")
    params = GREEDY | {"max_tokens": NUM_TOKENS[engines.runner]}
    known = engines.baseline(PROMPTS[:4], params)
    while state(engines).regime == "drafting":
        results, counters = engines.draft(PROMPTS[:4], params)
        assert_same(results, known)
        assert counters.draft_tokens == 0 or counters.accepted > 0
    engines.drafting.call("tests.engine.inside:native_passes")
    results, counters = engines.draft(PROMPTS[:4], params)
    assert_same(results, known)
    assert (counters.draft_tokens, engines.drafting.call("tests.engine.inside:native_passes")) == (0, 0)

    engines.drafting.call("tests.engine.inside:change_costs", *FLAT, 1e-5)  # asking is cheap now, and verifying too
    passes = 0
    while state(engines).regime == "paused":
        results, counters = engines.draft(PROMPTS[:4], params)
        assert_same(results, known)
        passes += engines.drafting.call("tests.engine.inside:native_passes")
    assert passes > 0  # on requests that began then
    results, counters = engines.draft(PROMPTS[:4], params)
    assert_same(results, known)
    assert counters.accepted == counters.draft_tokens > 0  # nobody lapsed that is drafted for

    assert engines.drafting.call("tests.engine.inside:control_in_data_parallel") == (False, True, True)
    engines.replaced()


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
@pytest.mark.parametrize("name", ["itself", "mtp"])
def test_steps_that_are_planned_ahead(engines: SideBySide, pytestconfig: pytest.Config, name: str) -> None:
    """Under asynchronous scheduling all requests get as many drafts as pay for all of them, and none where none do."""
    case = MAKE[name](pytestconfig.cache.mkdir("tiny"))
    most = 3
    engines.open(most, model=str(case.target), plugin=case.plugin(control="adaptive"), force_async=True)
    assert engines.inside("scheduler") == "AsyncScheduler"
    engines.inside("watch_drafter_runs")
    params = [asked | {"max_tokens": 16} for asked in (GREEDY, SEEDED, GREEDY, SEEDED)]
    params[2] |= {"extra_args": {"specplugin": {"enabled": False}}}
    known = engines.baseline(PROMPTS[1:5], params)

    def passes() -> tuple[Counters, list[int]]:
        results, counters = engines.draft(PROMPTS[1:5], params)
        assert_same(results, known)
        return counters, engines.inside("drafter_runs")

    engines.inside("plan_by", *FLAT)
    passes()
    cheap, runs = passes()
    assert set(runs) == {most}
    assert cheap.accepted > 8
    engines.inside("plan_by", *DEAR)
    passes()
    dear, runs = passes()
    assert (dear.draft_tokens, set(runs)) == (0, {1})  # one pass of the drafter, which keeps its KV cache whole

    # Requests that lived through that are drafted for as well as others.
    for place, (prompt, asked) in enumerate(zip(PROMPTS[1:5], params, strict=True)):
        engines.inside("add", str(place), prompt, asked)
    for _ in range(6):
        engines.inside("step_once")
    engines.inside("plan_by", *FLAT)
    before = Counters.read(engines.drafting.metrics())
    done = engines.inside("run_to_the_end")
    counters = Counters.read(engines.drafting.metrics()).since(before)
    assert {name: tokens for name, (tokens, _) in done.items()} == {str(at): each.token_ids for at, each in enumerate(known)}
    rate = cheap.accepted / cheap.draft_tokens if name == "itself" else 0.0  # the target is right wherever its cache is whole
    assert counters.accepted > 0.8 * rate * counters.draft_tokens
    assert counters.accepted > 0

    # Left out it makes no pass at all; those who lived through that decode plainly to their end, beside others that do not.
    engines.inside("plan_by", *DEAR)
    engines.inside("leave_drafter_out")
    passes()
    left_out, runs = passes()
    assert (left_out.draft_tokens, set(runs)) == (0, {0})
    before = Counters.read(engines.drafting.metrics())
    for place, (prompt, asked) in enumerate(zip(PROMPTS[1:5], params, strict=True)):
        if place == 2:
            for _ in range(4):
                engines.inside("step_once")
            engines.inside("plan_by", *FLAT)
            engines.inside("drafter_runs")
        engines.inside("add", str(place), prompt, asked | {"extra_args": {}})
    for _ in range(10):  # a run of which nothing is known but that both have lapsed, and some more
        engines.inside("step_once")
    given = engines.inside("drafted_for")
    assert (given["0"], given["1"]) == (0, 0)
    assert min(given["2"], given["3"]) > 0
    assert max(engines.inside("drafter_runs")) == most
    done = engines.inside("run_to_the_end")
    assert {name: tokens for name, (tokens, _) in done.items()} == {str(at): each.token_ids for at, each in enumerate(known)}
    assert Counters.read(engines.drafting.metrics()).since(before).accepted > 0


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_a_proposer_of_our_own_follows_the_plan(engines: SideBySide) -> None:
    """One that is asked on the host, where asynchronous scheduling was asked for: 0 drafts are a step like any other."""
    engines.open(K, plugin={"control": "adaptive"}, force_async=True, again=True)
    engines.draft(PROMPTS[1:2], GREEDY | {"max_tokens": 2})
    rows = engines.inside("timed_before_planning")
    assert rows[:3] == [1, 2, 4]  # what the worker timed at start-up has reached the engine core
    engines.inside("plan_by", *FLAT)
    modes = ["oracle", "half_oracle", "constant", "oracle"]
    cheap = draft(engines, modes)
    assert cheap.accepted > 20
    engines.inside("plan_by", *DEAR)
    assert draft(engines, modes).draft_tokens < cheap.draft_tokens / 2  # the first run was planned before
    assert draft(engines, modes).draft_tokens == 0
    found = engines.inside("plan_state")
    assert (found.regime, 0 < found.drafts_per_request < K) == ("drafting", True)  # too soon for a verdict
    metrics = engines.drafting.metrics()
    assert metrics["vllm:specplugin_draft_length"] == pytest.approx(found.drafts_per_request, abs=0.5)
    assert metrics["vllm:specplugin_paused"] == 0


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_what_is_planned_ahead(engines: SideBySide) -> None:
    engines.open(K, plugin={"control": "adaptive"}, force_async=True)

    def planned(**more: Any) -> Any:
        return engines.drafting.call("tests.engine.inside:planned_with", **more)

    assert [level for *_, level in planned()] == [0, 1, 3, 4]
    assert planned(control="fixed") is None
    assert planned(control=None) is None  # k was given
    assert planned(asynchronous=False) is None
    for size in ("data_parallel_size", "pipeline_parallel_size"):
        assert planned(**{size: 2}) is None
        said = f"with --{size.replace('_', '-')} 2 draft lengths under asynchronous scheduling are fixed"
        assert said in engines.drafting.log()


def test_a_mixture_of_experts(v1: EngineWorker, drafting_v1: EngineWorker, pytestconfig: pytest.Config) -> None:
    """With the default configuration: passes are timed at start-up, and the tokens are plain decoding's."""
    target = mixture(pytestconfig.cache.mkdir("tiny"))
    v1.open(target)
    drafting_v1.open(target, {"proposer": "ngram", "draft_budget_ms": PATIENCE_MS})
    prompts = [[7, 8, 9] * 8, PROMPTS[3]]
    params = GREEDY | {"max_tokens": 40}
    assert_same(drafting_v1.generate(prompts, params), v1.generate(prompts, params))
    line = next(line for line in reversed(drafting_v1.log().splitlines()) if "Timed passes of the target" in line)
    assert "milliseconds by rows: 1: " in line
    assert drafting_v1.call("tests.engine.inside:control") is not None
