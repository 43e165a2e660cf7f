"""Steps of real engines, timed in turns: what one way to draft costs against another, with everything around it.

Each contender is an engine in a process of its own (this file is also what runs there), with the same requests in it. They
take turns of a few steps, so that whatever else the machine does hits all of them alike. CPU time leaves out what others took.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from vllm_specplugin.engine_process import EngineProcess, serve_engine

WARM_UP = 10
"""Steps of each contender before the clock counts, prefill among them."""


class Engine:
    """The child's side: an engine on the CPU, its core in this process, and one batch of requests that go on for ever."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=256 << 20,
            disable_log_stats=False,
            **settings,
        )
        self.batches = 0

    def facts(self) -> dict[str, Any]:
        import torch
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}

    def begin(self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float = 0.0) -> dict[str, Any]:
        """Hand in one request per prompt, and let them get under way."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        engine.abort_request([f"{self.batches}-{row}" for row in range(1024)])
        self.batches += 1
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        for row, prompt in enumerate(prompts):
            engine.add_request(f"{self.batches}-{row}", {"prompt_token_ids": list(prompt)}, params)
        for _ in range(WARM_UP):
            engine.step()
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Milliseconds of each step, by the clock and of CPU time."""
        step = self.llm.llm_engine.step
        clock, cpu = [], []
        for _ in range(count):
            began, used = time.perf_counter(), time.process_time()
            outputs = step()
            clock.append((time.perf_counter() - began) * 1e3)
            cpu.append((time.process_time() - used) * 1e3)
            if any(output.finished for output in outputs):
                raise RuntimeError("a request ended: ask for more tokens, or time fewer steps")
        return {"clock": clock, "cpu": cpu}

    def counters(self) -> dict[str, Any]:
        """Drafts made and accepted since the engine started."""
        values = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        prefix = "vllm:spec_decode_num_"
        return {name: values.get(f"{prefix}{name}_tokens", 0) for name in ("draft", "accepted")}


@dataclass
class Times:
    """Milliseconds per step of one contender."""

    clock: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.cpu)

    @property
    def middle_half(self) -> tuple[float, float]:
        low, _, high = quantiles(self.cpu, n=4)
        return low, high


def start(contenders: Mapping[str, dict[str, Any] | None], model: Path, logs: Path, **engine: Any) -> dict[str, EngineProcess]:
    """An engine for each contender's speculative configuration, loaded; `engine` are arguments that all of them get."""
    os.environ["OMP_NUM_THREADS"] = "1"  # tiny matrices, and a machine that may be shared
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = {
        name: EngineProcess(
            name, "engine_steps", {"model": str(model), "speculative_config": spec, **engine}, logs / f"{name}.log"
        )
        for name, spec in contenders.items()
    }
    for process in processes.values():
        process.wait()
    return processes


def take_turns(
    processes: Mapping[str, EngineProcess], prompts: Sequence[Sequence[int]], rounds: int, steps: int, tokens_per_step: int
) -> dict[str, Times]:
    """Time `rounds` turns of `steps` steps of each contender, the order rotating; a step emits at most `tokens_per_step`."""
    for process in processes.values():
        process.call("begin", prompts=prompts, max_tokens=(rounds * steps + WARM_UP + 1) * tokens_per_step)
    times = {name: Times() for name in processes}
    names = list(processes)
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            found = processes[name].call("steps", count=steps)
            times[name].clock += found["clock"]
            times[name].cpu += found["cpu"]
    return times


def machine() -> str:
    """What it ran on, for a report."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, shared with other work (load average {load:.1f} at the end), Python {sys.version.split()[0]}"


if __name__ == "__main__":
    serve_engine(Engine)
