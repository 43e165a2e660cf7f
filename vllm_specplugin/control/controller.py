"""Control of one engine: when the proposer is asked for drafts, and how many of them are verified.

Two questions come up in each step. *Is the proposer asked at all?* Drafting takes time, too, so a proposer whose drafts do not
pay is paused, and asked again in so few steps that this takes no more than `PROBE_SHARE` of the time. *Which of its drafts are
verified?* Those that bring the most tokens per second (`policy`), from none to all, by what steps have cost (`costs`) and by
what became of drafts (`acceptance`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.compiled import compile_all
from vllm_specplugin.control.acceptance import Acceptance
from vllm_specplugin.control.clock import STEP_CLOCK
from vllm_specplugin.control.costs import CostTable, TypicalSeconds
from vllm_specplugin.control.kernels import KERNELS
from vllm_specplugin.control.policy import Choice, choose

logger = logging.getLogger("vllm.specplugin")

PROBE_SHARE = 0.01
"""The part of the time that may go into finding out whether drafting pays again."""

LEAST_PROBE_INTERVAL = 8
"""Steps, at least, in which a paused proposer is not asked between two tries: else a quick one would hardly pause."""

MOST_DEBT = 16
"""How many tries may be made ahead of their time, one after the other, while drafts turn out right: traffic may have changed."""

REFERENCE_SHARE = 0.001
"""The part of drafting's gain that may go into steps without drafts, to know what those take."""

LEAST_REFERENCE_INTERVAL = 16
"""Steps with drafts, at least, between two such."""

PAUSE_BELOW, RESUME_ABOVE = 0.0, 0.005
"""Mean gain of drafting, as a part of plain decoding's speed, at which a proposer is paused, and asked in every step again."""

MARGIN, PAUSED_MARGIN = 0.01, 0.03
"""What a step must be expected to gain for its drafts to be verified: figures are never so exact that less would be a gain."""

FAR_ABOVE = 0.05
"""Mean gain at which a paused proposer is asked in every step again however often that has changed of late."""

GAIN_RATE = 0.04
"""Weight of the newest step in the mean gain."""

FIRST_GAIN = 0.1
"""What is thought of a proposer at first: it is asked until shown wrong."""

PROBE_STEPS = 2
"""Steps in a row in which a paused proposer is asked: the first may take in what it missed, the second has the usual price."""

TRIAL_STEPS = 24
"""The same for one that must see every step of a request: for requests that begin then."""

DWELL = 64
"""Steps, at least, from one change to the next; twice as many after each, up to `MOST_DWELL`."""

MOST_DWELL = 4096
"""Where a regime lasts three times as long as it must, or longer, the next change may come sooner again."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """What control is at, for those who watch."""

    regime: Literal["drafting", "paused"]
    drafts_per_request: float
    """Drafts verified per request and step, over the last steps."""
    gain: float
    """What drafting is expected to bring, as a part of plain decoding's speed, over the last steps."""
    changes: int
    """How often the regime changed."""
    reason: str
    """The figures behind the last change; empty before the first."""


