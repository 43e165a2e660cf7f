"""The report as one page that needs nothing else: no network, no scripts; readable narrow and on paper."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_specplugin.validate import plots
from vllm_specplugin.validate.chisquare import ChiSquare
from vllm_specplugin.validate.evidence import Evidence
from vllm_specplugin.validate.page import PAGE
from vllm_specplugin.validate.report import Report, Settings, write_whole
from vllm_specplugin.validate.summary import FAMILY_NAMES, rows
from vllm_specplugin.validate.verdict import e_value, percent

SETS = {
    "draft": "tokens that the draft favours, q(x) > p(x)",
    "residual": "the token that a refusal favours, largest p - q",
    "top": "the likeliest token",
    "processed": "tokens that the sampling parameters favour",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of the page: its SVG as a data URI, and in words for those who cannot see it."""

    source: str
    alt: str
    caption: str


def write_html(report: Report, path: Path) -> None:
    """Write one self-contained page; a file already there is replaced whole or not at all."""
    write_whole(path, render(report))


def render(report: Report) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined

    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    return template.render(
        report=report,
        rows=rows(report),
        path=_path_plot(report.martingale),
        places=_place_plots(report.martingale),
        bins=_bin_plot(report.chi_square),
        settings=_settings(report),
        e_value=e_value,
        percent=percent,
        far=plots.FAR,
        sets=SETS,
    )


def _path_plot(evidence: Evidence) -> Plot:
    crossed = evidence.crossed_at
    end = "It stayed below." if crossed is None else f"It reached it after {crossed:,} tokens."
    return Plot(
        _data_uri(plots.paths(evidence)),
        f"E-values against tokens, up to {evidence.tokens:,}. All together: {e_value(evidence.log10_e)} at the end, "
        f"{e_value(evidence.log10_max)} at the highest; the limit is {1 / evidence.alpha:,.0f}. {end}",
        "Wealth of a gambler who bets that the engine is biased, starting from 1. On a lossless engine it reaches the red line "
        f"at any time with probability at most {evidence.alpha:.2g}.",
    )


def _place_plots(evidence: Evidence) -> list[Plot]:
    """One for each set of each family."""
    made = []
    for (family, name), group in groupby(evidence.places, lambda place: (place.family, place.set)):
        places = list(group)
        words = "; ".join(
            f"{p.place}: {p.observed / p.tokens:.2%} observed, {p.expected / p.tokens:.2%} expected, {p.z:+.1f} sd"
            for p in places
        )
        made.append(
            Plot(_data_uri(plots.places(places)), f"{SETS[name]}. {words}.", f"{FAMILY_NAMES[family].capitalize()}: {SETS[name]}")
        )
    return made


def _bin_plot(test: ChiSquare | None) -> Plot | None:
    if test is None or not test.bins:
        return None
    words = "; ".join(f"{plots.bin_name(item)}: {item.observed:,} of {item.expected:,.0f}" for item in test.bins[:5])
    return Plot(
        _data_uri(plots.bins(test.bins)),
        f"Observed and expected counts of the {len(test.bins)} largest bins, the first of them {words}.",
        f"The {len(test.bins)} largest of {test.degrees + test.cells:,} bins, over {test.cells} prefixes.",
    )


def _data_uri(svg: str) -> str:
    """As the source of an image: its ids and styles stay apart from the page's."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _settings(report: Report) -> list[tuple[str, str]]:
    """Names and values, in the order of the model; the engine's facts unfolded."""
    values = dict(report.settings)
    facts: dict[str, Any] = values.pop("engine")
    lines = [*values.items(), *facts.items(), ("seconds", f"{report.seconds:.0f}")]
    return [
        (name.replace("_", " "), _shown(value))
        for name, value in lines
        if name in Settings.model_fields or value not in ("", None)
    ]


def _shown(value: object) -> str:
    """As JSON where it has parts, so that it can be typed in again."""
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
