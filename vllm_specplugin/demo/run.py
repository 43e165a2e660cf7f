"""Runs the demo: plain and speculative decoding of the same prompts, side by side.

Both engines are alive at the same time and answer the same prompt in turns of a few tokens, each alone on the machine while it
works and its clock stopped while it does not. A machine that slows down for a while (a neighbour, a hot processor) then slows
both, and the ratio stays fair, which two runs one after the other would not give. Log-probabilities are asked for in separate
passes that are not timed.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from vllm_specplugin.demo.measure import (
    DemoResult,
    Difference,
    Noise,
    PromptResult,
    Sample,
    first_difference,
    margin_between,
    margin_changes,
)
from vllm_specplugin.demo.prompts import demo_prompts
from vllm_specplugin.engine_process import EngineProcess, as_loaded
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.neighbours import NeighbourMeter
from vllm_specplugin.progress import progress_bars
from vllm_specplugin.prompt_files import Prompt

DEFAULT_CONFIG: dict[str, Any] = {"proposer": "ngram", "num_speculative_tokens": 5}
DEFAULT_MAX_TOKENS = 80
ENGINE = "vllm_specplugin.demo.engine"  # what an engine process runs
SLICE = 8  # tokens per turn: about half a second on two cores
WARM_UP_TOKENS = 12  # per kind: enough to compile what is compiled on first use, and to sample the noise


def run_demo(
    model: str | Path,
    speculative_config: Mapping[str, Any] = DEFAULT_CONFIG,
    *,
    prompts: Sequence[Prompt] | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    repeat: int = 1,
    progress: bool = True,
) -> DemoResult:
    """Measure `model` plain and with `speculative_config` over `prompts` (default: the demo's own), greedily, one by one.

    Each prompt is answered `repeat` times by each engine with at most `max_tokens` tokens. Bars are drawn on stderr with
    `progress`. Raises SpecPluginError where an engine does not start or dies, naming its log, which is then kept.
    """
    if max_tokens < 2 or repeat < 1:
        raise SpecPluginError(
            f"max_tokens is {max_tokens} and repeat is {repeat}; at least 2 and 1 are needed to measure anything"
        )
    chosen = list(prompts) if prompts is not None else demo_prompts()
    if not chosen:
        raise SpecPluginError("there are no prompts to run; leave them out to run the demo's own")
    settings = {"model": str(model), "max_tokens": max_tokens, "prompts": [asdict(prompt) for prompt in chosen]}
    logs = Path(tempfile.mkdtemp(prefix="vllm-specplugin-demo-"))
    engines: list[EngineProcess] = []
    failed = False
    try:
        for title, config in (("plain", None), ("speculative", dict(speculative_config))):
            engines.append(EngineProcess(title, ENGINE, {**settings, "speculative_config": config}, logs / f"{title}.log"))
        return _run(
            engines[0], engines[1], DemoResult(str(model), dict(speculative_config), max_tokens, repeat), chosen, progress
        )
    except SpecPluginError:
        failed = True  # its text names a log
        raise
    finally:
        for engine in engines:
            engine.close()
        if not failed:
            shutil.rmtree(logs, ignore_errors=True)


def _run(
    plain: EngineProcess, speculative: EngineProcess, result: DemoResult, prompts: Sequence[Prompt], progress: bool
) -> DemoResult:
    """The stages in order; fills and returns `result`."""
    with progress_bars(progress) as bars:
        facts = _wait_for([plain, speculative], bars)
        result.prompts = [PromptResult(p.kind, p.name, n) for p, n in zip(prompts, facts["prompt_tokens"], strict=True)]
        result.noise = _warm_up(plain, speculative, result.prompts, min(result.max_tokens, WARM_UP_TOKENS), bars)
        meter = NeighbourMeter([plain.process.pid, speculative.process.pid])
        _measure(plain, speculative, result, bars)
        result.environment = {
            "vllm": facts["vllm"],
            "torch": facts["torch"],
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "threads": facts["threads"],
            "dtype": facts["dtype"],
            "others_share": meter.share(),
        }
        result.noise = _explain(plain, result.prompts, result.noise, bars)
    return result


def _wait_for(engines: Sequence[EngineProcess], bars: Progress) -> dict[str, Any]:
    """Wait for all engines, which load at the same time; the facts of one of them. The first to fail ends the wait."""
    task = bars.add_task("loading both engines", total=len(engines))
    facts: dict[str, Any] = {}
    for engine in as_loaded(engines):
        facts = engine.wait()
        bars.advance(task)
    return facts


def _warm_up(
    plain: EngineProcess, speculative: EngineProcess, results: Sequence[PromptResult], tokens: int, bars: Progress
) -> Noise:
    """Run the first prompt of each kind on both engines, untimed; on the plain one it samples the noise at the same time."""
    kinds = {result.kind: index for index, result in reversed(list(enumerate(results)))}
    task = bars.add_task("warming up", total=2 * len(kinds))
    noise = Noise()
    for index in sorted(kinds.values()):
        noise = noise.including(_noise_of(plain, index, plain.call("decode_logprobs", prompt=index, max_tokens=tokens)))
        bars.advance(task)
        _race([speculative], index, tokens, lambda count: None)
        bars.advance(task)
    return noise


def _noise_of(plain: EngineProcess, prompt: int, decoded: Mapping[str, Any]) -> list[float]:
    """How much the top margins of a decoded output change when one pass computes all its positions at once."""
    forced = plain.call("forced_logprobs", prompt=prompt, token_ids=decoded["token_ids"])
    return margin_changes(decoded["logprobs"], forced["logprobs"])


def _measure(plain: EngineProcess, speculative: EngineProcess, result: DemoResult, bars: Progress) -> None:
    """The timed part: every prompt on both engines."""
    tokens_each = 2 * result.max_tokens
    task = bars.add_task("measuring", total=result.repeat * len(result.prompts) * tokens_each)
    done = 0
    for _ in range(result.repeat):
        for index, prompt in enumerate(result.prompts):
            bars.update(task, description=f"measuring: {prompt.kind} ({prompt.name})")
            report = partial(_report, bars, task, done)
            first, second = _race([plain, speculative], index, result.max_tokens, report)
            prompt.plain.append(first)
            prompt.speculative.append(second)
            done += tokens_each
            bars.update(task, completed=done)
    bars.update(task, description="measuring")


def _report(bars: Progress, task: TaskID, done: int, count: int) -> None:
    bars.update(task, completed=done + count)


def _race(engines: Sequence[EngineProcess], prompt: int, max_tokens: int, report: Callable[[int], None]) -> list[Sample]:
    """Answer one prompt on each of `engines`, in turns of `SLICE` tokens; `report` is told how many tokens there are so far."""
    for engine in engines:
        engine.call("begin", prompt=prompt, max_tokens=max_tokens)
    counts = [0] * len(engines)
    running = set(range(len(engines)))
    goal = 0
    while running:
        goal += SLICE
        for index in sorted(running, reverse=goal // SLICE % 2 == 0):  # neither engine is always the first
            state = engines[index].call("advance", until=goal)
            counts[index] = state["tokens"]
            report(sum(counts))
            if state["finished"]:
                running.remove(index)
    return [Sample.load(engine.call("finish")) for engine in engines]


def _explain(plain: EngineProcess, results: Sequence[PromptResult], noise: Noise, bars: Progress) -> Noise:
    """Find where outputs part and what margin plain decoding had there, then hold each against all the noise seen."""
    parted: list[tuple[PromptResult, int, dict[str, Any]]] = []
    task = bars.add_task("comparing the outputs", total=len(results))
    for index, result in enumerate(results):
        result.output = plain.call("text", token_ids=list(result.plain[0].token_ids))["text"]
        position = first_difference(result.plain[0].token_ids, result.speculative[0].token_ids)
        if position is not None:
            decoded = plain.call("decode_logprobs", prompt=index, max_tokens=position + 1)
            noise = noise.including(_noise_of(plain, index, decoded))
            parted.append((result, position, decoded))
        bars.advance(task)
    for result, position, decoded in parted:
        result.difference = _difference(plain, result, position, decoded, noise.largest)
    return noise


def _difference(
    plain: EngineProcess, result: PromptResult, position: int, decoded: Mapping[str, Any], noise: float
) -> Difference:
    """The first difference of one prompt's outputs, with the margin that plain decoding saw there."""
    tokens = [samples[0].token_ids[position : position + 1] for samples in (result.plain, result.speculative)]
    mine, other = (token[0] if token else None for token in tokens)
    first, second = (plain.call("text", token_ids=list(token))["text"] if token else "(end)" for token in tokens)
    margin, obstacle = None, "plain decoding did not repeat itself"
    if decoded["token_ids"][:position] == list(result.plain[0].token_ids[:position]):
        margin = margin_between(decoded["logprobs"][position], mine, other)
        obstacle = "the other token was not among the likely ones" if margin is None else ""
    return Difference(position, first, second, margin, noise, obstacle)
