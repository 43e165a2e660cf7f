"""Predictions are followed, found again after every kind of edit, and never trusted beyond what they have shown."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.steps import host, step
from vllm_specplugin import Request
from vllm_specplugin.guard import Guard
from vllm_specplugin.proposers import predicted_kernels as kernels
from vllm_specplugin.proposers.predicted import TEXT_PER_STEP, PredictedOptions, PredictedProposer
from vllm_specplugin.proposers.predicted_kernels import MAX_GUESSES, TAIL, TOKEN_BITS, TRUSTED

K, VOCAB = 8, 1000
PROMPT = [991, 992, 993]

TEXT = [int(token) for token in np.random.default_rng(0).permutation(600)]
"""No token twice, so that it is clear where one is."""


def make(requests: int = 8, encode: Callable[[str], list[int]] | None = None, **options: Any) -> PredictedProposer:
    around = host(vocab_size=VOCAB, max_num_seqs=requests, k=K, max_model_len=4096, encode=encode)
    return PredictedProposer(around, PredictedOptions(**({"max_predictions_mib": 1} | options)))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    make().load(None)  # type: ignore[arg-type]


class Run:
    """One request's answer, step by step, with as many tokens at a time as the drafts were right."""

    def __init__(self, prediction: Sequence[int] | str, answer: Sequence[int], proposer: PredictedProposer | None = None) -> None:
        self.proposer = proposer or make()
        self.request = Request("a", prediction=prediction if isinstance(prediction, str) else tuple(prediction))
        self.answer, self.done, self.new = list(answer), 1, 1
        self.expected: list[float] = []

    def draft(self) -> list[int]:
        known = PROMPT + self.answer[: self.done]
        drafts = self.proposer.propose(step({"a": known}, {"a": self.new}, k=K, requests={"a": self.request}))
        length = int(drafts.lengths[0])  # type: ignore[index]
        assert drafts.expected is not None
        self.expected = drafts.expected[0, :length].tolist()
        return drafts.token_ids[0, :length].tolist()  # type: ignore[union-attr, call-overload]

    def accept(self, drafts: Sequence[int]) -> int:
        coming = self.answer[self.done :]
        right = [draft == token for draft, token in zip(drafts, coming, strict=False)]
        accepted = right.index(False) if False in right else len(right)
        self.new = min(accepted + 1, len(coming))
        self.done += self.new
        return accepted

    def passes(self) -> int:
        """How many the whole answer takes."""
        count = 1
        while self.done < len(self.answer):
            self.accept(self.draft())
            count += 1
        return count


# -- following ---------------------------------------------------------------------------------------------


def test_a_right_prediction_is_drafted_to_its_end() -> None:
    run = Run(TEXT[:60], TEXT[:60])
    lengths = []
    while run.done < 60:
        drafts = run.draft()
        lengths.append(len(drafts))
        assert run.accept(drafts) == len(drafts)
    assert lengths == [*[K] * 6, 60 - 1 - 6 * (K + 1)]


def test_without_a_prediction_there_are_no_drafts() -> None:
    requests = {"a": Request("a"), "b": Request("b", prediction=()), "c": Request("c", prediction=tuple(TEXT))}
    drafts = make().propose(step({name: [5, TEXT[0]] for name in requests}, k=K, requests=requests))
    assert drafts.lengths.tolist() == [0, 0, K]  # type: ignore[union-attr]


