"""The start-up measurement for control: how long the target takes over few rows and over many, on this machine.

It runs the passes that vLLM itself warms up with. They carry random tokens, since a mixture of experts reads the more experts the
more its tokens differ, but no contexts; what those cost is learnt from real steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from vllm.logger import init_logger

from vllm_specplugin.runtime.core import Runtime

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.specplugin")

BUDGET_SECONDS = 2.0
"""For all sizes together. When it is used up no larger pass is tried; larger ones are taken to go on as the last two did."""

REPEATS = 4
"""Passes of a size, of which the fastest counts: the first may compile, and whatever else a machine does makes them slower."""

SHARED_SIZES = 8
"""Sizes that are timed where several workers must run the same passes, so that no clock may decide."""


class Stopwatch:
    """What work takes that is queued on a device; read once the device has been waited for."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._times = [0.0, 0.0]

    def __enter__(self) -> Stopwatch:
        self._note(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._note(1)

    def _note(self, place: int) -> None:
        if self._events:
            self._events[place].record()
        else:
            self._times[place] = time.perf_counter()

    @property
    def seconds(self) -> float:
        """What the last work took."""
        if self._events:
            return self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._times[1] - self._times[0]


_RUNTIMES: WeakKeyDictionary[Any, Runtime] = WeakKeyDictionary()
"""By model runner."""


def remember(runner: Any, runtime: Runtime) -> None:
    """Note whose control a runner's passes are measured for."""
    _RUNTIMES[runner] = runtime


@contextmanager
def warming_up(runner: Any) -> Iterator[None]:
    """While vLLM runs requests of its own before it serves: nobody drafts for them, or learns from them."""
    runtime = _RUNTIMES.get(runner)
    if runtime is None:
        yield
        return
    runtime.warming_up = True
    try:
        yield
    finally:
        runtime.warming_up = False


def calibrate(runner: Any, vllm_config: VllmConfig) -> None:
    """Time a runner's passes and tell its control; where that does not work control learns from real steps alone."""
    runtime = _RUNTIMES.get(runner)
    ahead = getattr(vllm_config.speculative_config, "plans_ahead", False)
    if runtime is None or (runtime.controller is None and not ahead) or vllm_config.parallel_config.pipeline_parallel_size > 1:
        return
    parallel = vllm_config.parallel_config
    shared = parallel.tensor_parallel_size > 1 or parallel.data_parallel_size > 1
    most = min(vllm_config.scheduler_config.max_num_batched_tokens, runtime.host.max_num_seqs * (runtime.k + 1))
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    started = time.perf_counter()
    try:
        devices = [] if runtime.host.device.startswith("cpu") else [torch.device(runtime.host.device)]
        # Requests without a seed draw what they would draw without this; and the drafter is no part of the target.
        with torch.random.fork_rng(devices=devices), _without_drafter(runner, runtime):
            timed = _timed(_pass_of(runner), sizes[:SHARED_SIZES] if shared else sizes, None if shared else BUDGET_SECONDS)
    except Exception:
        logger.warning(
            "Passes of the target could not be timed at start-up; draft lengths follow real steps alone.", exc_info=True
        )
        _tidy_up(runner)
        return
    if runtime.controller is None:
        runtime.meter.timed(timed)
    else:
        runtime.controller.calibrate(list(timed), list(timed.values()))
    text = ", ".join(f"{size}: {seconds * 1e3:.3g}" for size, seconds in timed.items())
    logger.info("Timed passes of the target in %.1f s; milliseconds by rows: %s.", time.perf_counter() - started, text)


def _tidy_up(runner: Any) -> None:
    """V2 switches its KV connector off for such a pass, and on again only where the pass succeeds."""
    switch_off = getattr(getattr(runner, "kv_connector", None), "set_disabled", None)
    if switch_off is not None:
        switch_off(False)
        runner.execute_model_state = None


def _timed(run: Callable[[int], None], sizes: list[int], budget: float | None) -> dict[int, float]:
    """Seconds of a pass over each number of rows, while the budget lasts."""
    timed: dict[int, float] = {}
    started = time.perf_counter()
    for _ in range(REPEATS):  # round after round: what disturbs one pass disturbs its neighbours, too
        for size in sizes[: len(timed) or None]:
            began = time.perf_counter()
            run(size)
            now = time.perf_counter()
            timed[size] = min(now - began, timed.get(size, math.inf))
            if budget is not None and now - started + timed[size] > budget:
                return timed
    return timed


@contextmanager
def _without_drafter(runner: Any, runtime: Runtime) -> Iterator[None]:
    """vLLM's passes without those of its own drafter."""
    if runtime.capabilities.native is None:
        yield
        return
    drafter, name = (runner.drafter, "dummy_run") if runtime.host.runner == "v1" else (runner.speculator, "propose")
    stock = getattr(drafter, name)
    setattr(drafter, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(drafter, name, stock)


def _pass_of(runner: Any) -> Callable[[int], None]:
    """One pass of the target over random tokens, logits included, waited for."""

    def run(rows: int) -> None:
        hidden, _ = runner._dummy_run(rows, skip_eplb=True, randomize_inputs=True)
        runner.model.compute_logits(hidden[:rows])
        if hidden.is_cuda:
            torch.cuda.synchronize()

    return torch.inference_mode()(run)
