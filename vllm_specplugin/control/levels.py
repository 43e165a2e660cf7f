"""What steps cost by how many drafts all of their requests get: learnt from neighbours in time.

A step takes longer because it has more drafts, or because contexts have grown, the host is busy, the clock has fallen. Only the
first must be learnt here. So what is learnt is how much two *stretches* differ, each of steps of one level, one right after the
other: what slowed both cancels out.

    seconds(requests, level) = curve(requests * (1 + level)) * factor(requests, level) * what everything takes now

The curve is what passes took at start-up; the factor is the drafter's passes, sampling, the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.control.costs import CostTable, cell_of

LEAST_STEPS = 2
"""Steps of a stretch that say what it takes."""

REMEMBERED = 8
"""Steps of a stretch that the next one is compared with, the last ones."""

LEAST_RATE = 0.1
"""Weight of the newest comparison in a factor that is known from many."""

LEAN = 1.0
"""How many comparisons the same level's factor at other batch sizes counts for."""


class LevelCosts:
    """Seconds of a step, from output to output, by its requests and the number of drafts of each."""

    def __init__(
        self, levels: NDArray[np.integer], most_requests: int, sizes: Sequence[int] = (), seconds: Sequence[float] = ()
    ) -> None:
        """Args:
        levels: `[levels]`, numbers of drafts per request, ascending from 0.
        most_requests: in one step.
        sizes: rows of the passes that were timed at start-up, ascending; none for an engine that could not be timed.
        seconds: `[sizes]`, what each took.
        """
        self._levels = levels
        self._curve = CostTable(sizes, seconds).curve
        cells = cell_of(max(most_requests, 1)) + 1
        self._factors, self._seen = np.zeros((cells, len(levels))), np.zeros((cells, len(levels)))
        """`[cells, levels]`: logarithms of the factors, and from how many comparisons each is known."""
        self._now = (0, -1)
        """Cell and level of the stretch that goes on."""
        self._stretch: deque[float] = deque(maxlen=REMEMBERED)
        """How far its last steps are from the curve, in logarithms."""
        self._before: tuple[int, float] | None = None
        """Level of the stretch before, and how far it was from the curve; None where it had other batch sizes."""
        self._length = 0
        self._all = 0.0
        """The logarithm of what everything takes now beside curve and factor."""

    def seconds(self, requests: int) -> NDArray[np.float64]:
        """`[levels]`: what a step of so many requests takes at each level."""
        bare = self._curve(requests * (1 + self._levels))
        return bare * np.exp(self._factors_at(cell_of(requests)) + self._all)

    def knows(self, level: int) -> bool:
        """Whether the stretch that goes on is one of this level, and long enough to say something."""
        return self._now[1] == level and self._length >= LEAST_STEPS

    def observe(self, requests: int, level: int, seconds: float) -> None:
        """A step between two of its own level took `seconds`.

        Args:
            requests: how many it had.
            level: a place in `levels`.
            seconds: from the output before to its own.
        """
        cell = cell_of(requests)
        if (cell, level) != self._now:
            known = self._length >= LEAST_STEPS and cell == self._now[0]
            self._before = (self._now[1], median(self._stretch)) if known else None
            self._now, self._length = (cell, level), 0
            self._stretch.clear()
        self._stretch.append(math.log(seconds / float(self._curve(requests * (1 + int(self._levels[level]))))))
        self._length += 1
        if self._length == LEAST_STEPS and self._before is not None:
            self._compare(cell, level, *self._before)
        if self._length >= LEAST_STEPS:
            self._all = median(self._stretch) - float(self._factors_at(cell)[level])

    def _compare(self, cell: int, level: int, other: int, of_other: float) -> None:
        """Learn from two stretches that differ in their level: who is known less moves more."""
        at = self._factors_at(cell)
        off = median(self._stretch) - of_other - float(at[level] - at[other])
        both = [level, other]
        seen = self._seen[cell, both]
        shares = (seen[::-1] + 1) / (seen.sum() + 2)  # [2]
        self._factors[cell, both] = at[both] + np.array([off, -off]) * shares * max(1 / (seen.min() + 1), LEAST_RATE)
        self._seen[cell, both] += 1

    def _factors_at(self, cell: int) -> NDArray[np.float64]:
        """`[levels]`: logarithms of the factors at a batch size; one that is known little leans on other batch sizes'."""
        of_level = (self._factors * self._seen).sum(axis=0) / np.maximum(self._seen.sum(axis=0), 1)
        seen = self._seen[cell]
        found: NDArray[np.float64] = (self._factors[cell] * seen + of_level * LEAN) / (seen + LEAN)
        return found
