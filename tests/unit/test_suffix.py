"""The suffix proposer drafts what its reference drafts, forgets the oldest answers first, and starts warm."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.steps import host, step
from tests.support.weak_hash import with_weak_hash
from vllm_specplugin.compiled import kernel_over
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.proposers import suffix_answers, suffix_index, suffix_kernels, suffix_store, suffix_tree
from vllm_specplugin.proposers.ngram_kernels import KEY_SHIFT, LENGTH_MASK, MAX_TOKENS, home, make_key, mix
from vllm_specplugin.proposers.suffix import SuffixOptions, SuffixProposer
from vllm_specplugin.proposers.suffix_answers import Answers, pieces_of, ring_bytes, ring_size
from vllm_specplugin.proposers.suffix_kernels import CHUNK, HEAD
from vllm_specplugin.proposers.suffix_reference import Rules, Text, space_saving, suffix_draft
from vllm_specplugin.proposers.suffix_tree import CLASSES, MAX_COUNT, MAX_VOCAB, NODE_WORDS, TRUST_CLASSES, counted, dead

K = 4


def make(k: int = K, max_num_seqs: int = 8, vocab_size: int = 1000, **options: object) -> SuffixProposer:
    around = host(max_model_len=4096, max_num_seqs=max_num_seqs, k=k, vocab_size=vocab_size)
    return SuffixProposer(around, SuffixOptions(**({"max_cached_tokens": 4096} | options)))  # type: ignore[arg-type]


def drafts(
    proposer: SuffixProposer, known: dict[str, list[int]], committed: dict[str, int] | None = None, k: int = K, **more: object
) -> dict[str, list[int]]:
    """One step's drafts by request."""
    answer = proposer.propose(step(known, committed, k=k, **more))  # type: ignore[arg-type]
    return {name: answer.token_ids[row, : answer.lengths[row]].tolist() for row, name in enumerate(known)}


def answered(proposer: SuffixProposer, name: str, prompt: list[int], answer: list[int], new: int = 3) -> None:
    """Let a request be answered, `new` tokens per step, and end."""
    for end in range(new, len(answer) + new, new):
        part = answer[:end]
        drafts(proposer, {name: prompt + part}, {name: len(part) - end + new})
    proposer.forget([name])


def rules_of(proposer: SuffixProposer) -> Rules:
    options, index = proposer.options, proposer.index
    return Rules(options.min_match, options.max_tree_depth, options.min_token_prob, index.odds, index.trust)


# -- sketches --------------------------------------------------------------------


def unpacked(sketch: int) -> list[tuple[int, int]]:
    pairs = [(sketch >> 42, (sketch >> 31) & MAX_COUNT), ((sketch >> 11) & (MAX_VOCAB - 1), sketch & MAX_COUNT)]
    return [pair for pair in pairs if pair[1]]


@pytest.mark.parametrize(
    ("tokens", "sketch"),
    [
        ([], []),
        ([5], [(5, 1)]),
        ([5, 5, 0], [(5, 2), (0, 1)]),
        ([5, 7], [(7, 1), (5, 1)]),  # of equals the latest leads
        ([5, 5, 7, 7], [(7, 2), (5, 2)]),
        ([5, 5, 5, 7, 8], [(5, 3), (8, 2)]),  # the third takes over the smaller counter
        ([MAX_VOCAB - 1] * 3, [(MAX_VOCAB - 1, 3)]),
    ],
)
def test_a_sketch_counts_two_tokens(tokens: list[int], sketch: list[tuple[int, int]]) -> None:
    assert space_saving(tokens) == sketch
    packed = 0
    for token in tokens:
        packed = counted(packed, token)
    assert unpacked(packed) == sketch
    assert sum(count for _, count in sketch) == len(tokens)


