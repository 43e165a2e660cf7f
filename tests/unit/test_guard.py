"""The guard: whatever a proposer does, the drafts that come out can be verified, in time."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.steps import host, step
from vllm_specplugin import Capabilities, Drafts, Proposer, Step, Verdict
from vllm_specplugin import guard as guard_module
from vllm_specplugin.guard import MAX_FAILED_STEPS, Fallback, Fault, Guard, wait_for_late_work
from vllm_specplugin.proposers.base import ProposerOptions

VOCAB = 100


class Scripted(Proposer):
    """Answers with what a function of the step says."""

    def __init__(self, answer: Callable[[Step], Any]) -> None:
        super().__init__(host(vocab_size=VOCAB), ProposerOptions())
        self.answer = answer
        self.forgotten: list[str] = []
        self.verdicts: list[Verdict] = []
        self.threads: set[int] = set()

    def propose(self, step: Step) -> Drafts:
        self.threads.add(threading.get_ident())
        return self.answer(step)

    def observe(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten += request_ids


class OnDevice(Scripted):
    """Works in the engine's own stream, so it cannot be left behind."""

    capabilities = Capabilities(tokens="device")


def guard_of(answer: Callable[[Step], Any], budget_ms: float = 5000, kind: type[Scripted] = Scripted) -> tuple[Guard, Scripted]:
    proposer = kind(answer)
    return Guard(proposer, "scripted", budget_ms), proposer


def two_rows(**more: Any) -> Step:
    return step({"a": [1, 2, 3], "b": [4, 5]}, **more)


# -- good drafts ------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafts",
    [
        Drafts([[7, 8], [9]]),
        Drafts([np.array([7, 8]), (9,)]),
        Drafts(np.array([[7, 8, 0], [9, 0, 0]], dtype=np.int16), lengths=[2, 1]),
        Drafts(torch.tensor([[7, 8, 0, 0], [9, 0, 0, 0]]), lengths=torch.tensor([2, 1])),
        Drafts(torch.tensor([[7, 8, 99, -1, 3, 3], [9, -1, 0, 0, 0, 0]], dtype=torch.int32), lengths=np.array([2, 1])),
    ],
    ids=["lists", "arrays", "rectangle", "tensor", "wide"],
)
def test_every_form_of_drafts(drafts: Drafts) -> None:
    guard, _ = guard_of(lambda _: drafts)
    checked = guard.propose(two_rows())
    assert checked.rows() == [[7, 8], [9]]
    assert checked.token_ids.shape == (2, 4)
    assert not guard.faults


def test_limits_cut_silently() -> None:
    guard, _ = guard_of(lambda _: Drafts([[7, 8, 9], [7, 8, 9]]))
    assert guard.propose(two_rows(limits=[1, 0])).rows() == [[7], []]
    assert not guard.faults


def test_k_of_zero() -> None:
    guard, _ = guard_of(lambda _: Drafts([[], []]))
    assert guard.propose(two_rows(k=0)).rows() == [[], []]
    assert not guard.faults


