"""Several engines, alive at the same time, that answer the same requests in turns.

Each is alone on the machine while it works, in turns that are short: on a CPU a fifth of a second, after which whoever has come
the least far goes on. A machine that slows down for a while (a neighbour, a hot processor) then slows all of them, and the ratios
stay fair. An engine's clock stands still while it waits, the one that it times its passes by in order to choose draft lengths,
too. Where passes go on by themselves, on a GPU or in other processes, a turn lasts until its requests are done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.progress import Progress

from vllm_specplugin.bench.candidates import Candidate, LeftOut
from vllm_specplugin.bench.samples import Sample, total
from vllm_specplugin.bench.traffic import Traffic
from vllm_specplugin.engine_process import EngineProcess, as_loaded
from vllm_specplugin.errors import SpecPluginError

ENGINE = "vllm_specplugin.bench.engine"
SLACK = 32
"""Room in the context beyond the longest request, for drafts past its end."""
WARM_UP_TOKENS = 8
WARM_UP_PROMPT = 32
"""Tokens of a prompt, except at the lowest concurrency, where they are read whole: reading 64 of them takes minutes on a CPU."""
SLICE_SECONDS = 0.2
"""Of a turn, or one step where that takes longer. A shared machine drifts within seconds; and for the first 5 ms of a turn the
threads of the engine before may still spin (KMP_BLOCKTIME), which is the same for all."""


@dataclass(frozen=True, slots=True)
class Load:
    """How the engines are asked."""

    concurrencies: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    """Every answer then has `max_tokens` tokens, whatever the model wants to say."""
    uneven: bool = False
    """They have between half and one and a half times as many, as if the model had ended them: else requests that began together
    would end together, and only where nothing drafts."""
    per_place: int = 1
    """Requests of a batch for each that runs at once. Where one takes the place of another the load lasts; with 1 a batch ends as
    slowly as its slowest request, beside fewer and fewer others."""

    def requests(self, concurrency: int, kinds: int) -> int:
        """Of a round, at one concurrency: full batches, with at least one request of every kind."""
        batch = concurrency * self.per_place
        return batch * -(-kinds // batch)

    def lengths(self, requests: int) -> int | list[int]:
        """The most tokens of a batch's answers: one number for all of them, or `[requests]`."""
        if not self.uneven:
            return self.max_tokens
        return [max(1, self.max_tokens // 2 + self.max_tokens * (5 * place % 8) // 7) for place in range(requests)]

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return self.max_tokens // 2 + self.max_tokens if self.uneven else self.max_tokens


def loaded_together(candidates: Sequence[Candidate]) -> list[Sequence[Candidate]]:
    """In which groups engines load: on CPUs one by one, since at its start an engine times the passes that control goes by."""
    return [candidates] if torch.cuda.is_available() else [[one] for one in candidates]


def in_turn(names: Sequence[str], batch: int) -> list[str]:
    """The order for a batch, which is counted from 0: each first in turn, and each order followed by its reverse."""
    first = batch // 2 % max(len(names), 1)
    order = [*names[first:], *names[:first]]
    return order[::-1] if batch % 2 else order


@dataclass
class Lineup:
    """The engines by name, in the order in which they were started. Used as a context, it ends them."""

    model: str
    load: Load
    traffic: Traffic
    engine_args: Mapping[str, Any]
    at_once: int
    """Most engines that will be alive at once: what they share the memory of a GPU by."""
    logs: Path
    bars: Progress
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the engine that answered first, since all are of one installation; kv_cache_tokens are the fewest of any."""
    slice_seconds: float | None = SLICE_SECONDS
    """None where an engine cannot be halted between two steps: every turn then lasts until its requests are done."""
    failed: list[LeftOut] = field(default_factory=list)
    _started: int = 0
    _batches: dict[int, int] = field(default_factory=dict)
    """How many there were at each concurrency."""

    def __enter__(self) -> Lineup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self.engines):
            self.drop(name)

    def start(self, candidates: Sequence[Candidate]) -> list[str]:
        """Start engines and warm them up; the names of those that came up. The others are in `failed`, with the reason."""
        settings = {
            "model": self.model,
            "engine_args": dict(self.engine_args),
            "max_model_len": self.traffic.longest + self.load.longest + SLACK,
            "max_num_seqs": max(self.load.concurrencies),
            "engines": self.at_once,
        }
        task = self.bars.add_task("loading engines", total=len(candidates))
        for group in loaded_together(candidates):
            for one in group:
                self._started += 1
                log = self.logs / f"{self._started}-{one.name.split()[0].replace(':', '-')}.log"
                self.engines[one.name] = EngineProcess(one.name, ENGINE, {**settings, "speculative_config": one.config}, log)
            names = {id(self.engines[one.name]): one.name for one in group}
            for engine in as_loaded([self.engines[one.name] for one in group]):
                self._keep(names[id(engine)], engine)
                self.bars.advance(task)
        started = [one.name for one in candidates if one.name in self.engines]
        warm_up = replace(self.load, per_place=1, max_tokens=min(WARM_UP_TOKENS, self.load.max_tokens))
        for concurrency in self.load.concurrencies:  # compiles what is compiled on first use
            longest = None if concurrency == min(self.load.concurrencies) else WARM_UP_PROMPT
            self._race(started, concurrency, "warming up", warm_up, longest)
        self.bars.remove_task(task)
        return [name for name in started if name in self.engines]

    def _keep(self, name: str, engine: EngineProcess) -> None:
        """Take an engine that has loaded, or note why it has not."""
        try:
            facts = engine.wait()
        except SpecPluginError as error:
            self._lose(name, error)
        else:
            fewest = min(self.facts.get("kv_cache_tokens", math.inf), facts["kv_cache_tokens"])
            self.facts = {**(self.facts or facts), "kv_cache_tokens": fewest}
            if not facts["pausable"]:
                self.slice_seconds = None

    def _lose(self, name: str, error: SpecPluginError) -> None:
        """Note why an engine failed, and keep its log, which the reason names."""
        self.failed.append(LeftOut(name, str(error)))
        self.engines.pop(name).close()

    def drop(self, name: str) -> None:
        """End an engine that is not wanted any more."""
        engine = self.engines.pop(name)
        engine.close()
        engine.log.unlink(missing_ok=True)

    def has_prompts(self) -> bool:
        """Whether the traffic lasts for another race at every concurrency."""
        load, kinds = self.load, len(self.traffic.kinds)
        return self.traffic.lasts(sum(load.requests(concurrency, kinds) for concurrency in load.concurrencies))

    def race(self, concurrency: int) -> dict[str, Sample]:
        """Let every engine answer the next requests of the traffic, so many at once.

        An engine that fails is dropped, noted in `failed`, and not in the answer.
        """
        return self._race(list(self.engines), concurrency, f"{concurrency} at once", self.load)

    def settle(self, name: str, concurrency: int, requests: int) -> None:
        """Let one engine get used to the traffic: it answers so many requests, at least, that nobody measures."""
        self._race([name], concurrency, "settling", replace(self.load, per_place=-(-requests // concurrency)))

    def _race(
        self, names: Sequence[str], concurrency: int, what: str, load: Load, longest: int | None = None
    ) -> dict[str, Sample]:
        """`longest`: tokens of a prompt, the rest of which is cut off."""
        count, batch_length = load.requests(concurrency, len(self.traffic.kinds)), concurrency * load.per_place
        prompts = [prompt[:longest] for prompt in self.traffic.take(count)]
        batches = [prompts[at : at + batch_length] for at in range(0, count, batch_length)]
        task = self.bars.add_task(what, total=len(batches) * len(names))
        found: dict[str, list[Sample]] = {name: [] for name in names}
        for batch in batches:
            order = in_turn(names, self._batches.get(concurrency, 0))
            self._batches[concurrency] = self._batches.get(concurrency, 0) + 1
            for name, sample in self._serve(order, batch, concurrency, load):
                found[name].append(sample)
                self.bars.advance(task)
        self.bars.remove_task(task)
        return {name: total(samples) for name, samples in found.items() if name in self.engines}

    def _serve(
        self, names: Sequence[str], prompts: Sequence[Sequence[int]], at_once: int, load: Load
    ) -> Iterator[tuple[str, Sample]]:
        """Let the engines answer the same requests; each that did not fail, as it is done."""
        how = {
            "max_tokens": load.lengths(len(prompts)),
            "temperature": load.temperature,
            "ignore_eos": load.ignore_eos,
            "at_once": at_once,
        }
        running: dict[str, tuple[int, float]] = {}
        """Tokens and seconds so far."""
        for name in names:
            if self._call(name, "begin", prompts=prompts, **how) is not None:
                running[name] = (0, 0.0)
        while running:
            name = min(running, key=running.__getitem__)
            answer = self._call(name, "go_on", seconds=self.slice_seconds)
            if answer is not None and answer["sample"] is None:
                running[name] = (answer["tokens"], answer["seconds"])
                continue
            del running[name]
            if answer is not None:
                yield name, Sample.load(answer["sample"])

    def _call(self, name: str, method: str, **arguments: Any) -> dict[str, Any] | None:
        """An engine's answer; None where it failed, or had before."""
        if name not in self.engines:
            return None
        try:
            return self.engines[name].call(method, **arguments)
        except SpecPluginError as error:
            self._lose(name, error)
            return None
