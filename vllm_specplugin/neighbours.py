"""How much of the processors others took meanwhile: on a shared machine the first thing to know about a timing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

IDLE_FIELDS = (3, 4)  # idle, iowait
COUNTED_FIELDS = 8  # user nice system idle iowait irq softirq steal; guest time is part of user time


def machine_ticks(stat: str) -> tuple[int, int]:
    """Busy and total clock ticks over all processors since boot, from the text of /proc/stat. Stolen time counts as busy."""
    values = [int(value) for value in stat.splitlines()[0].split()[1 : COUNTED_FIELDS + 1]]
    total = sum(values)
    return total - sum(values[field] for field in IDLE_FIELDS), total


def process_ticks(stat: str) -> int:
    """User and system ticks of one process, all threads included, from the text of /proc/PID/stat."""
    after_name = stat.rpartition(")")[2].split()  # the name may hold spaces
    return int(after_name[11]) + int(after_name[12])


class NeighbourMeter:
    """Measures from its making on; `share` tells what part of all processor time went to processes other than `pids`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = [*pids, os.getpid()]
        self.start = self._read()

    def share(self) -> float | None:
        """Between 0 and 1; None where the system has no /proc to tell it."""
        now = self._read()
        if now is None or self.start is None or now[1] == self.start[1]:
            return None
        busy, total, own = (after - before for after, before in zip(now, self.start, strict=True))
        return max(0, busy - own) / total

    def _read(self) -> tuple[int, int, int] | None:
        """Busy, total and own ticks at this moment."""
        try:
            busy, total = machine_ticks(Path("/proc/stat").read_text())
            own = sum(process_ticks(Path(f"/proc/{pid}/stat").read_text()) for pid in self.pids)
        except OSError:
            return None
        return busy, total, own
