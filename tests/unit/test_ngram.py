"""The n-gram proposer drafts what its reference drafts, however its index came about, and costs only what is new."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from pydantic import ValidationError

from tests.support.steps import host, step
from tests.support.weak_hash import with_weak_hash
from vllm_specplugin import compiled
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.proposers import ngram_index, ngram_kernels
from vllm_specplugin.proposers.ngram import NgramOptions, NgramProposer
from vllm_specplugin.proposers.ngram_arena import MIN_BLOCK, Arena
from vllm_specplugin.proposers.ngram_index import NgramIndex
from vllm_specplugin.proposers.ngram_kernels import CAPACITY, ENTRIES, INDEXED, LENGTH, TABLE, TABLE_SIZE, TOKENS
from vllm_specplugin.proposers.ngram_reference import ngram_draft

K = 4


def make(min_n: int = 2, max_n: int = 5, max_model_len: int = 4096, requests: int = 8, **options: int) -> NgramProposer:
    around = host(max_model_len=max_model_len, max_num_seqs=requests, k=K)
    return NgramProposer(around, NgramOptions(min_n=min_n, max_n=max_n, **options))


def drafts(proposer: NgramProposer, known: dict[str, list[int]], committed: dict[str, int] | None = None, **more: object) -> dict:
    """One step's drafts by request."""
    answer = proposer.propose(step(known, committed, k=K, **more))  # type: ignore[arg-type]
    return {name: answer.token_ids[row, : answer.lengths[row]].tolist() for row, name in enumerate(known)}


def expected(proposer: NgramProposer, tokens: list[int], limit: int = K) -> list[int]:
    return ngram_draft(tokens, proposer.options.min_n, proposer.options.max_n, limit)


def assert_sound(index: NgramIndex) -> None:
    """Blocks lie apart, tokens stay within theirs, and a table holds what it says: too full a one would be walked for ever."""
    taken = np.zeros(len(index.arena.words), dtype=int)
    for slot in index._slots.values():
        state = index._state[slot]
        first, end = state[TOKENS] // 2, state[TABLE] + state[TABLE_SIZE]
        taken[first:end] += 1
        assert state[INDEXED] <= state[LENGTH] <= state[CAPACITY] == 2 * (state[TABLE] - first)
        assert np.count_nonzero(index.arena.words[state[TABLE] : end]) == state[ENTRIES] <= state[TABLE_SIZE] * 2 // 3
    assert taken.max() <= 1
    assert taken.sum() == index.arena.used_words


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    make().load(None)  # type: ignore[arg-type]


# -- the reference itself --------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([], []),
        ([7], []),
        ([7, 8], []),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest occurrence; then the draft goes on with itself
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1, 2]),  # a longer suffix wins over a later occurrence
        ([5] * 48, [5, 5, 5, 5]),  # the occurrence overlaps the suffix
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
    ],
)
def test_reference_by_hand(tokens: list[int], draft: list[int]) -> None:
    assert ngram_draft(tokens, 2, 3, 4) == draft
    assert drafts(make(2, 3), {"a": tokens}, {"a": 0})["a"] == draft


# -- equal to the reference ------------------------------------------------------


@dataclass
class Play:
    """What happens to a few requests: in each step some get tokens, some end, some steps are missed by the proposer."""

    min_n: int
    max_n: int
    steps: list[list[tuple[int, list[int], int]]] = field(default_factory=list)
    """`[steps][rows]`: request, new tokens, limit."""
    ended: list[set[int]] = field(default_factory=list)
    missed: list[bool] = field(default_factory=list)