# -- bad drafts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "rows", "fault"),
    [
        (Drafts([[5] * 7, [6]]), [[5] * 4, [6]], Fault.TOO_LONG),
        (Drafts([[5, VOCAB], [6]]), [[5], [6]], Fault.BAD_TOKEN),
        (Drafts([[2**40], [6]]), [[], [6]], Fault.BAD_TOKEN),
        (Drafts([[-1, 5], [6]]), [[], [6]], Fault.BAD_TOKEN),
        (Drafts(torch.tensor([[5, -1], [6, 7]])), [[5], [6, 7]], Fault.BAD_TOKEN),
        (Drafts([[5]] * 3), [[], []], Fault.BAD_SHAPE),
        (Drafts(torch.zeros((2, 2))), [[], []], Fault.BAD_SHAPE),
        (Drafts(torch.zeros((3, 2), dtype=torch.int64)), [[], []], Fault.BAD_SHAPE),
        (Drafts(np.zeros((2, 2), dtype=np.int64), lengths=[3, 1]), [[], []], Fault.BAD_SHAPE),
        (Drafts(np.zeros((2, 2), dtype=np.int64), lengths=[1]), [[], []], Fault.BAD_SHAPE),
        (Drafts([[5], [6]], probabilities=torch.ones(2, 1, VOCAB)), [[], []], Fault.BAD_SHAPE),
        (Drafts([[5.0], [6]]), [[], []], Fault.EXCEPTION),  # type: ignore[list-item]
        (Drafts([["x"], [6]]), [[], []], Fault.EXCEPTION),  # type: ignore[list-item]
        (None, [[], []], Fault.BAD_SHAPE),
        ([[5], [6]], [[], []], Fault.BAD_SHAPE),
    ],
    ids=str,
)
def test_malformed_drafts(drafts: Any, rows: list[list[int]], fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    guard, _ = guard_of(lambda _: drafts)
    with caplog.at_level(logging.WARNING):
        assert guard.propose(two_rows()).rows() == rows
        guard.propose(two_rows())
    assert guard.faults[fault] >= 2
    assert len([record for record in caplog.records if f"({fault})" in record.getMessage()]) == 1  # said once


def probabilities(first: torch.Tensor) -> torch.Tensor:
    rows = torch.full((2, 4, VOCAB), 1 / VOCAB)
    rows[0, 1] = first
    return rows


@pytest.mark.parametrize("bad", [float("nan"), -0.5, 0.5], ids=["nan", "negative", "sum"])
def test_a_row_with_bad_probabilities_is_verified_without_them(bad: float) -> None:
    wrong = torch.full((VOCAB,), 1 / VOCAB)
    wrong[3] = bad
    guard, _ = guard_of(lambda _: Drafts([[5, 6, 7], [8, 9]], probabilities=probabilities(wrong)))
    checked = guard.propose(two_rows())
    assert checked.rows() == [[5, 6, 7], [8, 9]]
    assert checked.unreliable == {0}
    assert guard.faults == {Fault.BAD_PROBABILITIES: 1}


def evenly(rows: int = 2, k: int = 4) -> torch.Tensor:
    return torch.full((rows, k, VOCAB), 1 / VOCAB)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_draft_that_its_law_rules_out(place: int) -> None:
    """It cannot have been drawn from there; beyond a row's drafts anything may stand."""
    law = evenly()
    law[1, place, 7] = 0.0
    law[1, place, 8] = 2 / VOCAB
    law[1, 3] = float("nan")
    guard, _ = guard_of(lambda _: Drafts([[5], [7, 7, 7]], probabilities=law))
    checked = guard.propose(two_rows())
    assert checked.rows() == [[5], [7, 7, 7]]
    assert checked.unreliable == ({1} if place < 3 else set())
    assert guard.faults == ({Fault.BAD_PROBABILITIES: 1} if place < 3 else {})


@pytest.mark.parametrize(
    ("total", "reliable"), [(1.0, True), (0.995, True), (1.015, True), (0.97, False), (1.03, False), (0.5, False), (0.0, False)]
)
def test_probabilities_are_brought_to_one_where_they_miss_it_by_rounding(total: float, reliable: bool) -> None:
    law = torch.rand(2, 4, VOCAB, generator=torch.Generator().manual_seed(2))
    law /= law.sum(-1, keepdim=True)
    guard, _ = guard_of(lambda _: Drafts([[5, 6], [7]], probabilities=law * total))
    checked = guard.propose(two_rows())
    assert checked.unreliable == (set() if reliable else {0, 1})
    assert checked.probabilities is not None
    if reliable:
        torch.testing.assert_close(checked.probabilities, law)
        # float32's last bits
        assert (checked.probabilities.double().sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_probabilities_of_other_types(dtype: torch.dtype) -> None:
    """What was drawn from weights of a narrow type was drawn from these over their sum, rounded as they are."""
    law = (3 * torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(3))).softmax(-1).to(dtype)
    guard, _ = guard_of(lambda _: Drafts([[5, 6], [7]], probabilities=law))
    checked = guard.propose(two_rows())
    assert checked.probabilities is not None
    assert checked.probabilities.dtype == torch.float32
    torch.testing.assert_close(checked.probabilities.double(), law.double() / law.double().sum(-1, keepdim=True))
    assert not guard.faults


def test_right_probabilities_are_handed_on_as_they_are() -> None:
    law = evenly()
    guard, _ = guard_of(lambda _: Drafts([[5, 6], [7]], probabilities=law))
    checked = guard.propose(two_rows())
    assert checked.probabilities is not None
    assert torch.equal(checked.probabilities, law)
    assert checked.unreliable == set()


@pytest.mark.parametrize("shape", [(2, 4, VOCAB - 1), (2, 3, VOCAB), (1, 4, VOCAB), (2, 4)], ids=str)
def test_probabilities_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    guard, _ = guard_of(lambda _: Drafts([[5], [6]], probabilities=torch.full(shape, 1 / VOCAB)))
    assert guard.propose(two_rows()).rows() == [[], []]
    assert guard.faults == {Fault.BAD_SHAPE: 1}


def test_a_row_that_is_cut_by_what_was_drawn_loses_its_law() -> None:
    """What is left of it was drawn under a condition that its law does not know of."""
    guard, _ = guard_of(lambda _: Drafts([[5, VOCAB], [6, 7]], probabilities=evenly()))
    checked = guard.propose(two_rows())
    assert checked.rows() == [[5], [6, 7]]
    assert checked.unreliable == {0}


def test_rows_cut_at_their_limit_keep_their_law() -> None:
    guard, _ = guard_of(lambda _: Drafts([[5, 6, 7], [6, 7]], probabilities=evenly()))
    checked = guard.propose(two_rows(limits=[1, 2]))
    assert checked.rows() == [[5], [6, 7]]
    assert checked.unreliable == set()


def test_probabilities_find_their_rows_where_others_decode_plainly() -> None:
    """Three requests, of which the first came to grief earlier: the laws of the others lie at their places."""
    laws = torch.rand(3, 4, VOCAB, generator=torch.Generator().manual_seed(4)).softmax(-1)
    of = {"a": 0, "b": 1, "c": 2}

    def answer(step: Step) -> Drafts:
        if "a" in step.request_ids:
            raise RuntimeError("boom")
        given = laws[[of[name] for name in step.request_ids]].clone()
        if step.num_rows == 2:
            given[1, 0] = float("nan")
        return Drafts([[5]] * step.num_rows, probabilities=given)

    guard, _ = guard_of(answer)
    three = {"a": [1, 2], "b": [3, 4], "c": [5, 6]}
    found = guard.propose(step(three))
    assert found.rows() == [[], [5], [5]]
    assert found.probabilities is None
    assert found.unreliable == {1, 2}  # asked one by one; drawn by chance all the same
    checked = guard.propose(step(three))
    assert checked.rows() == [[], [5], [5]]
    assert checked.probabilities is not None
    torch.testing.assert_close(checked.probabilities[1], laws[1])
    assert checked.unreliable == {2}


def test_logits_become_probabilities() -> None:
    logits = torch.randn(2, 4, VOCAB)
    guard, _ = guard_of(lambda _: Drafts([[5], [6]], logits=logits))
    checked = guard.propose(two_rows())
    assert checked.probabilities is not None
    torch.testing.assert_close(checked.probabilities, logits.softmax(-1))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(-3, VOCAB + 3), max_size=7), min_size=2, max_size=2),
    st.lists(st.integers(0, 4), min_size=2, max_size=2),
)
def test_what_comes_out_can_always_be_verified(rows: list[list[int]], limits: list[int]) -> None:
    guard = Guard(OnDevice(lambda _: Drafts(rows)), "scripted", 5000)
    checked = guard.propose(two_rows(limits=limits))
    assert checked.token_ids.shape == (2, 4)
    assert ((checked.token_ids >= 0) & (checked.token_ids < VOCAB)).all()
    for row, limit, drafts in zip(rows, limits, checked.rows(), strict=True):
        assert len(drafts) <= limit
        assert drafts == row[: len(drafts)]


