"""What a pass of the target costs, by how many rows it verifies: measured at start-up, corrected by every step since.

At start-up the model alone is timed, over bare rows. A real step also attends to contexts, samples, and waits for the host; what
that takes is known once such steps have been seen. So the table holds the start-up curve, and factors that steps differ by:

    seconds(requests, drafts) = curve(requests + drafts) * drift * plain(requests) * drafted(requests, requests + drafts)

`drift` follows the machine as a whole (contexts grow, a neighbour comes and goes) and cancels out of every comparison; `plain`
goes by batch size; `drafted`, 1 without drafts, is what verification costs beside its rows. Factors that were seldom seen lean on
their like; `drafted` on less of it the fewer drafts there are: else, after a start-up that was disturbed, few drafts would look
as dear as the many that are verified because of it. Nothing is assumed of the curve: for a mixture of experts, where more rows
touch more experts, it is another one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

PER_OCTAVE = 2
"""Cells between a batch and one twice its size."""

DRIFT_RATE = 0.2
"""Weight of the newest step in `drift`."""

LEAST_RATE = 0.04
"""Weight of the newest step in a factor that has been observed often: little beside `DRIFT_RATE`, so that drift stays drift."""

LEAN = 4.0
"""How many observations the like of a factor count for."""

MOST_SEEN = 1000.0
"""Observations that a factor is remembered by, at most."""

FADE = 0.999
"""What a step without drafts leaves of the observations of steps with some: what once looked dear is tried again in time."""

OUTLIER = math.log(1.5)
"""A step that differs by more than this factor from what was expected counts as one that differs by this factor."""


REMEMBERED = 15
"""Times that a median is taken of."""


class CostTable:
    """Seconds of a step, from its start to the sampled tokens, by its requests and drafts."""

    def __init__(self, sizes: Sequence[int] = (), seconds: Sequence[float] = (), most_rows: int = 1 << 16) -> None:
        """Args:
        sizes: rows of the passes that were timed at start-up, ascending; none for an engine that could not be timed.
        seconds: `[sizes]`, what each took.
        most_rows: the most rows that a step can have.
        """
        self._sizes = np.asarray(sizes if len(sizes) else [1], dtype=np.float64)
        self._seconds = _not_falling(np.asarray(seconds if len(seconds) else [1.0], dtype=np.float64))
        cells = int(PER_OCTAVE * math.log2(max(most_rows, 2))) + 2
        self._prepare(most_rows + 1)
        self._drift: float | None = None
        self._plain = _Factors((cells,))
        self._drafted = _FactorsOfDrafts(cells)

    def _prepare(self, end: int) -> None:
        rows = np.maximum(np.arange(end), 1)
        self._log_curve = np.log(self.curve(rows))
        """By rows."""
        self._places = PER_OCTAVE * np.log2(rows)
        """By rows, where on the logarithmic axis of cells they lie."""

    def _cover(self, end: int) -> None:
        """Have the tables by rows reach so far."""
        if end > len(self._log_curve):
            self._prepare(2 * end)

    def curve(self, rows: NDArray[np.integer] | int) -> NDArray[np.float64]:
        """Seconds of the bare model over `rows`, as timed at start-up; beyond the largest it goes on as between the last two."""
        rows = np.asarray(rows, dtype=np.float64)
        inside = np.interp(rows, self._sizes, self._seconds)
        if len(self._sizes) < 2:
            return inside
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        return inside + slope * np.maximum(rows - self._sizes[-1], 0.0)

    def seconds(self, requests: int, most_drafts: int) -> NDArray[np.float64]:
        """`[most_drafts + 1]`: what a step of so many requests takes with 0, 1, ... drafts in all."""
        cell = cell_of(requests)
        end = requests + most_drafts + 1
        self._cover(end)
        logs = self._log_curve[requests:end] + ((self._drift or 0.0) + self._plain.at(cell))
        if most_drafts:
            of_cells = self._drafted.row(cell)
            logs[1:] += np.interp(self._places[requests + 1 : end], np.arange(len(of_cells)), of_cells)
        return np.exp(logs)

    def plain_seconds(self, requests: int) -> float:
        """What a step of so many requests takes without drafts: `seconds(requests, 0)[0]`, for little."""
        self._cover(requests + 1)
        return math.exp(float(self._log_curve[requests]) + (self._drift or 0.0) + self._plain.at(cell_of(requests)))

    def observe(self, requests: int, drafts: int, seconds: float) -> None:
        """A step of so many requests, with so many drafts in all, took `seconds`."""
        place, rows_place = cell_of(requests), cell_of(requests + drafts)
        self._cover(requests + drafts + 1)
        measured = math.log(seconds) - float(self._log_curve[requests + drafts])
        if self._drift is None:
            self._drift = measured
        expected = self._drift + self._plain.at(place) + (self._drafted.at((place, rows_place)) if drafts else 0.0)
        off = min(max(measured - expected, -OUTLIER), OUTLIER)
        self._drift += DRIFT_RATE * off
        # What drift took must not be taken again, or a machine that slows down for all would look like one that verifies badly.
        off *= 1 - DRIFT_RATE
        if drafts:
            self._drafted.learn((place, rows_place), off)
        else:
            self._plain.learn(place, off)
            self._drafted.fade()


class TypicalSeconds:
    """The median of what something took the last times, by the magnitude of the batch."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}

    def observe(self, requests: int, seconds: float) -> None:
        """With so many requests it took `seconds`."""
        here = _magnitude(requests)
        last = self._last.setdefault(here, deque(maxlen=REMEMBERED))
        last.append(seconds)
        self._median[here] = median(last)

    def seconds(self, requests: int) -> float:
        """With so many requests, or with the number nearest to it that was seen; 0 where none was."""
        here = _magnitude(requests)
        nearest = min(self._median, key=lambda magnitude: abs(magnitude - here), default=None)
        return 0.0 if nearest is None else self._median[nearest]


