"""How the demo's results look: a table on the terminal, the same one in Markdown, and the lines below it."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_specplugin.demo.measure import DemoResult, PromptResult, Row

COLUMNS = ("prompts", "plain tok/s", "spec. tok/s", "ratio", "acceptance length", "accepted at position (%)", "same output")
BUSY = 0.1  # share of the processor time taken by others above which the timings are called doubtful


def cells(row: Row) -> tuple[str, ...]:
    """A row's numbers as text, one cell per column."""
    spread = f"\n{row.ratio_range[0]:.2f}-{row.ratio_range[1]:.2f}" if row.ratio_range else ""
    positions = " ".join(f"{100 * value:.0f}" for value in row.acceptance_per_position)
    return (
        row.kind,
        f"{row.plain_rate:.1f}",
        f"{row.speculative_rate:.1f}",
        f"{row.ratio:.2f}x{spread}",
        f"{row.acceptance_length:.2f}",
        positions or "no drafts",
        f"{row.same} of {row.prompts}",
    )


def heading(result: DemoResult) -> str:
    """One line: what was run."""
    config = json.dumps(result.speculative_config)
    return f"{Path(result.model).name}, plain and with {config}, greedy, {result.environment['dtype']}, one request at a time"


def differences(result: DemoResult) -> list[str]:
    """One line for each prompt whose outputs are not the same, and for each that an engine answered in two ways."""
    lines = []
    for prompt in result.prompts:
        where = f"{prompt.kind} ({prompt.name})"
        if prompt.difference is not None:
            at = prompt.difference
            tokens = f"{at.plain_token!r} against {at.speculative_token!r}"
            lines.append(f"{where}: outputs part at token {at.position}, {tokens}: {at.verdict}")
        if not prompt.repeatable:
            lines.append(f"{where}: {_unrepeatable(prompt)} gave different outputs in different repetitions")
    return lines


def _unrepeatable(prompt: PromptResult) -> str:
    """Which engine did not repeat itself."""
    engines = (("plain decoding", prompt.plain), ("speculative decoding", prompt.speculative))
    return " and ".join(name for name, samples in engines if len({sample.token_ids for sample in samples}) > 1)


def notes(result: DemoResult) -> list[str]:
    """What a reader needs to judge the numbers."""
    facts = result.environment
    tokens = sum(len(prompt.plain[0].token_ids) for prompt in result.prompts)
    size = f"{len(result.prompts)} prompts, {tokens} output tokens, {result.repeat} repetition(s)"
    lines = [
        f"{size}; vLLM {facts['vllm']}, {facts['cores']} cores. Rates are whole requests, prefill included.",
        "Acceptance length: tokens per target pass, bonus included, passes without a draft counted too. "
        "Accepted at position i: share of drafts accepted at least that far.",
    ]
    if any(prompt.difference is not None for prompt in result.prompts):
        lines.append(
            f"In {facts['dtype']} a pass over several tokens rounds differently from a pass over one: over "
            f"{result.noise.positions} positions that moved the margin of the two top logits by up to "
            f"{result.noise.largest:.3f}. Two tokens nearer than that can change places."
        )
    others = facts["others_share"]
    if others is not None and others > BUSY:
        lines.append(
            f"Other processes took {others:.0%} of the processors meanwhile: tokens/s are too low, and the ratios are rough."
        )
    return lines


def rich_table(result: DemoResult) -> Table:
    """The table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, title in enumerate(COLUMNS):
        stacked = title.replace(" ", "\n", 1)  # narrow enough for 80 columns
        table.add_column(stacked, justify="left" if index == 0 else "right", no_wrap="position" in title)
    rows = result.rows()
    for index, row in enumerate(rows):
        last_of_many = index == len(rows) - 1 and len(rows) > 1
        table.add_row(*cells(row), style="bold" if last_of_many else None, end_section=index == len(rows) - 2)
    return table


def print_result(result: DemoResult, console: Console) -> None:
    """The table, the differences (an unexplained one in red), the notes."""
    console.print(Text(heading(result), style="bold"))
    console.print(rich_table(result))
    for line in differences(result):
        console.print(Text(line, style="" if "near-tie" in line else "bold red"))
    for line in notes(result):
        console.print(Text(line, style="dim"))


def markdown(result: DemoResult) -> str:
    """The same as a Markdown table with its notes as a list, for a README."""
    lines = [f"{heading(result)}:".replace("with {", "with `{").replace("}, greedy", "}`, greedy"), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    lines += [f"| {' | '.join(cells(row))} |".replace("\n", ", ") for row in result.rows()]
    lines += ["", *(f"- {line}" for line in [*differences(result), *notes(result)])]
    return "\n".join(lines) + "\n"
