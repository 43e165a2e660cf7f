"""The clock that steps are timed by."""

from __future__ import annotations

import time


class StepClock:
    """Seconds that this process had to itself: it stands still while paused.

    Where several engines share a machine in turns, as in `bench`, one that waits for its turn between two steps would otherwise
    see a slow step, and choose draft lengths by it.
    """

    def __init__(self) -> None:
        self._left_out = 0.0
        self._paused_at: float | None = None

    def __call__(self) -> float:
        paused_at = self._paused_at
        return (time.perf_counter() if paused_at is None else paused_at) - self._left_out

    def pause(self) -> None:
        """What passes from here on is another's, until `resume`."""
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Go on where `pause` left off, if it was called."""
        if self._paused_at is not None:
            self._left_out += time.perf_counter() - self._paused_at
            self._paused_at = None


STEP_CLOCK = StepClock()
"""What control goes by, in every engine of this process."""
