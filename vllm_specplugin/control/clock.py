"""The clock that steps are timed by."""

from __future__ import annotations

import time


class StepClock:
    """Seconds that this process had to itself: what it leaves out did not pass.

    Where several engines share a machine in turns, as in `bench`, one that waits for its turn between two steps would otherwise
    see a slow step, and choose draft lengths by it.
    """

    def __init__(self) -> None:
        self._left_out = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self._left_out

    def leave_out(self, seconds: float) -> None:
        """So many seconds, just over, were not this process's."""
        self._left_out += seconds


STEP_CLOCK = StepClock()
"""What control goes by, in every engine of this process."""
