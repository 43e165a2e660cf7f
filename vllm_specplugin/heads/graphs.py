"""CUDA graphs of a function over rows: at small batches drafting costs launches, and a graph makes them one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

RowFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Capture: TypeAlias = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
"""Records what a function does: returns where its result will lie, and what does it again."""


def batch_sizes(most: int) -> list[int]:
    """The numbers of rows that are worth a graph of their own: a batch is padded by less than half, or by fewer than 64 rows."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < most]
    return [*sizes, *range(64, most, 64), most]


class RowGraphs:
    """A function of rows `[n, ...]` -> `[n, ...]`, recorded at some numbers of rows and repeated at the next larger one."""

    def __init__(self, function: RowFunction, example: torch.Tensor, sizes: Sequence[int], capture: Capture) -> None:
        """Record.

        Args:
            function: each row of its result depends on that row alone.
            example: `[most rows, ...]`, valid rows, which become the buffer that the graphs read.
            sizes: numbers of rows, ascending, the last one `most rows`.
            capture: see `Capture`; `cuda_capture` but in tests.
        """
        self._function = function
        self._rows = example
        self._sizes = list(sizes)
        self._recorded: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}
        for size in reversed(self._sizes):  # the largest first, so that smaller ones find their memory in its pool
            self._recorded[size] = self._record(size, capture)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The function's result; it lies in a buffer that the next call overwrites."""
        count = len(rows)
        place = bisect_left(self._sizes, count)
        if place == len(self._sizes):
            return self._function(rows)
        self._rows[:count].copy_(rows)
        result, replay = self._recorded[self._sizes[place]]
        replay()
        return result[:count]

    def _record(self, size: int, capture: Capture) -> tuple[torch.Tensor, Callable[[], None]]:
        part = self._rows[:size]
        return capture(lambda: self._function(part))


def cuda_capture(device: str | torch.device) -> Capture:
    """Captures into CUDA graphs that share one pool of memory, on the current stream, which must not be the default one."""
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        for _ in range(2):  # libraries choose and load their kernels at first calls, which a graph must not record
            function()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(device)):
            result = function()
        torch.cuda.synchronize(device)  # whoever replays it does so on another stream
        return result, graph.replay

    return capture
