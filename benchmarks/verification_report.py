"""What `verification.py` measured, as tables for the terminal and for a document."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

LIMIT = 1.1
"""What the plugin promises: no slower than this many times stock, for the same rule."""


@dataclass
class Result:
    """One cell."""

    rows: int
    k: int
    vocab: int
    times: dict[str, list[float]] = field(default_factory=dict)
    """Milliseconds per step of each contender."""
    accepted: dict[str, float] = field(default_factory=dict)
    """Drafts accepted per row, on average over the steps."""

    def median(self, *names: str) -> float:
        """Milliseconds; several contenders that follow each other are added up. Not a number where one was left out."""
        return sum(float(np.median(self.times[name])) if name in self.times else math.nan for name in names)

    def ratio(self, ours: str, *stock: str) -> float:
        return self.median(ours) / self.median(*stock)


MEMORY_HEADINGS = ["verifier", "batch", "k", "vocabulary", "bytes in all", "per row", "per row : (4 x vocabulary)"]

Column = tuple[str, Callable[[Result], str]]


def number_of(value: int) -> str:
    return f"{value:,}"


def milliseconds(*names: str) -> Callable[[Result], str]:
    def text(result: Result) -> str:
        value = result.median(*names)
        return "" if math.isnan(value) else f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"

    return text


def ratio(ours: str, *stock: str) -> Callable[[Result], str]:
    def text(result: Result) -> str:
        value = result.ratio(ours, *stock)
        return "" if math.isnan(value) else f"{value:.2f}"

    return text


CELL_COLUMNS: list[Column] = [
    ("batch", lambda result: number_of(result.rows)),
    ("k", lambda result: number_of(result.k)),
    ("vocabulary", lambda result: number_of(result.vocab)),
]
WITH_PROBABILITIES: list[Column] = [
    *CELL_COLUMNS,
    ("accepted: stock, token, block", lambda r: ", ".join(f"{r.accepted[name]:.2f}" for name in ("stock", "token", "block"))),
    ("stock, ms", milliseconds("stock")),
    ("stock's bonus, ms", milliseconds("stock bonus")),
    ("token, ms", milliseconds("token")),
    ("block, ms", milliseconds("block")),
    ("token : stock", ratio("token", "stock")),
    ("token : stock with bonus", ratio("token", "stock", "stock bonus")),
    ("token : stock's kernels", ratio("token", "stock kernels")),
    ("block : stock", ratio("block", "stock")),
    ("typical, ms", milliseconds("typical")),
]
ONE_HOT: list[Column] = [
    *CELL_COLUMNS,
    ("accepted: stock, one_hot", lambda r: ", ".join(f"{r.accepted[name]:.2f}" for name in ("stock one-hot", "one_hot"))),
    ("stock, ms", milliseconds("stock one-hot")),
    ("one_hot, ms", milliseconds("one_hot")),
    ("token, ms", milliseconds("token one-hot")),
    ("one_hot : stock", ratio("one_hot", "stock one-hot")),
    ("token : stock", ratio("token one-hot", "stock one-hot")),
    ("one_hot : stock's kernels", ratio("one_hot", "stock one-hot kernels")),
    ("walk alone, ms", milliseconds("walk")),
    ("vLLM's sampler at every row + walk, ms", milliseconds("sampler + walk")),
    ("the same : stock with bonus", ratio("sampler + walk", "stock one-hot", "stock bonus")),
    ("uniforms alone, ms", milliseconds("uniforms")),
]
SAME_RULE = [("token", "stock"), ("token one-hot", "stock one-hot"), ("one_hot", "stock one-hot")]
"""Ours and stock's contender by the same rule; `block` is held to stock's token rule, as stock has no other here."""


def worst(results: list[Result]) -> list[str]:
    lines = []
    for ours, stock in [*SAME_RULE, ("block", "stock")]:
        slowest = max(results, key=lambda result: result.ratio(ours, stock))
        fastest = min(results, key=lambda result: result.ratio(ours, stock))
        kernels = max(results, key=lambda result: result.ratio(ours, f"{stock} kernels"))
        verdict = "within" if slowest.ratio(ours, stock) <= LIMIT else "ABOVE"
        lines.append(
            f"{ours} : {stock}: {fastest.ratio(ours, stock):.2f} to {slowest.ratio(ours, stock):.2f} "
            f"(slowest at {slowest.rows} x {slowest.k} x {slowest.vocab:,}; {verdict} the limit of {LIMIT}); "
            f"to stock's kernels alone at most {kernels.ratio(ours, f'{stock} kernels'):.2f}"
        )
    return lines


def table(results: list[Result], columns: list[Column]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines."""
    return [heading for heading, _ in columns], [[text(result) for _, text in columns] for result in results]


def markdown_table(headings: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(headings)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *lines))


def rich_table(title: str, headings: list[str], lines: list[list[str]]) -> Table:
    table = Table(*headings, title=title)
    for line in lines:
        table.add_row(*line)
    return table


def fill(document: str, parts: dict[str, str]) -> str:
    """The document with the text between each `<!-- name -->` and the `<!-- end -->` after it replaced."""
    for name, text in parts.items():
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        document, found = place.subn(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", document)  # type: ignore[misc]
        if found != 1:
            sys.exit(f"The document must have one part between <!-- {name} --> and <!-- end -->, and has {found}.")
    return document