def edit(kind: str) -> list[int]:
    """An answer that differs from TEXT by one edit at place 100."""
    new = [*range(700, 900)]
    return {
        "replaced": TEXT[:100] + new[:1] + TEXT[101:200],
        "two replaced by five": TEXT[:100] + new[:5] + TEXT[102:200],
        "left out": TEXT[:100] + TEXT[140:240],
        "inserted": TEXT[:100] + new[:50] + TEXT[100:200],
        "repeated": TEXT[:100] + TEXT[60:160],
        "moved to the front": TEXT[400:500] + TEXT[:100],
        "begun otherwise": new[:3] + TEXT[:100],
        "begun in the middle": TEXT[300:400],
        "ended otherwise": TEXT[:100] + new[:100],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("replaced", 1),
        ("two replaced by five", 7),
        ("left out", 3),
        ("inserted", 52),
        ("repeated", 3),
        ("moved to the front", 4),
        ("begun otherwise", 5),
        ("begun in the middle", 3),
        ("ended otherwise", 101),
    ],
)
def test_it_is_found_again_after(kind: str, most: int) -> None:
    """Few passes more than the tokens that are not in the prediction, which take one each."""
    answer = edit(kind)
    undisturbed = -(-len(answer) // (K + 1))
    assert Run(TEXT, answer).passes() <= undisturbed + most + 1


@pytest.mark.parametrize(("least", "length"), [(0.0, K), (0.2, 2), (0.5, 0)])
def test_right_after_a_difference_it_is_less_sure(least: float, length: int) -> None:
    run = Run(TEXT, [*TEXT[:19], 700, *TEXT[20:60]], make(min_probability=least))
    while run.done < 20:
        run.accept(run.draft())
    drafts = run.draft()
    assert drafts == TEXT[20 : 20 + length]
    assert run.expected == sorted(run.expected)
    assert not drafts or 0.3 < run.expected[0] < 0.5
    while run.done < 40:
        run.accept(drafts)
        drafts = run.draft()
    assert min(run.expected) > 0.8


def test_near_where_they_parted_one_token_is_enough() -> None:
    """However far into the prediction that is."""
    run = Run(TEXT, [*TEXT[:300], *range(700, 710), *TEXT[300:400]])
    while run.done < 311:
        run.accept(run.draft())
    drafts = run.draft()
    assert drafts
    assert drafts == TEXT[301 : 301 + len(drafts)]


def test_a_coincidence_far_off_does_not_lead_astray() -> None:
    """After `x` became `y`, a `(` follows, of which there are many: the next one is meant, though a far one has `y` before it."""
    x, y, bracket = 700, 701, 702
    prediction = [*TEXT[:20], x, bracket, *TEXT[20:500], y, bracket, *TEXT[500:520]]
    run = Run(prediction, [*TEXT[:20], y, bracket, *TEXT[20:60]])
    while run.done < 50:
        drafts = run.draft()
        assert bracket not in drafts or y not in drafts
        accepted = run.accept(drafts)
        assert accepted == len(drafts) or run.answer[run.done - 1] == y


def test_predictions_differ_by_request_and_rows_change_places() -> None:
    proposer = make(requests=2)  # one less than there are
    requests = {
        name: Request(name, prediction=tuple(TEXT[start : start + 100])) for name, start in (("a", 0), ("b", 200), ("c", 400))
    }
    known = {name: [1, 2, request.prediction[0]] for name, request in requests.items()}  # type: ignore[index]
    order = list(requests)
    for done in range(1, 20):
        drafts = proposer.propose(step({name: known[name] for name in order}, k=2, requests=requests))
        for row, name in enumerate(order):
            said = requests[name].prediction
            assert said is not None
            assert drafts.token_ids[row, : drafts.lengths[row]].tolist() == list(said[done : done + 2])  # type: ignore
            known[name].append(said[done])  # type: ignore[arg-type]
        order = order[1:] + order[:1]


def test_a_resumed_request_is_found_in_all_of_its_prediction() -> None:
    long = [*range(600)] * 20 + TEXT  # far beyond any window
    proposer = make(window=16)
    answer = [700, *TEXT[:300]]
    drafts = proposer.propose(step({"a": PROMPT + answer}, k=K, requests={"a": Request("a", prediction=tuple(long))}))
    assert drafts.token_ids[0].tolist() == TEXT[300 : 300 + K]  # type: ignore[union-attr]


def test_all_of_a_long_prediction_is_looked_through_in_time() -> None:
    """The answer goes on 3000 tokens ahead, 47 windows; a window, and one more in turn, is what a step costs."""
    far = [int(token) for token in np.random.default_rng(1).integers(0, 600, 3000)]
    answer = [*TEXT[:50], *range(900, 980)]
    run = Run([*TEXT[:50], *far, *range(900, 980)], answer, make(window=64))
    assert 47 < run.passes() < 47 + 20


def test_steps_that_were_missed_are_made_up_for() -> None:
    run = Run(TEXT, TEXT[:400])
    run.draft()
    run.done, run.new = 120, 1  # 118 tokens came in between that nobody said
    assert run.draft() == TEXT[120 : 120 + K]


def test_estimates_follow_what_a_prediction_turned_out_to_be_worth() -> None:
    right, wrong = Run(TEXT, TEXT[:300]), Run(TEXT, [token if place % 3 else 700 for place, token in enumerate(TEXT[:300])])
    for run in (right, wrong):
        run.passes()
        run.done -= 20
        run.draft()
    assert min(right.expected) > 0.95
    assert not wrong.expected or wrong.expected[0] < 0.6


# -- bad predictions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [VOCAB, 2**31 + 5, 2**40])
def test_an_id_outside_the_vocabulary_ends_the_drafts_and_is_said_once(outside: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.specplugin")
    proposer = make()
    guard = Guard(proposer, "predicted", 60_000)
    request = {"a": Request("a", prediction=(*TEXT[:5], outside, *TEXT[5:10]))}
    for done in (1, 2, 3):
        known = [1, *TEXT[:done]]
        assert guard.propose(step({"a": known}, k=K, requests=request)).rows() == [TEXT[done:5]]
    assert not guard.faults
    assert len([record for record in caplog.records if "outside the vocabulary" in record.getMessage()]) == 1


def test_predictions_beyond_the_memory_go_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.specplugin")
    proposer = make()
    huge = tuple([3] * (300 << 10))  # 1.2 MB of tokens, where 1 MiB is allowed
    requests = {"huge": Request("huge", prediction=huge), "small": Request("small", prediction=tuple(TEXT))}
    for length in (1, 2):
        texts = {"huge": [1] * length, "small": [1, *TEXT[:length]]}
        assert proposer.propose(step(texts, k=K, requests=requests)).lengths.tolist() == [0, K]  # type: ignore[union-attr]
    assert [record for record in caplog.messages if "bounded at 1 MiB (option max_predictions_mib)" in record] == caplog.messages
    proposer.forget(["huge", "small"])
    assert proposer._arena.used_words == 0
    assert not proposer._without


# -- texts -------------------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return [ord(letter) % VOCAB for letter in text]


def test_a_text_goes_through_the_tokenizer() -> None:
    run = Run("some text", letters("\nsome text"), make(encode=letters))
    assert run.draft() == []
    run.accept([])
    assert run.draft() == letters("ome text")


def test_the_tokenizer_is_loaded_before_the_first_text() -> None:
    """Which may take seconds, and would otherwise be done within a step."""
    texts: list[str] = []
    make(encode=lambda text: texts.append(text) or []).load(None)  # type: ignore
    assert texts == [""]
    make(encode=lambda text: 1 // 0).load(None)  # type: ignore[arg-type]


def test_one_text_at_a_time_though_its_request_is_gone() -> None:
    """A tokenizer may object to two threads at once, and is still at what was sent before."""
    hold, at_once, most = threading.Event(), [0], [0]

    def slow(text: str) -> list[int]:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        if len(text) > 100:
            assert hold.wait(10)
        at_once[0] -= 1
        return letters(text)

    proposer = make(encode=slow)
    long = "".join(chr(300 + token) for token in TEXT) * (TEXT_PER_STEP // 600 + 1)
    requests = {name: Request(name, prediction=long) for name in ("gone", "queued")}
    known = {"gone": [1], "queued": [1]}
    assert proposer.propose(step(known, k=1, requests=requests)).lengths.tolist() == [0, 0]  # type: ignore[union-attr]
    proposer.forget(["queued"])  # before it is begun with
    proposer.forget(["gone"])  # while it is worked on
    requests, short = {"short": Request("short", prediction="short one")}, letters("short one")
    proposer.propose(step({"short": [1]}, k=1, requests=requests))
    assert most == [1]
    hold.set()
    proposer._coming["short"].result(10)
    found = proposer.propose(step({"short": [1, *short[:1]]}, {"short": 1}, k=1, requests=requests))
    assert found.lengths.tolist() == [1]  # type: ignore[union-attr]
    assert most == [1]


def test_a_long_text_is_tokenized_beside_the_steps() -> None:
    """No step waits for it; once it is there, the answer so far is found in it. Short ones that come later queue behind it."""
    hold, calls = threading.Event(), []

    def slow(text: str) -> list[int]:
        calls.append(threading.current_thread())
        if len(text) > 100:
            assert hold.wait(10)
        return letters(text)

    proposer = make(encode=slow)
    text = "".join(chr(300 + token) for token in TEXT) * (TEXT_PER_STEP // 600 + 1)
    long, short = letters(text), letters("short one")
    requests = {"long": Request("long", prediction=text), "short": Request("short", prediction="short one")}

    def lengths(done: int) -> list[int]:
        known = {"long": [1, *long[:done]], "short": [1, *short[:done]]}
        return proposer.propose(step(known, {"long": 1, "short": 1}, k=1, requests=requests)).lengths.tolist()  # type: ignore

    assert lengths(1) == [0, 0]
    assert lengths(2) == [0, 0]
    hold.set()
    for coming in list(proposer._coming.values()):
        coming.result(10)
    assert lengths(3) == [1, 1]
    assert not proposer._coming
    assert len(set(calls)) == 1
    # With nothing on its way a short one is tokenized at once.
    proposer.forget(["short"])
    assert lengths(4)[1] == 1
    assert calls[-1] is threading.current_thread()


@pytest.mark.parametrize("encode", [None, lambda text: 1 / 0])
def test_a_text_that_cannot_be_tokenized_is_said_once(encode: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.specplugin")
    proposer = make(encode=encode)
    for length in (1, 2, 3):
        drafts = proposer.propose(step({"a": [1] * length}, k=K, requests={"a": Request("a", prediction="text")}))
        assert drafts.lengths.tolist() == [0]  # type: ignore[union-attr]
    assert len(caplog.messages) == 1
    assert "without a tokenizer" in caplog.text or "ZeroDivisionError" in caplog.text


# -- against a reference -----------------------------------------------------------------------------------


def realigned(prediction: Sequence[int], known: Sequence[int], anchor: int) -> tuple[int, int, int]:
    """Score, place and agreement of the best place, word for word from the docstring of `predicted_kernels`."""
    found = []
    for place in range(1, len(prediction) + 1):
        agreed = 0
        while agreed < min(TAIL, len(known), place) and prediction[place - 1 - agreed] == known[len(known) - 1 - agreed]:
            agreed += 1
        distance = place - anchor
        score = TOKEN_BITS * agreed - abs(distance).bit_length() - (2 if distance < 0 else 0)
        if agreed:
            found.append((score, distance >= 0, -abs(distance), place, agreed))
    best = max(found, default=(-1, True, 0, 0, 0))
    return (best[0], best[3], best[4]) if best[0] >= 0 else (-1, 0, 0)


@given(
    prediction=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    known=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    anchor=st.integers(0, 40),
)
@settings(max_examples=300, deadline=None)
def test_the_best_place_is_the_references(prediction: list[int], known: list[int], anchor: int) -> None:
    anchor = min(anchor, len(prediction))
    state = np.zeros(kernels.STATE_COLUMNS, dtype=np.int64)
    state[kernels.SIZE], state[kernels.LENGTH], state[kernels.ANCHOR] = len(prediction), len(known), anchor
    tail = np.full(TAIL, -7, dtype=np.int32)
    end = known[-TAIL:]
    tail[TAIL - len(end) :] = end
    found = kernels.search(np.array(prediction, dtype=np.int32), state, tail, 1, len(prediction), (-1, 0, 0))
    assert found == realigned(prediction, known, anchor)


def test_lengths_of_agreement_fall_into_buckets() -> None:
    assert [kernels.bucket(run) for run in range(19)] == [0, 1, 2, 3, 3, *[4] * 4, *[5] * 8, 6, 6]
    assert kernels.bucket(10**6) == kernels.BUCKETS - 1


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_whatever_is_answered_nothing_is_drafted_that_is_not_predicted(seed: int) -> None:
    """Random texts of few tokens with random commits: drafts are stretches of the prediction, within limits and memory."""
    random = np.random.default_rng(seed)
    proposer = make(window=int(random.integers(16, 40)), min_probability=0.0)
    prediction = random.integers(0, 4, random.integers(1, 120)).tolist()
    request = {"a": Request("a", prediction=tuple(prediction))}
    known = random.integers(0, 4, random.integers(1, 50)).tolist()
    new = 1
    for _ in range(30):
        limit = int(random.integers(0, K + 1))
        drafts = proposer.propose(step({"a": known}, {"a": new}, k=K, limits=[limit], requests=request))
        rows = drafts.token_ids[0, : drafts.lengths[0]].tolist()  # type: ignore
        assert len(rows) <= limit
        assert not rows or any(prediction[at : at + len(rows)] == rows for at in range(len(prediction)))
        assert drafts.expected is not None
        assert ((drafts.expected >= 0) & (drafts.expected <= 1)).all()
        new = int(random.integers(1, K + 2))
        known = known + random.integers(0, 4, new).tolist()
    assert TRUSTED > 1
    assert MAX_GUESSES > 0
