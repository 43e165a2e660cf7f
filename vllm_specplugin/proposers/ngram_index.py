"""Suffix look-up over the tokens of many requests: an index per request, all served by one compiled call per step."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.compiled import compile_all
from vllm_specplugin.proposers import ngram_kernels as kernels
from vllm_specplugin.proposers.ngram_arena import MIN_BLOCK, Arena
from vllm_specplugin.proposers.ngram_kernels import CAPACITY, INDEXED, LENGTH, TABLE, TABLE_SIZE, TOKENS
from vllm_specplugin.types import Request

logger = logging.getLogger("vllm.specplugin.ngram")

WORD_BYTES = 8

History = Callable[[int], NDArray[np.int32]]


def block_words(num_tokens: int, entries_per_token: int = 1, entry_words: int = 1) -> int:
    """Words in the smallest block for so many tokens: a power of two, at least two per token and word of a table entry.

    With entries of one word a quarter of a block holds tokens (two to a word), the rest the table, which is full at two
    thirds: room for as many entries as tokens. With longer entries the tokens' part is so many times smaller.
    """
    return max(MIN_BLOCK, 1 << (2 * num_tokens * entries_per_token * entry_words - 1).bit_length())


def most_bytes(max_tokens: int, max_requests: int, entry_words: int = 1) -> int:
    """What so many requests of that length can come to: two entries per token, and a block for the one that is just moving."""
    return (max_requests + 1) * block_words(max_tokens, 2, entry_words) * WORD_BYTES


class NgramIndex:
    """For each request: where did the longest suffix of its tokens, `min_n` to `max_n` long, last occur before?

    A request costs 16 to 32 bytes per token while it has no more table entries than tokens (true of most text, see
    docs/benchmarks/ngram.md), and never more than 64, whatever `max_n` is. All requests together stay within `max_bytes`: one
    for which there is no room gets no drafts until there is.

    At most `build_tokens` tokens of requests that are new (or missed steps) are indexed per step; long prompts take several.
    One thread at a time. Apart from that limit and `max_bytes`, no request's drafts depend on its neighbours.

    Another kind of index over the same blocks overrides the four methods that call compiled code (see `suffix_index`).
    """

    entry_words: ClassVar[int] = 1
    """Words of 8 bytes in a table entry."""
    num_kernels: ClassVar[int] = 3
    """How many functions there are to compile."""
    name: ClassVar[str] = "n-gram"
    """What warnings call it."""

    def __init__(
        self,
        min_n: int,
        max_n: int,
        *,
        max_bytes: int,
        max_tokens: int,
        max_requests: int,
        build_tokens: int,
        salt: int | None = None,
    ) -> None:
        """`max_tokens` is the most in one request. Raises MemoryError where `max_bytes` cannot be reserved."""
        self.min_n, self.max_n, self.build_tokens = min_n, max_n, build_tokens
        self.arena = Arena(min(max_bytes, most_bytes(max_tokens, max_requests, self.entry_words)) // WORD_BYTES)
        # Hashes that nobody can foresee, so that no prompt can be made of collisions. Drafts do not depend on them.
        self._salt = np.uint64(secrets.randbits(64) if salt is None else salt)
        self._state = np.zeros((max_requests, kernels.STATE_COLUMNS), dtype=np.int64)
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._slots: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        """Words that a request without room needs before it is worth another try."""
        self._warned = False
        self._last_requests: list[Request] | None = None
        """The rows that `_last_slots` belongs to; None once a slot was given or taken."""
        self._last_slots = np.zeros(0, dtype=np.int64)
        self._work = np.zeros(2, dtype=np.int64)

    def __len__(self) -> int:
        """Requests that have an index."""
        return len(self._slots)

    @property
    def used_bytes(self) -> int:
        """Bytes in the blocks of the present requests."""
        return self.arena.used_words * WORD_BYTES

    @property
    def touched_bytes(self) -> int:
        """The most bytes that were ever in use; what is freed is kept for the next request."""
        return self.arena.touched_words * WORD_BYTES + self._state.nbytes

    @property
    def entries(self) -> int:
        """Table entries of the present requests."""
        return int(sum(self._state[slot, kernels.ENTRIES] for slot in self._slots.values()))

    @property
    def probes(self) -> int:
        """Table places looked at so far, growth aside."""
        return int(self._work[kernels.PROBES])

    @property
    def compared(self) -> int:
        """Tokens compared so far."""
        return int(self._work[kernels.COMPARED])

    def compile(self) -> None:
        """Compile every kernel, or fetch it from numba's cache, by serving a request that fills a block and outgrows it."""
        compile_all(self._warm_up, self.num_kernels)
        self.forget([""])

    def _warm_up(self) -> None:
        tokens = np.arange(MIN_BLOCK // 2 + 1, dtype=np.int32) % 7
        prompt, last = tokens[:-1], tokens[-1:]
        requests, one = [Request("")], np.ones(1, dtype=np.int64)
        self.forget([""])
        self.advance(requests, last[:0], np.array([0, 0]), one * len(prompt), one, 1, lambda row: prompt)
        self.advance(requests, last, np.array([0, 1]), one * len(tokens), one, 1, lambda row: tokens)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the memory of requests; ids may be unknown."""
        for request_id in request_ids:
            self._refused.pop(request_id, None)
            self._drop(request_id)

    def advance(
        self,
        requests: Sequence[Request],
        committed_ids: NDArray[np.int32],
        committed_offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        limits: NDArray[np.int64],
        k: int,
        history: History,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Take in one step and draft: ids `[rows, k]`, and how many of each row's count `[rows]`. Arguments as in Step.

        A request gets its index, from its whole `history`, when drafts are first wanted of it (its limit is not 0), and
        catches up with its history after missed steps. From then on a step costs O(max_n) per committed token and O(k) per
        row, amortised over the doublings of its block.
        """
        # Copies, since compiled code is bound to exact types and a read-only array has another one.
        ids = np.array(committed_ids, dtype=np.int32)
        offsets = np.array(committed_offsets, dtype=np.int64)
        known = np.array(lengths, dtype=np.int64)
        wanted = np.array(limits, dtype=np.int64)
        return self._advance(requests, ids, offsets, known, wanted, k, history)

    def _advance(
        self,
        requests: Sequence[Request],
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        limits: NDArray[np.int64],
        k: int,
        history: History,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        rows = len(requests)
        slots = self._slots_of(requests)
        drafts = np.zeros((rows, k), dtype=np.int32)
        counts, status = np.zeros((2, rows), dtype=np.int64)
        step = slots, ids, offsets, lengths, limits
        if not self._serve(*step, drafts, counts, status) and self._settle(requests, slots, lengths, limits, status, history):
            self._serve(*step, drafts, counts, status)
        return drafts, counts

    # -- compiled code -----------------------------------------------------------

    def _serve(
        self,
        slots: NDArray[np.int64],
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        limits: NDArray[np.int64],
        drafts: NDArray[np.int32],
        counts: NDArray[np.int64],
        status: NDArray[np.int64],
    ) -> bool:
        """Take in and draft for the rows that can be served; True if all can. May be called again for the same step."""
        memory = self.arena.words, self.arena.tokens, self._state
        rules = self.min_n, self.max_n, self._salt
        done: bool = kernels.advance(*memory, slots, ids, offsets, lengths, limits, *rules, drafts, counts, status, self._work)
        return done

    def _index(self, slot: int, until: int) -> bool:
        """Index the tokens of a slot up to `until`; False where its table is too full."""
        memory = self.arena.words, self.arena.tokens, self._state
        done: bool = kernels.build(*memory, slot, until, self.min_n, self.max_n, self._salt, self._work)
        return done

    def _move(self, old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        """Copy the entries of one table, given by its slot's state, into an empty one."""
        kernels.rehash(self.arena.words, int(old[TABLE]), int(old[TABLE_SIZE]), int(new[TABLE]), int(new[TABLE_SIZE]))

    # -- rows ----------------------------------------------------------------------

    def _slots_of(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """`[rows]`, -1 where a request has none. Most steps have the rows of the last one, so those are kept."""
        if self._last_requests is None or list(requests) != self._last_requests:  # compared by identity
            slot_of = self._slots.get
            self._last_slots = np.array([slot_of(request.request_id, -1) for request in requests], dtype=np.int64)
            self._last_requests = list(requests)
        return self._last_slots

    def _settle(
        self,
        requests: Sequence[Request],
        slots: NDArray[np.int64],
        lengths: NDArray[np.int64],
        limits: NDArray[np.int64],
        status: NDArray[np.int64],
        history: History,
    ) -> bool:
        """Make it possible to serve the rows that the kernel could not, updating `slots`; False where nothing was to be done."""
        allowance, changed = self.build_tokens, False
        for row in np.flatnonzero(status != kernels.DONE):
            request_id, length = requests[row].request_id, int(lengths[row])
            if status[row] == kernels.FULL:
                self._grow(request_id, length)
            elif status[row] != kernels.BEHIND:
                if limits[row] == 0 or allowance <= 0 or not self._make_room(request_id, length):
                    slots[row] = self._slots.get(request_id, -1)  # lost where it could not grow, and the next row may take it
                    continue
                self._catch_up(request_id, history(int(row)))
            allowance -= self._build(request_id, allowance)
            slots[row] = self._slots.get(request_id, -1)
            changed = True
        return changed

    def _make_room(self, request_id: str, length: int) -> bool:
        """See that a request has a block for its tokens; False where there is no memory."""
        slot = self._slots.get(request_id)
        if slot is not None:
            return length <= self._state[slot, CAPACITY] or self._grow(request_id, length)
        words = max(block_words(length, entry_words=self.entry_words), self._refused.get(request_id, 0))
        offset = self.arena.allocate(words)
        if offset is None:
            return self._refuse(request_id, words)
        self._refused.pop(request_id, None)
        if not self._free_slots:
            known = len(self._state)
            self._state = np.concatenate([self._state, np.zeros_like(self._state)])
            self._free_slots = list(range(2 * known - 1, known - 1, -1))
        slot = self._slots[request_id] = self._free_slots.pop()
        self._last_requests = None
        self._state[slot] = 0
        self._place(slot, offset, words)
        return True

    def _place(self, slot: int, offset: int, words: int) -> None:
        """Give a slot a block, its table empty."""
        state = self._state[slot]
        token_words = words // (4 * self.entry_words)
        state[TOKENS], state[CAPACITY] = 2 * offset, 2 * token_words
        state[TABLE], state[TABLE_SIZE] = offset + token_words, (words - token_words) // self.entry_words
        self.arena.words[offset + token_words : offset + words] = 0

    def _block_of(self, state: NDArray[np.int64]) -> tuple[int, int]:
        """Offset and words of a slot's block."""
        return int(state[TOKENS]) // 2, 2 * self.entry_words * int(state[CAPACITY])

    def _catch_up(self, request_id: str, history: NDArray[np.int32]) -> None:
        """Append what the history has beyond the known tokens; where it contradicts them, start again from it."""
        state = self._state[self._slots[request_id]]
        known, start = state[LENGTH], state[TOKENS]
        if not np.array_equal(self.arena.tokens[start : start + known], history[:known]):
            self._drop(request_id)
            if not self._make_room(request_id, len(history)):
                return
            state = self._state[self._slots[request_id]]
            known, start = state[LENGTH], state[TOKENS]
        total = min(len(history), state[CAPACITY])
        self.arena.tokens[start + known : start + total] = history[known:total]
        state[LENGTH] = total

    def _build(self, request_id: str, allowance: int) -> int:
        """Index up to `allowance` tokens that a request is behind; returns how many it was."""
        slot = self._slots.get(request_id)
        if slot is None:
            return 0
        before = int(self._state[slot, INDEXED])
        until = min(int(self._state[slot, LENGTH]), before + max(0, allowance))
        while not self._index(slot, until):
            if not self._grow(request_id, until):
                break
        return until - before

    def _grow(self, request_id: str, length: int) -> bool:
        """Move a request to a block at least twice as large; where there is none its index is dropped, and False returned."""
        slot = self._slots[request_id]
        old = self._state[slot].copy()
        old_offset, old_words = self._block_of(old)
        words = max(2 * old_words, block_words(length, entry_words=self.entry_words))
        offset = self.arena.allocate(words)
        if offset is None:
            self._drop(request_id)
            return self._refuse(request_id, words)
        self._place(slot, offset, words)
        new = self._state[slot]
        self.arena.tokens[new[TOKENS] : new[TOKENS] + old[LENGTH]] = self.arena.tokens[old[TOKENS] : old[TOKENS] + old[LENGTH]]
        self._move(old, new)
        self.arena.free(old_offset, old_words)
        return True

    def _drop(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._last_requests = None
            self.arena.free(*self._block_of(self._state[slot]))
            self._free_slots.append(slot)

    def _refuse(self, request_id: str, words: int) -> bool:
        """Note that there is no room; returns False for the caller to pass on."""
        if not self._warned:
            self._warned = True
            size = len(self.arena.words) * WORD_BYTES >> 20
            logger.warning(
                "The %s index has no room for request %s: it is bounded at %d MiB (option max_index_mib). "
                "Such requests decode without drafts from it until others end.",
                self.name,
                request_id,
                size,
            )
        self._refused[request_id] = words
        return False
