"""Control where steps are planned ahead: one number of drafts for all requests of a step, chosen by what past steps brought.

Under asynchronous scheduling the engine core plans a step while those before it are still under way. Which drafts there will be,
and whose are any good, is not known then; how many each request is to get, must be. So the choice is between a few *levels*, 0
among them: the one with the most expected tokens per second, by how far drafts were accepted lately and by how long such steps
took. Both figures come with the outputs, some steps late, and nobody waits for them.

A step is timed from output to output of a busy engine, so its time holds all that a level costs: verification, the drafter's
passes, and what the host does meanwhile. A level is kept for a few steps, since a step tells what it costs only among its like.

A drafter with a KV cache makes a pass over each step's tokens even where it drafts nothing, or it could not go on with these
requests. While drafting does not pay it is left out altogether (`NoPass`), so that a step costs what a plain one does. Requests
that lived through such a step have *lapsed*: they decode plainly to their end, and the drafter is tried on requests that begin.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.control.acceptance import PRIOR, PRIOR_TESTS
from vllm_specplugin.control.clock import STEP_CLOCK
from vllm_specplugin.control.controller import DWELL, MARGIN, MOST_DWELL, PROBE_SHARE, TRIAL_STEPS, ControlState
from vllm_specplugin.control.costs import TypicalSeconds
from vllm_specplugin.control.levels import LevelCosts

logger = logging.getLogger("vllm.specplugin")

RUN = 6
"""Steps that a level is kept for."""

MOST_EXTENSIONS = 3
"""Further runs that a try may last for, until it has steps that say what the level costs."""

HALF_LIFE = 1000.0
"""Tests of a position after which an older one counts half."""

LEAN = 20.0
"""How many tests of its own the mean of all positions counts for."""

SURVEY = 2
"""Runs of each level at the start, whatever they cost, so that each is known from steps of its own."""

RUNS_BETWEEN_TRIES = 16
"""Runs, at least, from one try of a level that is not thought the best to the next; what tries may cost is `PROBE_SHARE`."""

LENGTH_RATE = 0.1
"""Weight of the newest run in the mean number of drafts."""

PAUSED_BELOW, DRAFTING_ABOVE = 0.1, 0.5
"""Mean drafts per request at which drafting is said to be paused, and to go on; while paused the drafter may be left out."""

TRIAL_MEMORY = 48.0
"""Tests of a position that older ones count for when a drafter that was left out is tried: on few requests, and perhaps of other
kinds than those before."""

MOST_SPARED = 0.9
"""The part of a step that the drafter's pass is taken for at most."""


class NoPass(int):
    """0 drafts, and no pass of the drafter either. A number, so that it travels to the workers in the place of vLLM's own."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step that is planned and not over."""

    at: float
    level: int
    skipped: bool
    """The drafter is left out."""
    begins: bool
    """A request begins with it."""


def levels_of(k: int) -> list[int]:
    """Between how many drafts is chosen: 0, 1, 3, 7, ... and k. Few, since vLLM captures CUDA graphs for each.

    With the token before them these are powers of 2 of rows per request. So are the steps between the sizes of vLLM's graphs: at
    other numbers many a batch size would find no graph of its own, and go without a full one.
    """
    return sorted({0, k, *((1 << power) - 1 for power in range((k + 1).bit_length()))})


def schedule(k: int, max_num_seqs: int) -> list[tuple[int, int, int]]:
    """The levels as a schedule by batch size, in vLLM's form: first and last batch size, number of drafts.

    The highest level has the largest batches, since vLLM chooses the sizes of its graphs by them. Levels for which there are too
    few batch sizes are left out: they get no graphs of their own.
    """
    lower = levels_of(k)[:-1][: max_num_seqs - 1]
    return [*((size, size, level) for size, level in enumerate(lower, 1)), (len(lower) + 1, max_num_seqs, k)]


