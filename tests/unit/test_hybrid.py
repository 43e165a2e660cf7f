"""A hybrid drafts what the part that promises most drafts, keeps every part up to date, and says which it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.heads import checkpoint_for
from tests.support.steps import host, step
from vllm_specplugin import Capabilities, ConfigError, Drafts, Proposer, Request, Step, Verdict
from vllm_specplugin.config import SpecConfig, resolve
from vllm_specplugin.guard import Guard
from vllm_specplugin.proposers.hybrid import EXPLORE, HybridProposer
from vllm_specplugin.proposers.hybrid_estimates import Estimates
from vllm_specplugin.registry import PROPOSERS

K, VOCAB = 4, 50

Says = Callable[[Step, int], Sequence[int]]


class Part(Proposer):
    """A part that drafts what the test tells it to, and keeps what it was shown."""

    capabilities = Capabilities(tokens="host")
    says: Says
    expected: Sequence[float] | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[Step] = []
        self.verdicts: list[Verdict] = []
        self.forgotten: list[str] = []

    def propose(self, step: Step) -> Drafts:
        self.seen.append(step)
        rows = [list(type(self).says(step, row))[: step.limits[row]] for row in range(step.num_rows)]
        if self.expected is None:
            return Drafts(rows)
        return Drafts(rows, expected=np.tile(np.asarray(self.expected, dtype=float)[: step.k], (step.num_rows, 1)))

    def observe(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten.extend(request_ids)


class Deaf(Part):
    """Learns nothing from verdicts."""

    observe = Proposer.observe


class CatchesUp(Part):
    """Sees by itself that it missed something."""

    catches_up = True


class OnDevice(Part):
    """Reads tokens on the target's device."""

    capabilities = Capabilities(tokens="device")


class Model(Part):
    """Works on hidden states, has a checkpoint, and may draw its drafts."""

    capabilities = Capabilities(hidden_states="last", tokens="none", probabilities=True, checkpoint=True)
    sharp = 0.75

    def propose(self, step: Step) -> Drafts:
        drafts = super().propose(step)
        if self.host.config.draft_sampling == "greedy":
            return drafts
        laws = torch.full((step.num_rows, step.k, VOCAB), (1 - self.sharp) / (VOCAB - 1))
        for row, ids in enumerate(drafts.token_ids):
            for place, token in enumerate(ids):
                laws[row, place, token] = self.sharp
        self.laws = laws
        return Drafts(drafts.token_ids, probabilities=laws, expected=drafts.expected)


class Native(Model):
    """Runs in every step, and has attention state of its own."""

    capabilities = Capabilities(tokens="none", probabilities=True, own_kv_cache=True, checkpoint=True, native="eagle")


class OtherNative(Native):
    capabilities = Capabilities(tokens="none", own_kv_cache=True, native="mtp")


