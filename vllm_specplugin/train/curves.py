"""The curves of a run, as a table for machines and a picture for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, GREY = "#1b1f24", "#8b949e"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, told apart by the colour-blind."""


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row per point: `split` is train (mean since the row before) or held_out; acceptance_d is of draft d."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _replace(file, text.getvalue().encode())


def write_png(file: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Loss, acceptance of each draft and acceptance length over the tokens seen. Held-out figures are the strong lines."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    held_out = any(row["split"] == "held_out" for row in rows)
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY}):
        figure = Figure(figsize=(7, 8), layout="constrained")
        loss, rates, length = figure.subplots(3, 1, sharex=True)
        loss.set_title(title, loc="left", color=INK)
        for split in ("train", "held_out"):
            part = [row for row in rows if row["split"] == split]
            strong = split == "held_out" or not held_out
            style: Any = {"linewidth": 1.8, "marker": "o", "markersize": 3} if strong else {"linewidth": 0.8, "alpha": 0.4}

            def draw(axes: Any, column: str, colour: str, label: str, part: Any = part, style: Any = style) -> None:
                if part:
                    axes.plot([row["tokens"] for row in part], [row[column] for row in part], color=colour, label=label, **style)

            draw(loss, "loss", INK, split.replace("_", "-"))
            draw(length, "acceptance_length", INK, "")
            for depth, colour in zip(_depths(rows), COLOURS * 4, strict=False):
                draw(rates, f"acceptance_{depth}", colour, f"draft {depth}" if strong else "")
        loss.set_ylabel("loss (nats)")
        loss.legend(frameon=False)
        rates.set_ylabel("acceptance, given the drafts before")
        rates.set_ylim(-0.02, 1.02)
        rates.legend(frameon=False, loc="lower right", ncols=4)
        length.set_ylabel("acceptance length (estimated)")
        length.set_xlabel("tokens seen")
        length.xaxis.set_major_formatter("{x:,.0f}")
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=120, metadata={"Software": None})
    _replace(file, stream.getvalue())


def _depths(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return [int(key.removeprefix("acceptance_")) for key in rows[0] if key.removeprefix("acceptance_").isdigit()] if rows else []


def _replace(file: Path, content: bytes) -> None:
    """Whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(content)
    partial.replace(file)
