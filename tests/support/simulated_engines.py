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

FACTS = {"vllm": "0", "torch": "0", "threads": 1, "device": "none", "dtype": "float32", "kv_cache_tokens": 1000, "pausable": True}
LOADING = 10.0
"""Seconds."""
STEP = 4
"""Tokens."""


class Simulation:
    """The machine: its clock, how slow it is at the moment, and who runs on it."""

    def __init__(self, speed: Speed, slowdown: Callable[[float], float] = lambda now: 1.0) -> None:
        self.speed, self.slowdown = speed, slowdown
        self.facts: dict[str, Any] = dict(FACTS)
        self.now = 0.0
        self.alive: list[str] = []
        self.most_alive = 0
        self.started: list[str] = []
        self.batches: list[tuple[str, int, int]] = []
        """(engine, requests, tokens per answer), in the order in which they were begun."""
        self.slices: list[str] = []
        """The engines, in the order in which they worked."""
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
        return self.machine.facts

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        assert method in ("begin", "go_on")
        answer: dict[str, Any] = getattr(self, method)(**arguments)
        return answer

    def begin(self, *, prompts: Sequence[list[int]], max_tokens: int | list[int], **load: Any) -> dict[str, Any]:
        machine = self.machine
        machine.before_batch(len(machine.batches))
        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        machine.batches.append((self.title, len(prompts), max(lengths)))
        machine.prompts.setdefault(self.title, []).extend(prompts)
        speed = machine.speed(self.settings["speculative_config"], load["at_once"])
        if not math.isfinite(speed):
            raise SpecPluginError(f"the {self.title} engine failed (begin): its process ended with -9; log: {self.log}")
        self.lengths, self.rate, self.done, self.spent = lengths, 100 * speed * load["at_once"], 0.0, 0.0
        return {}

    def go_on(self, *, seconds: float | None) -> dict[str, Any]:
        """A step emits `STEP` tokens, whoever makes it."""
        machine, total, begun = self.machine, sum(self.lengths), self.spent
        while self.done < total and (seconds is None or self.spent - begun < seconds):
            step = min(STEP, total - self.done)
            took = machine.slowdown(machine.now) * step / self.rate
            machine.now += took
            self.spent += took
            self.done += step
        machine.slices.append(self.title)
        sample = {
            "requests": len(self.lengths),
            "tokens": total,
            "seconds": self.spent,
            "first_token": [0.1] * len(self.lengths),
            "per_token": [self.spent / length for length in self.lengths],
            "passes": total - len(self.lengths),
            "draft_tokens": 0,
            "accepted_tokens": 0,
        }
        return {"tokens": int(self.done), "seconds": self.spent, "sample": sample if self.done >= total else None}

    def close(self) -> None:
        self.machine.alive.remove(self.title)