class Controller:
    """Control of one engine; call `begin`, `asks`, `lengths` (if asked) and `end` in each step, in this order.

    A proposer that must see every step of a request (`stateful`) is of no use to requests that lived through a step in which it
    was not asked: those have lapsed. So while paused it is tried on requests that begin, some steps in a row; and `asks` comes
    before `begin`, since such a proposer works before the step's tokens are known.
    """

    def __init__(
        self,
        proposer: str,
        k: int,
        most_requests: int,
        stateful: Iterable[str] = (),
        clock: Callable[[], float] = STEP_CLOCK,
    ) -> None:
        """Args:
        proposer: the configured proposer.
        k: the most drafts per request and step.
        most_requests: in one step.
        stateful: who of those that draft (the proposer, or parts of it) must see every step of a request.
        clock: seconds.
        """
        self.proposer = proposer
        self._stateful_sources = frozenset(stateful)
        self.stateful = bool(self._stateful_sources)
        self.k = k
        self.costs = CostTable(most_rows=most_requests * (k + 1))
        self.acceptance = Acceptance(k, most_requests)
        self._most_rows = most_requests * (k + 1)
        self._clock = clock
        self._ended: float | None = None
        """When the last step's drafts were done."""
        self._running: frozenset[str] = frozenset()
        """The requests that the last step committed tokens of."""
        self._slots = np.zeros(0, dtype=np.int64)
        self._rows = 0
        self._asking = TypicalSeconds()
        """What asking the proposer takes where it was asked in the step before, too: the price of drafting."""
        self._resuming = TypicalSeconds()
        """What it takes where it was not: tokens that it missed may have to be taken in first."""
        self._asked = self._asked_before = False
        """Whether it was asked in this step, and in the one before."""
        self._credit = self._probe_credit = 0.0
        """Seconds that asking a paused proposer may take, and verifying drafts that are not thought to pay."""
        self._gain = FIRST_GAIN
        self._paused = False
        self._steps_in_regime = 0
        self._since_plain = 0
        self._changes = 0
        self._restless = 0
        """How many doublings of `DWELL` the last changes are worth."""
        self._drafts_per_request = 0.0
        self._reason = ""
        self._next_probe = 0
        self._trial = 0
        """Steps left in which a paused proposer is tried."""
        self._unasked = 0
        """Steps since it was."""
        self._unprobed = 0
        """Steps whose share `_probe_credit` has not been given."""
        self._lapsed: set[str] = set()
        self._begun: set[str] = set()
        """The requests that are new in this step, where `begin` has been told of it, and it matters (`stateful`)."""

    @property
    def state(self) -> ControlState:
        regime: Literal["drafting", "paused"] = "paused" if self._paused else "drafting"
        return ControlState(regime, self._drafts_per_request, self._gain, self._changes, self._reason)

    def calibrate(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """What passes over so many rows took at start-up."""
        self.costs = CostTable(sizes, seconds, self._most_rows)

    def compile(self) -> None:
        """Compile what runs in every step, so that no request waits for it: about 5 s the first time, then from numba's cache."""

        def one_step() -> None:
            ids, one = [""], np.ones(1, dtype=np.int64)
            control = Controller("", 1, 1)
            control.begin(ids, one, np.array([0, 1]), one)
            control.lengths(ids, np.ones((1, 1), dtype=np.int64), one, one, 0.0)
            control.begin(ids, one, np.array([0, 1]), one)  # now there are drafts to judge

        compile_all(one_step, len(KERNELS))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests ended; ids may be unknown."""
        gone = list(request_ids)
        self.acceptance.forget(gone)
        self._lapsed.difference_update(gone)

    # -- one step ------------------------------------------------------------

    def begin(
        self,
        request_ids: Sequence[str],
        tokens: NDArray[np.integer],
        offsets: NDArray[np.int64],
        tested: NDArray[np.int64],
        spent: float = 0.0,
    ) -> None:
        """A pass of the target is over.

        Args:
            request_ids: `[rows]`.
            tokens: `[total]`, the tokens that it committed, row after row.
            offsets: `[rows + 1]`, where each row's begin.
            tested: `[rows]`, how many drafts it verified.
            spent: seconds that went into drafting for the next one already.
        """
        now = self._clock() - spent
        running = self._running_in(request_ids, offsets)
        # Only between two steps of the same requests was there nothing but the pass; and prefilling is not what is chosen here.
        if self._ended is not None and len(running) == len(request_ids) and running <= self._running and now > self._ended:
            self.costs.observe(len(running), int(tested.sum()), now - self._ended)
        self._running, self._rows = running, len(running)
        self._unprobed += self._rows > 0
        self._asked, self._asked_before = False, self._asked
        if self.stateful:
            self._begun = {request_id for request_id in request_ids if self.acceptance.is_new(request_id)}
        self._slots = self.acceptance.slots(request_ids)
        self.acceptance.committed(self._slots, tokens, offsets, tested)

    def _running_in(self, request_ids: Sequence[str], offsets: NDArray[np.int64]) -> frozenset[str]:
        """The requests of a step that it committed tokens of."""
        counts = offsets[1:] - offsets[:-1]
        if not counts.all():
            return frozenset(request_id for request_id, count in zip(request_ids, counts.tolist(), strict=True) if count)
        if len(request_ids) == len(self._running) and self._running.issuperset(request_ids):
            return self._running
        return frozenset(request_ids)

    def asks(self, request_ids: Sequence[str]) -> bool:
        """Whether the proposer is to be asked in this step, of the requests `[rows]`."""
        self._steps_in_regime += 1
        if not self._paused and self._stateful_sources == {self.proposer} and self._lapsed.issuperset(request_ids):
            return False  # it could draft for none of them
        if not self._paused:
            return self.stateful or self._rows > 0
        asks = (self.stateful or self._rows > 0) and self._tries(request_ids)
        if self.stateful and not asks:
            self._lapsed.update(request_ids)
        return asks

    def _tries(self, request_ids: Sequence[str]) -> bool:
        """Whether a paused proposer is tried now."""
        if self._trial:
            self._trial -= self._rows > 0  # while prompts are read nothing is drafted
            return True
        rows = max(self._rows, 1)
        steps = TRIAL_STEPS if self.stateful else PROBE_STEPS
        price = self._resuming.seconds(rows) + self._asking.seconds(rows) * (steps - 1)
        self._credit = min(self._credit + PROBE_SHARE * self.costs.plain_seconds(rows), 2 * price)
        self._unasked += 1
        due = self._credit >= price and self._unasked > LEAST_PROBE_INTERVAL
        if self.stateful:
            due = due and any(map(self._begins, request_ids))
        ahead = not due and self._asked_before and self._credit > -MOST_DEBT * price and self._promising
        if not due and not ahead:
            return False
        self._credit -= price
        self._trial, self._unasked = steps - 1, 0
        return True

    @property
    def _promising(self) -> bool:
        """So many drafts of the last step were right that they would pay, of a proposer that can draft for every request."""
        right = self.acceptance.right
        if self.stateful or not right or not self._rows:
            return False
        seconds = self._seconds(self._rows)
        dearer = float(seconds[-1] - seconds[0]) + self._asking.seconds(self._rows)  # with a draft for each
        return right * float(seconds[0]) > self._rows * dearer

    def _begins(self, request_id: str) -> bool:
        """Nobody missed a step of the request: this is its first, whether `begin` has been told or not."""
        return request_id not in self._lapsed and (request_id in self._begun or self.acceptance.is_new(request_id))

    def lengths(
        self,
        request_ids: Sequence[str],
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        limits: NDArray[np.int64],
        asking_seconds: float,
        sources: Sequence[str] | None = None,
        expected: NDArray[np.floating] | None = None,
        by_chance: bool = False,
    ) -> NDArray[np.int64]:
        """How many of each row's drafts to verify, `[rows]`.

        Args:
            request_ids: `[rows]`.
            token_ids: `[rows, k]`.
            lengths: `[rows]`, how many drafts there are.
            limits: `[rows]`, how many there could have been at most, and can be emitted.
            asking_seconds: what asking for them took.
            sources: `[rows]`, who drafted, where there are several.
            expected: `[rows, k]`, the proposer's own estimates of acceptance.
            by_chance: the drafts were drawn by chance, so that the choice may depend on nothing that did.
        """
        rows, k = token_ids.shape
        self._asked = True
        if k == 0 or not self._rows:
            return np.zeros_like(lengths)
        (self._asking if self._asked_before else self._resuming).observe(self._rows, asking_seconds)
        if not by_chance and not lengths.any():
            return self._nothing_drafted(lengths)
        names = [self.proposer] * rows if sources is None else sources
        kinds = self.acceptance.kinds(self._slots, names, k, None if by_chance else expected)
        estimates = self.acceptance.estimate(self._slots, kinds, by_chance)
        if sources is not None:  # a row that no part drafts for has none, whatever others drew
            limits = np.where(np.array([bool(name) for name in names]), limits, 0)
        possible = limits if by_chance else np.minimum(lengths, limits)
        margin = PAUSED_MARGIN if self._paused else MARGIN
        choice = foreseen = choose(estimates, possible, self._rows, self._seconds, margin)
        if self._lapsed:
            drafted_by = zip(request_ids, names, strict=True)
            useless = (name in self._lapsed and source in self._stateful_sources for name, source in drafted_by)
            lapsed = np.fromiter(useless, dtype=np.bool_, count=rows)
            lengths, limits = np.where(lapsed, 0, lengths), np.where(lapsed, 0, limits)
            choice = choose(estimates, np.where(lapsed, 0, possible), self._rows, self._seconds, margin)
        chosen = np.minimum(self._adjusted(choice, limits, by_chance), lengths)
        self.acceptance.keep(self._slots, token_ids, chosen if by_chance else lengths, kinds, by_chance)
        self._judge(foreseen)  # what drafting would bring if no request had lapsed, as will be once those end
        self._drafts_per_request += GAIN_RATE * (float(chosen.sum()) / self._rows - self._drafts_per_request)
        return chosen

    def _nothing_drafted(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """What `lengths` comes to where there is nothing to choose from."""
        plain = float(self._seconds(0)[0])
        self._since_plain = 0
        self.acceptance.keep_none(self._slots)
        self._judge(Choice(lengths, self._rows, float(self._rows), plain, plain))
        self._drafts_per_request -= GAIN_RATE * self._drafts_per_request
        return lengths

    def end(self) -> None:
        """Drafting is done."""
        self._begun = set()
        self._ended = self._clock()

    # -- figures -------------------------------------------------------------

    def _seconds(self, most_drafts: int) -> NDArray[np.float64]:
        return self.costs.seconds(self._rows, most_drafts)

    # -- decisions -----------------------------------------------------------

    def _adjusted(self, choice: Choice, limits: NDArray[np.int64], by_chance: bool) -> NDArray[np.int64]:
        """The lengths chosen, unless something is to be found out in this step."""
        if choice.lengths.any():
            self._since_plain += 1
            interval = max(LEAST_REFERENCE_INTERVAL, (choice.speedup - 1) / REFERENCE_SHARE)
            if self._since_plain < interval:
                return choice.lengths
        elif by_chance:
            return self._probe(limits)
        self._since_plain = 0
        return np.zeros_like(choice.lengths)

    def _probe(self, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Verify the drafts of one request now and then: those that were drawn by chance cannot be judged otherwise."""
        lengths = np.zeros_like(limits)
        rows = np.flatnonzero(limits > 0)
        if not len(rows):
            return lengths
        row = rows[self._next_probe % len(rows)]
        seconds = self._seconds(int(limits[row]))
        price = float(seconds[-1] - seconds[0])
        self._probe_credit = min(self._probe_credit + PROBE_SHARE * float(seconds[0]) * self._unprobed, 2 * price)
        self._unprobed = 0
        if self._probe_credit >= price:
            self._probe_credit -= price
            self._next_probe += 1
            lengths[row] = limits[row]
        return lengths

    def _judge(self, choice: Choice) -> None:
        """Note what drafting gains, its own time included, and pause or resume it."""
        seconds = choice.seconds + self._asking.seconds(self._rows)
        gain = choice.tokens / choice.requests * choice.plain_seconds / seconds - 1
        self._gain += GAIN_RATE * (gain - self._gain)
        if self._steps_in_regime < (DWELL if self._paused and self._gain > FAR_ABOVE else self._dwell()):
            return
        if not self._paused and self._gain < PAUSE_BELOW:
            self._change(paused=True, choice=choice)
        elif self._paused and self._gain > RESUME_ABOVE:
            self._change(paused=False, choice=choice)

    def _dwell(self) -> int:
        return min(DWELL << self._restless, MOST_DWELL)

    def _change(self, paused: bool, choice: Choice) -> None:
        outlived = max(self._steps_in_regime // self._dwell(), 1)
        self._restless = min(max(self._restless + 2 - outlived, 0), 16)
        self._paused = paused
        self._steps_in_regime = 0
        self._changes += 1
        self._credit, self._trial = 0.0, 0
        rate = self.acceptance.rate()
        one_each = float(self._seconds(self._rows)[-1])
        plain, asking = choice.plain_seconds, self._asking.seconds(self._rows)
        self._reason = (
            f"of the last drafts {rate:.0%} agreed with the answers; a step of {self._rows} requests takes {plain * 1e3:.3g} ms, "
            f"with a draft for each {one_each * 1e3:.3g} ms, and asking for drafts {asking * 1e3:.2g} ms"
        )
        if paused:
            logger.info(
                "Drafting by %r does not pay now and is paused: %s. It is tried again from time to time.",
                self.proposer,
                self._reason,
            )
        else:
            logger.info("Drafting by %r pays again (%+.1f %%): %s.", self.proposer, self._gain * 100, self._reason)
