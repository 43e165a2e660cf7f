"""Drafts that the caller gives: what a request expects to be answered, followed through whatever the target changes of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vllm_specplugin.compiled import compile_all
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.proposers import predicted_kernels as kernels
from vllm_specplugin.proposers.base import Proposer, ProposerOptions
from vllm_specplugin.proposers.ngram_arena import MIN_BLOCK, Arena
from vllm_specplugin.proposers.predicted_kernels import ANCHOR, LENGTH, LOST, NEW, RUN, SIZE, START, STATE_COLUMNS, TAIL
from vllm_specplugin.types import Capabilities, Drafts, Host, Request, Step

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("vllm.specplugin.predicted")

TEXT_PER_STEP = 1 << 14
"""Characters of new predictions that are tokenized within a step, some milliseconds' work; longer ones in a thread beside it."""

WORD_BYTES = 8

ScalarT = TypeVar("ScalarT", bound=np.generic)


class PredictedOptions(ProposerOptions):
    """The `options` of the proposer `predicted`."""

    min_probability: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="How likely it must be that a draft and all before it are accepted, as far as this request and others have "
        "shown: right after a difference little is drafted, and more the longer answer and prediction have agreed again.",
    )
    window: int = Field(
        default=4096,
        ge=16,
        le=1 << 20,
        description="How many tokens of the prediction are looked through ahead of where it last agreed with the answer, in each "
        "step in which the two have parted; as many of the rest are looked through in turn.",
    )
    max_predictions_mib: int = Field(
        default=256,
        ge=1,
        description="Most memory of the predictions of running requests, in MiB, at 4 to 8 bytes per token; requests beyond it "
        "decode without drafts.",
    )


