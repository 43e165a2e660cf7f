"""The whole: plain decoding, then the engine under test in rounds, then the report.

One engine at a time, so that a model which fills the machine can be validated on it. What is compared with plain decoding is
chosen from plain decoding alone, so the plain engine runs first and is not needed again, even when a run is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from vllm_specplugin.engine_process import EngineProcess
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.validate.first_tokens import PROMPTS, SECONDS, THIRDS, Prefix, beginnings, likeliest_after, probabilities_at
from vllm_specplugin.validate.greedy import first_difference
from vllm_specplugin.validate.html import write_html
from vllm_specplugin.validate.outcome import make_report, martingale_of
from vllm_specplugin.validate.plan import Plan
from vllm_specplugin.validate.report import Report
from vllm_specplugin.validate.state import Plain, State, Tested, open_state
from vllm_specplugin.validate.wire import unpack_tokens

ENGINE = "vllm_specplugin.validate.engine"
GREEDY_TOKENS = 64
"""Per prompt."""
FIRST_TOKENS = 3
"""Of a short request: what the chi-square looks at."""
SHORT_SHARE = 0.25
"""Of the tokens, from short requests; the others are from requests of the sampling parameters' `max_tokens`."""
FIRST_ROUND, LARGEST_ROUND = 1_000, 50_000
"""Tokens; a round in between lasts about `ROUND_SECONDS`."""
ROUND_SECONDS = 10.0

STATE, DISTRIBUTIONS, LEVEL, ROUND = "state.json", "distributions.npy", "level.npy", "round.npz"
PLAIN, SPECULATIVE = "plain", "speculative"
OURS = (STATE, f"{STATE}.partial", DISTRIBUTIONS, LEVEL, ROUND, f"{PLAIN}.log", f"{SPECULATIVE}.log")
"""All that a run leaves in its folder: what --fresh drops, and nothing else."""


def run(plan: Plan, out: Path, *, fresh: bool = False, progress: bool = True) -> Report:
    """Run the plan, or go on with it where the folder `out` holds a part, and write report.json and report.html there.

    Ctrl-C ends the run early: what was measured is kept and reported, and the same call goes on from there.

    Raises:
        SpecPluginError: the folder cannot be used or the disk is full, or an engine failed (its log is named).
    """
    work = out / "state"
    try:
        work.mkdir(parents=True, exist_ok=True)
        for name in OURS if fresh else ():
            (work / name).unlink(missing_ok=True)
    except OSError as error:
        raise SpecPluginError(f"--out {out} cannot be used: {error.strerror}; choose another folder.") from error
    state = open_state(work / STATE, plan.fingerprint(), fresh)
    try:
        return _measure_and_report(plan, out, work, state, progress)
    except OSError as error:
        raise SpecPluginError(f"the run ended with {error}; what {work} holds is whole, and the same command goes on.") from error


def _measure_and_report(plan: Plan, out: Path, work: Path, state: State, progress: bool) -> Report:
    interrupted, measured = False, True
    with _bars(progress) as bars:
        try:
            measured = _Run(plan, work, state, bars).measure()
        except KeyboardInterrupt:  # somewhere within a round: only what was written is whole
            interrupted = True
            state = open_state(work / STATE, plan.fingerprint(), fresh=not (work / STATE).exists())
    report = make_report(plan, state, work / DISTRIBUTIONS, interrupted=interrupted, measured=measured)
    report.write_json(out / "report.json")
    write_html(report, out / "report.html")
    return report


