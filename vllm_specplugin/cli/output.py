"""How the commands print: results on stdout, one look for all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table


def console() -> Console:
    """For results. Numbers and paths keep their colour: what is coloured here says something."""
    return Console(highlight=False, emoji=False)


def one_line(message: object) -> str:
    """A message of whatever shape on one line."""
    return " ".join(str(message).split())


def print_json(value: Any) -> None:
    """On stdout, as the only thing there."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def parts_of(items: Sequence[tuple[str, RenderableType]], label_width: int) -> Table:
    """Labels on the left, what they stand for on the right, wrapped beside them."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", min_width=label_width, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in items:
        grid.add_row(label, value)
    return grid


def marks(target: Console) -> tuple[str, str]:
    """A sign for found and one for missing, that the terminal can show."""
    return ("✓", "✗") if (target.encoding or "").lower().startswith("utf") else ("+", "MISSING")
