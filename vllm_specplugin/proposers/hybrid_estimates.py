"""How many drafts of each part will be accepted, learned by hindsight: what would have been accepted of every part's drafts.

A pass shows the target's next tokens whoever drafted them, so each part's drafts of that pass can be held against them, also
those that nobody verified. Nothing has to be tried out for that, and ranks that see the same tokens learn the same.

The estimate for a draft is the part's own, or a constant where it has none, times two corrections: how drafts of that kind fared
in all requests, and how the part fared in this request. Each is `(accepted + w) / (estimated + w)`, which is 1 before there is
evidence and moves away from it as evidence comes (the posterior mean of a Poisson rate under a Gamma prior).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.proposers import hybrid_kernels as kernels
from vllm_specplugin.proposers.hybrid_kernels import LEVELS
from vllm_specplugin.types import Request

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What drafts of one part promise."""

    kind: Ints
    """`[rows, k]`: what they are told apart by."""
    said: Floats
    """`[rows, k]`: the part's own estimates, or a constant."""
    expected: Floats
    """`[rows, k]`: the same corrected: how probably each draft is accepted once those before it are."""
    worth: Floats
    """`[rows]`: how many are expected to be accepted."""


class Estimates:
    """The evidence on a number of parts, `k` drafts each at most."""

    def __init__(self, num_parts: int, k: int, num_requests: int) -> None:
        self.k = k
        self._of_kind = np.zeros((2, num_parts, k + LEVELS))
        """Drafts accepted and estimated, by part and kind."""
        self._slots: dict[str, int] = {}
        self._free = list(range(num_requests - 1, -1, -1))
        self._of_request = np.zeros((num_requests, 2, num_parts))
        """The same by request and part."""
        self._unseen = np.zeros((num_requests, num_parts), dtype=np.int64)
        self._ids = np.zeros((num_requests, num_parts, k), dtype=np.int64)
        """The last drafts."""
        self._kind = np.full((num_requests, num_parts, k), -1, dtype=np.int64)
        """Their kinds, -1 where there is none that could be learned from."""
        self._said = np.zeros((num_requests, num_parts, k))
        """Their parts' own estimates."""

    def compile(self) -> None:
        """Call every kernel once, for a request that has none of its own."""
        request_id = "compiled before the first request"
        slots, one = self.slots([Request(request_id)]), np.ones(1, dtype=np.int64)
        for said in (None, np.ones((1, self.k), dtype=np.float32)):
            self.keep(0, slots, np.zeros((1, self.k), dtype=np.int64), 0 * one, 0 * one, self.value(0, slots, said, one))
        self.learn(slots, one, np.array([0, 1]))
        self.forget([request_id])

    def slots(self, requests: Sequence[Request]) -> Ints:
        """`[rows]`: where each request's evidence is kept."""
        for request in requests:
            if request.request_id not in self._slots:
                self._admit(request.request_id)
        return np.array([self._slots[request.request_id] for request in requests], dtype=np.int64)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what only concerns requests that ended."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)

    def passes_without_evidence(self, part: int, slots: Ints) -> Ints:
        """`[rows]`: for how many passes a part's drafts in a request have gone unseen."""
        return self._unseen[slots, part]

    def wait(self, part: int, slots: Ints) -> None:
        """Count those passes from here on."""
        self._unseen[slots, part] = 0

    def value(self, part: int, slots: Ints, said: NDArray[np.floating] | None, counted: Ints) -> Value:
        """What drafts of a part promise, of which there are `counted` `[rows]`, given what it says of them, if anything."""
        rows = len(slots)
        given = np.zeros((rows, 0), dtype=np.float32) if said is None else np.ascontiguousarray(said, dtype=np.float32)
        value = Value(
            np.zeros((rows, self.k), dtype=np.int64), np.zeros((rows, self.k)), np.zeros((rows, self.k)), np.zeros(rows)
        )
        tables = self._of_kind, self._of_request
        kernels.judge(part, slots, given, counted, *tables, value.kind, value.said, value.expected, value.worth)
        return value

    def keep(self, part: int, slots: Ints, token_ids: Ints, lengths: Ints, counted: Ints, value: Value) -> None:
        """Remember a part's drafts `[rows, at most k]` until it is seen what they were worth.

        Of `counted` `[rows]` drafts something is to be learned; those beyond `lengths` `[rows]` are refused.
        """
        kernels.keep(part, slots, token_ids, lengths, counted, value.kind, value.said, self._ids, self._kind, self._said)

    def cut(self, part: int, slots: Ints, tested: Ints) -> None:
        """Learn nothing from a part's last drafts beyond those `tested` `[rows]`."""
        untested = (self._ids[slots, part] >= 0) & (np.arange(self.k) >= tested[:, None])
        self._kind[slots, part] = np.where(np.logical_or.accumulate(untested, axis=1), -1, self._kind[slots, part])

    def void(self, slots: Ints) -> None:
        """Learn nothing from the last drafts of these requests: passes were missed in which they came true, or did not."""
        self._kind[slots] = -1

    def learn(self, slots: Ints, committed_ids: NDArray[np.integer], offsets: Ints) -> None:
        """Hold the last drafts against what the step committed, row after row; `offsets` is `[rows + 1]`."""
        tokens, ends = np.array(committed_ids, dtype=np.int64), np.array(offsets, dtype=np.int64)
        drafts = self._ids, self._kind, self._said
        kernels.learn(slots, tokens, ends, *drafts, self._of_kind, self._of_request, self._unseen)

    def _admit(self, request_id: str) -> None:
        if not self._free:
            known = len(self._of_request)
            for name in ("_of_request", "_unseen", "_ids", "_kind", "_said"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
            self._free = list(range(2 * known - 1, known - 1, -1))
        slot = self._slots[request_id] = self._free.pop()
        self._of_request[slot] = 0.0
        self._unseen[slot] = 0
        self._kind[slot] = -1