# -- exceptions -------------------------------------------------------------------


def raises_for(name: str) -> Callable[[Step], Drafts]:
    def answer(step: Step) -> Drafts:
        if name in step.request_ids:
            raise RuntimeError("boom")
        return Drafts([[int(row[-1])] for row in (step.committed(place) for place in range(step.num_rows))])

    return answer


def test_the_request_at_fault_is_found_and_its_neighbour_keeps_its_drafts() -> None:
    guard, proposer = guard_of(raises_for("a"))
    assert guard.propose(two_rows()).rows() == [[], [5]]
    assert guard.faults == {Fault.EXCEPTION: 1}
    calls: list[list[str]] = []
    answer = proposer.answer
    proposer.answer = lambda step: calls.append(step.request_ids) or answer(step)  # type: ignore[func-returns-value]
    for _ in range(2 * MAX_FAILED_STEPS):
        assert guard.propose(two_rows()).rows() == [[], [5]]
    assert guard.faults == {Fault.EXCEPTION: 1}  # the request decodes plainly, so it is not asked about again
    assert all(names == ["b"] for names in calls)
    assert guard.fallbacks == {Fallback.FAILED: 1, Fallback.EXCLUDED: 2 * MAX_FAILED_STEPS}
    guard.forget(["a"])
    guard.propose(step({"a": [1]}))
    assert guard.faults == {Fault.EXCEPTION: 2}  # a new request of that name is given a chance