@st.composite
def plays(draw: st.DrawFn) -> Play:
    min_n = draw(st.integers(1, 6))
    play = Play(min_n, draw(st.integers(min_n, 8)))
    token = st.integers(0, draw(st.sampled_from([0, 1, 2, 5, 49151])))
    phrases = draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=4))
    piece = st.one_of(
        st.lists(token, max_size=6), st.sampled_from(phrases), st.sampled_from(phrases).map(lambda words: words * 3)
    )
    for _ in range(draw(st.integers(1, 12))):
        row = st.tuples(st.integers(0, 4), piece, st.integers(0, K))
        rows = draw(st.lists(row, min_size=1, max_size=5, unique_by=lambda row: row[0]))
        play.steps.append(rows)
        play.ended.append(draw(st.sets(st.integers(0, 4), max_size=1)))
        play.missed.append(draw(st.integers(0, 5)) == 0)
    return play


def check(play: Play, **options: int) -> None:
    """Play it, and compare each draft with the reference."""
    proposer = make(play.min_n, play.max_n, **options)
    known: dict[str, list[int]] = {}
    for rows, ended, missed in zip(play.steps, play.ended, play.missed, strict=True):
        proposer.forget([str(name) for name in ended])
        for name in ended:
            known.pop(str(name), None)
        for name, new, _ in rows:
            known.setdefault(str(name), []).extend(new)
        if missed:
            continue
        limits = [limit for _, _, limit in rows]
        now = {str(name): list(known[str(name)]) for name, _, _ in rows}
        answer = drafts(proposer, now, {str(name): len(new) for name, new, _ in rows}, limits=limits)
        assert answer == {name: expected(proposer, now[name], limit) for name, limit in zip(now, limits, strict=True)}
        assert_sound(proposer.index)
    proposer.forget([str(name) for name in range(5)])
    assert len(proposer.index) == 0
    assert proposer.index.used_bytes == 0


@given(plays())
@settings(max_examples=300, deadline=None)
def test_equals_reference(play: Play) -> None:
    check(play)


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 2), (1, 5), (2, 3), (2, 5)])
@pytest.mark.parametrize(("vocabulary", "length"), [(2, 8), (3, 6)])
def test_every_short_text(min_n: int, max_n: int, vocabulary: int, length: int) -> None:
    texts = {str(text): list(text) for text in product(range(vocabulary), repeat=length)}
    proposer = make(min_n, max_n, requests=len(texts))
    for known in range(1, length + 1):
        now = {name: tokens[:known] for name, tokens in texts.items()}
        assert drafts(proposer, now) == {name: expected(proposer, tokens) for name, tokens in now.items()}
    assert_sound(proposer.index)


@pytest.fixture(scope="module")
def colliding() -> types.ModuleType:
    """The kernels with a hash of 2 bits: nearly all entries of a table have the same hash and want the same place."""
    module = with_weak_hash(ngram_kernels)
    assert module.HASH_BITS == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "kernels", module)
        make().load(None)  # type: ignore[arg-type]
    return module


@given(plays())
@settings(max_examples=150, deadline=None)
def test_collisions_never_match(colliding: types.ModuleType, play: Play) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "kernels", colliding)
        check(play)


def text(seed: int, length: int, vocabulary: int = 5000) -> list[int]:
    """New tokens and repeated passages by turns."""
    random = np.random.default_rng(seed)
    tokens: list[int] = random.integers(0, vocabulary, 40).tolist()
    while len(tokens) < length:
        size = int(random.integers(3, 40))
        if random.random() < 0.5:
            place = int(random.integers(0, len(tokens)))
            tokens += tokens[place : place + size]
        else:
            tokens += random.integers(0, vocabulary, size).tolist()
    return tokens[:length]


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 32), (2, 5), (3, 3)])
@pytest.mark.parametrize("vocabulary", [3, 5000])
def test_grows_with_its_request(min_n: int, max_n: int, vocabulary: int) -> None:
    tokens = text(0, 1500, vocabulary)
    proposer = make(min_n, max_n)
    random = np.random.default_rng(1)
    length, blocks = 1, set()
    while length < len(tokens):
        new = min(int(random.integers(1, 5)), len(tokens) - length)
        length += new
        assert drafts(proposer, {"a": tokens[:length]}, {"a": new})["a"] == expected(proposer, tokens[:length])
        assert_sound(proposer.index)
        blocks.add(proposer.index.used_bytes)
    assert len(blocks) > 3, "the block was to be outgrown a few times"