def test_full_counters_are_halved() -> None:
    packed = 0
    for token in [3] * 10 + [4] * MAX_COUNT:
        packed = counted(packed, token)
        assert all(0 < count <= MAX_COUNT for _, count in unpacked(packed))
    assert unpacked(counted(packed, 4)) == [(4, (MAX_COUNT + 1) // 2), (3, 5)]


# -- equal to the reference --------------------------------------------------------

Play = list[list[tuple[int, list[int], bool]]]
"""`[steps][rows]`: request, new tokens, whether it ends after the step."""


@st.composite
def plays(draw: st.DrawFn) -> Play:
    token = st.integers(0, draw(st.sampled_from([1, 2, 5, 999])))
    phrases = draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=4))
    piece = st.one_of(st.lists(token, min_size=1, max_size=5), st.sampled_from(phrases))
    row = st.tuples(st.integers(0, 3), piece, st.integers(0, 5).map(lambda chance: chance == 0))
    return draw(st.lists(st.lists(row, min_size=1, max_size=4, unique_by=lambda row: row[0]), min_size=1, max_size=14))


def check(play: Play, min_match: int, depth: int) -> None:
    """Play it, and compare each draft, and its odds, with the reference."""
    proposer = make(min_match=min_match, max_tree_depth=depth)
    known: dict[str, list[int]] = {}
    answers: list[Text] = []
    for rows in play:
        committed = {}
        for place, new, _ in rows:
            name = str(place)
            # A new request's first step commits one token; what is before is its prompt.
            committed[name] = len(new) if name in known else 1
            text = known.setdefault(name, [])
            text.extend(new)
            start = len(text) - committed[name]
            answers.append((text[max(0, start - depth) : start], text[start:]))
        now = {name: list(known[name]) for name in committed}
        answer = proposer.propose(step(now, committed, k=K))
        for row, name in enumerate(now):
            draft, chances = suffix_draft(now[name], answers, rules_of(proposer), K)
            length = answer.lengths[row]  # type: ignore[index]
            assert answer.token_ids[row, :length].tolist() == draft  # type: ignore[index, union-attr]
            assert answer.expected[row, :length].tolist() == chances  # type: ignore[index]
        ended = [str(place) for place, _, ends in rows if ends]
        proposer.forget(ended)
        for name in ended:
            del known[name]
    assert_sound(proposer.index.answers)


@given(plays(), st.integers(1, 3), st.integers(3, 6))
@settings(max_examples=80, deadline=None)
def test_equals_reference(play: Play, min_match: int, depth: int) -> None:
    check(play, min_match, depth)


@pytest.fixture(scope="module")
def colliding() -> ModuleType:
    """The kernels with a hash of 2 bits: nearly all nodes of a table have the same hash and want the same place."""
    return with_weak_hash(suffix_kernels)


@given(plays())
@settings(max_examples=40, deadline=None)
def test_collisions_never_match(colliding: ModuleType, play: Play) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_index, "kernels", colliding)
        patch.setattr(suffix_answers, "kernels", colliding)
        patch.setattr("tests.unit.test_suffix.assert_sound", lambda answers: None)  # looks by the true hash
        check(play, 1, 4)


def test_drafts_are_bounded_by_limits_and_probability() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    assert drafts(make(), {"a": text}, limits=[2])["a"] == [1, 2]
    assert drafts(make(), {"a": text}, limits=[0])["a"] == []
    assert drafts(make(min_token_prob=1.0), {"a": text})["a"] == []
    assert drafts(make(min_token_prob=0.0), {"a": text})["a"] == [1, 2, 3, 4]


# -- answers of others -------------------------------------------------------------

ANSWER = list(range(100, 160))


def test_a_later_request_is_drafted_for_from_an_earlier_answer() -> None:
    proposer = make()
    answered(proposer, "first", [1, 2, 3], ANSWER)
    assert drafts(proposer, {"second": [7, 8, 9, *ANSWER[:5]]})["second"] == ANSWER[5 : 5 + K]
    assert drafts(make(), {"second": [7, 8, 9, *ANSWER[:5]]})["second"] == []


