"""Case 11: a proposer that misbehaves costs its drafts, never an answer, nor a neighbour's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, SideBySide, assert_same, forecast, script
from tests.support.engine import Result

K = 3
NUM_TOKENS = 12


@dataclass(frozen=True)
class Misdeed:
    """What a mode of the scripted proposer does, and what has to come of it."""

    fault: str
    """Counted as this."""
    own_drafts: int = 0
    """How many drafts of each pass of its own are left for the target to verify."""
    every_step: bool = True
    """It goes on with it; else it is not asked again about that request."""


MISDEEDS = {
    "over_long": Misdeed("too_long", own_drafts=K),
    "out_of_vocabulary": Misdeed("bad_token", own_drafts=1),
    "huge": Misdeed("bad_token"),
    "negative": Misdeed("bad_token"),
    "negative_later": Misdeed("bad_token", own_drafts=1),
    "float": Misdeed("exception", every_step=False),
    "raise": Misdeed("exception", every_step=False),
    "none": Misdeed("bad_shape", every_step=False),
    "missing_row": Misdeed("bad_shape", every_step=False),
    "exit": Misdeed("exception", every_step=False),
    "nan": Misdeed("bad_probabilities", own_drafts=K),  # its drafts are verified by samples
}

PAIR = [PROMPTS[2], PROMPTS[5]]  # the one at fault, and its neighbour


def faults(engines: SideBySide) -> dict[str, int]:
    counted: dict[str, int] = engines.inside("guard")["faults"]
    return counted


def scripts(mode: str, known: list[Result]) -> list[dict[str, Any]]:
    return [script(mode), script("oracle", PAIR[1], known[1].token_ids)]


@pytest.mark.parametrize("asked", [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")])
@pytest.mark.parametrize("mode", MISDEEDS)
def test_a_misdeed(engines: SideBySide, mode: str, asked: dict[str, Any]) -> None:
    """Right tokens for all, one fault per step at most, and the neighbour's oracle accepted as ever."""
    engines.open(K)
    misdeed = MISDEEDS[mode]
    params = asked | {"max_tokens": NUM_TOKENS}
    known = engines.baseline(PAIR, params)
    before = faults(engines)
    said = scripts(mode, known)
    results, counters = engines.draft(PAIR, [params | each for each in said])
    assert_same(results, known)
    now = {kind: count - before.get(kind, 0) for kind, count in faults(engines).items()}
    assert {kind for kind, count in now.items() if count} == {misdeed.fault}
    if misdeed.every_step:
        assert now[misdeed.fault] > NUM_TOKENS / 2
    else:
        assert now[misdeed.fault] == 1, "the request was not left to decode plainly"
    oracle = forecast(PAIR[1], known[1].token_ids, said[1], K)
    assert counters.accepted >= oracle.accepted > NUM_TOKENS / 2, "the neighbour lost its drafts"
    own_passes = NUM_TOKENS - 1  # what is left of its drafts is wrong
    assert counters.draft_tokens >= misdeed.own_drafts * own_passes / 2
    if misdeed.own_drafts == 0:
        assert counters.draft_tokens <= oracle.draft_tokens
    assert not engines.inside("guard")["switched_off"]


def test_later_requests_are_served(engines: SideBySide) -> None:
    """After every misdeed at once, drafts are made and accepted as if nothing had happened."""
    engines.open(K)
    params = GREEDY | {"max_tokens": NUM_TOKENS}
    modes = list(MISDEEDS)
    prompts = [PROMPTS[2]] * len(modes)
    results, _ = engines.draft(prompts, [params | script(mode) for mode in modes])
    assert_same(results, engines.baseline(prompts, params))
    known = engines.baseline(PROMPTS[1:4], params)
    asked = [params | script("oracle", prompt, result.token_ids) for prompt, result in zip(PROMPTS[1:4], known, strict=True)]
    results, counters = engines.draft(PROMPTS[1:4], asked)
    assert_same(results, known)
    plan = [forecast(prompt, result.token_ids, said, K) for prompt, result, said in zip(PROMPTS[1:4], known, asked, strict=True)]
    assert counters.accepted == sum(each.accepted for each in plan) > 0
    assert engines.inside("guard")["plain"] == 0, "requests at fault are remembered after their end"


@pytest.mark.parametrize("mode", ["over_long", "raise", "exit", "negative", "nan"])
def test_each_kind_is_said_once(engines: SideBySide, mode: str) -> None:
    """One warning for a kind of fault, which names the proposer and the fault; however often it happens."""
    engines.open(K, again=True)
    start = len(engines.drafting.log())
    for _ in range(3):
        engines.draft(PAIR, [GREEDY | {"max_tokens": 6} | script(each) for each in (mode, "empty")])
    said = [line for line in engines.drafting.log()[start:].splitlines() if "The proposer 'scripted' is at fault" in line]
    assert len(said) == 1
    assert f"({MISDEEDS[mode].fault})" in said[0]
    assert faults(engines)[MISDEEDS[mode].fault] >= 3
    assert "A proposer's thread met" not in engines.drafting.log()[start:]


def test_a_proposer_that_always_fails_is_switched_off(engines: SideBySide) -> None:
    """When nothing ever succeeds it is said once, and drafting stops costing; answers go on."""
    engines.open(K, again=True)
    start = len(engines.drafting.log())
    params = GREEDY | {"max_tokens": 4}
    known = engines.baseline(PAIR, params)
    for _ in range(10):
        results, counters = engines.draft(PAIR, params | script("raise"))
        assert_same(results, known)
        assert counters.draft_tokens == 0
    assert engines.inside("guard")["switched_off"]
    assert engines.drafting.log()[start:].count("is switched off") == 1
    engines.inside("forget_seen")
    engines.draft(PAIR, params | script("constant"))
    assert engines.inside("seen")["steps"] == 0


BUDGET_MS = 50.0


def test_silence(engines: SideBySide) -> None:
    """Two seconds without an answer: the step goes on after its budget, and drafts come back afterwards."""
    engines.open(K, plugin={"draft_budget_ms": BUDGET_MS}, again=True)
    params = GREEDY | {"max_tokens": NUM_TOKENS}
    known = engines.baseline(PAIR, params)
    engines.draft(PAIR, params | script("empty"))  # what is slow at first is not the proposer
    start = len(engines.drafting.log())
    before = faults(engines).get("late", 0)
    began = time.monotonic()
    results, counters = engines.draft(PAIR, [params | said for said in scripts("slow", known)])
    took = time.monotonic() - began
    assert_same(results, known)
    assert counters.draft_tokens == 0
    assert faults(engines)["late"] > before
    if engines.runner == "v1":  # V2's interpreter is slow by itself
        assert took < 1.5, "the engine waited for the proposer"
    assert engines.drafting.log()[start:].count("(late)") == (before == 0)
    # A late answer is for a step that has passed: while it is awaited everyone decodes plainly, and rightly.
    results, _ = engines.draft(PAIR, [params | said for said in scripts("over_long", known)])
    assert_same(results, known)
    deadline = time.monotonic() + 20
    while engines.inside("guard")["busy"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    results, counters = engines.draft(PAIR, [params | said for said in scripts("empty", known)])
    assert_same(results, known)
    assert counters.accepted > 0