def test_all_at_once_equals_bit_by_bit() -> None:
    tokens = text(2, 3000)
    assert drafts(make(), {"a": tokens})["a"] == expected(make(), tokens)


def test_rows_change_their_order() -> None:
    proposer = make()
    texts = {name: text(seed, 400) for seed, name in enumerate("abcdef")}
    random = np.random.default_rng(3)
    lengths = dict.fromkeys(texts, 100)
    for _ in range(100):
        order = random.permutation(list(texts))[: random.integers(1, 7)]
        new = {name: int(random.integers(0, 4)) for name in order}
        for name in order:
            lengths[name] += new[name]
        now = {str(name): texts[name][: lengths[name]] for name in order}
        assert drafts(proposer, now, new) == {name: expected(proposer, tokens) for name, tokens in now.items()}


def test_a_request_that_is_given_no_drafts_is_still_followed() -> None:
    proposer = make()
    drafts(proposer, {"a": [1, 2, 3, 4]})
    drafts(proposer, {"a": [1, 2, 3, 4, 5, 6]}, {"a": 2}, limits=[0])

    def no_history(row: int) -> np.ndarray:
        raise AssertionError("the index should be up to date")

    now = step({"a": [1, 2, 3, 4, 5, 6, 4, 5]}, {"a": 2}, k=K)
    now.history.host = no_history  # type: ignore[method-assign]
    assert make().propose(step({"a": [1, 2, 3, 4, 5, 6, 4, 5]}, k=K)).token_ids.tolist() == [[6, 4, 5, 6]]
    assert proposer.propose(now).token_ids.tolist() == [[6, 4, 5, 6]]


def test_a_known_id_with_other_tokens_starts_again() -> None:
    # Preempted, or the id reused, and the engine said nothing.
    proposer = make()
    drafts(proposer, {"a": [1, 2, 3, 1, 2]})
    for other in ([9, 8, 7, 9, 8, 7, 9, 8], [4, 4, 4], text(5, 700)):
        assert drafts(proposer, {"a": other}, {"a": 0})["a"] == expected(proposer, other)


# -- cost ------------------------------------------------------------------------


def work_per_step(context: int, texts: dict[str, list[int]]) -> float:
    """Table places looked at and tokens compared per step, once `context` tokens are known."""
    index = NgramIndex(2, 5, max_bytes=64 << 20, max_tokens=1 << 20, max_requests=8, build_tokens=1 << 20, salt=1)

    def run(length: int, new: int) -> None:
        now = step({name: tokens[:length] for name, tokens in texts.items()}, dict.fromkeys(texts, new), k=K)
        index.advance(now.requests, now.committed_ids, now.committed_offsets, now.lengths, now.limits, K, now.history.host)

    run(context, 0)
    before = index.probes + index.compared
    for count in range(1, 101):
        run(context + 2 * count, 2)
    return (index.probes + index.compared - before) / 100


@pytest.mark.parametrize("vocabulary", [1, 4, 50_000])
def test_a_step_costs_what_is_new(vocabulary: int) -> None:
    random = np.random.default_rng(0)
    texts = {name: random.integers(0, vocabulary, 60_000).tolist() for name in "ab"}
    # Two rows of two tokens: each looks up at most 4 nodes and compares at most 5 tokens there. A table at most two thirds
    # full is walked for 5 places on average where a node is absent; what is found is nearer.
    bound = 4 * 4 * (5 + 5)
    costs = [work_per_step(context, texts) for context in (500, 5000, 50_000)]
    assert max(costs) < bound, costs
    assert min(costs) > 0