class UniformControl:
    """Control of one engine; call `plan` when a step is planned, then in the same order `over` when its output is there."""

    def __init__(
        self,
        proposer: str,
        k: int,
        most_requests: int,
        can_skip: bool = False,
        clock: Callable[[], float] = STEP_CLOCK,
    ) -> None:
        """Args:
        proposer: the configured proposer.
        k: the most drafts per request and step.
        most_requests: in one step.
        can_skip: the drafter makes a pass in steps without drafts, too, and can be left out of them.
        clock: seconds.
        """
        self.proposer, self.k = proposer, k
        self.levels = np.array(levels_of(k))
        self._most_requests = most_requests
        self.costs = LevelCosts(self.levels, most_requests)
        self._clock = clock
        self._tests, self._accepted = np.zeros(k), np.zeros(k)
        """`[k]`, by position: drafts that were verified while all before them stood, and those that stood; older ones faded."""
        self._can_skip = can_skip
        self._spared = TypicalSeconds()
        """What the drafter's pass takes in steps without drafts."""
        self._lapsed: set[str] = set()
        """Running requests whose drafter has not seen all of their tokens."""
        self._whole = 1.0
        """The part of the requests of the last step that have not lapsed."""
        self._ahead: deque[_Planned] = deque()
        """Steps that are planned and not over."""
        self._last_over = -math.inf
        self._last: tuple[int, bool] | None = None
        """Level and `skipped` of the last step, where it drafted as many for each request as it verified."""
        self._chosen = len(self.levels) - 1
        """The level that is thought the best, as a place in `levels`; drafting is tried until shown wrong."""
        self._level = self._chosen
        self._left = 0
        """Steps left of the run."""
        self._extended = 0
        """By how many runs it was made longer."""
        self._runs = 0
        self._tried = np.zeros(len(self.levels), dtype=np.int64)
        """`[levels]`: the run that each was tried in last."""
        self._tries_of = np.zeros(len(self.levels), dtype=np.int64)
        """`[levels]`: in how many runs each was tried."""
        self._tries = False
        """The run tries a level that is not thought the best, until it can be timed."""
        self._last_try = 0
        self._credit = 0.0
        """Seconds that trying other levels may cost."""
        self._price = 0.0
        """What a run of the last try costs, or of the next one, if none is under way."""
        self._usual = 0.0
        """Seconds of a step, as things are."""
        self._length, self._gain = float(k), 0.0
        self._paused, self._changes, self._reason = False, 0, ""
        self._steps_in_regime = 0

    @property
    def state(self) -> ControlState:
        regime: Literal["drafting", "paused"] = "paused" if self._paused else "drafting"
        return ControlState(regime, self._length, self._gain, self._changes, self._reason)

    def calibrate(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """What passes over so many rows took at start-up."""
        self.costs = LevelCosts(self.levels, self._most_requests, sizes, seconds)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests ended; ids may be unknown."""
        self._lapsed.difference_update(request_ids)

    # -- steps ---------------------------------------------------------------

    @property
    def skips(self) -> bool:
        """Whether the drafter is left out of steps without drafts now."""
        return self._can_skip and self._paused and self._chosen == 0 and self._length < PAUSED_BELOW

    def plan(self, requests: int, begins: bool = False) -> int:
        """A step is being planned: how many drafts each request gets in it, or `NoPass`.

        Args:
            requests: how many the step has.
            begins: one of them begins with it.
        """
        self._credit = min(self._credit + PROBE_SHARE * self._usual, 2 * self._price)
        # While the drafter is left out it can be tried on those alone that begin in the very step.
        if not self._left or (begins and self.skips and self._level == 0 and self._may_try()):
            self._extended = self._extended + 1 if self._is_inconclusive() else 0
            if self._extended:
                self._credit -= self._price
            else:
                self._level = self._decide(requests, begins)
            self._left = self._run_length() if self._level else RUN
        self._left -= 1
        self._steps_in_regime += 1
        skipped = self._level == 0 and (self.skips or self._is_of_no_use(begins))
        self._ahead.append(_Planned(self._clock(), self._level, skipped, begins))
        drafts = int(self.levels[self._level])
        return NoPass(drafts) if skipped else drafts

    def _is_of_no_use(self, begins: bool) -> bool:
        """Whether the drafter's pass would be for requests alone that have lapsed."""
        return self._can_skip and self._whole == 0 and not begins and not any(planned.begins for planned in self._ahead)

    def _run_length(self) -> int:
        """Steps of a run: those who begin must also have been drafted for by then."""
        return TRIAL_STEPS if self.skips else RUN

    def _is_inconclusive(self) -> bool:
        """The run was a try of which no steps were seen that could be timed, for the prompts that were read beside."""
        return self._tries and not self.costs.knows(self._level) and self._extended < MOST_EXTENSIONS

    def over(self, request_ids: Sequence[str], drafts: int, decoding: bool) -> None:
        """The output of the step that was planned first is there.

        Args:
            request_ids: of the step.
            drafts: how many places for drafts it verified, in all.
            decoding: no request was still prefilling.
        """
        if not self._ahead:
            return
        now, requests = self._clock(), len(request_ids)
        planned = self._ahead.popleft()
        began, self._last_over = max(planned.at, self._last_over), now
        alike = decoding and drafts == requests * int(self.levels[planned.level])
        like = (planned.level, planned.skipped)
        # The host may give a step's output before its drafter is done, so that the step before must have been alike, too.
        if alike and self._last == like and now > began:
            # A level is held against the others with the drafter's pass; what is saved without it is known by itself.
            spared = self._spared.seconds(requests) if planned.skipped else 0.0
            self.costs.observe(requests, planned.level, now - began + spared)
        self._last = like if alike else None
        if planned.skipped:
            self._lapsed.update(request_ids)
        lapsed = sum(map(self.has_lapsed, request_ids)) if self._lapsed else 0
        self._whole = 1 - lapsed / max(requests, 1)

    def has_lapsed(self, request_id: str) -> bool:
        """Whether a request lived through a step that the drafter was left out of, so that it is drafted for no more."""
        return request_id in self._lapsed

    def passed(self, requests: int, seconds: float) -> None:
        """The drafter's pass in a step without drafts took so long."""
        self._spared.observe(requests, seconds)

    def judged(self, planned: NDArray[np.integer], accepted: NDArray[np.integer]) -> None:
        """What became of the drafts of a step; a place that nobody had a draft for was planned in vain like any other.

        Args:
            planned: `[rows]`, places for drafts; of requests that have not lapsed.
            accepted: `[rows]`.
        """
        places = np.arange(self.k)
        tests = ((planned[:, None] > places) & (accepted[:, None] >= places)).sum(axis=0)  # [k]
        fade = 0.5 ** (tests / HALF_LIFE)
        self._tests = self._tests * fade + tests
        self._accepted = self._accepted * fade + (accepted[:, None] > places).sum(axis=0)

    def acceptance(self) -> NDArray[np.float64]:
        """`[k]`: how probably a draft is accepted once those before it are."""
        mean = (self._accepted.sum() + PRIOR * PRIOR_TESTS) / (self._tests.sum() + PRIOR_TESTS)
        found: NDArray[np.float64] = (self._accepted + LEAN * mean) / (self._tests + LEAN)
        return found

    # -- decisions -----------------------------------------------------------

    def _decide(self, requests: int, begins: bool) -> int:
        """The level, as a place in `levels`, of the next run of steps with so many requests."""
        seconds = self.costs.seconds(requests)  # [levels], with the drafter's pass at level 0
        left_out = seconds.copy()  # without it
        if self._can_skip:
            left_out[0] -= min(self._spared.seconds(requests), MOST_SPARED * float(seconds[0]))
        gains = np.concatenate([[0.0], self.acceptance().cumprod().cumsum()])[self.levels]  # tokens per request
        rates = (1 + gains) / left_out  # what would be, had nobody lapsed
        best = int(rates.argmax())
        if rates[best] >= rates[self._chosen] * (1 + MARGIN):
            self._chosen = best
        self._runs += 1
        self._gain = float(rates[self._chosen] / rates[0]) - 1
        self._length += LENGTH_RATE * (float(self.levels[self._chosen]) - self._length)
        self._watch(requests, left_out)

        seconds = left_out if self.skips else seconds
        rates = (1 + self._whole * gains) / seconds
        usual = int(rates.argmax()) if self._chosen and self._whole < 1 else self._chosen
        self._usual = float(seconds[usual])
        level = self._level_to_try(usual, seconds, rates, begins)
        self._tries = level != usual and not self.skips
        self._tried[level] = self._runs
        self._tries_of[level] += 1
        return level

    def _level_to_try(self, usual: int, seconds: NDArray[np.float64], rates: NDArray[np.float64], begins: bool) -> int:
        """Now and then another level than usual: whichever was not tried for longest, when its price has been saved up."""
        if (self._tries_of < SURVEY).any():
            # Highest first, and from there down: what is accepted at the first positions is known on the way.
            return len(self.levels) - 1 - int(self._tries_of[::-1].argmin())
        ages = self._runs - self._tried
        ages[usual] = -1
        other = int(ages.argmax())
        self._price = self._run_length() * max(float(seconds[other] * (1 - rates[other] / rates[usual])), 0.0)
        if not self._may_try() or (self.skips and not begins):
            return usual
        self._credit -= self._price
        self._last_try = self._runs
        if self.skips:
            fade = np.minimum(1.0, TRIAL_MEMORY / np.maximum(self._tests, 1.0))
            self._tests, self._accepted = self._tests * fade, self._accepted * fade
        return other

    def _may_try(self) -> bool:
        """Whether the price of another level has been saved up, and the last try is long enough ago."""
        return self._runs - self._last_try >= RUNS_BETWEEN_TRIES and self._credit >= self._price

    def _watch(self, requests: int, seconds: NDArray[np.float64]) -> None:
        """Say when drafting is left off, and when it goes on."""
        turned = self._length > DRAFTING_ABOVE if self._paused else self._length < PAUSED_BELOW
        if not turned or self._steps_in_regime < min(DWELL << min(self._changes, 16), MOST_DWELL):
            return
        self._paused = not self._paused
        self._steps_in_regime = 0
        self._changes += 1
        tests = self._tests.sum()
        self._reason = (
            f"of the last drafts {self._accepted.sum() / tests if tests else 0.0:.0%} were accepted; a step of {requests} "
            f"requests takes {seconds[0] * 1e3:.3g} ms, with {self.levels[1]} for each {seconds[1] * 1e3:.3g} ms"
        )
        if self._paused:
            logger.info("Drafting by %r does not pay now and is left off: %s.", self.proposer, self._reason)
        else:
            logger.info("Drafting by %r pays again (%+.1f %%): %s.", self.proposer, self._gain * 100, self._reason)
