"""Engines of `bench` and `tune` without an engine: they answer at a speed that a test chooses, on a clock of their own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specplugin.bench import lineup, run
from vllm_specplugin.errors import SpecPluginError

Speed = Callable[[dict[str, Any] | None, int], float]
"""(configuration, requests at once) -> times plain decoding; 0 for an engine that does not start."""

FACTS = {"vllm": "0", "torch": "0", "threads": 1, "device": "none", "dtype": "float32", "kv_cache_tokens": 1000}
LOADING = 10.0
"""Seconds."""


class Simulation:
    """The machine: its clock, how slow it is at the moment, and who runs on it."""

    def __init__(self, speed: Speed, slowdown: Callable[[float], float] = lambda now: 1.0) -> None:
        self.speed, self.slowdown = speed, slowdown
        self.now = 0.0
        self.alive: list[str] = []
        self.most_alive = 0
        self.started: list[str] = []
        self.batches: list[tuple[str, int, int]] = []
        """(engine, requests, tokens per answer), in the order in which they were served."""
        self.prompts: dict[str, list[list[int]]] = {}
        self.before_batch: Callable[[int], None] = lambda number: None
        """Called with the number of batches that were served."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Simulation:
        monkeypatch.setattr(lineup, "EngineProcess", self._engine)
        monkeypatch.setattr(lineup, "as_loaded", iter)
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: self.now))
        return self

    def _engine(self, title: str, module: str, settings: Mapping[str, Any], log: Path) -> SimulatedEngine:
        assert module == "vllm_specplugin.bench.engine"
        return SimulatedEngine(self, title, settings, log)


class SimulatedEngine:
    """Stands for `EngineProcess`."""

    def __init__(self, machine: Simulation, title: str, settings: Mapping[str, Any], log: Path) -> None:
        self.machine, self.title, self.settings, self.log = machine, title, settings, log
        self.process = SimpleNamespace(pid=os.getpid())
        log.write_text("a log")
        machine.started.append(title)
        machine.alive.append(title)
        machine.most_alive = max(machine.most_alive, len(machine.alive))

    def wait(self) -> dict[str, Any]:
        self.machine.now += LOADING
        if not self.machine.speed(self.settings["speculative_config"], 1):
            raise SpecPluginError(f"the {self.title} engine failed (start): it does not want to; log: {self.log}")
        return FACTS

    def call(self, method: str, *, prompts: Sequence[list[int]], max_tokens: int | list[int], **load: Any) -> dict[str, Any]:
        assert method == "serve"
        machine = self.machine
        machine.before_batch(len(machine.batches))
        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        machine.batches.append((self.title, len(prompts), max(lengths)))
        machine.prompts.setdefault(self.title, []).extend(prompts)
        at_once = load["at_once"]
        speed = machine.speed(self.settings["speculative_config"], at_once)
        if not math.isfinite(speed):
            raise SpecPluginError(f"the {self.title} engine failed (serve): its process ended with -9; log: {self.log}")
        tokens, passes = sum(lengths), sum(lengths) - len(prompts)
        seconds = machine.slowdown(machine.now) * tokens / (100 * speed) / at_once
        machine.now += seconds
        return {
            "requests": len(prompts),
            "tokens": tokens,
            "seconds": seconds,
            "first_token": [0.1] * len(prompts),
            "per_token": [seconds / length for length in lengths],
            "passes": passes,
            "draft_tokens": 0,
            "accepted_tokens": 0,
        }

    def close(self) -> None:
        self.machine.alive.remove(self.title)