def test_prompts_are_not_shared() -> None:
    proposer = make()
    answered(proposer, "first", [*ANSWER, 1, 2], [5, 6, 7])
    assert drafts(proposer, {"second": [7, 8, 9, *ANSWER[:5]]})["second"] == []
    # But what they end with is where the answer starts.
    assert drafts(proposer, {"third": [*ANSWER[-5:], 1, 2, 9], "fourth": [9, *ANSWER[-5:], 1, 2, 5]})["fourth"] == [6, 7]


def texts(proposer: SuffixProposer) -> list[list[int]]:
    return [piece.tokens.tolist() for piece in proposer.index.answers.texts()]


def in_file(file: Path) -> list[list[int]]:
    with np.load(file) as stored:
        return [piece.tokens.tolist() for piece in pieces_of(stored["tokens"], stored["origins"], int(stored["head"]))]


def test_a_preempted_request_is_counted_once() -> None:
    proposer = make()
    drafts(proposer, {"a": [1, 2, 3]})
    drafts(proposer, {"a": [1, 2, 3, 4, 5]}, {"a": 2})
    proposer.forget(["a"])
    drafts(proposer, {"a": [1, 2, 3, 4, 5, 6]})  # resumed, with all that it had
    assert texts(proposer) == [[3, 4, 5], [6]]


def test_what_was_missed_may_fill_several_pieces() -> None:
    """And is all in the ring, whatever comes next to it."""
    proposer = make()
    answer = np.random.default_rng(1).integers(0, 1000, 2 * CHUNK).tolist()
    drafts(proposer, {"a": [1, 2, *answer[:1]]}, {"a": 1})
    drafts(proposer, {"a": [1, 2, *answer]}, {"a": 2})
    assert [token for piece in texts(proposer) for token in piece] == answer
    assert_sound(proposer.index.answers)


def test_rows_that_prefill_leave_no_answer() -> None:
    proposer = make()
    assert drafts(proposer, {"a": [1, 2, 1, 2]}, {"a": 0}, limits=[0]) == {"a": []}
    assert texts(proposer) == []


def test_short_answers_share_a_chunk() -> None:
    proposer = make(max_tree_depth=8)
    for number in range(40):
        answered(proposer, str(number), [1, 2, 3], [number, number + 1, number + 2])
    assert proposer.index.answers.total <= 8 * CHUNK
    assert texts(proposer) == [[number, number + 1, number + 2] for number in range(40)]


# -- memory ------------------------------------------------------------------------


def assert_sound(answers: Answers) -> None:
    """Every node is found where the search for it looks, under the hash of the tokens that it points to."""
    words, size, mask = answers.words, len(answers.words) // NODE_WORDS, len(answers.tokens) - 1
    entries = words[::NODE_WORDS]
    places = np.flatnonzero(entries)
    assert len(places) == answers.nodes <= size * 3 // 4
    for place in places.tolist():
        entry = int(entries[place])
        key = entry >> KEY_SHIFT
        first = int(home.py_func(key, size))
        between = np.arange(first, place if place >= first else place + size) % size
        assert entries[between].all(), "the search ends before it gets there"
        if not dead.py_func(entry, mask, int(answers.ring[HEAD])):
            last = ((entry & MAX_TOKENS) - 1) & mask
            state = answers.salt
            with np.errstate(over="ignore"):
                for back in range((key & LENGTH_MASK) + 1):
                    state = mix.py_func(state, answers.tokens[last - back])
                assert key == make_key.py_func(state, (key & LENGTH_MASK) + 1)
            assert unpacked(int(words[NODE_WORDS * place + 1])), "a node of nothing"


