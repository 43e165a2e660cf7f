"""How probably a draft is accepted: by who drafted it, how far ahead it is, how well drafts went just before, and whose it is.

A draft that was picked deterministically can be judged without being verified: it would have been accepted exactly if the
target's own token equals it. So every draft is held against the tokens that its request goes on to commit, whether it was
verified or trimmed. That is how estimates stay right while nothing is verified, and it costs the target nothing. A draft that was
drawn by chance is judged only where it was verified: it may be accepted more often than the same token would be drawn again.

All of this is about tokens that are committed. What a step decides depends on nothing that is still to be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.control import kernels

STREAKS = np.array([1, 4, 16])
"""Kinds of moments: how many of the request's last tokens in a row had been drafted right; none, from 1, from 4, from 16."""

BINS = 8
"""Kinds of drafts of a proposer that says itself how sure it is: by its own estimate."""

PRIOR, PRIOR_TESTS = 0.6, 2.0
"""The acceptance that a new proposer starts from, and how many tests that is worth: drafting is tried, and not for long."""

LEAN, REQUEST_LEAN = 4.0, 64.0
"""How many tests the like of a kind of draft count for, which leans on its proposer's mean; and all requests for one of them."""

WINDOW, REQUEST_WINDOW = 30.0, 60.0
"""Tests after which an older one of a kind of draft, and of a request, counts half: traffic changes."""

STEPS_LATELY, DOUBT, LATE_LEAN = 6.0, 2.5, 2.0
"""Steps after which an older one counts half in what a proposer did lately; by how many standard errors it must have done
better or worse than foreseen, so that all its drafts are thought better or worse; and how many tests the estimates count for
then. A change of traffic is seen sooner so: a far draft is reached so rarely that its own tests would take long to tell. Less
doubt reacts faster, and loses up to 4 % where traffic is steady (`benchmarks/control_replay.py`)."""

CAUTION = 1.5
"""Standard errors that drafts picked deterministically are thought to be worse than they seem. Of many estimates the highest are
chosen, and those are mostly too high; nothing is lost by it, since these drafts are judged whether they are verified or not."""

HIGHEST = 0.995
"""No draft is taken for certain."""

GROWING = (
    "_of_request",
    "_streaks",
    "_ids",
    "_cells",
    "_lengths",
    "_by_chance",
    "_open_ids",
    "_open_cells",
    "_open_lengths",
    "_decided",
)
"""Tables by slot."""