def test_a_proposer_that_always_fails_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    def answer(_: Step) -> Drafts:
        raise ValueError("broken")

    guard, _ = guard_of(answer)
    for _ in range(MAX_FAILED_STEPS + 5):
        assert guard.propose(two_rows()).rows() == [[], []]
    assert guard.switched_off
    assert guard.fallbacks == {Fallback.FAILED: 2 * MAX_FAILED_STEPS, Fallback.SWITCHED_OFF: 2 * 5}  # two rows a step
    assert "switched off" in caplog.text
    assert "ValueError: broken" in caplog.text


def fails_together(step: Step) -> Drafts:
    """As where memory runs out: any row alone is well."""
    if step.num_rows > 1:
        raise MemoryError("too many")
    return Drafts([[7]] * step.num_rows)


def test_a_failure_that_no_row_reproduces_switches_the_proposer_off() -> None:
    guard, _ = guard_of(fails_together)
    for _ in range(MAX_FAILED_STEPS - 1):
        assert guard.propose(two_rows()).rows() == [[7], [7]]
    assert not guard.switched_off
    assert guard.propose(two_rows()).rows() == [[], []]
    assert guard.switched_off
    assert guard.fallbacks == {Fallback.FAILED: 2}


def test_only_failed_steps_in_a_row_switch_the_proposer_off() -> None:
    guard, _ = guard_of(fails_together)
    for _ in range(3):
        for _ in range(MAX_FAILED_STEPS - 1):
            guard.propose(two_rows())
        assert guard.propose(step({"a": [1]})).rows() == [[7]]
    assert not guard.switched_off


CALL_SECONDS = 10
EIGHT = {name: [1, 2] for name in "abcdefgh"}


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Step], Drafts]], tuple[Guard, list[list[str]]]]:
    """A guard with 55 s for a proposer that takes 10 s per call, by a clock that nothing else moves; and who was asked about."""
    now = [0]
    monkeypatch.setattr(guard_module.time, "perf_counter", lambda: now[0])

    def make(answer: Callable[[Step], Drafts]) -> tuple[Guard, list[list[str]]]:
        calls: list[list[str]] = []

        def takes_time(step: Step) -> Drafts:
            now[0] += CALL_SECONDS
            calls.append(step.request_ids)
            return answer(step)

        return guard_of(takes_time, 55_000, OnDevice)[0], calls

    return make