def test_the_oldest_answers_go_first() -> None:
    proposer = make(max_num_seqs=1, max_cached_tokens=1024)
    answers = proposer.index.answers
    assert len(answers.tokens) == 1024
    random = np.random.default_rng(0)
    for number in range(60):
        text = random.integers(0, 1000, 100).tolist()
        answered(proposer, str(number), [1], text)
        assert_sound(answers)
        kept = [token for piece in texts(proposer) for token in piece]
        assert kept[-100:] == text
        assert len(kept) <= 1024
        dead_nodes = sum(dead(int(entry), 1023, int(answers.ring[HEAD])) for entry in answers.words[::2] if entry)
        assert dead_nodes <= 2 * 1024 // 4 + 2 * CHUNK, "what was overwritten is to be swept up within a quarter of the ring"
        assert drafts(proposer, {"again": [9, *text[:20]]})["again"][:1] == text[20:21]
        proposer.forget(["again"])
    assert answers.total > 3 * 1024
    assert answers.nbytes == pytest.approx(ring_bytes(1024), rel=0.01)


def test_what_was_overwritten_does_not_count_even_where_the_same_is_written_again() -> None:
    proposer = make(max_num_seqs=1, max_cached_tokens=1024)
    random = np.random.default_rng(2)

    def answer(start: list[int]) -> None:
        """It fills a chunk, up to what is too short for another piece."""
        answered(proposer, "request", [1], [*start, *random.integers(0, 700, 200 - len(start)).tolist()])

    words = [[800 + 5 * number + letter for letter in range(5)] for number in range(6)]
    before = [token for number, word in enumerate(words) for token in (*word, 700 + number)]
    after = [token for number, word in enumerate(words) for token in (*word, 720 + number)]
    answer(before + before)
    for _ in range(3):
        answer([])
    answer([*range(750, 750 + len(before)), *after])  # where the words had been the second time
    assert proposer.index.answers.total == 5 * CHUNK, "the last answer was to be where the first one had been"
    for number, word in enumerate(words):
        assert drafts(proposer, {"again": [9, *word]})["again"][:1] == [720 + number]
        proposer.forget(["again"])


def test_positions_wrap_around() -> None:
    proposer = make(max_num_seqs=1, max_cached_tokens=1024)
    answers = proposer.index.answers
    answers.ring[HEAD] = MAX_TOKENS + 1 - 2 * CHUNK
    random = np.random.default_rng(1)
    for number in range(12):
        text = random.integers(0, 1000, 100).tolist()
        answered(proposer, str(number), [1], text)
        assert_sound(answers)
        assert drafts(proposer, {"again": [9, *text[:20]]})["again"][:1] == text[20:21]
        proposer.forget(["again"])
    assert 0 < answers.ring[HEAD] < 1 << 20


def test_a_ring_has_room_for_all_running_requests() -> None:
    assert ring_size(1000, 1) == 1024
    assert ring_size(1, 64) == 64 * 4 * CHUNK
    proposer = make(max_num_seqs=8, max_cached_tokens=1)
    names = [f"r{row}" for row in range(8)]
    known = {name: [row * 100 + place for place in range(90)] for row, name in enumerate(names)}
    for length in range(2, 91):
        drafts(proposer, {name: tokens[:length] for name, tokens in known.items()})
    assert {tuple(piece) for piece in texts(proposer)} == {tuple(tokens[1:]) for tokens in known.values()}


def test_a_request_without_room_for_its_own_tree_is_drafted_for_from_answers() -> None:
    proposer = make(max_index_mib=1, max_num_seqs=64)
    answered(proposer, "first", [1, 2, 3], ANSWER)
    long = np.random.default_rng(0).integers(200, 1000, 3900).tolist()
    known = {str(row): [*long, *ANSWER[:5]] for row in range(40)}
    assert set(map(tuple, drafts(proposer, known).values())) == {tuple(ANSWER[5 : 5 + K])}
    assert len(proposer.index) < 40, "the bound was to be met"


# -- experience --------------------------------------------------------------------


