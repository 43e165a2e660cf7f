"""The report's figures, as SVG text. Matplotlib is imported where it is used: it is slow to load, and an extra."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

from vllm_specplugin.validate.chisquare import Bin
from vllm_specplugin.validate.evidence import Evidence, Family, Place
from vllm_specplugin.validate.summary import FAMILY_NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arguments = ParamSpec("Arguments")

INK, GREY, RED = "#1b1f24", "#8b949e", "#b3261e"
# Okabe and Ito's colours, told apart by the colour-blind, and styles that a grey printer tells apart.
LINES = {Family.ACCEPTED: ("#0072b2", "--"), Family.RESIDUAL: ("#d55e00", "-."), Family.BONUS: ("#009e73", ":")}
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "text.parse_math": False,  # a prompt may hold a dollar sign
    "svg.hashsalt": "vllm-specplugin",  # the same report gives the same file
}
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LABEL_LENGTH = 30
FAR = 4.0
"""Standard deviations beyond which a place is drawn in red."""


def svg(draw: Callable[Arguments, Figure]) -> Callable[Arguments, str]:
    """Draw in the report's style, and return the figure as an SVG element."""

    @wraps(draw)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> str:
        from matplotlib import rc_context

        stream = io.StringIO()
        with rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a prompt in a script that the font lacks
            draw(*args, **kwargs).savefig(stream, format="svg", metadata={"Date": None})
        return stream.getvalue()

    return drawn


@svg
def paths(evidence: Evidence) -> Figure:
    """The e-values against the tokens seen, on a logarithmic axis (of logarithms: no float holds 10 to the 1000)."""
    from math import log10

    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure, axes = _figure(7.2, 3.4)
    path = evidence.path
    axes.plot(path.tokens, path.overall, color="#b6bdc5", linewidth=4.5, solid_capstyle="butt", label="all together")
    for family in Family:
        colour, style = LINES[family]
        axes.plot(path.tokens, path.families[family], color=colour, linestyle=style, linewidth=1.3, label=FAMILY_NAMES[family])
    limit = -log10(evidence.alpha)
    axes.axhline(limit, color=RED, linewidth=1.2)
    axes.annotate(
        f"biased from here: 1/alpha = {1 / evidence.alpha:,.0f}",
        (1, limit),
        (-4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=RED,
        ha="right",
    )
    if evidence.crossed_at is not None:
        axes.axvline(evidence.crossed_at, color=RED, linewidth=0.8, linestyle=":")
    axes.set_ylim(top=max(axes.get_ylim()[1], limit * 1.2))
    axes.yaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"10{str(round(y)).translate(SUPERSCRIPTS)}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlim(0, max(1, path.tokens[-1]))
    axes.set_xlabel("tokens")
    axes.set_ylabel("e-value")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, handlelength=2.6)
    return figure


@svg
def places(rows: Sequence[Place]) -> Figure:
    """One set at its places: shares observed and expected above, their difference with its two standard deviations below."""
    figure, (shares, differences) = _figure(4.2, 3.6, rows=2)
    at = range(len(rows))
    expected = [100 * row.expected / row.tokens for row in rows]
    observed = [100 * row.observed / row.tokens for row in rows]
    shares.bar(at, expected, width=0.62, color="#d7dde3", label="expected")
    shares.plot(at, observed, "o", color=INK, markersize=4.5, label="observed")
    shares.set_ylabel("share, %")
    shares.set_ylim(bottom=0)
    shares.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    spread = [200 * row.deviation / row.tokens for row in rows]
    differences.axhline(0, color=GREY, linewidth=0.8)
    differences.errorbar(at, [0.0] * len(rows), yerr=spread, fmt="none", ecolor=GREY, elinewidth=5, alpha=0.55)
    for x, row in enumerate(rows):
        value = observed[x] - expected[x]
        differences.plot([x], [value], "o", color=RED if abs(row.z) > FAR else INK, markersize=4.5)
    differences.set_ylabel("difference,\npoints")
    differences.margins(y=0.25)
    differences.set_xticks(at, [row.place.replace(" ", "\n") for row in rows])
    shares.set_xticks(at, [""] * len(rows))
    for axes in (shares, differences):
        half = max(len(rows), 4) / 2  # a single bar need not fill the figure
        axes.set_xlim((len(rows) - 1) / 2 - half, (len(rows) - 1) / 2 + half)
    return figure


@svg
def bins(largest: Sequence[Bin]) -> Figure:
    """Chi-square: counts expected (bars, with two standard deviations) and observed (dots) of the largest bins."""
    figure, axes = _figure(7.2, 1.1 + 0.21 * len(largest))
    at = range(len(largest))
    axes.barh(at, [item.expected for item in largest], height=0.66, color="#d7dde3", label="expected")
    spread = [2 * item.deviation for item in largest]
    axes.errorbar([item.expected for item in largest], at, xerr=spread, fmt="none", ecolor=GREY, elinewidth=3, alpha=0.7)
    axes.plot([item.observed for item in largest], at, "o", color=INK, markersize=4, label="observed")
    axes.set_yticks(at, [bin_name(item) for item in largest])
    axes.set_ylim(len(largest) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("samples; the grey line spans two standard deviations to each side")
    axes.legend(loc="lower right")
    return figure


def bin_name(item: Bin) -> str:
    """`France is, token 262`."""
    label = item.label if len(item.label) <= LABEL_LENGTH else f"{item.label[: LABEL_LENGTH - 3]}..."
    return f"{label}, {'the rest' if item.token is None else f'token {item.token}'}"


def _figure(width: float, height: float, rows: int = 1) -> tuple[Figure, Any]:
    """A figure (inches) with axes below each other; without pyplot, so that no window system is looked for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, 1)