class _Run:
    """The measuring part; changes `state` and writes it after each step."""

    def __init__(self, plan: Plan, work: Path, state: State, bars: Progress) -> None:
        self.plan, self.work, self.state, self.bars = plan, work, state, bars
        self.martingale = martingale_of(plan, state)
        self._since = time.monotonic()

    def measure(self) -> bool:
        """Do what is missing; whether anything was."""
        missing = self.state.plain is None or self.state.tested is None or self._wanted() > 0
        if self.state.plain is None:
            with self._engine(PLAIN, None) as (engine, facts):
                self._measure_plain(engine, facts)
        if self.state.tested is None or self._wanted():
            with self._engine(SPECULATIVE, self.plan.speculative_config) as (engine, facts):
                if self.state.tested is None:
                    self._measure_greedy(engine, facts)
                self._sample(engine, facts)
        return missing

    def _wanted(self) -> int:
        """Tokens to go; none where the engine is found biased."""
        return 0 if self.martingale.crossed else max(self.plan.tokens - self.state.tokens, 0)

    @contextmanager
    def _engine(self, title: str, speculative_config: Mapping[str, Any] | None) -> Iterator[tuple[EngineProcess, dict[str, Any]]]:
        task = self.bars.add_task(f"loading the {title} engine", total=1)
        settings = {
            "model": self.plan.model,
            "speculative_config": speculative_config,
            "engine_args": self.plan.engine_args,
            "prompts": self.plan.prompts,
            "sampling": self.plan.sampling.model_dump(mode="json"),
            "seed": self.plan.engine_seed(self.state.rounds),
        }
        engine = EngineProcess(title, ENGINE, settings, self.work / f"{title}.log")
        try:
            facts = engine.wait()
            self.bars.advance(task)
            yield engine, facts
        finally:
            engine.close()

    def _save(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self._since
        self._since = now
        self.state.write(self.work / STATE)

    # -- plain decoding, and greedily with drafts ------------------------------------------------------------

    def _measure_plain(self, engine: EngineProcess, facts: Mapping[str, Any]) -> None:
        task = self.bars.add_task("plain decoding", total=4)
        greedy = engine.call("greedy", max_tokens=GREEDY_TOKENS)["outputs"]
        self.bars.advance(task)
        prefixes: list[Prefix] = []
        found = []
        level = beginnings(len(facts["prompts"]))
        weights = np.ones(len(level), dtype=np.float32)
        for most in (SECONDS, THIRDS, 0):
            engine.call("distributions", prefixes=level, file=str(self.work / LEVEL))
            values = np.load(self.work / LEVEL)  # [places of this level, vocab]
            prefixes += level
            found.append(values)
            level, weights = likeliest_after(level, probabilities_at(values, self.plan.sampling) * weights[:, None], most)
            self.bars.advance(task)
        (self.work / LEVEL).unlink()
        np.save(self.work / DISTRIBUTIONS, np.concatenate(found))
        self.state.plain = Plain(greedy=greedy, prefixes=prefixes)
        self._save()

    def _measure_greedy(self, engine: EngineProcess, facts: dict[str, Any]) -> None:
        assert self.state.plain is not None
        task = self.bars.add_task("greedy decoding with drafts", total=1)
        greedy = engine.call("greedy", max_tokens=GREEDY_TOKENS)["outputs"]
        tokens: set[int] = set()
        for plain, tested in zip(self.state.plain.greedy, greedy, strict=True):
            place = first_difference(plain["token_ids"], tested["token_ids"])
            if place is not None:
                tokens.update(plain["token_ids"][place : place + 1], tested["token_ids"][place : place + 1])
        asked = sorted(tokens)
        texts = dict(zip(asked, engine.call("texts", token_ids=asked)["texts"], strict=True))
        self.state.tested = Tested(facts=facts, greedy=greedy, texts=texts)
        self._save()
        self.bars.advance(task)

    # -- sampling ----------------------------------------------------------------------------------------------

    def _sample(self, engine: EngineProcess, facts: Mapping[str, Any]) -> None:
        task = self.bars.add_task("sampling", total=self.plan.tokens, completed=self.state.tokens)
        size = FIRST_ROUND
        while wanted := self._wanted():
            began = time.monotonic()
            added = self._round(engine, len(facts["prompts"]), min(size, wanted))
            rate = added / max(time.monotonic() - began, 1e-3)
            size = int(min(max(rate * ROUND_SECONDS, FIRST_ROUND / 4), LARGEST_ROUND))
            self._tell(task)

    def _round(self, engine: EngineProcess, prompts: int, tokens: int) -> int:
        """Sample about so many tokens and bet on them."""
        file = self.work / ROUND
        requests = round_of(tokens, prompts, self.plan.sampling.max_tokens, self.state.rounds)
        answer = engine.call("sample", requests=requests, file=str(file))
        records = unpack_tokens(file.read_bytes())
        file.unlink()
        if not len(records):
            raise SpecPluginError(f"the {engine.title} engine emitted no token that could be recorded; log: {engine.log}")
        self.martingale.add(records)
        state = self.state
        state.rounds += 1
        state.tokens += len(records)
        state.unclear += answer["unclear"]
        state.first = _merged(state.first, answer["first"])
        state.martingale = self.martingale.state()
        self._save()
        return len(records)

    def _tell(self, task: TaskID) -> None:
        self.bars.update(task, completed=min(self.state.tokens, self.plan.tokens))


def round_of(tokens: int, prompts: int, max_tokens: int, number: int) -> list[tuple[int, int]]:
    """The requests of a round, (prompt's index, tokens) each: long ones over all prompts, short ones over the first few."""
    short = round(tokens * SHORT_SHARE / FIRST_TOKENS)
    long = max(round((tokens - short * FIRST_TOKENS) / max_tokens), 1)
    few = min(prompts, PROMPTS)
    longs = [((number + place) % prompts, max_tokens) for place in range(long)]
    return longs + [((number + place) % few, FIRST_TOKENS) for place in range(short)]


def _merged(counts: Sequence[Sequence[int]], more: Sequence[Sequence[int]]) -> list[list[int]]:
    """Counts of equal beginnings added up."""
    total: dict[tuple[int, ...], int] = {}
    for *beginning, count in (*counts, *more):
        total[tuple(beginning)] = total.get(tuple(beginning), 0) + count
    return [[*beginning, count] for beginning, count in sorted(total.items())]


def _bars(enabled: bool) -> Progress:
    """Bars on stderr, so that stdout carries results alone."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not enabled)