def test_the_odds_of_drafts_are_what_comes_true() -> None:
    # After a 1 comes a 2 seven times of ten, chosen by chance, and anything else.
    random = np.random.default_rng(0)
    proposer, said, hits = make(k=1), [], []
    text, guess = [1, 2, 1, 2], []
    for number in range(600):
        new = [int(2 if random.random() < 0.7 else random.integers(3, 1000)), 1]
        text = [*text[-200:], *new] if number % 50 == 0 else [*text, *new]
        if guess:
            hits.append(guess[0] == new[0])
        name = str(number // 50)
        answer = proposer.propose(step({name: text}, {name: 2}, k=1))
        guess = answer.token_ids[0, : answer.lengths[0]].tolist()  # type: ignore[index, union-attr]
        if guess:
            said.append(float(answer.expected[0, 0]))  # type: ignore[index]
    # 500 trials of a chance of 0.7 have a standard deviation of 0.02.
    assert np.mean(said[-400:]) == pytest.approx(np.mean(hits[-400:]), abs=0.06)
    assert len(said) > 500


def test_random_text_stops_being_drafted_for() -> None:
    random = np.random.default_rng(0)
    proposer, drafted = make(vocab_size=50), []
    text = random.integers(0, 50, 50).tolist()
    for _ in range(300):
        text.append(int(random.integers(0, 50)))
        drafted.append(bool(drafts(proposer, {"a": text})["a"]))
    assert any(drafted[:50])
    assert not any(drafted[-100:])


def test_what_is_held_back_is_still_judged() -> None:
    proposer = make()
    proposer.index.trust[0] = 0.01  # all has failed, and nothing is drafted
    text, draft, steps = [1, 2, 3, 4, 5] * 4, [], 0
    while len(draft) < K and steps < 200:
        new = len(draft) + 1  # all accepted, and one more
        text += [text[len(text) - 5 + place] for place in range(new)]
        draft = drafts(proposer, {"a": text}, {"a": new})["a"]
        assert steps > 0 or draft == []
        steps += 1
    assert draft == text[-5:-1]


# -- files -------------------------------------------------------------------------


def write(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def loaded(encode: object = None, **options: object) -> SuffixProposer:
    around = host(max_model_len=4096, k=K, vocab_size=1000, encode=encode)
    proposer = SuffixProposer(around, SuffixOptions(**options))  # type: ignore[arg-type]
    proposer.load(None)  # type: ignore[arg-type]
    return proposer


def spell(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("code.txt", "hello world\n\nagain"),
        ("texts.jsonl", '{"text": "hello world"}\n\n{"text": ""}\n'),
        ("ids.jsonl", f'{{"distilled_with": {{}}}}\n{{"skipped": "long"}}\n{{"token_ids": {spell("hello world")}}}\n'),
        ("answers.json", f'{{"prompt_token_ids": [1, 2], "token_ids": {spell("hello world")}, "kind": "x"}}\n'),
    ],
)
def test_starts_warm_from_a_corpus(tmp_path: Path, name: str, text: str) -> None:
    proposer = loaded(spell, corpus=write(tmp_path, name, text))
    assert drafts(proposer, {"a": [1, 2, *spell("hello")]})["a"] == spell(" wor")


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("none.txt", None, "cannot be read"),
        ("empty.txt", "", "is empty"),
        ("broken.jsonl", '{"text": ', "line 1 is not JSON"),
        ("list.jsonl", "[1, 2]", "line 1 is a list"),
        ("keys.jsonl", '{"prompt": "x"}', "line 1 has the keys prompt"),
        ("ids.jsonl", '{"token_ids": [1, "2"]}', 'line 1 has a "token_ids" that is no list'),
    ],
)
def test_a_corpus_that_is_none_is_refused_before_a_model_is_loaded(
    tmp_path: Path, name: str, text: str | None, what: str
) -> None:
    file = str(tmp_path / name) if text is None else write(tmp_path, name, text)
    with pytest.raises(ConfigError, match=f"'options.corpus' is '{file}'.*{what}") as error:
        SuffixProposer.depth(None, SuffixOptions(corpus=file), None)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"token_ids": [1]}\n{"token_ids": [1, 1000]}', "line 2 has the token id 1000; the target's are 0 to 999"),
        ('{"token_ids": [1]}\n{"text": "x"}', "the target has no tokenizer"),
        ('{"token_ids": [1]}\nx', "line 2 is not JSON"),
    ],
)
def test_a_corpus_that_does_not_fit_is_refused_at_the_start(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        loaded(None, corpus=write(tmp_path, "c.jsonl", text))


def test_answers_outlive_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "answers.npz"
    proposer = loaded(cache_file=str(file))
    for number in range(30):
        answered(proposer, str(number), [1, 2, 3], np.random.default_rng(number).integers(0, 1000, 70).tolist())
    kept, odds, trust = texts(proposer), proposer.index.odds.copy(), proposer.index.trust.copy()
    assert not file.exists()
    del proposer  # the engine lets go of it
    assert [path.name for path in tmp_path.iterdir()] == ["answers.npz"]
    again = loaded(cache_file=str(file))
    assert [token for piece in texts(again) for token in piece] == [token for piece in kept for token in piece]
    assert np.array_equal(again.index.odds, odds)
    assert np.array_equal(again.index.trust, trust)
    text = kept[-2]
    assert drafts(again, {"a": [9, *text[:5]]})["a"] == text[5 : 5 + K]


def test_writes_off_the_steps_path_while_there_is_something_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is idle afterwards, or killed, has its answers in the file all the same."""
    monkeypatch.setattr(suffix_store, "SAVE_SECONDS", 0.02)
    written = threading.Event()
    write_file = suffix_store.AnswersFile._write

    def told(*state: object) -> bool:
        done = write_file(*state)  # type: ignore[arg-type]
        written.set()
        return done

    monkeypatch.setattr(suffix_store.AnswersFile, "_write", told)
    file = tmp_path / "answers.npz"
    proposer = loaded(cache_file=str(file))
    assert not written.wait(0.2), "nothing has been answered"
    drafts(proposer, {"a": [1, 2, 3]}, {"a": 1})
    assert written.wait(10)
    first = in_file(file)
    written.clear()
    assert not written.wait(0.2), "nothing is new"
    drafts(proposer, {"a": [1, 2, 3, 4]}, {"a": 1})  # in the chunk that is in the file already
    assert written.wait(10)
    assert (first, in_file(file)) == ([[3]], [[3, 4]])


def test_a_process_that_was_forked_off_keeps_its_answers(tmp_path: Path) -> None:
    """It ends without what `atexit` knows of, and with its engine still there."""
    file = tmp_path / "answers.npz"

    def serve() -> None:
        gc.disable()
        proposer = loaded(cache_file=str(file))
        drafts(proposer, {"a": [1, 2, 3]}, {"a": 1})
        proposer.myself = proposer  # type: ignore[attr-defined]

    child = multiprocessing.get_context("fork").Process(target=serve)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert in_file(file) == [[3]]


def test_steps_that_nobody_told_of_belong_to_the_same_answer() -> None:
    """Control leaves drafting off for most steps where it does not pay; what is answered then is learnt as well."""
    proposer = loaded()
    answer = np.random.default_rng(0).integers(0, 1000, 60).tolist()
    for end in range(1, 61):
        if end % 7 < 2:  # two steps in a row, as when a paused proposer is tried
            drafts(proposer, {"a": [1, 2, 3, *answer[:end]]}, {"a": 1})
    proposer.forget(["a"])
    assert texts(proposer) == [answer[:57]]
    assert drafts(proposer, {"b": [9, *answer[:20]]})["b"] == answer[20 : 20 + K]


def test_what_comes_in_while_the_answers_are_copied_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are handed out again between the copy of their origins and that of their tokens belong to neither."""
    proposer = loaded(max_cached_tokens=1 << 13)
    answers = proposer.index.answers
    rng = np.random.default_rng(0)
    given: list[list[int]] = []

    def answer(count: int) -> None:
        for _ in range(count):
            given.append(rng.integers(0, 1000, 150).tolist())
            answered(proposer, str(len(given)), [1, 2, 3], given[-1])

    answer(80)  # more than the ring holds
    kept = texts(proposer)
    ring, half = answers.tokens, len(answers.tokens) // 2

    class Slowly:
        def copy(self) -> object:
            monkeypatch.undo()
            first = ring[:half].copy()
            answer(10)
            return np.concatenate([first, ring[half:]])

        def __len__(self) -> int:
            return len(ring)

    monkeypatch.setattr(answers, "tokens", Slowly())
    found = [piece.tokens.tolist() for piece in pieces_of(*answers.snapshot())]
    assert answers.tokens is ring
    spelt = [f", {str(tokens)[1:-1]}," for tokens in given]
    assert all(any(f", {str(piece)[1:-1]}," in text for text in spelt) for piece in found)
    assert len(kept) - 25 < len(found) < len(kept)


def test_a_copy_waits_for_the_step_that_runs() -> None:
    proposer = loaded()
    answers = proposer.index.answers
    done: list[object] = []
    copying = threading.Thread(target=lambda: done.append(answers.snapshot()))
    with answers._writing:
        copying.start()
        copying.join(0.1)
        assert not done
    copying.join(10)
    assert len(done) == 1


def test_each_data_parallel_engine_has_a_file_of_its_own(tmp_path: Path) -> None:
    for rank in range(3):
        around = host(vocab_size=1000, max_model_len=4096, k=K, data_parallel_rank=rank)
        proposer = SuffixProposer(around, SuffixOptions(cache_file=str(tmp_path / "answers.npz")))
        proposer.load(None)  # type: ignore[arg-type]
        answered(proposer, "a", [1], [rank, *ANSWER[:10]])
        del proposer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.dp1.npz", "answers.dp2.npz", "answers.npz"]
    again = SuffixProposer(around, SuffixOptions(cache_file=str(tmp_path / "answers.npz")))
    again.load(None)  # type: ignore[arg-type]
    assert [piece[0] for piece in texts(again)] == [2]


def test_a_disk_that_is_full_costs_the_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = loaded(cache_file=str(tmp_path / "answers.npz"))

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    drafts(proposer, {"a": [1, 2, 3]})
    del proposer
    assert "no space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_only_one_rank_writes(tmp_path: Path) -> None:
    around = host(max_model_len=4096, k=K, tensor_parallel_rank=1, tensor_parallel_size=2)
    proposer = SuffixProposer(around, SuffixOptions(cache_file=str(tmp_path / "answers.npz")))
    proposer.load(None)  # type: ignore[arg-type]
    answered(proposer, "a", [1], ANSWER[:10])
    del proposer
    assert list(tmp_path.iterdir()) == []


def one_wrong(classes: int, row: int, value: float) -> np.ndarray:
    """Odds `[2, classes]` of which a single one, or how often it was seen, cannot be."""
    odds = np.full((2, classes), 0.5)
    odds[row, -1] = value
    return odds


def stored(file: Path, **changes: object) -> None:
    """A sound file of answers, but for the changes."""
    proposer = loaded(cache_file=str(file))
    drafts(proposer, {"a": [1, 2, 3]})
    del proposer
    fields = dict(np.load(file)) | changes
    np.savez(file, **{name: value for name, value in fields.items() if value is not None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"version": 99}, "of format 99"),
        ({"vocab_size": 7}, "and 7 token ids; this engine writes format 1 and has 1000"),
        ({"origins": np.array([1, 99])}, "do not fit together"),
        ({"origins": None}, "do not fit together"),
        ({"tokens": np.array([1, 2, 3], dtype=np.int32)}, "do not fit together"),
        ({"tokens": np.full(1 << 20, 5000, dtype=np.int32)}, "do not fit together"),
        ({"head": np.zeros(2)}, "do not fit together"),
        ({"trust": np.zeros(3)}, "do not fit together"),
        ({"odds": None}, "do not fit together"),
        ({"tokens": np.array(5, dtype=np.int32)}, "do not fit together"),
        ({"odds": np.full((2, CLASSES), np.nan)}, "do not fit together"),
        ({"odds": np.full((2, CLASSES), "x")}, "do not fit together"),
        ({"odds": one_wrong(CLASSES, 0, 1.5)}, "do not fit together"),
        ({"odds": one_wrong(CLASSES, 0, -0.5)}, "do not fit together"),
        ({"odds": one_wrong(CLASSES, 1, -1.5)}, "do not fit together"),
        ({"odds": one_wrong(CLASSES, 1, np.inf)}, "do not fit together"),
        ({"odds": one_wrong(CLASSES, 1, 1e9)}, "do not fit together"),
        ({"trust": one_wrong(TRUST_CLASSES, 0, 1.5)}, "do not fit together"),
        ({"trust": one_wrong(TRUST_CLASSES, 1, np.nan)}, "do not fit together"),
        ({"head": 1.5}, "do not fit together"),
        ({"version": None}, "is no file of answers"),
        ({"version": np.array([1, 2])}, "is no file of answers"),
        ({"version": np.inf}, "is no file of answers"),
        ({"vocab_size": np.array([[1000, 1]])}, "is no file of answers"),
        ({"tokens": np.array([object()])}, "is no file of answers"),
    ],
)
def test_a_file_of_answers_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], what: str) -> None:
    file = tmp_path / "answers.npz"
    stored(file, **changes)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=f"'options.cache_file' is '{file}'.*{what}"):
        loaded(cache_file=str(file))
    gc.collect()
    assert file.read_bytes() == before, "it may be of use to somebody else"


