"""Control: what it takes steps to cost, how it judges drafts, what it chooses, and when it pauses a proposer."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.pretend import Cost, Pretended, Traffic, controlled, copying, dense, few_cores, fields, mixture, steady
from vllm_specplugin.control.acceptance import DOUBT, LATE_LEAN, Acceptance
from vllm_specplugin.control.clock import STEP_CLOCK, StepClock
from vllm_specplugin.control.controller import LEAST_REFERENCE_INTERVAL, PROBE_SHARE, TRIAL_STEPS, Controller
from vllm_specplugin.control.costs import CostTable, TypicalSeconds
from vllm_specplugin.control.kernels import KERNELS, turns
from vllm_specplugin.control.policy import choose

# -- costs -------------------------------------------------------------------------------------------------


def test_the_curve_never_falls_and_goes_on() -> None:
    table = CostTable([1, 2, 4, 8], [0.010, 0.030, 0.012, 0.020])  # the second was disturbed
    assert table.curve(np.array([1, 2, 3, 4])).tolist() == pytest.approx([0.010, 0.012, 0.012, 0.012])
    assert float(table.curve(16)) == pytest.approx(0.020 + 8 * 0.002)


@pytest.mark.parametrize("cost", [dense, mixture])
def test_live_steps_correct_the_curve(cost: Cost) -> None:
    """Steps take twice as long as the bare passes did, and those with drafts half as much again: both are learnt."""

    def real(requests: int, drafts: int) -> float:
        return 2 * cost(requests, drafts) * (1.5 if drafts else 1.0)

    sizes = [1 << power for power in range(8)]
    table = CostTable(sizes, [cost(0, size) for size in sizes])
    rng = np.random.default_rng(0)
    for step in range(400):
        requests, drafts = 8, 0 if step % 4 == 0 else 8 * (step % 4)
        table.observe(requests, drafts, real(requests, drafts) * float(np.exp(rng.normal(0, 0.03))))
    said = table.seconds(8, 24)
    assert said[0] == pytest.approx(real(8, 0), rel=0.1)  # as of the last steps, which are noisy
    for drafts in (8, 24):
        assert said[drafts] / said[0] == pytest.approx(real(8, drafts) / real(8, 0), rel=0.05)
    # Where no step has been, a factor leans on others like it; and the curve is interpolated between 8 rows and 16.
    assert table.seconds(4, 8)[8] / table.seconds(4, 0)[0] == pytest.approx(real(4, 8) / real(4, 0), rel=0.08)
    for requests in (1, 5, 8, 200):
        assert table.plain_seconds(requests) == pytest.approx(float(table.seconds(requests, 0)[0]), rel=1e-12)


@pytest.mark.parametrize("drafts", [0, 8], ids=["plain steps", "drafted steps"])
def test_a_machine_that_slows_down_as_a_whole_changes_few_comparisons(drafts: int) -> None:
    table = CostTable([1, 64], [0.010, 0.020])
    for _ in range(50):
        table.observe(4, 0, 0.011)
        table.observe(4, 8, 0.014)
    before = table.seconds(4, 8)
    for _ in range(200):
        table.observe(4, drafts, 0.028 if drafts else 0.022)  # twice as slow, and only steps of this kind are seen
    after = table.seconds(4, 8)
    assert after[drafts] == pytest.approx(2 * before[drafts], rel=0.05)
    assert after[8] / after[0] == pytest.approx(before[8] / before[0], rel=0.15)  # without drift it would be 2 or 1/2


def test_verification_that_once_looked_dear_is_tried_again() -> None:
    table = CostTable([1, 64], [0.010, 0.010])
    for _ in range(20):
        table.observe(4, 0, 0.010)
        table.observe(4, 8, 0.014)  # something else ran
    assert table.seconds(4, 8)[8] > 1.3 * table.seconds(4, 8)[0]
    for _ in range(5000):
        table.observe(4, 0, 0.010)
    assert table.seconds(4, 8)[8] < 1.02 * table.seconds(4, 8)[0]


def test_what_is_typical_is_little_moved_by_a_few_slow_ones() -> None:
    typical = TypicalSeconds()
    assert typical.seconds(8) == 0.0
    for place in range(100):
        typical.observe(8, 0.5 if place % 20 == 0 else 0.001)
    assert typical.seconds(8) == pytest.approx(0.001, rel=0.3)
    assert typical.seconds(64) == typical.seconds(8)  # the nearest that is known


# -- the choice --------------------------------------------------------------------------------------------


def rate(lengths: tuple[int, ...], gains: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    tokens = len(lengths) + sum(gains[row, :length].sum() for row, length in enumerate(lengths))
    return float(tokens / seconds[sum(lengths)])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3))
def test_no_choice_is_better(seed: int, rows: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    acceptance, available = rng.random((rows, k)), rng.integers(0, k + 1, rows)
    seconds = 0.01 + np.concatenate([[0.0], rng.random(rows * k).cumsum() * 0.004])
    choice = choose(acceptance, available, rows, lambda drafts: seconds[: drafts + 1])
    gains = acceptance.cumprod(axis=1)
    best = max(rate(lengths, gains, seconds) for lengths in itertools.product(*(range(int(most) + 1) for most in available)))
    assert (choice.lengths <= available).all()
    assert rate(tuple(choice.lengths.tolist()), gains, seconds) == pytest.approx(best)
    assert choice.tokens / choice.seconds == pytest.approx(best)
    assert choice.speedup == pytest.approx(best * seconds[0] / rows)


def test_a_gain_below_the_margin_is_none() -> None:
    acceptance, available = np.full((4, 2), 0.03), np.full(4, 2)
    costs = np.full(9, 0.01)
    assert choose(acceptance, available, 4, lambda drafts: costs[: drafts + 1], margin=0.01).lengths.tolist() == [2] * 4
    assert choose(acceptance, available, 4, lambda drafts: costs[: drafts + 1], margin=0.05).lengths.tolist() == [0] * 4


# -- acceptance --------------------------------------------------------------------------------------------


class Judged:
    """One request whose drafts and tokens a test writes down."""

    def __init__(self, k: int = 4) -> None:
        self.acceptance = Acceptance(k, 2)
        self.k = k

    def draft(self, ids: list[int], by_chance: bool = False) -> NDArray[np.float64]:
        """Keep a draft; what was thought of it."""
        slots = self.acceptance.slots(["r"])
        cells = self.acceptance.kinds(slots, ["p"], self.k, None)
        estimates = self.acceptance.estimate(slots, cells)
        row = np.array([[*ids, *[0] * (self.k - len(ids))]])
        self.acceptance.keep(slots, row, np.array([len(ids)]), cells, by_chance)
        return estimates[0]

    def commit(self, *ids: int, tested: int = 0) -> None:
        slots = self.acceptance.slots(["r"])
        self.acceptance.committed(slots, np.array(ids), np.array([0, len(ids)]), np.array([tested]))

    @property
    def tests(self) -> tuple[float, float]:
        """How many drafts were decided, and how many of them were right."""
        return float(self.acceptance._tests.sum()), float(self.acceptance._accepted.sum())


def test_a_draft_that_is_not_verified_is_held_against_what_follows() -> None:
    judged = Judged()
    judged.draft([5, 6, 7, 8])
    judged.commit(5)
    assert judged.tests == (1, 1)
    judged.draft([9])  # of the first, three are not decided yet, and stay
    judged.commit(6)
    assert judged.tests == (3, 2)
    judged.commit(1)
    assert judged.tests == (4, 2)  # of the first right, right, wrong; its fourth will never be known
    judged.commit(8)
    assert judged.tests == (4, 2)
    assert judged.acceptance.take() == {"p": (2, 2, 1)}  # for the alarm: what each step's drafts were worth in the next
    assert judged.acceptance.take() == {}


def test_nothing_is_known_of_a_draft_past_the_first_that_is_wrong() -> None:
    judged = Judged()
    judged.draft([5, 6, 7])
    judged.commit(5, 9, 7)  # other drafts were verified; the third may be right again by accident
    assert judged.tests == (2, 1)


def test_a_verified_draft_is_judged_by_what_the_pass_emitted() -> None:
    judged = Judged()
    judged.draft([5, 6, 7])
    judged.commit(5, 6, 1, tested=3)
    assert judged.tests == (3, 2)
    judged.draft([5, 6])
    judged.commit(5, 6, 9, tested=2)  # all of it, and a bonus token that nobody drafted
    assert judged.tests == pytest.approx((5, 4), rel=0.02)  # older ones have begun to fade


def test_what_was_drawn_by_chance_is_judged_where_it_was_verified_alone() -> None:
    judged = Judged()
    judged.draft([5, 6, 7], by_chance=True)
    judged.commit(5, 6, tested=1)  # that the bonus token equals the second says little about accepting it
    assert judged.tests == (1, 1)
    judged.draft([5], by_chance=True)
    judged.commit(1, tested=0)
    assert judged.tests == (1, 1)


def test_estimates_follow_what_happens_to_this_request_just_before() -> None:
    judged = Judged()
    first = judged.draft([1, 2, 3, 4])
    assert (first == first[0]).all()
    for _ in range(60):
        judged.commit(1, 2, 3, 4, 9, tested=4)
        on_track = judged.draft([1, 2, 3, 4])
    assert (on_track > 0.9).all()
    for _ in range(60):
        judged.commit(9, tested=4)
        off_track = judged.draft([1, 2, 3, 4])
    assert off_track[0] < 0.3
    judged.acceptance.forget(["r"])
    assert judged.draft([1, 2, 3, 4])[0] > off_track[0]  # another request starts from what is known of all


def test_a_request_that_is_on_track_is_told_from_one_that_is_not() -> None:
    """Stretches of 24 tokens that are drafted right, then as many that are not: what came just before says what comes next."""
    judged = Judged(k=1)
    estimates: dict[bool, float] = {}
    for step in range(24 * 20):
        right = step // 24 % 2 == 0
        estimates[right] = float(judged.draft([1])[0])  # in the end: of the last step of a stretch
        judged.commit(1 if right else 9)
    assert estimates[False] < 0.2 < 0.8 < estimates[True]


def test_positions_and_the_proposers_own_estimates_are_told_apart() -> None:
    acceptance = Acceptance(2, 1)
    slots = acceptance.slots(["r"])
    for step in range(400):
        sure = step % 2 == 0
        expected = np.array([[0.9 if sure else 0.1, 0.5]])
        acceptance.keep(slots, np.array([[1, 2]]), np.array([1]), acceptance.kinds(slots, ["p"], 2, expected), False)
        acceptance.committed(slots, np.array([1 if sure else 9]), np.array([0, 1]), np.array([0]))
    low, high = (acceptance.estimate(slots, acceptance.kinds(slots, ["p"], 2, np.array([[p, 0.5]])))[0, 0] for p in (0.1, 0.9))
    assert low < 0.3 < 0.7 < high


def test_more_requests_than_run_at_once_are_kept_apart() -> None:
    acceptance = Acceptance(2, 2)
    assert len(set(acceptance.slots([f"r{place}" for place in range(9)]).tolist())) == 9
    batch = ["r3", "r4"]
    before = acceptance.slots(batch).tolist()
    assert acceptance.slots(batch).tolist() == before
    batch.append("r5")  # a list that its owner goes on changing
    assert acceptance.slots(batch).tolist()[:2] == before
    assert len(acceptance.slots(batch)) == 3
    acceptance.forget(["r3", "nobody"])
    assert acceptance.is_new("r3")
    assert not acceptance.is_new("r4")
    taken = acceptance.slots(["r9"])  # the place that r3 had
    assert not set(taken.tolist()) & set(acceptance.slots(batch).tolist())


# -- whole engines -----------------------------------------------------------------------------------------

COSTS = {"dense": dense, "mixture": mixture}
TRAFFIC: dict[str, Traffic] = {"random": steady(0.02), "half": steady(0.5), "copying": copying}
KS = (1, 8)


@pytest.mark.parametrize("concurrency", [1, 32])
@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("cost", COSTS)
def test_no_harm_and_no_worse_than_the_best_fixed_length(cost: str, traffic: str, concurrency: int) -> None:
    """Over the same requests; the length that is best differs from case to case, and is 0 in some."""
    tokens = 16_000 if concurrency > 1 else 1_500
    same = (COSTS[cost], TRAFFIC[traffic], concurrency)
    rates = [Pretended(*same, control=k).until(tokens).rate for k in (None, *KS)]
    engine = controlled(*same).until(tokens)
    # The first hundred steps or so are spent on finding out; and 3 % of noise in a step leave some in the whole.
    assert engine.rate > 0.97 * max(rates)


@pytest.mark.parametrize("concurrency", [1, 8, 16])
def test_traffic_that_changes_kind(concurrency: int) -> None:
    """What long copies have taught (a token that is right is followed by others) is wrong of short ones, and soon unlearnt."""
    engine = controlled(few_cores, copying, concurrency, tokens_each=40).until(8_000)
    engine.traffic = fields
    emitted, now = engine.emitted, engine.now
    engine.until(emitted + 4_000)
    rates = [Pretended(few_cores, fields, concurrency, control=k, tokens_each=40).until(4_000).rate for k in (None, 1, 2, 4, 8)]
    assert (engine.emitted - emitted) / (engine.now - now) > 0.97 * max(rates)


def slow_cores(requests: int, drafts: int) -> float:
    """As timed on two cores without AVX-512: every row counts."""
    rows, milliseconds = [1, 2, 4, 9, 16, 32, 64, 128, 256, 512], [113, 116, 125, 156, 180, 260, 400, 600, 1000, 2000]
    return float(np.interp(requests + drafts, rows, milliseconds)) / 1e3


def test_a_start_up_curve_that_was_disturbed_is_put_right() -> None:
    """Other engines loaded meanwhile, and up to 16 rows seemed to take alike: the longest drafts looked best."""
    traffic = steady(0.6)
    engine = controlled(slow_cores, traffic, 1, k=10, tokens_each=40)
    assert isinstance(engine.control, Controller)
    sizes = [1 << power for power in range(10)]
    engine.control.calibrate(sizes, [0.127 if size <= 16 else slow_cores(1, size - 1) for size in sizes])
    rates = [Pretended(slow_cores, traffic, 1, k=10, control=k, tokens_each=40).until(3_000).rate for k in (1, 2, 3, 5, 10)]
    assert engine.until(3_000).rate > 0.97 * max(rates)
    assert rates[-1] < 0.9 * max(rates), "the longest are not the best"


def test_what_is_picked_for_looking_good_is_taken_for_worse() -> None:
    """But not drafts by chance: those that are not verified are never judged, so that doubts would last for ever."""
    judged = Judged()
    for _ in range(100):
        judged.draft([5, 6])
        judged.commit(5, 1)
        judged.draft([5])
        judged.commit(1)
    slots = judged.acceptance.slots(["r"])
    cells = judged.acceptance.kinds(slots, ["p"], judged.k, None)
    cautious, plain = (judged.acceptance.estimate(slots, cells, by_chance=chance)[0, 0] for chance in (False, True))
    assert plain == pytest.approx(0.5, abs=0.06)
    assert 0.05 < plain - cautious < 0.2


def test_what_is_asked_and_verified_where_nothing_is_accepted() -> None:
    """A slow proposer: it is paused, and what trying it again takes is bounded."""
    engine = controlled(dense, steady(0.0), 8, asking=0.005).run(2000)
    control = engine.control
    assert isinstance(control, Controller)
    assert control.state.regime == "paused"
    asked, tested = engine.asked, engine.tested
    engine.run(2000)
    assert (engine.asked - asked) * 0.005 <= 1.1 * PROBE_SHARE * 2000 * dense(8, 0)
    assert engine.tested == tested
    assert engine.asked > asked


def test_a_quick_proposer_is_paused_as_well_and_comes_back_at_once() -> None:
    """Two steps of ten, though it could be asked in all for less than 1 % of the time; and no more once drafts turn out right."""
    engine = controlled(dense, steady(0.0), 2, asking=2e-5).run(1000)
    asked = engine.asked
    engine.run(1000)
    assert 100 <= engine.asked - asked <= 200
    many = controlled(dense, steady(0.02), 64, asking=2e-5).run(1000)  # one of all its drafts is right in most steps
    asked = many.asked
    many.run(1000)
    assert 100 <= many.asked - asked <= 250
    engine.traffic = steady(0.95)
    engine._requests.clear()
    asked = engine.asked
    engine.run(60)
    assert engine.asked - asked > 40
    assert engine.tested > 100


def test_changes_that_lie_far_apart_make_none_slower() -> None:
    """Each regime lasts for thousands of steps; the last change is as quick as the first."""
    engine = controlled(dense, steady(0.0), 4, asking=0.0005)
    control = engine.control
    assert isinstance(control, Controller)
    took = []
    for turn in range(8):
        engine.traffic = steady(0.9 if turn % 2 else 0.0)
        engine._requests.clear()
        wanted, steps = ("drafting" if turn % 2 else "paused"), 0
        while control.state.regime != wanted:
            engine.run(1)
            steps += 1
        took.append(steps)
        engine.run(3000)
    assert max(took) < 400


def test_a_paused_proposer_comes_back_when_its_drafts_pay(caplog: pytest.LogCaptureFixture) -> None:
    engine = controlled(dense, steady(0.01), 4, asking=0.002)
    with caplog.at_level(logging.INFO, "vllm.specplugin"):
        engine.run(1000)
        assert isinstance(engine.control, Controller)
        assert engine.control.state.regime == "paused"
        engine.traffic = steady(0.9)
        engine.run(1500)
    state = engine.control.state
    assert (state.regime, state.changes) == ("drafting", 2)
    assert state.drafts_per_request > 4
    paused, resumed = [record.getMessage() for record in caplog.records]  # one line for each change
    assert paused.startswith("Drafting by 'pretended' does not pay now and is paused")
    assert "of the last drafts 1% agreed" in paused or "of the last drafts 2% agreed" in paused or "0% agreed" in paused
    assert "a step of 4 requests takes 20." in paused
    assert "asking for drafts 2 ms" in paused
    assert resumed.startswith("Drafting by 'pretended' pays again")


def test_what_a_pause_makes_dear_does_not_make_it_last() -> None:
    """After a step without drafts the proposer takes in what it missed, which is the price of the pause and not of drafting."""
    engine = controlled(dense, steady(0.01), 4, asking=0.0005, catching_up=0.040).run(600)
    assert isinstance(engine.control, Controller)
    assert engine.control.state.regime == "paused"
    before, began = engine.seconds_asking, engine.now
    engine.run(2000)
    assert engine.control.state.regime == "paused"
    assert engine.seconds_asking - before <= 1.1 * PROBE_SHARE * (engine.now - began)  # but it is paid for
    engine.traffic = steady(0.9)
    engine.run(6000)
    assert engine.control.state.regime == "drafting"
    assert engine.control._asking.seconds(4) == 0.0005


def test_a_price_that_falls_during_a_pause_is_noticed() -> None:
    engine = controlled(dense, steady(0.9), 1, asking=0.120, catching_up=0.010).run(500)
    assert isinstance(engine.control, Controller)
    assert engine.control.state.regime == "paused"
    engine.asking = 0.0005
    engine.run(15_000)
    assert engine.control.state.regime == "drafting"


def test_drafts_by_chance_are_tried_although_none_is_verified() -> None:
    engine = controlled(mixture, steady(0.02), 4, by_chance=True).run(1200)
    assert isinstance(engine.control, Controller)
    assert engine.rate > 0.97 * Pretended(mixture, steady(0.02), 4).run(1200).rate
    engine.traffic = steady(0.97)
    engine.run(1500)
    assert engine.control.state.drafts_per_request > 1


def test_the_lengths_of_drafts_by_chance_depend_on_nothing_that_was_drawn() -> None:
    """Tokens, the number of drafts and the proposer's own remarks may all depend on draws."""
    chosen = {}
    for drafted, sure in ((4, 0.9), (4, 0.1), (1, 0.1)):
        control = Controller("p", 4, 4, clock=itertools.count().__next__)
        # The first draft does not pay for itself, all of them together do.
        control.calibrate([1, 2, 16], [0.010, 0.022, 0.022])
        slots = control.acceptance.slots(["r"])
        for _ in range(100):  # drafts that their proposer is not sure of are wrong
            kinds = control.acceptance.kinds(slots, ["p"], 4, np.full((1, 4), 0.1))
            control.acceptance.keep(slots, np.full((1, 4), 5), np.array([1]), kinds, False)
            control.acceptance.committed(slots, np.array([6]), np.array([0, 1]), np.array([0]))
            kinds = control.acceptance.kinds(slots, ["p"], 4, None)
            control.acceptance.keep(slots, np.full((1, 4), 5), np.array([4]), kinds, False)
            control.acceptance.committed(slots, np.full(4, 5), np.array([0, 4]), np.array([4]))
        control.begin(["r"], np.array([1]), np.array([0, 1]), np.array([0]))
        assert control.asks(["r"])
        ids, limits = np.full((1, 4), drafted), np.array([4])
        lengths = control.lengths(["r"], ids, np.array([drafted]), limits, 1e-3, None, np.full((1, 4), sure), by_chance=True)
        chosen[drafted, sure] = int(lengths[0])
    assert chosen == {(4, 0.9): 4, (4, 0.1): 4, (1, 0.1): 1}


