"""The report on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_specplugin.validate.report import Report
from vllm_specplugin.validate.summary import rows
from vllm_specplugin.validate.verdict import Verdict

STYLES = {Verdict.LOSSLESS: "bold green", Verdict.BIASED: "bold red", Verdict.INCONCLUSIVE: "bold yellow"}


def print_report(report: Report, console: Console) -> None:
    """The verdict first, a row for each test, the greedy mismatches, what could not be tested."""
    console.print(Text.assemble((report.verdict.value, STYLES[report.verdict]), f": {report.reason}"))
    console.print(_table(report))
    for line in _mismatches(report):
        console.print(line)
    if report.not_tested:
        console.print(Text("Not tested", style="bold"))
        for sentence in report.not_tested:
            console.print(Text(f"- {sentence}"))


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("test")
    table.add_column("figures", overflow="fold")
    table.add_column("verdict")
    for row in rows(report):
        # Text, not str: what stands in square brackets must not be taken for markup.
        table.add_row(
            Text(f"  {row.test}" if row.part else row.test), Text(row.figure), Text(row.verdict, "bold red" if row.bad else "")
        )
    return table


def _mismatches(report: Report) -> list[Text]:
    """One line for each greedy output that differs."""
    return [
        Text(
            f"{prompt}: differs from token {at.position}, {at.plain_text!r} against {at.tested_text!r}: {at.explanation}",
            "bold red" if at.cause.value == "bug" else "dim",
        )
        for prompt, at in (report.greedy.mismatches if report.greedy else ())
    ]
