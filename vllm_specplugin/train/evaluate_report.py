"""What `evaluate` found: figures that mean little apart from each other, in one value that reads and writes JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_specplugin.train.evaluate_statistics import FEWEST_UNITS, Estimate

VERSION: Literal[1] = 1
NO_INTERVAL = "[-]"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MainHead(_Frozen):
    """How well one model says the held-out texts, and answers the questions."""

    name: str
    """'target', 'target with drafts', or the model that it is held against."""
    loss: Estimate
    """Cross-entropy in nats per token."""
    next_token: Estimate
    """The share of tokens that are the model's first choice."""
    downstream: Estimate | None = None
    """The share of questions answered correctly."""
    loss_difference: Estimate | None = None
    """Its loss minus the target's, text by text."""
    downstream_difference: Estimate | None = None

    @property
    def perplexity(self) -> Estimate:
        return self.loss.map(math.exp)


class Acceptance(_Frozen):
    """How much drafting saves at one temperature."""

    temperature: float
    length: Estimate
    """Tokens per target pass, bonus included; passes without a draft count too."""
    by_position: list[Estimate]
    """`[k]`: the share of drafts accepted at least that far."""
    drafts: int
    tokens: int
    tokens_per_second: Estimate
    """After the first token, one request at a time."""
    plain_tokens_per_second: Estimate
    """Of the same engine without drafts, measured in turns with the other."""

    @property
    def speed_up(self) -> float:
        return self.tokens_per_second.value / self.plain_tokens_per_second.value


class Evaluation(_Frozen):
    """The whole of one run."""

    version: Literal[1] = VERSION
    target: str
    speculative_config: dict[str, Any] | None
    against: str | None
    data: str
    texts: int
    scored_tokens: int
    questions: str | None
    downstream_kind: str | None
    """What a right answer is, in words."""
    seed: int
    engine: dict[str, Any] = Field(default_factory=dict)
    """vllm, torch, dtype, ..."""
    main_head: list[MainHead]
    acceptance: list[Acceptance]
    seconds: float = 0.0

    def write_json(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


# -- as tables ---------------------------------------------------------------------------------------------


def with_interval(estimate: Estimate | None, digits: int = 3, scale: float = 1.0, unit: str = "") -> str:
    """`1.234 [1.200, 1.268]`; a dash for what was not measured, or rests on too little for an interval."""
    if estimate is None:
        return "-"
    numbers = (number for number in (estimate.value, estimate.low, estimate.high) if number is not None)
    value, *bounds = (f"{number * scale:.{digits}f}{unit}" for number in numbers)
    return f"{value} [{', '.join(bounds)}]" if bounds else f"{value} {NO_INTERVAL}"


def main_head_rows(report: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the first table."""
    titles = ["model", "loss (nats/token)", "perplexity", "next token", "downstream", "loss - target's"]
    rows = [
        [
            part.name,
            with_interval(part.loss),
            with_interval(part.perplexity, 2),
            with_interval(part.next_token, 1, 100, "%"),
            with_interval(part.downstream, 1, 100, "%"),
            with_interval(part.loss_difference, 4),
        ]
        for part in report.main_head
    ]
    return titles, rows


def acceptance_rows(report: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the second table."""
    titles = ["temperature", "acceptance length", "accepted up to each position", "tokens/s", "without drafts", "ratio"]
    rows = [
        [
            f"{part.temperature:g}",
            with_interval(part.length, 2),
            " ".join(f"{position.value:.0%}" for position in part.by_position) or "-",
            with_interval(part.tokens_per_second, 1),
            with_interval(part.plain_tokens_per_second, 1),
            f"{part.speed_up:.2f}",
        ]
        for part in report.acceptance
    ]
    return titles, rows


def notes(report: Evaluation) -> list[str]:
    """What the figures rest on, and how to read them."""
    lines = [
        f"Loss over {report.scored_tokens} tokens of {report.texts} texts in {report.data}; in brackets 95 % intervals, "
        "by a bootstrap over texts."
    ]
    if report.downstream_kind is not None:
        asked = report.main_head[0].downstream
        lines.append(f"Downstream: {report.downstream_kind}; {asked.units if asked else 0} of them in {report.questions}.")
    for part in report.acceptance:
        served = f"{part.length.units} requests, {part.tokens} tokens, {part.drafts} drafts"
        lines.append(f"At temperature {part.temperature:g}: {served}.")
    for other in report.main_head[1:]:
        lines.extend(_comparison(other, report.main_head[0].name))
    cells = [cell for _, rows in _filled(report) for row in rows for cell in row]
    if any(NO_INTERVAL in shown for shown in (*cells, *lines)):
        lines.append(f"{NO_INTERVAL}: fewer than {FEWEST_UNITS} texts or questions, too few for an interval or a difference.")
    return lines


def _comparison(part: MainHead, target: str) -> list[str]:
    found = {"loss": part.loss_difference, "downstream score": part.downstream_difference}
    return [
        f"{part.name}: its {what} is {'different from' if by.settled else 'not told apart from'} the {target}'s "
        f"(by {with_interval(by, 4)})."
        for what, by in found.items()
        if by is not None
    ]


def print_evaluation(report: Evaluation, console: Console) -> None:
    console.print(Text(_heading(report), style="bold"))
    console.print(_tables(report))
    for line in notes(report):
        console.print(Text(line, style="dim"))


def markdown(report: Evaluation) -> str:
    """The same for a README."""
    parts = [_heading(report), ""]
    for titles, rows in _filled(report):
        parts += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
        parts += [f"| {' | '.join(row)} |" for row in rows]
        parts.append("")
    return "\n".join([*parts, *(f"- {line}" for line in notes(report))]) + "\n"


def _heading(report: Evaluation) -> str:
    facts = report.engine
    how = f" with {report.speculative_config}" if report.speculative_config else ""
    return f"{report.target}{how}, vLLM {facts.get('vllm', '?')}, {facts.get('dtype', '?')}"


def _filled(report: Evaluation) -> Sequence[tuple[list[str], list[list[str]]]]:
    return [part for part in (main_head_rows(report), acceptance_rows(report)) if part[1]]


def _tables(report: Evaluation) -> RenderableType:
    tables = []
    for titles, rows in _filled(report):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for number, title in enumerate(titles):
            table.add_column(title, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        tables.append(table)
    return Group(*tables)