def test_steps_without_drafts_are_taken_now_and_then() -> None:
    """Else nobody would know any more what they take: a proposer that costs as much as it brings would stay for ever."""
    engine = controlled(dense, steady(0.2), 1, tokens_each=20_000).run(1)
    plain = 0
    for _ in range(1500):
        before = engine.tested
        engine.run(1)
        plain += engine.tested == before
    assert 2 <= plain <= 1500 / LEAST_REFERENCE_INTERVAL


def test_a_stateful_proposer_is_tried_on_requests_that_begin() -> None:
    control = Controller("p", 2, 4, stateful=["p"], clock=itertools.count(0.0, 0.01).__next__)

    def step(*names: str) -> tuple[bool, list[int]]:
        asked = control.asks(list(names))
        control.begin(list(names), np.ones(len(names), dtype=int), np.arange(len(names) + 1), np.zeros(len(names), dtype=int))
        lengths = np.zeros(len(names), dtype=int)
        if asked:
            full = np.full(len(names), 2)
            lengths = control.lengths(list(names), np.ones((len(names), 2), dtype=int), full, full, 0.002)
        control.end()
        return asked, lengths.tolist()

    assert step("old")[0]
    control._paused, control._gain = True, -0.1
    for _ in range(400):
        assert not step("old")[0]  # a request that lapsed is not drafted for, however much trying may cost by now
    asked, lengths = step("old", "new")
    assert asked
    assert lengths[0] == 0
    tried = [step("old", "new") for _ in range(TRIAL_STEPS)]
    assert [asked for asked, _ in tried] == [True] * (TRIAL_STEPS - 1) + [False] or control.state.regime == "drafting"
    assert all(lengths[0] == 0 for _, lengths in tried)
    assert any(lengths[1] for _, lengths in tried)
    control.forget(["old", "new"])
    assert not control._lapsed


