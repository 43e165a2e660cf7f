"""One suite over every registered proposer that drafts by itself: good manners, repeatability, no leftovers.

Those that hand on the host's own drafts (`Capabilities.native`) need an engine, and are tested in one (`tests/engine`). Those
with a checkpoint get a tiny one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.heads import checkpoint_for
from tests.support.steps import host, step
from vllm_specplugin import Proposer, Request
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.guard import Guard
from vllm_specplugin.registry import PROPOSERS

NAMES = [name for name in PROPOSERS.names() if PROPOSERS.resolve(name).capabilities.native is None]
VOCAB, K = 12, 4
PATIENCE_MS = 30_000.0  # for drafting: a busy machine must not decide what is drafted
PREDICTION = tuple(range(4)) * 5
"""What requests expect to be answered: it holds stretches of what they are."""


def make(name: str) -> Proposer:
    cls = PROPOSERS.resolve(name)
    model = checkpoint_for(name, VOCAB, K) if cls.capabilities.checkpoint else None
    config = SpecConfig(proposer=name, model=model, draft_budget_ms=PATIENCE_MS)
    proposer = cls(host(vocab_size=VOCAB, k=K, config=config), cls.Options())
    proposer.load(None)  # type: ignore[arg-type]
    return proposer


def test_every_proposer_with_a_checkpoint_of_its_own_has_a_tiny_one() -> None:
    """A new one must be added to `tests/support/heads.py`, or this suite would not run over it."""
    for name in NAMES:
        if PROPOSERS.resolve(name).capabilities.checkpoint:
            checkpoint_for(name, VOCAB, K)


def guarded(name: str) -> Guard:
    return Guard(make(name), name, PATIENCE_MS)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class Conversation:
    """Requests that come, grow by what a step commits, and go; the order of rows changes all the time."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.requests: dict[str, Request] = {}
        self.known: dict[str, list[int]] = {}
        self.born = 0

    def steps(self, count: int) -> Iterator[tuple[list[str], dict[str, int], list[str]]]:
        """Row order, tokens committed by each row, and the requests that ended before this step."""
        for _ in range(count):
            ended = [name for name in self.known if self.random.random() < 0.05]
            for name in ended:
                del self.known[name], self.requests[name]
            committed = {}
            for name, tokens in self.known.items():
                committed[name] = int(self.random.integers(0, K + 2))
                tokens.extend(self._text(committed[name]))
            while len(self.known) < 3 or self.random.random() < 0.1:
                name = f"request-{self.born}"
                self.born += 1
                self.requests[name] = Request(name, seed=self.born, prediction=PREDICTION)
                self.known[name] = self._text(int(self.random.integers(1, 60)))
                committed[name] = 1
            order = list(self.known)
            self.random.shuffle(order)
            yield order, committed, ended

    def _text(self, length: int) -> list[int]:
        """Repetitive enough that something can be predicted."""
        if self.random.random() < 0.5:
            return (self.random.permutation(4).tolist() * (length // 4 + 1))[:length]
        return self.random.integers(0, VOCAB, length).tolist()


def play(guard: Guard, seed: int, count: int = 60) -> list[list[list[int]]]:
    talk = Conversation(seed)
    drafts = []
    for order, committed, ended in talk.steps(count):
        guard.forget(ended)
        limits = [0 if committed[name] == 0 else int(talk.random.integers(0, K + 1)) for name in order]
        now = step({name: list(talk.known[name]) for name in order}, committed, k=K, limits=limits, requests=talk.requests)
        checked = guard.propose(now)
        assert (checked.lengths <= now.limits).all()
        drafts.append(checked.rows())
    return drafts


def test_is_documented(name: str) -> None:
    cls = PROPOSERS.resolve(name)
    assert inspect.getdoc(cls)
    assert cls.default_num_speculative_tokens >= 1
    for option, field in cls.Options.model_fields.items():
        assert field.description, f"option {option} has no description"


def test_never_at_fault_over_a_long_conversation(name: str) -> None:
    guard = guarded(name)
    drafts = play(guard, seed=1, count=150)
    assert not guard.faults
    assert not guard.switched_off
    assert any(row for rows in drafts for row in rows), "nothing was ever drafted"


def test_same_conversation_same_drafts(name: str) -> None:
    # Ranks of a tensor-parallel engine draft each for itself, and must agree.
    assert play(guarded(name), seed=2) == play(guarded(name), seed=2)


def test_no_drafts_where_none_are_wanted(name: str) -> None:
    guard = guarded(name)
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    assert guard.propose(step({"a": tokens}, k=0, limits=[0])).rows() == [[]]
    assert guard.propose(step({"a": tokens, "b": tokens}, k=K, limits=[0, 1])).rows()[0] == []
    assert not guard.faults


def test_a_forgotten_request_starts_afresh(name: str) -> None:
    proposer = make(name)
    old, new = [1, 2, 3, 4] * 5, [5, 6, 7] * 5
    proposer.propose(step({"a": old}))
    proposer.forget(["a", "never seen"])
    again = Guard(proposer, name, PATIENCE_MS).propose(step({"a": new})).rows()
    assert again == guarded(name).propose(step({"a": new})).rows()


@pytest.mark.parametrize("missed", [1, 7, 90])
def test_a_gap_is_made_up_for(name: str, missed: int) -> None:
    """Who says that it catches up drafts after missed steps what one drafts that was told to forget, and so starts afresh.

    Or, where it learns from all that is answered, what one drafts that missed nothing. How far is not compared: it may depend on
    what was learned of the request before.
    """
    if not PROPOSERS.resolve(name).catches_up:
        pytest.skip("the proposer is told to forget what it missed steps of")
    random = np.random.default_rng(missed)
    text = [*PREDICTION, *random.integers(0, VOCAB, 20).tolist(), *PREDICTION * 5]
    requests = {request: Request(request, seed=0, prediction=PREDICTION * 8) for request in "ab"}
    starting_afresh, attentive = make(name), make(name)
    proposers = make(name), starting_afresh, attentive
    drafted = 0
    for known in (24, 25, 26, 27 + missed, 28 + missed, 31 + missed):
        # One request goes on without the proposer, the other one has just begun; the order of rows changes.
        now = {request: text[:length] for request, length in (("a", known), ("b", known - 10))[:: 1 if known % 2 else -1]}
        if known == 27 + missed:
            starting_afresh.forget(["a", "b"])
            for length in range(28, 27 + missed):
                attentive.propose(step({"a": text[:length], "b": text[: length - 10]}, k=K, requests=requests))
        one_step = step(now, {"a": 3, "b": 3} if known == 31 + missed else None, k=K, requests=requests)
        drafts = [Guard(proposer, name, PATIENCE_MS).propose(one_step).rows() for proposer in proposers]
        for one, *others in zip(*drafts, strict=True):
            common = [min(len(one), len(other)) for other in others]
            same = [one[:n] == other[:n] and bool(one) == bool(other) for n, other in zip(common, others, strict=True)]
            assert any(same), (known, one, others)
            drafted += max(common)
    assert drafted


def test_memory_is_given_back(name: str) -> None:
    proposer = make(name)
    if proposer.memory_bytes() is None:
        pytest.skip("the proposer does not say what it holds")
    random = np.random.default_rng(0)
    held = []
    for round_ in range(6):
        names = [f"{round_}-{place}" for place in range(4)]
        proposer.propose(step({request: random.integers(0, VOCAB, 400).tolist() for request in names}))
        held.append(proposer.memory_bytes())
        proposer.forget(names)
    assert held[-1] <= held[1], f"what is held grows with the requests that have gone: {held}"