def test_one_compiled_version_serves_all() -> None:
    # Another type of argument would mean compiling, for seconds, while a request waits.
    proposer = make()
    proposer.load(None)  # type: ignore[arg-type]
    tokens = [1, 2, 3, 1, 2]
    now = step({"a": tokens, "b": tokens}, k=K)
    now.committed_ids.setflags(write=False)
    now.lengths.setflags(write=False)
    now.history.rows[0].setflags(write=False)  # type: ignore[attr-defined]
    proposer.propose(now)
    proposer.propose(now.select([1]))
    proposer.propose(now.select([]))
    for function in (ngram_kernels.advance, ngram_kernels.build, ngram_kernels.rehash):
        assert len(function.signatures) == 1  # type: ignore[attr-defined]


def test_compiles_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit_without_folder(cache: bool = False, **options: bool):  # type: ignore[no-untyped-def]
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return njit(**options)

    monkeypatch.setattr(compiled, "njit", njit_without_folder)
    assert compiled.kernel(lambda number: number + 1)(1) == 2


# -- memory ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "per_token"), [("never repeats", 32), ("one token", 32), ("worst", 64)])
def test_bytes_per_token(name: str, per_token: int) -> None:
    random = np.random.default_rng(0)
    lengths = [500, 1100, 3000, 9000]
    for length in lengths:
        texts = {
            "never repeats": list(range(length)),
            "one token": [1] * length,
            "worst": random.integers(0, round(length**0.4), length).tolist(),
        }
        proposer = make(max_model_len=length, requests=1)
        drafts(proposer, {"a": texts[name]})
        assert len(proposer.index) == 1, "an engine at its limits is to fit"
        assert proposer.index.used_bytes <= per_token * (length + 1)
        assert proposer.memory_bytes() >= proposer.index.used_bytes


def test_memory_is_bounded() -> None:
    proposer = make(max_model_len=40_000, max_index_mib=1)
    texts = {str(seed): text(seed, 9_000) for seed in range(8)}
    served = drafts(proposer, texts)
    assert_sound(proposer.index)
    assert proposer.index.used_bytes <= 1 << 20
    with_drafts = [name for name, draft in served.items() if draft == expected(proposer, texts[name])]
    assert 0 < len(proposer.index) < len(texts)
    assert len(with_drafts) >= len(proposer.index)
    # Those that were refused get theirs when the others have gone.
    refused = [name for name in texts if name not in with_drafts]
    proposer.forget([name for name in texts if name not in refused])
    now = {name: texts[name] for name in refused[:2]}
    assert drafts(proposer, now, dict.fromkeys(now, 0)) == {name: expected(proposer, tokens) for name, tokens in now.items()}


def test_a_request_that_outgrows_the_memory_loses_its_drafts_only() -> None:
    proposer = make(max_model_len=200_000, max_index_mib=1)
    big, small = list(range(60_000)), [1, 2, 3, 1, 2]
    drafts(proposer, {"big": big[:25_000], "small": small})
    assert len(proposer.index) == 2
    for length in (40_000, 60_000, 60_000):
        assert drafts(proposer, {"big": big[:length], "small": small}, {"big": 15_000, "small": 0})["small"] == [3, 1, 2, 3]
        assert_sound(proposer.index)
    assert len(proposer.index) == 1
    proposer.forget(["big"])
    assert drafts(proposer, {"next": [*big[:20_000], 0, 1]})["next"] == [2, 3, 4, 5]


def test_a_slot_that_was_lost_is_not_shared_with_the_row_that_gets_it() -> None:
    """Where there is no room to grow: the room that is freed then suffices for another request, as long as this one."""
    proposer = make(max_model_len=200_000, max_index_mib=1)
    big, other = list(range(33_000)), list(range(33_000, 66_000))
    other[-2:] = other[:2]
    drafts(proposer, {"big": big[:25_000]})
    taken = proposer.index._slots["big"]
    found = drafts(proposer, {"big": big, "other": other}, {"big": 1, "other": 0})  # and steps were missed
    assert proposer.index._slots == {"other": taken}
    assert found == {"big": [], "other": expected(proposer, other)}