class Asked:
    """Control of a proposer that must see every step, paused; the host asks it before a step's tokens are known, or after."""

    def __init__(self, asks_first: bool) -> None:
        self.asks_first = asks_first
        self.control = Controller("p", 2, 4, stateful=["p"], clock=itertools.count(0.0, 0.01).__next__)
        self.step({"old": 1})
        self.control._paused, self.control._gain = True, -0.1
        for _ in range(400):  # the price of a trial is saved up
            assert self.step({"old": 1}) is None

    def step(self, committed: dict[str, int]) -> list[int] | None:
        """Lengths for requests with so many new tokens, none while a prompt is read; None where it was not asked."""
        control, names, counts = self.control, list(committed), np.array(list(committed.values()))
        asked = control.asks(names) if self.asks_first else True
        offsets = np.concatenate([[0], counts.cumsum()])
        control.begin(names, np.ones(counts.sum(), dtype=int), offsets, np.zeros(len(names), dtype=int))
        asked = asked if self.asks_first else control.asks(names)
        full = 2 * (counts > 0)
        lengths = control.lengths(names, np.ones((len(names), 2), dtype=int), full, full, 0.002) if asked else None
        control.end()
        return None if lengths is None else lengths.tolist()


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_stateful_proposer_is_tried_on_a_prompt_of_many_chunks(asks_first: bool) -> None:
    """Also where nobody else decodes, and for as many steps after it as after a short one."""
    asked = Asked(asks_first)
    asked.control.forget(["old"])
    for _ in range(TRIAL_STEPS + 5):
        assert asked.step({"new": 0}) == [0]
    assert asked.control._lapsed == set()
    assert any(asked.step({"new": 1}) == [2] for _ in range(TRIAL_STEPS - 1))


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_stateful_proposer_is_tried_whenever_it_is_asked(asks_first: bool) -> None:
    asked = Asked(asks_first)
    assert asked.step({"old": 1, "new": 1}) is not None
    assert asked.control._lapsed == {"old"}