PARTS: dict[str, type[Part]] = {
    "one": Part,
    "two": Deaf,
    "catches_up": CatchesUp,
    "on_device": OnDevice,
    "model": Model,
    "native": Native,
    "other_native": OtherNative,
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts above under their names, each a class of its own, so that a test may set what it says."""
    stock = PROPOSERS.resolve
    known = {name: type(name, (cls,), {"says": staticmethod(lambda step, row: [])}) for name, cls in PARTS.items()}
    monkeypatch.setattr(PROPOSERS, "resolve", lambda name: known.get(name) or stock(name))


def hybrid(
    *names: str | dict[str, Any],
    sampling: Any = "greedy",
    says: dict[str, Says] | None = None,
    budget: float = 60_000.0,
    ranks: int = 1,
) -> HybridProposer:
    for name, words in (says or {}).items():
        PROPOSERS.resolve(name).says = staticmethod(words)  # type: ignore[attr-defined]
    options = {"proposers": list(names)}
    config = SpecConfig(proposer="hybrid", model="heads", options=options, draft_sampling=sampling, draft_budget_ms=budget)
    around = host(vocab_size=VOCAB, k=K, config=config, tensor_parallel_size=ranks)
    return HybridProposer(around, HybridProposer.Options(proposers=names))


def part_of(proposer: HybridProposer, name: str) -> Any:
    return proposer.guards[name].proposer


def guarded(proposer: HybridProposer) -> Guard:
    return Guard(proposer, "hybrid", 60_000)


def constant(*tokens: int) -> Says:
    return lambda step, row: tokens


class Talk:
    """One request that is answered with given tokens, a pass after the other, as many at a time as are drafted rightly."""

    def __init__(self, proposer: HybridProposer, answer: Sequence[int], **request: Any) -> None:
        self.proposer, self.answer = proposer, list(answer)
        self.request = Request("a", **request)
        self.known, self.new, self.done = [1, 2, self.answer[0]], 1, 1
        self.guard = guarded(proposer)
        self.cut_off: set[str] = set()
        """Parts whose drafts nobody verifies."""

    def step(self) -> tuple[list[int], str]:
        """The drafts of one pass, and where from; then the target goes on with the answer."""
        checked = self.guard.propose(step({"a": self.known}, {"a": self.new}, k=K, requests={"a": self.request}))
        assert not self.guard.faults
        assert checked.sources is not None
        drafts, coming = checked.rows()[0], self.answer[self.done :]
        if checked.sources[0] in self.cut_off:
            drafts = []
        accepted = 0
        while accepted < min(len(drafts), len(coming)) and drafts[accepted] == coming[accepted]:
            accepted += 1
        if drafts:
            emitted = torch.tensor([[*drafts[:accepted], 0]])
            self.guard.observe(Verdict(torch.tensor([accepted]), emitted, torch.tensor([len(drafts)]), ["a"]))
        self.new = accepted + 1
        self.known += coming[: self.new]
        self.done += self.new
        return drafts, checked.sources[0]

    def sources(self, passes: int) -> list[str]:
        return [self.step()[1] for _ in range(passes)]

    def oracle(self, wrong: Callable[[int], bool] = lambda place: False) -> Says:
        """Drafts of the answer, wrong at some places of it."""

        def says(step: Step, row: int) -> list[int]:
            done = int(step.lengths[row]) - 2
            coming = self.answer[done : done + K]
            return [(token + wrong(done + place)) % VOCAB for place, token in enumerate(coming)]

        return says

    def let(self, name: str, wrong: Callable[[int], bool] = lambda place: False) -> Talk:
        type(part_of(self.proposer, name)).says = staticmethod(self.oracle(wrong))
        return self


ANSWER = [(7 * place + place // 5) % VOCAB for place in range(1000)]


# -- who drafts ----------------------------------------------------------------------------------------------


def test_the_first_named_drafts_where_all_promise_the_same() -> None:
    proposer = hybrid("two", "one", says={"one": constant(1, 2, 3, 4), "two": constant(5, 6, 7, 8)})
    checked = guarded(proposer).propose(step({"a": [1, 2, 3], "b": [4, 5]}, k=K))
    assert checked.rows() == [[5, 6, 7, 8]] * 2
    assert checked.sources == ["two", "two"]


def test_rows_without_drafts_of_one_part_get_those_of_another() -> None:
    proposer = hybrid(
        "one", "two", says={"one": lambda step, row: [9] * 4 if row else [], "two": lambda step, row: [8] if row < 2 else []}
    )
    checked = guarded(proposer).propose(step({"a": [1], "b": [1], "c": [1], "d": [1]}, k=K, limits=[K, 2, K, 0]))
    assert checked.rows() == [[8], [9, 9], [9] * 4, []]
    assert checked.sources == ["two", "one", "one", ""]


def test_what_a_part_itself_expects_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = hybrid("one", "two", says={"one": constant(1, 2, 3, 4), "two": constant(5, 6)})
    monkeypatch.setattr(part_of(proposer, "one"), "expected", [0.5, 0.1, 0.1, 0.1])
    monkeypatch.setattr(part_of(proposer, "two"), "expected", [0.9, 0.9])
    checked = guarded(proposer).propose(step({"a": [1, 2, 3]}, k=K))
    assert checked.rows() == [[5, 6]]
    assert checked.expected is not None
    assert checked.expected[0] == pytest.approx([0.9, 0.9, 0, 0])


def test_the_better_part_takes_over_without_ever_having_been_verified() -> None:
    """The first part errs at every place, so the second one's drafts are held against what comes, and found right."""
    talk = Talk(hybrid("one", "two"), ANSWER).let("one", lambda place: True).let("two")
    sources = talk.sources(12)
    assert sources[0] == "one"
    assert sources[3:] == ["two"] * 9


def test_it_goes_back_when_the_traffic_of_a_request_changes() -> None:
    talk = Talk(hybrid("one", "two"), ANSWER).let("one", lambda place: place < 100 or place >= 300)
    talk.let("two", lambda place: 100 <= place < 300)
    by_place = {}
    while talk.done < 450:
        place = talk.done
        by_place[place] = talk.step()[1]
    for part, first, last in (("two", 20, 100), ("one", 140, 300), ("two", 350, 450)):
        here = [source for place, source in by_place.items() if first <= place < last]
        assert here.count(part) >= 0.9 * len(here), (part, here)


def test_requests_of_one_batch_go_each_their_way() -> None:
    """The same two parts, one right for every first request and one for every second."""

    def right_for(kind: str) -> Says:
        return lambda step, row: [10] * K if step.requests[row].request_id.startswith(kind) else [20] * K

    proposer = hybrid("one", "two", says={"one": right_for("a"), "two": right_for("b")})
    guard = guarded(proposer)
    texts = {name: [1, 2, 3] for name in ("a1", "b1", "a2", "b2")}
    for _ in range(8):
        checked = guard.propose(step(texts, dict.fromkeys(texts, K), k=K))
        texts = {name: tokens + [10] * K for name, tokens in reversed(texts.items())}
    sources = dict(zip(reversed(texts), checked.sources or (), strict=True))
    assert sources == {"a1": "one", "a2": "one", "b1": "two", "b2": "two"}


def test_a_request_may_name_its_part() -> None:
    proposer = hybrid("one", "two", "model", says={"one": constant(1), "two": constant(2), "model": constant(3)})
    requests = {name: Request(name, proposer=name) for name in ("one", "two", "model", "hybrid")}
    checked = guarded(proposer).propose(step({name: [1, 2] for name in requests}, k=K, requests=requests))
    assert (checked.rows(), checked.sources) == ([[1], [2], [3], [1]], ["one", "two", "model", "one"])
    # A part that draws nothing up for the request leaves it without drafts.
    type(part_of(proposer, "two")).says = staticmethod(constant())
    checked = guarded(proposer).propose(step({"two": [1, 2]}, k=K, requests=requests | {"two": Request("two", proposer="two")}))
    assert (checked.rows(), checked.sources) == ([[]], [""])


# -- the part with a model -----------------------------------------------------------------------------------


def limits_of(proposer: HybridProposer, name: str) -> list[list[int]]:
    return [seen.limits.tolist() for seen in part_of(proposer, name).seen]


def test_the_model_is_asked_only_where_it_may_do_better() -> None:
    proposer = hybrid("one", "model", says={"one": lambda step, row: [1] * K if row else [], "model": constant(3, 3, 3, 3)})
    checked = guarded(proposer).propose(step({"a": [1], "b": [1]}, k=K))
    assert limits_of(proposer, "model") == [[K, 0]]
    assert checked.sources == ["model", "one"]


def test_the_model_is_asked_now_and_then_to_see_what_it_is_worth() -> None:
    talk = Talk(hybrid("one", "model"), ANSWER).let("one").let("model")
    assert set(talk.sources(3 * EXPLORE)) == {"one"}
    asked = [place for place, (limit,) in enumerate(limits_of(talk.proposer, "model")) if limit]
    assert 2 <= len(asked) <= 3
    assert np.diff(asked).min() >= EXPLORE


def test_the_hosts_own_drafter_is_always_asked() -> None:
    talk = Talk(hybrid("one", "native"), ANSWER).let("one").let("native")
    assert set(talk.sources(10)) == {"one"}
    assert limits_of(talk.proposer, "native") == [[K]] * 10


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_ranks_ask_a_model_that_they_share_whatever_the_host_parts_say(sampling: str) -> None:
    """These may be late on one rank alone, and then one of the ranks would wait for the others. Requests say the same to all."""
    says: dict[str, Says] = {"one": constant(1, 2, 3, 4), "model": constant(3, 6)}
    proposer = hybrid("one", "model", sampling=sampling, says=says, ranks=2)
    requests = {"a": Request("a"), "b": Request("b", proposer="one"), "c": Request("c", proposer="model")}
    checked = guarded(proposer).propose(step({name: [1, 2] for name in requests}, k=K, requests=requests, limits=[K, K, 1]))
    assert limits_of(proposer, "model") == [[K, 0, 1]]
    assert checked.sources == ["one", "one", "model"]


def test_a_part_on_the_device_keeps_the_hybrid_out_of_a_thread() -> None:
    for names, on_host_only in ((("one", "two"), True), (("one", "on_device"), False), (("one", "native"), False)):
        guard = guarded(hybrid(*names))
        assert (guard.on_host_only, guard._worker is not None) == (on_host_only, on_host_only)
    device = hybrid("one", "on_device", says={"on_device": constant(1)})
    thread = []
    type(part_of(device, "on_device")).says = staticmethod(lambda step, row: thread.append(threading.get_ident()) or [1])
    guarded(device).propose(step({"a": [1]}, k=K))
    assert thread == [threading.get_ident()]


def test_a_model_that_cannot_draft_so_far_leaves_the_others_their_length(tmp_path: Any) -> None:
    heads = checkpoint_for("medusa", VOCAB, 2)
    config = SpecConfig.parse({"proposer": "hybrid", "model": heads, "options": {"proposers": ["ngram", "medusa"]}})
    assert resolve(config).num_speculative_tokens > 2
    proposer = HybridProposer(host(vocab_size=VOCAB, k=5, config=config), HybridProposer.Options(proposers=("ngram", "medusa")))
    proposer.load(None)  # type: ignore[arg-type]
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    checked = guarded(proposer).propose(step({"a": text, "b": [8, 9]}, k=5))
    assert checked.rows()[0] == [3, 4, 5, 6, 7]
    assert (len(checked.rows()[1]), checked.sources) == (2, ["ngram", "medusa"])


# -- drafts by chance ----------------------------------------------------------------------------------------


def requests_at(*temperatures: float) -> dict[str, Request]:
    return {f"r{place}": Request(f"r{place}", temperature=heat) for place, heat in enumerate(temperatures)}


def test_rows_without_chance_are_one_hot_beside_rows_with_probabilities() -> None:
    says: dict[str, Says] = {"one": lambda step, row: [4, 5] * 2 if row == 0 else [], "model": constant(3, 6)}
    proposer = hybrid("one", "model", sampling="probabilistic", says=says)
    requests = requests_at(1.0, 1.0, 0.0)
    checked = guarded(proposer).propose(step({name: [1, 2] for name in requests}, k=K, requests=requests))
    assert checked.sources == ["one", "model", "model"]
    assert checked.probabilities is not None
    assert not checked.unreliable
    for draft, token in enumerate([4, 5, 4, 5]):
        assert checked.probabilities[0, draft].nonzero().tolist() == [[token]]
        assert checked.probabilities[0, draft, token] == 1
    assert checked.probabilities[1, [0, 1], [3, 6]].tolist() == [Model.sharp] * 2
    torch.testing.assert_close(checked.probabilities[1, :2].sum(-1), torch.ones(2))


def test_probabilities_pass_as_they_are_where_all_drafts_were_drawn() -> None:
    """A copy of `[rows, k, vocab]` takes its time."""
    proposer = hybrid("one", "model", sampling="probabilistic", says={"model": constant(3, 6)})
    drafts = proposer.propose(step({"r0": [1, 2]}, k=K, requests=requests_at(1.0)))
    assert drafts.probabilities is part_of(proposer, "model").laws


@pytest.mark.parametrize("drawn", [[3], [3, 6, 9, 12], [49, 49]], ids=str)
def test_what_was_drawn_decides_nothing(drawn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the drafts that are verified would not follow the law that is said of them: they were picked by what they are."""
    proposer = hybrid("one", "native", sampling="probabilistic", says={"one": constant(1, 2, 3)})
    monkeypatch.setattr(part_of(proposer, "one"), "expected", [0.9] * K)
    monkeypatch.setattr(part_of(proposer, "native"), "expected", [1.0 if len(drawn) > 1 else 0.01] * K)
    type(part_of(proposer, "native")).says = staticmethod(constant(*drawn))
    requests = {"a": Request("a", temperature=1.0), "b": Request("b", temperature=1.0, proposer="native")}
    checked = guarded(proposer).propose(step({"a": [1, 2, 3], "b": [4, 5, 6]}, k=K, requests=requests))
    assert (checked.rows(), checked.sources) == ([[1, 2, 3], drawn], ["one", "native"])


def test_a_part_that_draws_is_verified_now_and_then() -> None:
    """What nobody verified of it shows nothing: whether the target says the same is not whether it would have been accepted."""
    talk = Talk(hybrid("one", "native", sampling="probabilistic"), ANSWER * 2, temperature=1.0).let("one").let("native")
    sources = talk.sources(2 * EXPLORE + 10)
    chosen = [place for place, source in enumerate(sources) if source == "native"]
    assert 1 <= len(chosen) <= 2
    assert chosen[0] >= EXPLORE - 1


def test_a_part_that_draws_is_not_forced_on_a_request_that_nobody_verifies_it_in() -> None:
    """Control cuts its drafts off where they do not pay; those of the others would be lost in every pass."""
    talk = Talk(hybrid("one", "native", sampling="probabilistic"), ANSWER * 2, temperature=1.0).let("one").let("native")
    talk.cut_off = {"native"}
    sources = talk.sources(4 * EXPLORE)
    assert 1 <= sources.count("native") <= 4


def test_drawn_drafts_that_are_cut_off_before_the_pass_teach_nothing() -> None:
    """Whether the target says the same by itself is not whether it would have accepted them."""
    talk = Talk(hybrid("native", "one", sampling="probabilistic"), ANSWER, temperature=1.0).let("native")
    assert talk.step()[1] == "native"
    estimates = talk.proposer._estimates
    talk.proposer._tested = {"a": 2}
    talk.step()
    assert estimates._of_kind[0, 0, :K].tolist() == [1, 1, 0, 0]
    talk.proposer._tested = {}
    talk.step()
    assert estimates._of_kind[0, 0, :K].tolist() == [1, 1, 0, 0]


def test_greedy_requests_teach_without_being_verified() -> None:
    talk = Talk(hybrid("one", "native", sampling="probabilistic"), ANSWER, temperature=0.0)
    talk.let("one", lambda place: place % 2 == 0).let("native")
    assert talk.sources(12)[4:] == ["native"] * 8


def test_probabilities_that_were_not_announced_are_left_out() -> None:
    """Given the draft it is one-hot, which is lossless; what it was drawn from might depend on the choice between the parts."""

    class Unannounced(Model):
        capabilities = Capabilities(tokens="host")

    unannounced = type("one", (Unannounced,), {"says": staticmethod(constant(3))})
    stock = PROPOSERS.resolve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PROPOSERS, "resolve", lambda name: unannounced if name == "one" else stock(name))
        proposer = hybrid("one", "model", sampling="probabilistic")
    checked = guarded(proposer).propose(step({"r0": [1, 2]}, k=K, requests=requests_at(1.0)))
    assert (checked.rows(), checked.probabilities) == ([[3]], None)


# -- a part at fault -----------------------------------------------------------------------------------------


def test_a_part_that_raises_takes_nobody_along() -> None:
    def raises(step: Step, row: int) -> list[int]:
        raise RuntimeError("boom")

    proposer = hybrid("one", "two", says={"one": raises, "two": constant(8)})
    guard = guarded(proposer)
    for length in range(12):
        assert guard.propose(step({"a": [1] * (length + 2), "b": [2] * (length + 2)}, k=K)).rows() == [[8], [8]]
    assert not guard.faults
    assert proposer.guards["one"].switched_off
    assert not proposer.guards["two"].faults


def test_a_part_that_is_late_takes_nobody_along() -> None:
    hold = threading.Event()

    def hangs(step: Step, row: int) -> list[int]:
        hold.wait(10)
        return [1]

    proposer = hybrid("one", "two", says={"one": hangs, "two": constant(8)}, budget=2000.0)
    assert guarded(proposer).propose(step({"a": [1, 2]}, k=K)).rows() == [[8]]
    assert dict(proposer.guards["one"].faults) == {"late": 1}
    hold.set()


def test_a_part_has_half_of_the_time_that_is_left() -> None:
    proposer = hybrid("one", "two", "model", budget=60_000.0)
    proposer.propose(step({"a": [1, 2]}, k=K))
    assert all(29 < part.budget_seconds < 30 for part in proposer.guards.values())


# -- what parts are shown ------------------------------------------------------------------------------------


def test_every_part_sees_every_token_whoever_drafts() -> None:
    talk = Talk(hybrid("one", "two", "model", "ngram"), ANSWER).let("one").let("two", lambda place: place % 3 == 0).let("model")
    talk.sources(40)
    for name in ("one", "two", "model"):
        seen: list[int] = []
        for step_seen in part_of(talk.proposer, name).seen:
            seen += step_seen.committed(0).tolist()
            assert len(seen) + 2 == step_seen.lengths[0]
        assert seen == ANSWER[: len(seen)]


def test_after_missed_steps_each_part_goes_on_as_it_can() -> None:
    """And the drafts from before teach nothing, as what they were about is gone."""
    talk = Talk(hybrid("one", "catches_up"), ANSWER).let("one", lambda place: True).let("catches_up")
    talk.sources(6)
    others = {"b": Request("b"), "a": talk.request}
    evidence = talk.proposer._estimates._of_kind.copy()
    talk.guard.skip(["a"])  # the guard has nothing forgotten
    missed = talk.answer[talk.done : talk.done + 3]
    talk.known, talk.done = talk.known + missed, talk.done + 3
    drafts = talk.guard.propose(step({"b": [1, 2], "a": talk.known}, k=K, requests=others)).rows()
    assert drafts[1] == talk.answer[talk.done : talk.done + K]
    np.testing.assert_array_equal(talk.proposer._estimates._of_kind, evidence)
    assert (part_of(talk.proposer, "one").forgotten, part_of(talk.proposer, "catches_up").forgotten) == (["a"], [])
    talk.new = 1  # and on it goes
    talk.known, talk.done = talk.known + talk.answer[talk.done : talk.done + 1], talk.done + 1
    assert talk.sources(3) == ["catches_up"] * 3
    assert talk.proposer._estimates._of_kind.sum() > evidence.sum()
    assert part_of(talk.proposer, "one").forgotten == ["a"]


def test_verdicts_go_to_the_part_that_drafted() -> None:
    says: dict[str, Says] = {"one": lambda step, row: [9] if row == 1 else [], "two": lambda step, row: [8] * 2}
    proposer = hybrid("one", "two", says=says)
    guard = guarded(proposer)
    guard.propose(step({"a": [1], "b": [1], "c": [1]}, k=1, requests={**requests_at(), **{n: Request(n) for n in "abc"}}))
    assert guard.wants_verdicts
    verdict = Verdict(
        accepted=torch.tensor([0, 1, 0]),
        token_ids=torch.tensor([[5, -1], [9, 6], [7, -1]]),
        tested=torch.tensor([1, 1, 1]),
        request_ids=["c", "b", "a"],  # the order of rows changes
    )
    guard.observe(verdict)
    (told,) = part_of(proposer, "one").verdicts
    assert (list(told.request_ids), told.accepted.tolist(), told.tested.tolist()) == (["b"], [1], [1])
    assert told.token_ids.tolist() == [[9, 6]]
    assert part_of(proposer, "two").verdicts == []  # it learns nothing from them


def test_forgetting_reaches_every_part() -> None:
    talk = Talk(hybrid("one", "two"), ANSWER).let("one", lambda place: True).let("two")
    assert talk.sources(8)[-1] == "two"
    talk.guard.forget(["a", "never seen"])
    assert part_of(talk.proposer, "one").forgotten == part_of(talk.proposer, "two").forgotten == ["a", "never seen"]
    assert not talk.proposer._drafted_by
    assert not talk.proposer._lengths
    assert not talk.proposer._estimates._slots


# -- estimates -----------------------------------------------------------------------------------------------


def test_hindsight_is_what_verification_would_have_been() -> None:
    """Against a count one by one: random drafts of two parts for requests whose rows change places, and random tokens."""
    random = np.random.default_rng(0)
    estimates, names = Estimates(2, 3, 2), ["a", "b", "c"]  # one more than there is room for at first
    accepted, tested = np.zeros((2, 3)), np.zeros((2, 3))
    last: dict[tuple[str, int], list[int]] = {}
    for _ in range(200):
        random.shuffle(names)
        committed = [random.integers(0, 3, random.integers(0, 5)).tolist() for _ in names]
        slots = estimates.slots([Request(name) for name in names])
        estimates.learn(slots, np.array(list(chain(*committed)), dtype=np.int32), np.cumsum([0, *map(len, committed)]))
        for name, tokens in zip(names, committed, strict=True):
            for part in (0, 1):
                for place, (draft, token) in enumerate(zip(last.get((name, part), []), tokens, strict=False)):
                    tested[part, place] += 1
                    accepted[part, place] += draft == token
                    if draft != token:
                        break
        for part in (0, 1):
            ids = random.integers(0, 3, (3, 3))
            lengths = random.integers(0, 4, 3)
            last |= {(name, part): ids[row, : lengths[row]].tolist() for row, name in enumerate(names)}
            estimates.keep(part, slots, ids, lengths, lengths, estimates.value(part, slots, None, lengths))
    assert tested.min() > 5
    np.testing.assert_array_equal(estimates._of_kind[0, :, :3], accepted)
    np.testing.assert_allclose(estimates._of_kind[1, :, :3], 0.6 * tested)


@pytest.mark.parametrize("truth", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("says", [None, 0.6, 0.97])
def test_estimates_come_near_the_truth(truth: float, says: float | None) -> None:
    """Also those of parts that are wrong about themselves; and of a new request, by what others have shown."""
    random = np.random.default_rng(1)
    estimates = Estimates(1, 3, 8)
    expected = None if says is None else np.full((1, 3), says)
    three = np.full(1, 3)
    for request in range(20):
        slots = estimates.slots([Request(str(request))])
        for _ in range(50):
            value = estimates.value(0, slots, expected, three)
            estimates.keep(0, slots, np.ones((1, 3), dtype=np.int64), three, three, value)
            tokens = (random.random(4) < truth).astype(np.int32)
            count = int(np.cumprod(tokens[:3]).sum()) + 1
            estimates.learn(slots, tokens[:count], np.array([0, count]))
        estimates.forget([str(request)])
    found = estimates.value(0, estimates.slots([Request("new")]), expected, three)
    assert found.expected[0, 0] == pytest.approx(truth, abs=0.06)
    assert found.worth[0] == pytest.approx(np.cumprod(found.expected[0]).sum())


# -- configurations ------------------------------------------------------------------------------------------


def test_what_parts_need_and_give_together() -> None:
    plain = resolve(SpecConfig.parse({"proposer": "hybrid", "options": {"proposers": ["predicted", "ngram"]}}))
    assert plain.capabilities == Capabilities(tokens="host", request_keys=("prediction",), parts=("predicted", "ngram"))
    assert plain.num_speculative_tokens == PROPOSERS.resolve("predicted").default_num_speculative_tokens
    found = resolve(
        SpecConfig.parse({"proposer": "hybrid", "model": "x", "options": {"proposers": ["one", "native"]}})
    ).capabilities
    assert found == Capabilities(
        tokens="host", probabilities=True, own_kv_cache=True, checkpoint=True, native="eagle", parts=("one", "native")
    )
    model = resolve(
        SpecConfig.parse({"proposer": "hybrid", "model": "x", "options": {"proposers": ["model", "one"]}})
    ).capabilities
    assert (model.hidden_states, model.native, model.checkpoint) == ("last", None, True)


def test_what_the_class_says_is_true_of_its_default_parts() -> None:
    resolved = resolve(SpecConfig.parse({"proposer": "hybrid", "control": "fixed"}))
    assert resolved.capabilities == HybridProposer.capabilities
    assert resolved.num_speculative_tokens == HybridProposer.default_num_speculative_tokens


def test_a_drafter_of_the_hosts_sets_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROPOSERS.resolve("native"), "default_num_speculative_tokens", 2)
    config = SpecConfig.parse({"proposer": "hybrid", "model": "x", "options": {"proposers": ["one", "native"]}})
    assert resolve(config).num_speculative_tokens == 2


def test_parts_have_their_own_options_and_only_theirs_has_the_model() -> None:
    proposer = hybrid({"proposer": "ngram", "options": {"min-n": 3}}, "model")
    ngram, model = part_of(proposer, "ngram"), part_of(proposer, "model")
    assert (ngram.options.min_n, ngram.host.config.proposer, ngram.host.config.model) == (3, "ngram", None)
    assert (model.host.config.proposer, model.host.config.model) == ("model", "heads")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"proposers": ["ngrm", "one"]}, ["'options.proposers[0]'", "'ngrm' is no proposer", "did you mean 'ngram'?"]),
        ({"proposers": ["one", "one"]}, ["names 'one' twice"]),
        ({"proposers": ["one", "hybrid"]}, ["'options.proposers[1]' is 'hybrid' itself"]),
        ({"proposers": ["one"]}, ["'options.proposers'", "at least 2"]),
        ({"proposers": "one"}, ["'options.proposers' is 'one'", "expected a list"]),
        ({"proposers": ["one", 3]}, ["'options.proposers'", "3 is neither a proposer's name nor"]),
        ({"proposers": ["one", {"options": {}}]}, ["'options.proposers[1].proposer' is None"]),
        ({"proposers": ["one", {"proposer": "two", "option": {}}]}, ["'options.proposers[1].option'", "did you mean 'options'?"]),
        ({"proposers": ["one", {"proposer": "two", "options": 3}]}, ["'options.proposers[1].options' is 3"]),
        (
            {"proposers": ["one", {"proposer": "ngram", "options": {"minn": 1}}]},
            ["'options.proposers[1].options.minn'", "did you mean 'min_n'?"],
        ),
        ({"proposers": ["one", {"proposer": "ngram", "options": {"min_n": 0}}]}, ["'options.proposers[1].options.min_n' is 0"]),
        ({"proposers": ["model", "native"]}, ["'model' and 'native'", "each drafts with a model"]),
        ({"proposers": ["native", "one", "other_native"]}, ["'native' and 'other_native'"]),
        ({"parts": ["one", "two"]}, ["'options.parts'", "Valid: proposers"]),
    ],
    ids=str,
)
def test_one_line_names_what_is_wrong(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(SpecConfig.parse({"proposer": "hybrid", "model": "x", "options": options}))
    text = str(caught.value)
    assert "\n" not in text
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model": "x", "options": {"proposers": ["one", "two"]}}, "loads no checkpoint"),
        ({"options": {"proposers": ["one", "model"]}}, "'model' is missing"),
        ({"options": {"proposers": ["one", "two"]}, "draft_sampling": "probabilistic"}, "gives no probabilities"),
    ],
    ids=str,
)
def test_keys_that_the_parts_have_no_use_for(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(SpecConfig.parse({"proposer": "hybrid", **keys}))


def test_the_bill_names_the_parts() -> None:
    config = SpecConfig(proposer="hybrid", options={"proposers": ["ngram", "predicted"]})
    bill = HybridProposer.memory_bill(host(config=config), HybridProposer.Options(proposers=("ngram", "predicted")))
    assert [what.split(":")[0] for what in bill] == ["ngram", "predicted"]
    assert all(size > 0 for size in bill.values())
