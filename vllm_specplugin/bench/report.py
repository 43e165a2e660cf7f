"""What `bench` found, as data: a cell for each configuration and concurrency, and the configuration to use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_specplugin.bench.candidates import PLAIN, Candidate
from vllm_specplugin.bench.samples import (
    ROUNDS_FOR_CONFIDENCE,
    Interval,
    Round,
    Sample,
    acceptance_length,
    interval,
    overall,
    percentiles,
    ratio,
)

PLAIN_IS_FASTEST = "plain decoding is fastest here; use no --speculative-config"
NOTHING_KNOWN = f"nothing is known yet: that takes {ROUNDS_FOR_CONFIDENCE} rounds; give more --minutes"


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(Frozen):
    """One configuration at one concurrency."""

    candidate: str
    concurrency: int
    speed: Interval
    """Over plain decoding's, in the same rounds."""
    tokens_per_second: float
    """The median over the rounds."""
    acceptance_length: float
    """Tokens per target pass, the bonus token included."""
    acceptance_rate: float | None
    """Accepted over drafted tokens; None where nothing was drafted."""
    first_token_ms: tuple[float, float]
    """50th and 95th percentile."""
    per_token_ms: tuple[float, float]
    """The same of each request's mean time per token after the first."""


class Overall(Frozen):
    """One configuration over all concurrencies, which count alike."""

    candidate: str
    config: dict[str, Any] | None
    speed: Interval | None
    """None where no round was complete."""


class LeftOutEntry(Frozen):
    candidate: str
    why: str


class Recommendation(Frozen):
    """What to use, and how sure that is."""

    candidate: str
    flag: str
    """What to paste behind `vllm serve MODEL`; empty for plain decoding."""
    reason: str
    known: bool = True
    """False where the rounds were too few to say what is fastest."""

    @property
    def line(self) -> str:
        """The last line of the output."""
        return self.flag or (PLAIN_IS_FASTEST if self.known else NOTHING_KNOWN)


class Report(Frozen):
    """The whole."""

    model: str
    prompts: str
    temperature: float
    max_tokens: int
    concurrencies: tuple[int, ...]
    environment: dict[str, Any]
    cells: list[Cell]
    overall: list[Overall]
    left_out: list[LeftOutEntry]
    notes: list[str]
    recommendation: Recommendation
    interrupted: bool

    def write_json(self, file: Path) -> None:
        file.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def cells_of(rounds: Sequence[Round], candidates: Sequence[Candidate]) -> list[Cell]:
    """Every cell that was measured, concurrency by concurrency; plain decoding first, as its own yardstick."""
    cells = []
    for concurrency in sorted({c for measured in rounds for c in measured}):
        played = [measured[concurrency] for measured in rounds if concurrency in measured]
        for one in candidates:
            pairs = [(samples[one.name], samples[PLAIN]) for samples in played if one.name in samples and PLAIN in samples]
            if pairs:
                cells.append(_cell(one.name, concurrency, pairs))
    return cells


def _cell(name: str, concurrency: int, pairs: Sequence[tuple[Sample, Sample]]) -> Cell:
    samples = [ours for ours, _ in pairs]
    drafted = sum(sample.draft_tokens for sample in samples)
    return Cell(
        candidate=name,
        concurrency=concurrency,
        speed=interval(ratio(ours, plain) for ours, plain in pairs),
        tokens_per_second=median(sample.rate for sample in samples),
        acceptance_length=acceptance_length(samples),
        acceptance_rate=sum(sample.accepted_tokens for sample in samples) / drafted if drafted else None,
        first_token_ms=percentiles(1000 * value for sample in samples for value in sample.first_token),
        per_token_ms=percentiles(1000 * value for sample in samples for value in sample.per_token),
    )


def complete(rounds: Sequence[Round], concurrencies: Sequence[int], *names: str) -> list[Round]:
    """The rounds in which all these engines were measured at all concurrencies."""
    return [
        measured
        for measured in rounds
        if all(c in measured and all(name in measured[c] for name in names) for c in concurrencies)
    ]


def overall_of(rounds: Sequence[Round], candidates: Sequence[Candidate], concurrencies: Sequence[int]) -> list[Overall]:
    """Every candidate's speed over plain decoding's in the rounds that were complete."""
    found = []
    for one in candidates:
        values = [overall(measured, one.name, PLAIN) for measured in complete(rounds, concurrencies, one.name, PLAIN)]
        found.append(Overall(candidate=one.name, config=one.config, speed=interval(values) if values else None))
    return found


def recommend(
    rounds: Sequence[Round], candidates: Sequence[Candidate], concurrencies: Sequence[int], cells: Sequence[Cell]
) -> Recommendation:
    """The candidate whose interval over all concurrencies has the highest lower end; plain decoding where none is above 1.

    Only of intervals with the confidence that is asked for; where those without it may change the answer, nothing is known.
    """
    standing = {o.candidate: o.speed for o in overall_of(rounds, candidates, concurrencies) if o.speed is not None}
    standing.pop(PLAIN, None)
    by_low = sorted(standing, key=lambda name: -standing[name].low)
    if not by_low:
        return unknown("no round was completed")
    best = next((name for name in by_low if standing[name].sure and standing[name].low > 1), by_low[0])
    speed = standing[best]
    if not speed.sure:
        return unknown(f"so far {best} is {described(speed)} over plain decoding")
    if speed.low <= 1:
        reason = f"no configuration is surely faster than plain decoding; the nearest is {best}, {described(speed)}"
        return Recommendation(candidate=PLAIN, flag="", reason=reason)
    reasons = [f"{best} is {described(speed)} over plain decoding, all concurrencies alike"]
    slower = [str(c.concurrency) for c in cells if c.candidate == best and c.speed.high < 1]
    if slower:
        reasons.append(f"but slower than it at {' and '.join(slower)} at once")
    if len(by_low) > 1:
        reasons.append(_ahead(rounds, concurrencies, best, next(name for name in by_low if name != best)))
    chosen = next(one for one in candidates if one.name == best)
    return Recommendation(candidate=best, flag=chosen.flag, reason="; ".join(reasons))


def unknown(reason: str) -> Recommendation:
    """There were too few rounds for any."""
    return Recommendation(candidate=PLAIN, flag="", reason=reason, known=False)


def _ahead(rounds: Sequence[Round], concurrencies: Sequence[int], best: str, next_best: str) -> str:
    """How surely the best is ahead of the next one, where both answered the same requests."""
    shared = complete(rounds, concurrencies, best, next_best)
    if not shared:
        return f"{next_best} was measured at other times, so the two are not compared directly"
    lead = interval(overall(measured, best, next_best) for measured in shared)
    return f"{'surely ahead of' if lead.sure and lead.low > 1 else 'not surely ahead of'} {next_best}, {described(lead)}"


def described(speed: Interval) -> str:
    """`1.21x (1.10 to 1.30 with 95 % confidence, 8 rounds)`"""
    if speed.rounds == 1:
        return f"{speed.value:.2f}x in the only round"
    return (
        f"{speed.value:.2f}x ({speed.low:.2f} to {speed.high:.2f} with {speed.confidence:.0%} confidence, {speed.rounds} rounds)"
    )