def test_the_search_for_a_row_at_fault_ends_within_the_budget(slowly: Any) -> None:
    guard, calls = slowly(fails_together)
    assert guard.propose(step(EIGHT)).rows() == [[7]] * 3 + [[]] * 5
    assert calls == [list(EIGHT), ["a"], ["b"], ["c"]]
    assert guard.fallbacks == {Fallback.FAILED: 5}
    assert guard.propose(step(EIGHT, limits=[4] * 7 + [0])).rows() == [[]] * 3 + [[7]] * 3 + [[]] * 2
    assert guard.fallbacks == {Fallback.FAILED: 5 + 4}  # the last one has no use for drafts
    assert not guard.faults[Fault.LATE]
    for _ in range(MAX_FAILED_STEPS):
        guard.propose(step(EIGHT))
    assert guard.switched_off
    assert len(calls) == MAX_FAILED_STEPS + 3 * (MAX_FAILED_STEPS - 1)


def test_the_search_goes_on_in_the_next_step(slowly: Any) -> None:
    guard, calls = slowly(raises_for("g"))
    steps = 0
    while guard._plain != {"g"}:
        steps += 1
        assert steps < MAX_FAILED_STEPS, calls
        guard.propose(step(EIGHT))
    assert guard.propose(step(EIGHT)).rows() == [[2]] * 6 + [[]] + [[2]]
    for _ in range(MAX_FAILED_STEPS):
        guard.propose(step(EIGHT))
    assert not guard.switched_off


def test_a_row_at_fault_is_found_although_it_takes_all_the_time(slowly: Any) -> None:
    guard, _ = slowly(raises_for("a"))
    guard.budget_seconds = CALL_SECONDS
    assert guard.propose(step(EIGHT)).rows() == [[], [2]] + [[]] * 6
    assert guard._plain == {"a"}


def test_rows_are_not_at_fault_where_all_that_were_tried_fail(slowly: Any) -> None:
    """Else each step would exclude a few, and the proposer would never be switched off."""

    def broken(_: Step) -> Drafts:
        raise ValueError("broken")

    guard, _ = slowly(broken)
    for _ in range(MAX_FAILED_STEPS):
        assert guard.propose(step(EIGHT)).rows() == [[]] * 8
        assert not guard._plain
    assert guard.switched_off
    assert guard.fallbacks == {Fallback.FAILED: 8 * MAX_FAILED_STEPS}


def test_rows_of_a_step_that_is_late_are_counted_once() -> None:
    def answer(step: Step) -> Drafts:
        if step.num_rows > 1:
            time.sleep(0.2)
        return fails_together(step)

    guard, _ = guard_of(answer, budget_ms=50)
    guard.propose(step(EIGHT))
    settled(guard)
    assert guard.fallbacks == {Fallback.LATE: 8}


def test_late_work_can_be_waited_for() -> None:
    done = threading.Event()

    def answer(step: Step) -> Drafts:
        time.sleep(0.3)
        done.set()
        return Drafts([[7]] * step.num_rows)

    guard, _ = guard_of(answer, budget_ms=20)
    guard.propose(two_rows())
    guard_module.wait_for_late_work(0.001)
    assert not done.is_set()
    guard_module.wait_for_late_work(30)
    assert done.is_set()
    began = time.monotonic()
    guard_module.wait_for_late_work(30)  # nobody works
    assert time.monotonic() - began < 5


def test_an_engine_that_is_gone_leaves_neither_proposer_nor_thread() -> None:
    guard, proposer = guard_of(lambda step: Drafts([[7]] * step.num_rows), budget_ms=5_000)
    assert guard.propose(two_rows()).rows() == [[7], [7]]
    threads = [thread for thread in threading.enumerate() if thread.ident in proposer.threads]
    assert len(threads) == 1
    seen = weakref.ref(proposer)
    del guard, proposer
    gc.collect()
    threads[0].join(10)
    assert not threads[0].is_alive()
    assert seen() is None