class Acceptance:
    """Estimates for all requests of one engine."""

    def __init__(self, k: int, most_requests: int) -> None:
        self.k = k
        self._columns = k + BINS
        self._sources: dict[str, int] = {}
        self._tests = np.zeros((0, len(STREAKS) + 1, self._columns))
        self._accepted = np.zeros_like(self._tests)
        self._rates, self._cautious = np.zeros_like(self._tests), np.zeros_like(self._tests)
        """`[sources, streaks, columns]`: by kind of draft, older tests faded; the last is `_rates` less `CAUTION`."""
        self._tally = np.zeros((0, 3), dtype=np.int64)
        """`[sources, 3]`: chains, drafts and right drafts that were judged since `take`."""
        self._late_tests, self._late_accepted = np.zeros_like(self._tests), np.zeros_like(self._tests)
        """`_tests` and `_accepted` of the last steps alone."""
        self._turns = np.zeros(0)
        """`[sources]`: what those say beyond the estimates."""
        self.right = 0
        """How many of the drafts that the last step judged were right."""
        self._slots: dict[str, int] = {}
        self._last: tuple[list[str], NDArray[np.int64]] | None = None
        """What `slots` was asked last, and what it said: from step to step that is mostly the same."""
        self._free = list(range(most_requests))
        self._of_request = np.zeros((most_requests, 3))
        """`[slots]`: tests, how many of them were accepted, and how many should have been by the estimates for all requests."""
        self._streaks = np.zeros(most_requests, dtype=np.int64)
        """`[slots]`: how many of the last committed tokens in a row had been drafted right."""
        self._ids = np.zeros((most_requests, k), dtype=np.int64)
        """`[slots, k]`: the last step's drafts, to be held against what the request commits next."""
        self._cells = np.zeros((most_requests, k), dtype=np.int64)
        """`[slots, k]`: which kind they are."""
        self._lengths = np.zeros(most_requests, dtype=np.int64)
        self._by_chance = np.zeros(most_requests, dtype=np.bool_)
        self._open_ids, self._open_cells = np.zeros_like(self._ids), np.zeros_like(self._cells)
        """`[slots, k]`: drafts of an earlier step that were right so far, and are not all decided."""
        self._open_lengths = np.zeros(most_requests, dtype=np.int64)
        self._decided = np.zeros(most_requests, dtype=np.int64)
        """`[slots]`: how many of those are."""

    # -- requests ------------------------------------------------------------

    def slots(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        """`[rows]`: where the figures of each request are kept; new ones get a place."""
        if self._last is not None and self._last[0] == request_ids:
            return self._last[1]
        known = self._slots
        for request_id in request_ids:
            if request_id not in known:
                slot = known[request_id] = self._free.pop() if self._free else self._grow()
                self._of_request[slot] = 0.0
                self._streaks[slot] = self._lengths[slot] = self._open_lengths[slot] = 0
        slots = np.fromiter((known[request_id] for request_id in request_ids), dtype=np.int64, count=len(request_ids))
        self._last = list(request_ids), slots
        return slots

    def is_new(self, request_id: str) -> bool:
        """No step of the request has been seen."""
        return request_id not in self._slots

    def _grow(self) -> int:
        """One more slot: requests that were preempted may be known beside as many that run."""
        slot = len(self._streaks)
        for name in GROWING:
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._free.extend(range(slot + 1, 2 * slot))
        return slot

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests ended; ids may be unknown."""
        self._last = None
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)

    # -- learning ------------------------------------------------------------

    def committed(
        self, slots: NDArray[np.int64], tokens: NDArray[np.integer], offsets: NDArray[np.int64], tested: NDArray[np.int64]
    ) -> None:
        """Hold the drafts that are kept against what their requests committed.

        Args:
            slots: `[rows]`.
            tokens: `[total]`, row after row.
            offsets: `[rows + 1]`, where each row's begin.
            tested: `[rows]`, how many drafts were verified.
        """
        self.right = 0
        if not (self._lengths[slots].any() or self._open_lengths[slots].any()):  # as in most steps where nothing is found
            self._streaks[slots[offsets[1:] > offsets[:-1]]] = 0
            return
        before = int(self._tally[:, kernels.RIGHT].sum())
        kernels.judge(
            slots,
            tokens.astype(np.int64),
            offsets,
            tested,
            (self._ids, self._cells, self._lengths, self._by_chance),
            (self._open_ids, self._open_cells, self._open_lengths, self._decided),
            self._streaks,
            self._of_request,
            (self._tests.ravel(), self._accepted.ravel(), self._rates.ravel()),
            self._tally,
            (self._late_tests.ravel(), self._late_accepted.ravel()),
            0.5 ** (1 / WINDOW),
            0.5 ** (1 / REQUEST_WINDOW),
            0.5 ** (1 / STEPS_LATELY),
        )
        self.right = int(self._tally[:, kernels.RIGHT].sum()) - before
        self._update()

    def keep(
        self,
        slots: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        cells: NDArray[np.int64],
        by_chance: bool,
    ) -> None:
        """Keep a step's drafts, to be held against what follows.

        Args:
            slots: `[rows]`.
            token_ids: `[rows, k]`.
            lengths: `[rows]`, before any trimming; those of drafts by chance after it.
            cells: `[rows, k]`, their kinds.
            by_chance: they were drawn by chance.
        """
        width = token_ids.shape[1]
        self._ids[slots, :width] = token_ids
        self._cells[slots, :width] = cells
        self._lengths[slots] = lengths
        self._by_chance[slots] = by_chance

    def keep_none(self, slots: NDArray[np.int64]) -> None:
        """There are no drafts in this step."""
        self._lengths[slots] = 0

    # -- estimating ----------------------------------------------------------

    def kinds(
        self, slots: NDArray[np.int64], sources: Sequence[str], k: int, expected: NDArray[np.floating] | None
    ) -> NDArray[np.int64]:
        """`[rows, k]`: which kind each draft of a step is.

        Args:
            slots: `[rows]`.
            sources: `[rows]`, who drafted.
            k: drafts per row.
            expected: `[rows, k]`, their proposer's own estimates, where it makes some.
        """
        for new in sorted(set(sources).difference(self._sources)):
            self._sources[new] = len(self._sources)
            more = np.zeros((1, *self._tests.shape[1:]))
            self._tests, self._accepted = np.concatenate([self._tests, more]), np.concatenate([self._accepted, more])
            self._tally = np.concatenate([self._tally, np.zeros((1, 3), dtype=np.int64)])
            self._late_tests = np.concatenate([self._late_tests, more])
            self._late_accepted = np.concatenate([self._late_accepted, more])
            self._update()
        source = np.fromiter((self._sources[name] for name in sources), dtype=np.int64, count=len(sources))
        first = (source * (len(STREAKS) + 1) + STREAKS.searchsorted(self._streaks[slots], side="right")) * self._columns
        if expected is None:
            return first[:, None] + np.arange(k)
        return first[:, None] + self.k + np.minimum((expected * BINS).astype(np.int64), BINS - 1)

    def _update(self) -> None:
        self._rates, self._cautious = kernels.rates(self._tests, self._accepted, LEAN, PRIOR, PRIOR_TESTS, CAUTION)
        self._turns = kernels.turns(self._late_tests, self._late_accepted, self._rates, DOUBT, LATE_LEAN)

    def estimate(self, slots: NDArray[np.int64], cells: NDArray[np.int64], by_chance: bool = False) -> NDArray[np.float64]:
        """`[rows, k]`: how probably each draft is accepted once those before it are.

        Args:
            slots: `[rows]`.
            cells: `[rows, k]`, their kinds.
            by_chance: they are drawn by chance, so that only who is verified is ever judged.
        """
        rates = self._rates if by_chance else self._cautious
        return kernels.estimate(slots, cells, rates.ravel(), self._of_request, self._turns, REQUEST_LEAN, HIGHEST)

    def take(self) -> dict[str, tuple[int, int, int]]:
        """What was judged since the last call, by source: rows whose first draft was, all drafts, and those that were right."""
        if not self._tally.any():
            return {}
        taken = {name: self._tally[index].tolist() for name, index in self._sources.items()}
        self._tally[:] = 0
        return {name: (chains, judged, right) for name, (chains, judged, right) in taken.items() if judged}

    def rate(self) -> float:
        """What part of the last drafts was right, of all that were decided."""
        tests = self._tests.sum()
        return float(self._accepted.sum() / tests) if tests else 0.0
