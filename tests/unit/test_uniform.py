"""Control of steps that are planned ahead: which number of drafts it settles on, what it knows that by, and what it costs."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.pretend import Cost, dense, mixture
from vllm_specplugin.control.controller import MARGIN, PROBE_SHARE
from vllm_specplugin.control.levels import LevelCosts
from vllm_specplugin.control.uniform import MOST_EXTENSIONS, RUN, NoPass, UniformControl, levels_of, schedule

K = 5
DRAFTER = 2e-4
"""Seconds that each of the drafter's passes takes, and per request a hundredth of that."""


@dataclass
class Ahead:
    """An engine that plans each step while the one before it runs; its output comes before its drafter is done, as on a GPU."""

    cost: Cost
    right: float
    """How probably a draft is accepted once those before it are."""
    requests: int
    control: UniformControl | int
    seed: int = 0
    drafter: float = DRAFTER
    steps_of_a_request: int = 200
    """After so many steps another request takes its place; all of them at different times."""
    now: float = 0.0
    emitted: int = 0
    drafts: dict[int, int] = field(default_factory=dict)
    """How many steps had so many drafts for each request."""
    passes: int = 0
    """Steps in which the drafter ran."""
    _drafted: int = 0
    _drafting: float = 0.0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._planned: deque[tuple[list[str], int]] = deque()
        self._steps = 0
        self._lapsed: set[str] = set()

    def run(self, steps: int) -> Ahead:
        for _ in range(steps):
            while len(self._planned) < 2:
                begins = self._steps % max(self.steps_of_a_request // self.requests, 1) == 0
                # Each place has had one request after the other; where they change is spread evenly.
                generations = [
                    (self._steps + place * self.steps_of_a_request // self.requests) // self.steps_of_a_request
                    for place in range(self.requests)
                ]
                ids = [f"{place}-{generation}" for place, generation in enumerate(generations)]
                level = self.control if isinstance(self.control, int) else self.control.plan(self.requests, begins)
                self._planned.append((ids, level))
                self._steps += 1
            self._over(*self._planned.popleft())
        return self

    def _over(self, ids: list[str], level: int) -> None:
        """The output of a step is there: its verification came after the drafting of the step before."""
        requests, skipped = len(ids), isinstance(level, NoPass)
        verified, self._drafted = self._drafted, level
        self.now += self._drafting + self.cost(requests, requests * verified) * float(np.exp(self._rng.normal(0, 0.03)))
        one_pass = self.drafter + self.drafter * requests / 100
        self._drafting = 0.0 if skipped else max(level, 1) * one_pass
        self.passes += not skipped
        stood = (self._rng.random((requests, max(verified, 1))) < self.right).cumprod(axis=1).sum(axis=1)
        whole = np.array([name not in self._lapsed for name in ids])
        accepted = np.minimum(stood, verified) * whole
        self.emitted += requests + int(accepted.sum())
        self.drafts[verified] = self.drafts.get(verified, 0) + 1
        if skipped:
            self._lapsed.update(ids)
        if isinstance(self.control, UniformControl):
            self.control.judged(np.full(whole.sum(), verified), accepted[whole])
            self.control.over(ids, requests * verified, decoding=True)
            assert [not self.control.has_lapsed(name) for name in ids] == [name not in self._lapsed for name in ids]
            if level == 0 and not skipped:
                self.control.passed(requests, one_pass)


def controlled(
    cost: Cost, right: float, requests: int, calibrated: bool = True, can_skip: bool = False, drafter: float = DRAFTER
) -> Ahead:
    engine = Ahead(cost, right, requests, 0, drafter=drafter)
    engine.control = UniformControl("pretended", K, 256, can_skip, clock=lambda: engine.now)
    if calibrated:
        sizes = [1 << power for power in range(11)]
        engine.control.calibrate(sizes, [cost(1, size - 1) for size in sizes])
    return engine


def rate(engine: Ahead, steps: int) -> float:
    """Tokens per second over the next steps."""
    emitted, now = engine.emitted, engine.now
    engine.run(steps)
    return (engine.emitted - emitted) / (engine.now - now)


def test_few_levels_from_nothing_to_k() -> None:
    assert [levels_of(k) for k in (1, 2, 3, 5, 8)] == [[0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 5], [0, 1, 3, 7, 8]]


def test_vllm_is_told_of_every_level_there_is_a_batch_size_for() -> None:
    assert schedule(5, 64) == [(1, 1, 0), (2, 2, 1), (3, 3, 3), (4, 64, 5)]
    assert schedule(5, 3) == [(1, 1, 0), (2, 2, 1), (3, 3, 5)]
    assert schedule(5, 1) == [(1, 1, 5)]


@pytest.mark.parametrize("cost", [dense, mixture])
@pytest.mark.parametrize("right", [0.1, 0.6, 0.9])
@pytest.mark.parametrize(("requests", "calibrated"), [(1, True), (16, True), (128, True), (16, False)])
def test_no_harm_and_no_worse_than_the_best_level(cost: Cost, right: float, requests: int, calibrated: bool) -> None:
    engine = controlled(cost, right, requests, calibrated).run(1000)
    got = rate(engine, 1500)
    best = max(rate(Ahead(cost, right, requests, level).run(10), 1000) for level in levels_of(K))
    assert got > best * (1 - MARGIN - PROBE_SHARE - 0.02)  # 2 %: what the noise of the costs and of the drafts makes of it


def test_it_follows_the_load_both_ways() -> None:
    """Where decoding is bound by memory drafts pay; at 128 requests they cost more than they bring."""
    engine = controlled(dense, 0.6, 4).run(400)
    assert engine.drafts.get(0, 0) < 40
    for requests, mostly_plain in ((128, True), (4, False), (128, True)):
        engine.requests, engine.drafts = requests, {}
        engine.run(400)
        assert (engine.drafts.get(0, 0) > 320) == mostly_plain, engine.drafts


def test_it_notices_when_drafts_become_right(caplog: pytest.LogCaptureFixture) -> None:
    """And says so once each time, with figures."""
    engine = controlled(dense, 0.02, 48)
    assert isinstance(engine.control, UniformControl)
    with caplog.at_level(logging.INFO, "vllm.specplugin"):
        engine.run(1500)
        assert engine.control.state.regime == "paused"
        assert engine.control.state.drafts_per_request < 0.1
        engine.right, engine.drafts = 0.95, {}
        engine.run(6000)
    assert engine.control.state.regime == "drafting"
    assert engine.control.state.gain > 0.1
    assert max(engine.drafts, key=lambda level: engine.drafts[level]) > 0
    left_off, goes_on = (record.getMessage() for record in caplog.records)
    assert left_off.startswith("Drafting by 'pretended' does not pay now and is left off: of the last drafts ")
    assert " were accepted; a step of 48 requests takes " in left_off
    assert goes_on.startswith("Drafting by 'pretended' pays again (+")


def test_what_tries_cost() -> None:
    """Where nothing is accepted, drafts are made in few steps, and plain decoding loses no more than is set aside for them."""
    engine = controlled(dense, 0.0, 64).run(1000)
    plain = rate(Ahead(dense, 0.0, 64, 0).run(10), 3000)
    engine.drafts = {}
    assert rate(engine, 3000) > plain * (1 - 2 * PROBE_SHARE)
    assert 0 < sum(steps for level, steps in engine.drafts.items() if level) < 150
    assert len(engine.drafts) == len(levels_of(K))  # each is tried


def test_levels_last_for_a_run() -> None:
    control = UniformControl("pretended", K, 8, clock=itertools.count().__next__)
    control.costs.knows = lambda level: True  # type: ignore[method-assign]
    planned = [control.plan(4) for _ in range(40 * RUN)]
    runs = [set(planned[start : start + RUN]) for start in range(0, len(planned), RUN)]
    assert all(len(run) == 1 for run in runs)
    assert len(set(planned)) > 1


def test_a_try_lasts_until_it_can_be_timed_but_not_for_ever() -> None:
    """Between prompts that are being read, no step is like the one before it."""
    control = UniformControl("pretended", 1, 8, clock=itertools.count().__next__)
    while control.plan(4) == 1:
        pass
    planned = [control.plan(4) for _ in range(20 * RUN)]
    assert planned.index(1) == RUN * (1 + MOST_EXTENSIONS) - 1


def test_tries_that_last_longer_are_paid_for() -> None:
    """No step can be timed, so that each try is as long as it may be; plain decoding still loses but 1 %."""
    control = UniformControl("pretended", 1, 8)
    control.costs.seconds = lambda requests: np.array([0.010, 0.020])  # type: ignore[method-assign]
    control.judged(np.full(4000, 1), np.zeros(4000, dtype=np.int64))
    for _ in range(100):
        control.plan(4)
    drafting = sum(control.plan(4) for _ in range(20_000))
    assert 0 < drafting < 20_000 * PROBE_SHARE * 1.1


def test_a_step_is_timed_between_two_like_it() -> None:
    """From its planning or from the last output, whichever is later; not while prompts are read, nor at a change of level."""
    now = 0.0
    control = UniformControl("pretended", 2, 8, clock=lambda: now)
    seen: list[tuple[int, int, float]] = []
    control.costs.observe = lambda *step: seen.append(step)  # type: ignore[method-assign]
    control._level, control._left = 2, 100  # the third level: 2 drafts

    def step(at: float, drafts: int, decoding: bool = True) -> None:
        nonlocal now
        now = at
        control.over(["a", "b", "c", "d"], drafts, decoding)

    for _ in range(6):
        control.plan(4)
    step(1.0, 0)  # the first has no drafts yet
    step(2.0, 8)
    step(3.5, 8)
    step(4.0, 8, decoding=False)
    step(5.0, 8)  # what came before it drafted for prompts, too
    step(5.5, 7)  # a request at its end
    assert seen == [(4, 2, 1.5)]
    now = 10.0
    for _ in range(2):
        control.plan(4)
    step(10.5, 8)
    step(11.0, 8)
    now = 20.0  # nothing was asked of the engine meanwhile
    control.plan(4)
    step(20.25, 8)
    assert seen[1:] == [(4, 2, 0.5), (4, 2, 0.25)]
    step(21.0, 8)  # never planned
    assert len(seen) == 3


def test_a_draft_counts_if_all_before_it_stand() -> None:
    control = UniformControl("pretended", 2, 8)
    control.costs.seconds = lambda requests: np.array([1.0, 1.01, 1.02])  # type: ignore[method-assign]
    for _ in range(400):
        control.judged(np.array([2, 2, 2, 2]), np.array([0, 0, 1, 2]))  # half of them stand, at either position
    assert control.plan(4) == 2
    assert control.state.gain == pytest.approx((1 + 0.5 + 0.25) / 1.02 - 1, abs=0.01)


def test_acceptance_is_told_apart_by_position() -> None:
    control = UniformControl("pretended", 3, 8)
    for _ in range(200):
        control.judged(np.array([3, 3, 1, 0]), np.array([3, 1, 1, 0]))
    assert control.acceptance() == pytest.approx([1.0, 0.5, 1.0], abs=0.06)
    for _ in range(2000):
        control.judged(np.array([1, 1]), np.array([0, 0]))
    assert control.acceptance()[0] < 0.1
    assert control.acceptance()[1] > 0.4  # nothing was heard of it since


# -- the drafter left out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [2e-4, 2e-3])
@pytest.mark.parametrize("right", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("requests", [1, 16, 128])
def test_no_harm_where_the_drafter_is_dear(drafter: float, right: float, requests: int) -> None:
    """Plain decoding has no pass of a drafter in its steps, and that is what is not to be fallen behind."""
    engine = controlled(dense, right, requests, can_skip=True, drafter=drafter).run(2000)
    got = rate(engine, 4000)
    plain = rate(Ahead(dense, right, requests, NoPass(0)).run(10), 1000)
    best = max(rate(Ahead(dense, right, requests, level, drafter=drafter).run(10), 1000) for level in levels_of(K)[1:])
    assert got > max(plain * (1 - PROBE_SHARE - 0.01), best * (1 - MARGIN - PROBE_SHARE - 0.02))


def test_the_drafter_is_left_out_where_drafts_do_not_pay() -> None:
    """But for tries on requests that begin; without that it runs in every step."""
    engine = controlled(dense, 0.02, 48, can_skip=True).run(2000)
    engine.passes = 0
    engine.run(4000)
    assert 0 < engine.passes < 400
    engine = controlled(dense, 0.02, 48).run(2000)
    engine.passes = 0
    assert engine.run(1000).passes == 1000


def test_drafting_comes_back_with_requests_that_begin() -> None:
    engine = controlled(dense, 0.02, 48, can_skip=True).run(3000)
    assert isinstance(engine.control, UniformControl)
    assert engine.control.skips
    engine.right = 0.95
    engine.run(6000)
    assert engine.control.state.regime == "drafting"
    best = max(rate(Ahead(dense, 0.95, 48, level).run(10), 1000) for level in levels_of(K))
    assert rate(engine, 2000) > best * 0.95


def test_those_who_lapsed_are_forgotten() -> None:
    control = UniformControl("pretended", 2, 8, can_skip=True)
    control._paused, control._length, control._chosen, control._level, control._left = True, 0.0, 0, 0, 100
    assert isinstance(control.plan(2), NoPass)
    control.over(["a", "b"], 0, decoding=True)
    assert [control.has_lapsed(name) for name in "abc"] == [True, True, False]
    control.forget(["a", "c"])
    assert [control.has_lapsed(name) for name in "abc"] == [False, True, False]


def test_no_pass_is_made_for_those_alone_who_lapsed() -> None:
    """Drafting is thought to pay again, but all that run lived through a step without the drafter; until one begins."""
    control = UniformControl("pretended", 1, 8, can_skip=True)
    control._tries_of[:] = 10
    control.costs.seconds = lambda requests: np.array([1.0, 1.1])  # type: ignore[method-assign]
    control._paused, control._length, control._chosen, control._level, control._left = True, 0.0, 0, 0, 1
    assert isinstance(control.plan(2), NoPass)
    control.over(["a", "b"], 0, decoding=True)
    control.judged(np.full(500, 1), np.full(500, 1))
    assert isinstance(control.plan(2), NoPass)
    assert not control.skips
    control.over(["a", "b"], 0, decoding=True)
    assert not isinstance(control.plan(3, begins=True), NoPass)
    assert not isinstance(control.plan(3), NoPass)  # the outcome of the one before is not known yet
    control.over(["a", "b", "c"], 0, decoding=False)
    assert [control.has_lapsed(name) for name in "abc"] == [True, True, False]


def test_no_pass_travels_to_the_workers() -> None:
    """Steps reach them pickled."""
    arrived = pickle.loads(pickle.dumps(NoPass(0)))
    assert isinstance(arrived, NoPass)
    assert arrived == 0


# -- what levels cost --------------------------------------------------------------------------------------


def learnt(steps: list[tuple[int, int, float]]) -> LevelCosts:
    costs = LevelCosts(np.array([0, 1, 4]), 64, [1, 256], [0.010, 0.0355])
    for step in steps:
        costs.observe(*step)
    return costs


def test_only_what_levels_differ_by_is_learnt() -> None:
    """The machine gets slower and slower: seen in what all levels take, and in no comparison."""
    steps = []
    for stretch in range(60):
        level = stretch % 3
        slow = 1.05 ** min(stretch, 30)
        steps += [(8, level, slow * (0.020, 0.030, 0.050)[level])] * 5
    said = learnt(steps).seconds(8)
    assert said / said[0] == pytest.approx([1.0, 1.5, 2.5], rel=0.03)
    assert said[0] == pytest.approx(0.020 * 1.05**30, rel=0.05)


def test_costs_at_other_batch_sizes_are_leant_on() -> None:
    """The drafter adds half to whatever the curve says."""
    bare = LevelCosts(np.array([0, 1, 4]), 64, [1, 256], [0.010, 0.0355])
    steps = []
    for stretch in range(60):
        level = (0, 1, 0, 2)[stretch % 4]
        steps += [(8, level, float(bare.seconds(8)[level]) * (1.5 if level else 1.0))] * 3
    costs = learnt(steps)
    for requests in (1, 8, 64):
        said, expected = costs.seconds(requests), bare.seconds(requests)
        assert said / said[0] == pytest.approx(expected / expected[0] * [1.0, 1.5, 1.5], rel=0.03)


def test_a_single_step_says_nothing_and_neither_do_different_batch_sizes() -> None:
    plain = learnt([])
    one = learnt([(8, 0, 0.020), (8, 0, 0.020), (8, 1, 9.0), (8, 0, 0.020), (8, 0, 0.020)])
    assert one.seconds(8) / one.seconds(8)[0] == pytest.approx(plain.seconds(8) / plain.seconds(8)[0])
    two = learnt([(8, 0, 0.020)] * 3 + [(32, 1, 0.9)] * 3)
    assert two.seconds(8) / two.seconds(8)[0] == pytest.approx(plain.seconds(8) / plain.seconds(8)[0])