def test_ranks_that_draft_together_search_every_row(slowly: Any) -> None:
    """One whose clock said that time is up would leave the others waiting for it."""
    guard, calls = slowly(raises_for("h"))
    guard._spans_ranks = True
    assert guard.propose(step(EIGHT)).rows() == [[2]] * 7 + [[]]
    assert len(calls) == 9


def test_sys_exit_in_a_proposer_does_not_end_the_engine() -> None:
    guard, _ = guard_of(lambda _: sys.exit(3))
    assert guard.propose(two_rows()).rows() == [[], []]
    guard.proposer.answer = lambda _: Drafts([[1], [2]])  # type: ignore[attr-defined]
    assert guard.propose(two_rows()).rows() == [[1], [2]]


def test_faults_in_the_other_verbs() -> None:
    class Bad(Scripted):
        def forget(self, request_ids: Sequence[str]) -> None:
            raise RuntimeError("forget")

        def observe(self, verdict: Verdict) -> None:
            raise RuntimeError("observe")

    guard, _ = guard_of(lambda _: Drafts([[1], [2]]), kind=Bad)
    guard.forget(["a"])
    guard.observe(Verdict(torch.zeros(1), torch.zeros(1, 1)))
    assert guard.propose(two_rows()).rows() == [[1], [2]]
    assert guard.faults == {Fault.EXCEPTION: 2}


# -- time -------------------------------------------------------------------------


def test_a_silent_proposer_is_left_behind_and_catches_up() -> None:
    release = threading.Event()

    def answer(step: Step) -> Drafts:
        if "a" in step.request_ids and not release.is_set():
            release.wait(30)
            return Drafts([[66] for _ in step.requests])  # for a step that has passed
        return Drafts([[7] for _ in step.requests])

    guard, proposer = guard_of(answer, budget_ms=50)
    assert guard.propose(step({"c": [1]})).rows() == [[7]]
    started = time.perf_counter()
    assert guard.propose(two_rows()).rows() == [[], []]
    assert guard.propose(step({"c": [1, 2]})).rows() == [[]]  # busy: nobody waits
    assert time.perf_counter() - started < 5  # far below the 30 s of silence, far above the budget
    assert guard.faults == {Fault.LATE: 1}
    assert guard.fallbacks == {Fallback.LATE: 2, Fallback.SKIPPED: 1}
    guard.forget(["b"])
    release.set()
    deadline = time.monotonic() + 10
    while guard._worker is not None and guard._worker.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert guard.propose(step({"a": [1, 2, 3, 4], "c": [1, 2, 3]})).rows() == [[7], [7]]  # fresh, not the late 66
    assert {"a", "b", "c"} <= set(proposer.forgotten)  # it missed tokens of all three


def test_a_proposer_on_the_device_pays_its_overrun_back() -> None:
    guard, proposer = guard_of(lambda _: time.sleep(0.06) or Drafts([[1], [2]]), budget_ms=20, kind=OnDevice)  # type: ignore[func-returns-value]
    assert guard.propose(two_rows()).rows() == [[1], [2]]
    assert guard.faults == {Fault.LATE: 1}
    skipped = 0
    while guard.propose(two_rows()).rows() == [[], []]:
        skipped += 1
        assert skipped < 100
    assert skipped >= 3  # 60 ms are three budgets
    assert guard.fallbacks == {Fallback.SKIPPED: 2 * skipped}  # its late drafts are verified
    guard.propose(two_rows(limits=[1, 0]))
    assert guard.fallbacks[Fallback.SKIPPED] == 2 * skipped + 1  # the other row has no use for drafts
    assert proposer.threads == {threading.get_ident()}


def test_a_host_proposer_runs_in_one_thread_of_its_own() -> None:
    guard, proposer = guard_of(lambda _: Drafts([[1], [2]]))
    for _ in range(5):
        guard.propose(two_rows())
    assert len(proposer.threads) == 1
    assert proposer.threads != {threading.get_ident()}