def test_rows_never_share_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests come, miss steps, grow and end with too little memory for all of them."""
    proposer = make(max_model_len=40_000, max_index_mib=1)
    index, random = proposer.index, np.random.default_rng(0)
    serve, lost = index._serve, 0

    def looked_at(slots: np.ndarray, *rest: np.ndarray) -> bool:
        held = slots[slots >= 0]
        assert len(set(held.tolist())) == len(held)
        return serve(slots, *rest)

    monkeypatch.setattr(index, "_serve", looked_at)
    texts = {str(seed): text(seed, 30_000) for seed in range(6)}
    lengths = dict.fromkeys(texts, 100)
    for _ in range(200):
        had = set(index._slots)
        rows = random.permutation(list(texts))[: random.integers(1, 7)].tolist()
        for name in rows:
            lengths[name] = min(lengths[name] + int(random.integers(0, 2500)), 30_000)
        now = {name: texts[name][: lengths[name]] for name in rows}
        drafts(proposer, now, dict.fromkeys(now, 1))
        assert_sound(index)
        lost += len(had - set(index._slots))
        ended = str(random.choice(list(texts)))
        if random.random() < 0.3:
            proposer.forget([ended])
            lengths[ended] = 100
    assert lost > 5, "the bound was to be met"


def test_long_prompts_take_several_steps() -> None:
    proposer = make(index_tokens_per_step=100)
    tokens = text(7, 450)
    steps = 0
    answer: list[int] = []
    while not answer and steps < 20:
        steps += 1
        tokens += [tokens[-200]]
        answer = drafts(proposer, {"long": tokens, "short": [1, 2, 1, 2]}, {"long": 1, "short": 0})["long"]
    assert steps == 5
    assert answer == expected(proposer, tokens)


def test_short_requests_do_not_wait_for_a_long_prompt() -> None:
    proposer = make(index_tokens_per_step=100)
    drafts(proposer, {"short": [1, 2, 1, 2]})
    assert drafts(proposer, {"long": text(8, 4000), "short": [1, 2, 1, 2, 1]}) == {"long": [], "short": [2, 1, 2, 1]}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_arena_blocks_never_overlap(actions: list[tuple[bool, int]]) -> None:
    arena = Arena(37 * MIN_BLOCK)
    held: list[tuple[int, int]] = []
    for take, number in actions:
        if take:
            size = MIN_BLOCK << number
            offset = arena.allocate(size)
            if offset is not None:
                assert 0 <= offset <= len(arena.words) - size
                assert all(offset + size <= other or other + length <= offset for other, length in held)
                held.append((offset, size))
        elif held:
            arena.free(*held.pop(number % len(held)))
        assert arena.used_words == sum(size for _, size in held)
    for block in held:
        arena.free(*block)
    assert arena.allocate(32 * MIN_BLOCK) == 0, "free neighbours were not joined"


# -- options ---------------------------------------------------------------------


@pytest.mark.parametrize("option", NgramOptions.model_fields)
def test_options_are_described_and_bounded(option: str) -> None:
    assert NgramOptions.model_fields[option].description
    with pytest.raises(ValidationError, match=option):
        NgramOptions(**{option: 0})


def test_options_must_agree() -> None:
    with pytest.raises(ValidationError, match=r"min_n \(6\) is larger than max_n \(5\)"):
        NgramOptions(min_n=6, max_n=5)
    with pytest.raises(ValidationError, match="max_n"):
        NgramOptions(max_n=33)
    with pytest.raises(ValidationError, match="window"):
        NgramOptions(window=5)  # type: ignore[call-arg]


def test_memory_that_the_system_refuses() -> None:
    with pytest.raises(ConfigError, match="max_index_mib"):
        make(max_model_len=1 << 28 - 1, max_index_mib=1 << 40)


def test_a_context_beyond_the_index() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        make(max_model_len=1 << 29)