def test_what_is_no_file_of_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file of answers"):
        loaded(cache_file=write(tmp_path, "answers.npz", "hello"))
    for place, what in ((tmp_path / "none" / "a.npz", "no folder that can be written to"), (tmp_path, "which is no file")):
        with pytest.raises(ConfigError, match=f"'options.cache_file' is '{place}'.*{what}"):
            SuffixProposer.depth(None, SuffixOptions(cache_file=str(place)), None)  # type: ignore[arg-type]


# -- limits ------------------------------------------------------------------------


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'options.min_match' is 4, more than 'options.max_tree_depth' \(3\)"):
        SuffixProposer.depth(None, SuffixOptions(min_match=4, max_tree_depth=3), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="can tell 1048576 token ids apart"):
        make(vocab_size=MAX_VOCAB + 1)
    with pytest.raises(ConfigError, match="max_model_len"):
        SuffixProposer(host(max_model_len=1 << 28), SuffixOptions())


def test_the_bill_and_what_is_held() -> None:
    around = host(max_model_len=1024, max_num_seqs=2)
    bill = SuffixProposer.memory_bill(around, SuffixOptions(max_cached_tokens=1024))
    assert list(bill.values()) == [3 * 1024 * 2 * 2 * 2 * 8, ring_bytes(2048)]
    proposer = make()
    before = proposer.memory_bytes()
    for length in (900, 4000):
        drafts(proposer, {str(length): list(range(length))})
    assert 4900 * 32 <= proposer.index.used_bytes <= 4900 * 64
    assert before + proposer.index.used_bytes <= proposer.memory_bytes()
    assert proposer.memory_bytes() <= sum(SuffixProposer.memory_bill(proposer.host, proposer.options).values()) * 1.01


def test_machine_code_is_kept_for_these_very_parts() -> None:
    # numba looks at the file of the function alone; another version of the parts must lead to another name.
    def loop() -> None: ...

    def same() -> None: ...

    same.__qualname__ = loop.__qualname__
    names = [kernel_over(*modules)(function).py_func.__qualname__ for function, modules in ((loop, [suffix_tree]), (same, []))]  # type: ignore[attr-defined]
    assert len(set(names)) == 2
    assert suffix_kernels.draft.py_func.__qualname__ != "draft"
