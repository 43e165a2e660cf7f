"""How the results of `bench` and `tune` look: on a terminal, and the same in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_specplugin.bench.candidates import PLAIN
from vllm_specplugin.bench.report import Cell, LeftOutEntry, Recommendation, Report
from vllm_specplugin.bench.tune import BEST, Tried, TuneReport

COLUMNS = (
    "at once",
    "configuration",
    "tokens/s",
    "over plain",
    "acceptance length",
    "first token, ms",
    "ms per token",
    "accepted",
    "rounds",
)
ON_A_TERMINAL = 7
"""Columns that 100 characters have room for."""


def cells(cell: Cell) -> tuple[str, ...]:
    """A row's figures as text, one for each of `COLUMNS`."""
    plain = cell.candidate == PLAIN
    return (
        str(cell.concurrency),
        cell.candidate,
        f"{cell.tokens_per_second:,.1f}",
        "" if plain else str(cell.speed),
        "" if plain else f"{cell.acceptance_length:.2f}",
        _pair(cell.first_token_ms),
        _pair(cell.per_token_ms),
        "" if cell.acceptance_rate is None else f"{cell.acceptance_rate:.0%}",
        str(cell.speed.rounds),
    )


def _pair(values: tuple[float, float]) -> str:
    """Median and 95th percentile."""
    return "" if math.isnan(values[0]) else " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)


def heading(report: Report) -> str:
    """One line: what was run."""
    facts = report.environment
    engine = f"vLLM {facts['vllm']}, {facts['dtype']}, {facts['device']}" if "vllm" in facts else "no engine had loaded"
    where = f"{engine}, {facts['cores']} cores"
    asked = f"{report.prompts}, temperature {report.temperature:g}, up to {report.max_tokens} tokens per answer"
    return f"{Path(report.model).name}: {asked}; {where}"


def below(report: Report) -> list[str]:
    """What stands under the table: what the columns mean, the notes, what was left out."""
    lines = [
        "Over plain: the median over rounds in which both answered the same requests in turns, with its interval. Acceptance "
        "length: tokens per target pass, bonus included. First token and ms per token: 50th / 95th percentile.",
        *report.notes,
        *left_out(report.left_out),
    ]
    return [*lines, "Interrupted: this is what was measured by then."] if report.interrupted else lines


def left_out(entries: Sequence[LeftOutEntry]) -> list[str]:
    return [f"Left out: {entry.candidate}: {entry.why}" for entry in entries]


def print_report(report: Report, console: Console) -> None:
    """The table, the notes, how sure it is, and as the last line what to paste."""
    console.print(Text(heading(report), style="bold"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, title in enumerate(COLUMNS[:ON_A_TERMINAL]):
        stacked = title.replace(" ", "\n", 1)
        table.add_column(stacked, justify="left" if number == 1 else "right", overflow="fold", no_wrap=number != 1)
    for before, cell in zip([None, *report.cells], report.cells, strict=False):
        if before is not None and before.concurrency != cell.concurrency:
            table.add_section()
        chosen = cell.candidate == report.recommendation.candidate != PLAIN
        table.add_row(*cells(cell)[:ON_A_TERMINAL], style="bold" if chosen else None)
    console.print(table)
    for line in below(report):
        console.print(Text(line, style="dim"))
    _print_recommendation(report.recommendation, console)


def _print_recommendation(recommendation: Recommendation, console: Console) -> None:
    console.print(Text(f"{recommendation.reason}."))
    console.print(Text(recommendation.line, style="bold"), soft_wrap=True)


def markdown(report: Report) -> str:
    """The same as a Markdown table with its notes as a list."""
    lines = [f"{heading(report)}.", "", *markdown_table(COLUMNS, [cells(cell) for cell in report.cells])]
    lines += ["", *(f"- {line}" for line in below(report)), ""]
    return "\n".join([*lines, *recommendation_lines(report.recommendation)]) + "\n"


def recommendation_lines(recommendation: Recommendation) -> list[str]:
    return [f"{recommendation.reason}.", "", f"    {recommendation.line}"]


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [list(headings), ["---"] * len(headings), *rows]]


# -- tune --------------------------------------------------------------------------------------------------

TRIED_COLUMNS = ("search for", "configuration", "over plain", "rounds", "outcome")


def tried_cells(tried: Tried) -> tuple[str, ...]:
    """A row's figures as text, one for each of `TRIED_COLUMNS`."""
    return (tried.stage, tried.candidate, str(tried.speed), str(tried.speed.rounds), tried.outcome)


def print_tuning(report: TuneReport, console: Console) -> None:
    """What was tried, the winner's own measurements, and as the last line what to paste."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, title in enumerate(TRIED_COLUMNS):
        table.add_column(title, justify="right" if number in (2, 3) else "left", overflow="fold")
    for before, tried in zip([None, *report.tried], report.tried, strict=False):
        if before is not None and before.stage != tried.stage:
            table.add_section()
        table.add_row(*tried_cells(tried), style="bold" if tried.outcome == BEST else None)
    console.print(Text("The search", style="bold"))
    console.print(table)
    for line in [*left_out(report.left_out), *(["Interrupted: this is what was known by then."] if report.interrupted else [])]:
        console.print(Text(line, style="dim"))
    if report.confirmed is not None:
        console.print(Text("\nThe winner, measured afresh", style="bold"))
        print_report(report.confirmed, console)
    else:
        _print_recommendation(report.recommendation, console)


def tuning_markdown(report: TuneReport) -> str:
    """The same in Markdown."""
    lines = ["## The search", "", *markdown_table(TRIED_COLUMNS, [tried_cells(tried) for tried in report.tried]), ""]
    lines += [f"- {line}" for line in left_out(report.left_out)]
    if report.confirmed is not None:
        return "\n".join([*lines, "", "## The winner, measured afresh", "", markdown(report.confirmed)])
    return "\n".join([*lines, "", *recommendation_lines(report.recommendation)]) + "\n"