def test_a_stateful_proposer_is_not_asked_for_requests_that_lapsed() -> None:
    control = Controller("p", 2, 4, stateful=["p"])
    control._lapsed = {"old", "older"}
    assert not control.asks(["old", "older"])
    assert control.asks(["old", "new"])
    assert Controller("p", 2, 4, stateful=["p"]).asks(["old"])
    of_parts = Controller("hybrid", 2, 4, stateful=["eagle"])
    of_parts._lapsed = {"old"}
    assert of_parts.asks(["old"])  # whom the others draft for


def test_rows_that_no_part_drafts_for_promise_nothing() -> None:
    """Beside rows whose drafts were drawn; else they would hide that those do not pay, and nobody would look at them again."""
    control = Controller("hybrid", 2, 4, clock=itertools.count(0.0, 0.01).__next__)
    control.calibrate([1, 64], [0.01, 0.073])
    names, sources, full = ["drawn", "without"], ["eagle", ""], np.full(2, 2)
    tested = np.zeros(2, dtype=int)
    verified = 0
    for _ in range(1000):
        control.begin(names, np.zeros(2, dtype=int), np.arange(3), tested)
        control.asks(names)
        drafts = np.array([2, 0])
        lengths = control.lengths(names, np.ones((2, 2), dtype=int), drafts, full, 1e-3, sources, by_chance=True)
        control.end()
        tested = lengths
        verified += int(lengths[0])
        if control.state.regime == "paused":
            break
    assert control.state.regime == "paused"
    assert verified > 0