class PredictedProposer(Proposer[PredictedOptions]):
    """Drafts the prediction that a request brings along: `extra_args={"specplugin": {"prediction": ...}}`, text or token ids.

    For answers that are mostly known, such as a file with a few edits. The answer is followed through the prediction, and found
    again after tokens were replaced, left out, inserted or moved (see `predicted_kernels`). Requests without a prediction get no
    drafts. A step costs what it committed; one in which the two have parted looks through up to `2.25 * window` tokens.
    """

    Options = PredictedOptions
    catches_up = True
    capabilities = Capabilities(tokens="host", request_keys=("prediction",))
    default_num_speculative_tokens = 16

    def __init__(self, host: Host, options: PredictedOptions) -> None:
        super().__init__(host, options)
        try:
            self._arena = Arena((options.max_predictions_mib << 20) // WORD_BYTES)
        except MemoryError:
            raise ConfigError(
                f"the system refuses to reserve {options.max_predictions_mib} MiB for predictions; lower the option "
                "max_predictions_mib"
            ) from None
        self._state = np.zeros((host.max_num_seqs, STATE_COLUMNS), dtype=np.int64)
        self._tails = np.zeros((host.max_num_seqs, TAIL), dtype=np.int32)
        self._counts = np.zeros((host.max_num_seqs, 2, kernels.BUCKETS))
        self._overall = np.zeros((2, kernels.BUCKETS))
        self._free = list(range(host.max_num_seqs - 1, -1, -1))
        self._slots: dict[str, int] = {}
        self._blocks: dict[str, tuple[int, int]] = {}
        """Where in the arena each request's prediction lies, and how many words its block has."""
        self._coming: dict[str, Future[NDArray[np.int32]]] = {}
        """Texts that are being tokenized."""
        self._without: set[str] = set()
        """Requests whose prediction cannot be used, which has been said."""
        self._tokenizer: ThreadPoolExecutor | None = None
        self._at_work: list[Future[NDArray[np.int32]]] = []
        """The texts that it was handed and is not known to be done with, those of requests that are gone included."""

    def load(self, target: nn.Module) -> None:
        """Compile, so that no request waits for it: 2 s the first time, tenths of one from numba's cache on disk.

        For the same reason the tokenizer is loaded now. Where that fails, the first request with a text says so.
        """
        compile_all(self._advance_nobody, 1)
        if self.host.encode is not None:
            with suppress(Exception):
                self.host.encode("")

    def propose(self, step: Step) -> Drafts:
        """Draft up to `limits[row]` tokens per row: int32 `[rows, k]` with lengths, and how likely each is to be accepted."""
        slots = np.array([self._slots.get(request.request_id, -1) for request in step.requests], dtype=np.int64)
        counts = np.diff(step.committed_offsets)
        behind = (slots >= 0) & (self._state[slots, LENGTH] + counts != step.lengths)  # a step was missed
        left = TEXT_PER_STEP
        for row in np.flatnonzero(((slots < 0) & (step.limits > 0)) | behind):
            request = step.requests[row]
            if slots[row] < 0:
                if request.prediction is None or request.request_id in self._without:
                    continue
                left = self._admit(request, left)
                slots[row] = self._slots.get(request.request_id, -1)
            if slots[row] >= 0:
                self._see(int(slots[row]), step.history.host(int(row)), int(counts[row]))
        return self._advance(slots, step.committed_ids, step.committed_offsets, step.limits, step.k)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the predictions of requests that ended."""
        for request_id in request_ids:
            self._without.discard(request_id)
            coming = self._coming.pop(request_id, None)
            if coming is not None:
                coming.cancel()
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._arena.free(*self._blocks.pop(request_id))
                self._free.append(slot)

    @classmethod
    def memory_bill(cls, host: Host, options: PredictedOptions) -> dict[str, int]:
        """All requests with a prediction as long as the longest answer."""
        worst = host.max_num_seqs * _block_words(host.max_model_len) * WORD_BYTES
        return {"predictions (4-8 B per token)": min(worst, options.max_predictions_mib << 20)}

    def memory_bytes(self) -> int:
        """Bytes of memory that predictions have come to occupy; what requests leave is kept for those that follow."""
        return self._arena.touched_words * WORD_BYTES + self._state.nbytes + self._tails.nbytes + self._counts.nbytes

    # -- requests ----------------------------------------------------------

    def _admit(self, request: Request, left: int) -> int:
        """Give a request a slot with its prediction, once that is tokenized; returns what may be tokenized in this step still."""
        name, said = request.request_id, request.prediction
        coming = self._coming.get(name)
        if coming is not None:
            if coming.done():
                del self._coming[name]
                self._take(name, coming)
            return left
        if isinstance(said, str):
            if self.host.encode is None:
                self._refuse(name, "it is a text, and the engine runs without a tokenizer; send token ids")
                return left
            # Tokenizers are not made for two threads at once, so all queue behind a long one, be its request gone or not.
            self._at_work = [text for text in self._at_work if not text.done()]
            if len(said) > left or self._at_work:
                if self._tokenizer is None:
                    self._tokenizer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specplugin-tokenizer")
                self._coming[name] = self._tokenizer.submit(self._encoded, said)
                self._at_work.append(self._coming[name])
                return left
            left -= len(said)
        known: Future[NDArray[np.int32]] = Future()
        try:
            known.set_result(self._encoded(() if said is None else said))
        except Exception as error:
            known.set_exception(error)
        self._take(name, known)
        return left

    def _encoded(self, said: str | Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        if isinstance(said, str):
            assert self.host.encode is not None
            said = self.host.encode(said)
        return np.minimum(np.asarray(said, dtype=np.int64), np.iinfo(np.int32).max).astype(np.int32)

    def _take(self, name: str, coming: Future[NDArray[np.int32]]) -> None:
        error = coming.exception()
        if error is not None:
            self._refuse(name, f"its tokenization failed with {type(error).__name__}: {error}")
            return
        prediction = coming.result()
        if len(prediction) == 0:
            self._without.add(name)
            return
        words = _block_words(len(prediction))
        offset = self._arena.allocate(words)
        if offset is None:
            self._refuse(name, f"predictions are bounded at {self.options.max_predictions_mib} MiB (option max_predictions_mib)")
            return
        outside = np.flatnonzero(prediction >= self.host.vocab_size)
        if len(outside):
            logger.warning(
                "Request %s: its prediction holds the token id %d, outside the vocabulary of %d; no draft goes beyond it.",
                name,
                prediction[outside[0]],
                self.host.vocab_size,
            )
        if not self._free:
            known = len(self._state)
            self._state, self._tails = _doubled(self._state), _doubled(self._tails)
            self._counts = _doubled(self._counts)
            self._free = list(range(2 * known - 1, known - 1, -1))
        slot = self._slots[name] = self._free.pop()
        self._blocks[name] = offset, words
        self._arena.tokens[2 * offset : 2 * offset + len(prediction)] = prediction
        self._counts[slot] = 0
        self._state[slot] = 0
        self._state[slot, START], self._state[slot, SIZE] = 2 * offset, len(prediction)

    def _see(self, slot: int, history: NDArray[np.int32], committed: int) -> None:
        """Look for a request in all of its prediction, as it is new or its last steps were missed."""
        before = history[: len(history) - committed]
        end = before[-TAIL:]
        self._tails[slot, TAIL - len(end) :] = end
        state = self._state[slot]
        state[LENGTH], state[RUN], state[ANCHOR], state[LOST], state[NEW] = len(before), -1, 0, 0, 1

    def _refuse(self, name: str, why: str) -> None:
        self._without.add(name)
        logger.warning("Request %s gets no drafts from its prediction: %s.", name, why)

    # -- steps ---------------------------------------------------------------

    def _advance_nobody(self) -> None:
        self._advance(np.full(1, -1), np.zeros(0, np.int32), np.zeros(2, np.int64), np.zeros(1, np.int64), 1)

    def _advance(
        self, slots: NDArray[np.int64], ids: NDArray[np.int32], offsets: NDArray[np.int64], limits: NDArray[np.int64], k: int
    ) -> Drafts:
        drafts = np.zeros((len(slots), k), dtype=np.int32)
        lengths = np.zeros(len(slots), dtype=np.int64)
        expected = np.zeros((len(slots), k), dtype=np.float32)
        kernels.advance(
            self._arena.tokens,
            self._state,
            self._tails,
            self._counts,
            self._overall,
            slots,
            # Copies, since compiled code is bound to exact types and a read-only array has another one.
            np.array(ids, dtype=np.int32),
            np.array(offsets, dtype=np.int64),
            np.array(limits, dtype=np.int64),
            (self.options.window, self.host.vocab_size),
            self.options.min_probability,
            drafts,
            lengths,
            expected,
        )
        return Drafts(token_ids=drafts, lengths=lengths, expected=expected)


def _block_words(num_tokens: int) -> int:
    """Words in the block for so many tokens: a power of two, two tokens to a word."""
    return max(MIN_BLOCK, 1 << ((num_tokens + 1) // 2 - 1).bit_length())


def _doubled(array: NDArray[ScalarT]) -> NDArray[ScalarT]:
    return np.concatenate([array, np.zeros_like(array)])
