"""The requests' own suffix trees, in the blocks of the n-gram index, and drafting from them and from all answers together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.proposers import suffix_kernels as kernels
from vllm_specplugin.proposers.ngram_index import History, NgramIndex
from vllm_specplugin.proposers.ngram_kernels import TABLE, TABLE_SIZE
from vllm_specplugin.proposers.suffix_answers import Answers, ring_size
from vllm_specplugin.proposers.suffix_tree import NODE_WORDS, first_odds, first_trust
from vllm_specplugin.types import Request


class SuffixIndex(NgramIndex):
    """A suffix tree per request over its prompt and answer, beside the one over everybody's answers.

    A request costs 32 to 64 bytes per token, and never more than 128; the answers cost the same whatever they hold. A step costs
    a few look-ups per committed token and tree, and as many per drafted one.
    """

    entry_words = NODE_WORDS
    num_kernels = 6
    name = "suffix"

    def __init__(
        self,
        min_n: int,
        max_n: int,
        *,
        least: float,
        ring: int,
        max_bytes: int,
        max_tokens: int,
        max_requests: int,
        build_tokens: int,
        salt: int | None = None,
    ) -> None:
        """`least` is the probability below which no draft is made; `ring` the answers' size. Raises MemoryError."""
        super().__init__(
            min_n,
            max_n,
            max_bytes=max_bytes,
            max_tokens=max_tokens,
            max_requests=max_requests,
            build_tokens=build_tokens,
            salt=salt,
        )
        self.answers = Answers(min_n, max_n, ring=ring, salt=self._salt)
        self.odds = first_odds()
        self.trust = first_trust()
        self._least = least
        self._guesses, self._classes = np.zeros((1, 1), dtype=np.int32), np.zeros((1, 1), dtype=np.int64)
        self._made = np.zeros((1, 2), dtype=np.int64)
        """The last drafts of each slot, which the next step's tokens judge."""
        self._status = np.zeros(0, dtype=np.int64)
        """What became of each row of the last step."""

    def compile(self) -> None:
        """Compile every kernel, or fetch it from numba's cache, without leaving a trace in this index."""
        spare = SuffixIndex(
            self.min_n,
            self.max_n,
            least=0.0,
            ring=ring_size(1, 1),
            max_bytes=1 << 20,
            max_tokens=1024,
            max_requests=1,
            build_tokens=1024,
        )
        super(SuffixIndex, spare).compile()

    def _warm_up(self) -> None:
        super()._warm_up()
        tokens, one = np.arange(8, dtype=np.int32) % 4, np.ones(1, dtype=np.int64)
        self.draft([Request("")], tokens[-1:], np.array([0, 1]), one * len(tokens), one, 1, lambda row: tokens)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the requests' own trees; what they were answered stays among the answers."""
        request_ids = list(request_ids)
        super().forget(request_ids)
        self.answers.forget(request_ids)

    def draft(
        self,
        requests: Sequence[Request],
        committed_ids: NDArray[np.int32],
        committed_offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        limits: NDArray[np.int64],
        k: int,
        history: History,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
        """Take in one step and draft: ids `[rows, k]`, how many of each row's count `[rows]`, each one's odds `[rows, k]`.

        Arguments as in Step.
        """
        # Copies, as in `advance`.
        ids, offsets = np.array(committed_ids, dtype=np.int32), np.array(committed_offsets, dtype=np.int64)
        known, wanted = np.array(lengths, dtype=np.int64), np.array(limits, dtype=np.int64)
        answers = self.answers
        answer_slots = answers.follow(requests, ids, offsets, known, history, self.odds)
        self._make_room_for_drafts(k)
        drafts, counts = self._advance(requests, ids, offsets, known, wanted, k, history)
        expected = np.zeros(drafts.shape)
        kernels.draft(
            self.arena.words,
            self.arena.tokens,
            self._state,
            self._last_slots,
            self._status,
            answers.words,
            answers.tokens,
            answers.ring,
            answers.pieces,
            answer_slots,
            wanted,
            self.min_n,
            self.max_n,
            self._salt,
            self.odds,
            self.trust,
            self._guesses,
            self._classes,
            self._made,
            self._least,
            drafts,
            expected,
            counts,
        )
        return drafts, counts, expected

    def _make_room_for_drafts(self, k: int) -> None:
        slots, known = len(self.answers.pieces), self._guesses.shape
        if slots > known[0] or k > known[1]:
            grown = (0, max(slots - known[0], 0)), (0, max(k - known[1], 0))
            self._guesses, self._classes = np.pad(self._guesses, grown), np.pad(self._classes, grown)
            self._made = np.pad(self._made, (grown[0], (0, 0)))

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
        """Take in only: drafts need both kinds of trees, and every row's tokens in them."""
        self._status = status
        memory = self.arena.words, self.arena.tokens, self._state
        rules = self.min_n, self.max_n, self._salt
        done: bool = kernels.advance(*memory, slots, ids, offsets, lengths, *rules, self.odds, status)
        return done

    def _index(self, slot: int, until: int) -> bool:
        memory = self.arena.words, self.arena.tokens, self._state
        done: bool = kernels.build(*memory, slot, until, self.min_n, self.max_n, self._salt, self.odds)
        return done

    def _move(self, old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        kernels.rehash(self.arena.words, int(old[TABLE]), int(old[TABLE_SIZE]), int(new[TABLE]), int(new[TABLE_SIZE]))