def test_what_needs_no_history_drafts_for_requests_that_lapsed() -> None:
    """In a hybrid of a part that must see every step and one that need not."""
    control = Controller("hybrid", 2, 4, stateful=["eagle"], clock=itertools.count(0.0, 0.01).__next__)
    control._lapsed.add("old")
    names, full = ["old", "old too", "new"], np.full(3, 2)
    control._lapsed.add("old too")
    control.asks(names)
    control.begin(names, np.ones(3, dtype=int), np.arange(4), np.zeros(3, dtype=int))
    lengths = control.lengths(names, np.ones((3, 2), dtype=int), full, full, 1e-6, sources=["eagle", "ngram", "eagle"])
    assert lengths[0] == 0
    assert lengths[1:].all()


def compiled_kernels() -> list[list[int]]:
    """How often each kernel was compiled: before the first request, and after some."""
    Controller("p", 4, 4).compile()
    before = [len(kernel.signatures) for kernel in KERNELS]
    controlled(dense, copying, 3).run(20)
    controlled(dense, copying, 3, by_chance=True).run(20)
    return [before, [len(kernel.signatures) for kernel in KERNELS]]


def test_nothing_is_compiled_while_requests_wait() -> None:
    """In a process in which no other test has compiled anything."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        assert fresh.submit(compiled_kernels).result(120) == [[1] * len(KERNELS)] * 2


def test_a_pause_between_two_steps_is_no_slow_step() -> None:
    """As where `bench` lets another engine have its turn."""

    def cost(pauses: bool) -> float:
        control = Controller("p", 2, 4)
        for _ in range(20):
            control.begin(["a"], np.ones(1, dtype=np.int64), np.array([0, 1]), np.zeros(1, dtype=np.int64))
            control.end()
            time.sleep(0.001)
            if pauses:
                STEP_CLOCK.pause()
            time.sleep(0.001)
            STEP_CLOCK.resume()
        return float(control.costs.seconds(1, 0)[0])

    assert cost(pauses=True) < 0.8 * cost(pauses=False)


def test_what_a_proposer_does_lately_counts_beyond_chance() -> None:
    """20 tests in two cells, of which 19 were foreseen, 12 +- 2 or none; the sources are independent of each other."""
    tests = np.zeros((4, 2, 3))
    tests[:3, 0, 0], tests[:3, 1, 2] = 15.0, 5.0
    rates = np.full((4, 2, 3), 0.6)
    rates[0] = 0.95
    accepted = tests * np.array([0.2, 0.45, 1.0, 0.0])[:, None, None]
    worse, same, better, unknown = turns(tests, accepted, rates, DOUBT, LATE_LEAN)
    assert worse < -2
    assert same == unknown == 0
    assert better > 0.5


def test_a_paused_clock_stands_still() -> None:
    clock = StepClock()
    clock.resume()  # nothing to resume
    before = clock()
    clock.pause()
    paused = clock()
    time.sleep(0.02)
    clock.pause()  # twice is once
    assert clock() == paused >= before
    clock.resume()
    assert paused <= clock() < paused + 0.02
    time.sleep(0.001)
    assert clock() > paused
