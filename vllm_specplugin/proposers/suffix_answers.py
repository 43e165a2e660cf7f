"""What all requests were answered: a bounded ring of tokens, and the suffix tree over it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.proposers import suffix_kernels as kernels
from vllm_specplugin.proposers.ngram_index import History
from vllm_specplugin.proposers.suffix_kernels import CHUNK, END, HEAD, KNOWN, NEXT, PIECE, PIECE_COLUMNS, TOTAL
from vllm_specplugin.proposers.suffix_tree import NODE_WORDS
from vllm_specplugin.types import Request

PLACES_PER_TOKEN = 2
"""Places for nodes in the table; text makes about one node per token, and places are used up to three quarters."""
MAX_RING = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive tokens of one answer."""

    context: NDArray[np.int32]
    """`[<= max_n]`: what came before, of the prompt or of the answer."""
    tokens: NDArray[np.int32]
    """`[length]`"""


def ring_size(tokens: int, max_requests: int) -> int:
    """The ring for at least so many tokens: a power of two, with room for the chunks that all requests write to at once."""
    return max(1 << (max(tokens, 1) - 1).bit_length(), 1 << (4 * CHUNK * max_requests - 1).bit_length())


def ring_bytes(ring: int) -> int:
    """What such a ring and the tree over it take: 36.25 bytes per place."""
    return ring * (4 + PLACES_PER_TOKEN * NODE_WORDS * 8) + ring // PIECE * 8