class _Factors:
    """Logarithms of factors by cell, each leaning on the mean of all while it has been observed little."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._own = np.zeros(shape)
        self._seen = np.zeros(shape)
        self._all = 0.0
        self._seen_in_all = 0.0

    def at(self, cell: int | tuple[int, int]) -> float:
        seen = float(self._seen[cell])
        return (float(self._own[cell]) * seen + float(self._like(cell)) * LEAN) / (seen + LEAN)

    def _like(self, cell: int | tuple[int, int]) -> Any:
        """What a cell leans on."""
        return self._common

    @property
    def _common(self) -> float:
        return self._all * self._seen_in_all / (self._seen_in_all + LEAN)

    def learn(self, cell: int | tuple[int, int], off: float) -> None:
        """Steps of a cell take by `off` (a logarithm) more than was expected."""
        target = self.at(cell) + off
        self._seen[cell] = seen = min(self._seen[cell] + 1, MOST_SEEN)
        self._own[cell] += (target - self._own[cell]) * max(1 / seen, LEAST_RATE)
        self._seen_in_all = min(self._seen_in_all + 1, MOST_SEEN)
        self._all += (target - self._all) * max(1 / self._seen_in_all, LEAST_RATE)

    def fade(self) -> None:
        """What was observed counts a little less: a step has gone by in which nothing of the kind was."""
        self._seen *= FADE
        self._seen_in_all *= FADE


class _FactorsOfDrafts(_Factors):
    """By requests and rows, in cells.

    What drafts are dearer by than expected is one half there with the first of them, the other half grows with their number.
    """

    def __init__(self, cells: int) -> None:
        super().__init__((cells, cells))
        places = np.arange(cells, dtype=np.float64)
        self._beyond = np.maximum(places - places[:, None], 0.0)
        """`[cells, cells]`: how far the rows lie from the requests."""
        self._usual = 0.0
        """How far they did in the steps that were observed."""

    def row(self, cell: int) -> NDArray[np.float64]:
        """All cells of so many requests."""
        seen = self._seen[cell]
        found: NDArray[np.float64] = (self._own[cell] * seen + self._like(cell) * LEAN) / (seen + LEAN)
        return found

    def _like(self, cell: int | tuple[int, int]) -> Any:
        return self._common * (1 + np.minimum(self._beyond[cell] / max(self._usual, 1.0), 1.0)) / 2

    def learn(self, cell: int | tuple[int, int], off: float) -> None:
        super().learn(cell, off)
        self._usual += (float(self._beyond[cell]) - self._usual) * max(1 / self._seen_in_all, LEAST_RATE)


def cell_of(rows: int) -> int:
    """The cell of a table by size that a number of rows, or of requests, lies in: `PER_OCTAVE` to a doubling."""
    return round(PER_OCTAVE * math.log2(rows))


def _not_falling(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """More rows take no less time, and what disturbs a timing makes it longer: so none is longer than any of more rows."""
    return np.minimum.accumulate(seconds[::-1])[::-1]


def _magnitude(requests: int) -> int:
    return round(math.log2(requests))
