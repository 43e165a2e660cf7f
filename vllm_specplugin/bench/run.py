"""`bench`: every configuration beside plain decoding, round after round, until the time is up."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from vllm_specplugin.bench.candidates import PLAIN, PLAIN_DECODING, Candidate, LeftOut
from vllm_specplugin.bench.lineup import Lineup, Load
from vllm_specplugin.bench.report import LeftOutEntry, Report, cells_of, overall_of, recommend
from vllm_specplugin.bench.samples import CONFIDENCE, ROUNDS_FOR_CONFIDENCE, Sample
from vllm_specplugin.bench.traffic import Traffic
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.neighbours import NeighbourMeter

BUSY = 0.1
"""Share of the processor time taken by others above which the timings are called doubtful."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured; `minutes` of it all, loading included, and at most `repeat` rounds of each block of engines."""

    model: str
    candidates: Sequence[Candidate]
    """Plain decoding aside, which always takes part."""
    traffic: Traffic
    prompts: str
    """What the report calls them."""
    load: Load
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    minutes: float | None = 10.0
    repeat: int | None = None
    engines_at_once: int | None = None
    """Plain decoding included; None for all."""
    left_out: Sequence[LeftOut] = ()

    def blocks(self) -> list[list[Candidate]]:
        """The candidates in groups whose engines are alive at the same time, beside plain decoding."""
        size = len(self.candidates) if self.engines_at_once is None else self.engines_at_once - 1
        return [list(self.candidates[at : at + size]) for at in range(0, len(self.candidates), max(size, 1))]

    @property
    def alive(self) -> int:
        return 1 + max(map(len, self.blocks()))


class Clock:
    """Says whether another round is likely to end in time, told from how long the last one took. The first is always run."""

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self._began: float | None = None

    @property
    def left(self) -> float | None:
        """Seconds, not below 0; None without an end."""
        return None if self._until is None else max(self._until - time.monotonic(), 0.0)

    def another(self) -> bool:
        """Asked before each round."""
        now = time.monotonic()
        if self._began is not None and self._until is not None and now + (now - self._began) > self._until:
            return False
        self._began = now
        return True


def bench(plan: Plan, logs: Path, bars: Progress) -> Report:
    """Measure what the plan says. Ctrl-C ends it early; what was measured by then is reported.

    Raises:
        SpecPluginError: plain decoding does not run, or nothing else does.
    """
    with Lineup(plan.model, plan.load, plan.traffic, plan.engine_args, plan.alive, logs, bars) as lineup:
        run = _Run(plan, lineup)
        try:
            run.measure()
        except KeyboardInterrupt:
            run.interrupted = True
    return run.report()