# -- verbs ------------------------------------------------------------------------


def test_verdicts_and_forgetting_reach_the_proposer() -> None:
    guard, proposer = guard_of(lambda _: Drafts([[1], [2]]))
    verdict = Verdict(torch.tensor([1]), torch.tensor([[1, 2]]), torch.tensor([1]), ["a"])
    guard.observe(verdict)
    guard.forget(["a", "unknown"])
    assert proposer.verdicts == [verdict]
    assert sorted(proposer.forgotten) == ["a", "unknown"]


def test_nobody_waits_for_a_proposer_that_learns_too_long() -> None:
    """From a verdict; the next step goes on without it, too."""
    guard, proposer = guard_of(lambda _: Drafts([[1], [2]]), budget_ms=20)
    guard.propose(two_rows())
    release = threading.Event()
    observed: list[Verdict] = []

    def observe(verdict: Verdict) -> None:
        release.wait(30)
        observed.append(verdict)

    proposer.observe = observe  # type: ignore[method-assign]
    verdict = Verdict(torch.tensor([1]), torch.tensor([[1, 2]]), torch.tensor([1]), ["a"])
    began = time.perf_counter()
    guard.observe(verdict)
    assert time.perf_counter() - began < 5
    assert guard.faults == {Fault.LATE: 1}
    assert guard.propose(two_rows()).rows() == [[], []]
    assert guard.fallbacks[Fallback.SKIPPED]
    release.set()
    guard._worker.wait(30)  # type: ignore[union-attr]
    assert observed == [verdict]
    assert guard.propose(two_rows()).rows() == [[1], [2]]


def test_a_proposer_that_does_not_come_back_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is collected for it: ids of all requests to come would be."""
    monkeypatch.setattr(guard_module, "HUNG_SECONDS", 0.3)
    release = threading.Event()

    def answer(_: Step) -> Drafts:
        release.wait(30)
        return Drafts([[7]])

    guard, _ = guard_of(answer, budget_ms=20)
    guard.propose(step({"a": [1]}))
    guard.propose(step({"a": [1, 2]}))
    assert not guard.switched_off
    time.sleep(0.3)
    assert guard.propose(step({"a": [1, 2, 3]})).rows() == [[]]
    assert guard.switched_off
    for number in range(100):
        guard.propose(step({str(number): [1]}))
        guard.forget([str(number)])
        guard.skip([str(number)])  # as control does once it has paused drafting
    assert not guard._ended
    assert guard._to_forget <= {"a"}
    assert guard.fallbacks == {Fallback.LATE: 1, Fallback.SKIPPED: 1, Fallback.SWITCHED_OFF: 101}
    release.set()


# -- missed steps -----------------------------------------------------------------


class CatchesUp(Scripted):
    catches_up = True


@pytest.mark.parametrize("kind", [Scripted, CatchesUp])
def test_who_catches_up_is_not_told_to_forget(kind: type[Scripted]) -> None:
    """Neither after steps in which it was not asked, nor after those that it was too late for."""
    release, late = threading.Event(), threading.Event()

    def answer(_: Step) -> Drafts:
        if late.is_set():
            release.wait(30)
        return Drafts([[1], [2]])

    guard, proposer = guard_of(answer, kind=kind)
    guard.propose(two_rows())
    guard.skip(["a", "b"])
    guard.propose(two_rows())
    assert sorted(proposer.forgotten) == ([] if kind.catches_up else ["a", "b"])
    late.set()
    guard.budget_seconds = 0.01
    guard.propose(two_rows())
    guard.propose(two_rows())
    assert guard.fallbacks == {Fallback.LATE: 2, Fallback.SKIPPED: 2}
    guard.forget(["b"])  # one that ended is forgotten in any case
    release.set()
    late.clear()
    settled(guard)
    guard.budget_seconds = 5
    guard.propose(two_rows())
    assert sorted(proposer.forgotten) == (["b"] if kind.catches_up else ["a", "a", "b", "b"])


def settled(guard: Guard) -> None:
    """Wait until the proposer's thread has nothing to do."""
    deadline = time.monotonic() + 10
    while guard._worker is not None and guard._worker.busy and time.monotonic() < deadline:
        time.sleep(0.005)