class Answers:
    """The tokens that requests were answered, as they come in, with their counts; the oldest are overwritten.

    Memory is fixed from the start (`ring_bytes`). A request writes to a chunk of its own; what
    it leaves free when it ends is written on by the next one. One thread at a time, but for `snapshot`.
    """

    def __init__(self, min_n: int, max_n: int, *, ring: int, salt: np.uint64) -> None:
        """`ring` is from `ring_size`. Raises MemoryError where that cannot be reserved."""
        self.min_n, self.max_n, self.salt = min_n, max_n, salt
        self.tokens = np.full(ring, kernels.EMPTY, dtype=np.int32)
        self.words = np.zeros(PLACES_PER_TOKEN * ring * NODE_WORDS, dtype=np.int64)
        self.ring = np.zeros(4, dtype=np.int64)
        self.pieces = np.zeros((1, PIECE_COLUMNS), dtype=np.int64)
        self._origins = np.full(ring // PIECE, -1, dtype=np.int64)
        self.taken_in = 0
        """How many tokens `follow` was given so far."""
        self._free_slots = [0]
        self._slots: dict[str, int] = {}
        self._last_requests: list[Request] | None = None
        """The rows that `_last_slots` belongs to; None once a slot was taken back."""
        self._last_slots = np.zeros(0, dtype=np.int64)
        self._left: deque[NDArray[np.int64]] = deque(maxlen=64)
        """Pieces that ended requests did not fill, the latest last."""
        self._writing = threading.RLock()
        """Held while compiled code, which runs beside other threads, may write to the ring."""

    @property
    def total(self) -> int:
        """Places handed out so far, those that have been overwritten included."""
        return int(self.ring[TOTAL])

    @property
    def nodes(self) -> int:
        return int(self.ring[kernels.NODES])

    @property
    def nbytes(self) -> int:
        """Bytes reserved; the part that has been written to is what the system counts."""
        return self.tokens.nbytes + self.words.nbytes + self._origins.nbytes + self.pieces.nbytes

    def follow(
        self,
        requests: Sequence[Request],
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        history: History,
        odds: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """Append what a step committed; returns each row's slot `[rows]`, -1 where nothing has been committed yet.

        A request's answer begins with its first step, or again with the first one after `forget`: what it knows before is
        prompt, or was taken in already, and only serves as context. What was committed in steps that nobody told of, since control
        did not ask or drafting was late, comes from the history and goes on with the same answer.
        """
        self.taken_in += len(ids)
        if self._last_requests is None or list(requests) != self._last_requests:  # compared by identity
            slot_of = self._slots.get
            self._last_slots = np.array([slot_of(request.request_id, -1) for request in requests], dtype=np.int64)
            self._last_requests = list(requests)
        slots = self._last_slots
        with self._writing:
            if not self._append(slots, ids, offsets, lengths, odds, judged=True):
                self._begin_answers(requests, slots, offsets, lengths, history, odds)
                self._append(slots, ids, offsets, lengths, odds, judged=True)
        return slots

    def add(self, piece: Piece, odds: NDArray[np.float64]) -> None:
        """Append a text that no request of this engine was answered."""
        slot = self._begin(piece.context, 0)
        tokens = np.array(piece.tokens, dtype=np.int32)
        length = np.array([len(tokens)])
        self._append(np.array([slot]), tokens, np.array([0, len(tokens)]), length, odds, judged=False)
        self._release(slot)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests ended; what they were answered stays."""
        for request_id in request_ids:
            self._drop(request_id)

    def texts(self) -> Iterator[Piece]:
        """Everything that the ring holds, oldest first."""
        return pieces_of(self.tokens, self._origins, int(self.ring[HEAD]))

    def snapshot(self) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """Copies of what `pieces_of` reads; another thread may ask, and nobody waits for it.

        Meanwhile answers come in. What is appended to a chunk is in the copy or not yet, and either is well. A chunk that was
        handed out again may be half old and half new, so none of it is in the copy.
        """
        head, total = self._position()
        origins = self._origins.copy()  # first, so that a piece which they tell of is in the tokens
        tokens = self.tokens.copy()
        latest_head, latest_total = self._position()
        again = min(latest_total - total, len(tokens)) // PIECE
        origins[(head // PIECE + np.arange(again)) % len(origins)] = -1
        return tokens, origins, latest_head

    def _position(self) -> tuple[int, int]:
        """HEAD and TOTAL between two steps."""
        with self._writing:
            return int(self.ring[HEAD]), int(self.ring[TOTAL])

    # -- pieces ------------------------------------------------------------------

    def _begin_answers(
        self,
        requests: Sequence[Request],
        slots: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        history: History,
        odds: NDArray[np.float64],
    ) -> None:
        """See that each row's new tokens go on with its answer: catch up, or start a piece and give it a slot."""
        for row, request in enumerate(requests):
            known = int(lengths[row] - (offsets[row + 1] - offsets[row]))
            slot = int(slots[row])
            if known == lengths[row] or (slot >= 0 and self.pieces[slot, KNOWN] == known):
                continue
            if slot >= 0 and self.pieces[slot, KNOWN] < known:
                missed = np.array(history(row)[self.pieces[slot, KNOWN] : known], dtype=np.int32)
                ends = np.array([0, len(missed)])
                self._append(slots[row : row + 1], missed, ends, np.array([known]), odds, judged=False)
                continue
            self._drop(request.request_id)
            slots[row] = self._slots[request.request_id] = self._begin(history(row)[:known], known)
        self._last_requests = list(requests)

    def _begin(self, context: NDArray[np.int32], known: int) -> int:
        """A slot with a piece that goes on from `context`, of which the last `max_n` tokens count."""
        if not self._free_slots:
            before = len(self.pieces)
            self.pieces = np.concatenate([self.pieces, np.zeros_like(self.pieces)])
            self._free_slots = list(range(2 * before - 1, before - 1, -1))
        slot = self._free_slots.pop()
        self.pieces[slot] = self._left.pop() if self._left else 0
        context = np.array(context[-self.max_n :], dtype=np.int32)
        kernels.begin(self.tokens, self._origins, self.ring, self.pieces, slot, context, known)
        return slot

    def _append(
        self,
        slots: NDArray[np.int64],
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        odds: NDArray[np.float64],
        judged: bool,
    ) -> bool:
        """Where `judged`, what the tree would have forecast updates the odds. False where a row must begin an answer first."""
        ring = self.words, self.tokens, self._origins, self.ring, self.pieces
        rules = self.min_n, self.max_n, self.salt
        done: bool = kernels.take_in(*ring, slots, ids, offsets, lengths, *rules, odds, judged)
        return done

    def _drop(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._last_requests = None
            self._release(slot)

    def _release(self, slot: int) -> None:
        piece = self.pieces[slot]
        if piece[END] - piece[NEXT] >= 3 * PIECE:
            self._left.append(piece.copy())
        self._free_slots.append(slot)


def pieces_of(tokens: NDArray[np.int32], origins: NDArray[np.int64], head: int) -> Iterator[Piece]:
    """The pieces in a ring `[ring]` whose oldest place is at `head`, oldest first; see `suffix_kernels` for the layout."""
    starts = np.flatnonzero(origins >= 0) * PIECE
    first = head & (len(tokens) - 1)
    for start in np.concatenate([starts[starts >= first], starts[starts < first]]).tolist():
        chunk_end = (start // CHUNK + 1) * CHUNK
        text = tokens[start + 1 : chunk_end]
        ends = np.flatnonzero(text < 0)  # the next piece's mark, or what has not been written yet
        text = text[: ends[0]] if len(ends) else text
        context = int(origins[start // PIECE])
        if len(text) > context:
            yield Piece(text[:context], text[context:])