class _Run:
    """The measuring, and what it has brought so far."""

    def __init__(self, plan: Plan, lineup: Lineup) -> None:
        self.plan, self.lineup = plan, lineup
        self.rounds: list[dict[int, dict[str, Sample]]] = []
        self.others: list[float] = []
        """What part of the processors other processes took, for each block."""
        self.interrupted = False

    def measure(self) -> None:
        """All blocks, each with an equal part of the time that is left."""
        clock, blocks = Clock(None if self.plan.minutes is None else 60 * self.plan.minutes), self.plan.blocks()
        for number, block in enumerate(blocks):
            left = clock.left
            block_clock = Clock(None if left is None else left / (len(blocks) - number))
            self.lineup.start(block if number else [PLAIN_DECODING, *block])
            require_plain(self.lineup)
            if len(self.lineup.engines) > 1:
                self._measure_block(block_clock)
            for name in [name for name in self.lineup.engines if name != PLAIN]:
                self.lineup.drop(name)

    def _measure_block(self, clock: Clock) -> None:
        meter = NeighbourMeter([engine.process.pid for engine in self.lineup.engines.values()])
        task = self.lineup.bars.add_task("rounds", total=self.plan.repeat)
        number = 0
        while number != self.plan.repeat and len(self.lineup.engines) > 1:
            if (number and not self.lineup.has_prompts()) or not clock.another():
                break
            measured: dict[int, dict[str, Sample]] = {}
            self.rounds.append(measured)  # before it is complete: an interrupt loses no more than the batch that runs
            for concurrency in self.plan.load.concurrencies:
                measured[concurrency] = self.lineup.race(concurrency)
                require_plain(self.lineup)
            number += 1
            self.lineup.bars.advance(task)
        self.lineup.bars.remove_task(task)
        share = meter.share()
        if share is not None:  # None where an engine has died
            self.others.append(share)

    def report(self) -> Report:
        """Raises SpecPluginError where nothing but plain decoding ran."""
        plan, load = self.plan, self.plan.load
        candidates = [PLAIN_DECODING, *plan.candidates]
        cells = cells_of(self.rounds, candidates)
        failed = self.lineup.failed
        if not self.interrupted and all(cell.candidate == PLAIN for cell in cells):
            reasons = "; ".join(f"{lost.name}: {lost.why}" for lost in failed)
            raise SpecPluginError(f"there is nothing to compare plain decoding with; {reasons or 'no configuration was given'}")
        facts = environment(self.lineup.facts, self.others)
        return Report(
            model=plan.model,
            prompts=plan.prompts,
            temperature=load.temperature,
            max_tokens=load.max_tokens,
            concurrencies=load.concurrencies,
            environment=facts,
            cells=cells,
            overall=overall_of(self.rounds, candidates, load.concurrencies),
            left_out=[LeftOutEntry(candidate=lost.name, why=lost.why) for lost in [*plan.left_out, *failed]],
            notes=notes(plan.traffic, load, facts, [cell.speed.rounds for cell in cells]),
            recommendation=recommend(self.rounds, candidates, load.concurrencies, cells),
            interrupted=self.interrupted,
        )


def require_plain(lineup: Lineup) -> None:
    """Without plain decoding there is nothing to compare with.

    Raises:
        SpecPluginError: its engine failed.
    """
    if PLAIN not in lineup.engines:
        raise SpecPluginError(next(lost.why for lost in lineup.failed if lost.name == PLAIN))


def environment(facts: Mapping[str, Any], others: Sequence[float]) -> dict[str, Any]:
    """The engines' facts, and the machine's."""
    return {**facts, "python": platform.python_version(), "cores": os.cpu_count(), "others_share": max(others, default=None)}


def notes(traffic: Traffic, load: Load, facts: Mapping[str, Any], rounds: Sequence[int]) -> list[str]:
    """What a reader needs to judge the figures."""
    lines = []
    if rounds and min(rounds) < ROUNDS_FOR_CONFIDENCE:
        lines.append(
            f"With fewer than {ROUNDS_FOR_CONFIDENCE} rounds an interval is the whole range seen and covers the true median with "
            f"less than {CONFIDENCE:.0%} confidence; give more --minutes."
        )
    if traffic.repeated:
        lines.append(
            "The prompts were fewer than the requests, so some were asked again: a proposer that remembers past answers (suffix) "
            "looks better than it would on new ones. Give more prompts."
        )
    needed = max(load.concurrencies) * (traffic.longest + load.max_tokens)
    if facts.get("kv_cache_tokens", needed) < needed:  # unknown where no engine had loaded when it was interrupted
        lines.append(
            f"The KV cache of an engine holds {facts['kv_cache_tokens']:,} tokens, fewer than the {needed:,} that the longest "
            "requests need at the highest concurrency: some may have had to wait. Hold fewer engines with --engines-at-once, or "
            "set kv_cache_memory_bytes in --engine-args."
        )
    others = facts["others_share"]
    if others is not None and others > BUSY:
        lines.append(f"Other processes took {others:.0%} of the processors meanwhile: tokens/s are too low, ratios are rougher.")
    return lines