def test_a_request_that_ends_while_its_proposer_is_late_leaves_nothing() -> None:
    """Row by row the late proposer meets it once more, after all; it is forgotten after that, and not held to have failed."""
    release, reached = threading.Event(), threading.Event()
    states: set[str] = set()

    class Keeps(Scripted):
        def forget(self, request_ids: Sequence[str]) -> None:
            super().forget(request_ids)
            states.difference_update(request_ids)

    def answer(step: Step) -> Drafts:
        if step.num_rows > 1:
            reached.set()
            release.wait(30)
            raise ValueError("all of them at once")
        states.update(step.request_ids)
        if step.request_ids == ["a"]:
            raise ValueError("this one")
        return Drafts([[7]] * step.num_rows)

    guard, _ = guard_of(answer, budget_ms=20, kind=Keeps)
    guard.propose(two_rows())
    assert reached.wait(10)
    guard.forget(["a", "b"])
    release.set()
    settled(guard)
    assert states == {"a", "b"}  # the late answer
    guard.budget_seconds = 5
    assert guard.propose(step({"c": [1]})).rows() == [[7]]
    assert states == {"c"}
    assert guard._plain == set()


def test_nobody_is_missed_who_ends_at_the_wrong_moment() -> None:
    guard, proposer = guard_of(lambda step: Drafts([[7]] * step.num_rows), kind=OnDevice)
    threads = []

    class Interrupted(set[str]):
        """Another thread comes to forget `b` once this one has read what there is to forget."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from tuple(super().__iter__())
            threads.append(threading.Thread(target=guard.skip, args=(["b"],)))
            threads[-1].start()
            threads[-1].join(0.05)

    guard._to_forget = Interrupted({"a"})
    guard._forget_now()
    threads[0].join(10)
    guard._to_forget = set(set.__iter__(guard._to_forget))
    guard._forget_now()
    assert proposer.forgotten == ["a", "b"]


def test_ranks_that_draft_together_skip_no_step_by_their_own_clocks(caplog: pytest.LogCaptureFixture) -> None:
    proposer = OnDevice(lambda _: time.sleep(0.02) or Drafts([[1], [2]]))  # type: ignore[func-returns-value]
    proposer.host = host(vocab_size=VOCAB, tensor_parallel_size=2)
    guard = Guard(proposer, "scripted", 5)
    for _ in range(4):
        assert guard.propose(two_rows()).rows() == [[1], [2]]
    assert guard.faults == {Fault.LATE: 4}
    assert "the ranks work together" in caplog.text


@pytest.mark.parametrize("row_by_row", [False, True])
def test_a_late_proposer_reads_no_tokens_of_a_step_that_is_over(row_by_row: bool) -> None:
    """The engine's table has other requests' tokens in that row by then. It is late, and at fault in nothing else."""
    release, read = threading.Event(), []

    def answer(current: Step) -> Drafts:
        if row_by_row and current.num_rows == 2:
            raise ValueError("no two rows")
        release.wait(10)
        read.append(current.history.host(0))
        return Drafts([[1]] * current.num_rows)

    guard, _ = guard_of(answer, budget_ms=30)
    late = two_rows()
    assert guard.propose(late).rows() == [[], []]
    for row in late.history.rows:  # type: ignore[attr-defined]
        row[:] = 99
    release.set()
    wait_for_late_work(10)
    assert not read
    assert guard.faults == {Fault.LATE: 1} | ({Fault.EXCEPTION: 1} if row_by_row else {})
    if not row_by_row:
        assert guard.propose(two_rows()).rows() == [[1], [1]]
        assert read
