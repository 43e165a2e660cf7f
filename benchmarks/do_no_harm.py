"""Does adaptive control ever make serving slower? Plain decoding, adaptive and fixed draft lengths, over load and traffic.

    python benchmarks/do_no_harm.py MODEL --rounds FILE [--proposer NAME] [--fixed 1,2,4,8] [--concurrency 1,2,...,64]
                                    [--kinds KIND ...] [--seconds-per-cell N] [--max-tokens N] [--per-place N]
                                    [--engine-args JSON]
                                    [--markdown FILE] [--plots DIR]

A cell is one kind of traffic at one concurrency. All engines are alive at once and answer the same requests in turns (on a CPU
of a fifth of a second), round after round until the cell's time is up; a ratio is the median over its rounds. In a round another
request takes the place of one that ends, until `--per-place` times as many as run at once are done. Answers differ in length,
and have the same one from all engines (the end of text is ignored): else plain decoding alone would go on in lockstep, and read
all prompts together. The kinds are `bench`'s own; random text is token ids drawn from a few, gone on with at temperature 1, so
that a drafter always finds something to copy and is mostly refused; the others are greedy. Prompts never repeat. Rounds are
appended to the file as they come: an interrupted run goes on where it was, and `--seconds-per-cell 0` only evaluates what is
there. There are two plain engines: the others are held against the mean of both, and one against the other says how far two
engines that do the same seem to differ. They do, by some percent and for as long as they live; several runs average that out.
Cells are of steady traffic: the adaptive engine answers a dozen requests of it before (`control_replay.py` is about changes).
Small loads come first, of all kinds. Seven engines of a small model take 10 GB; on two cores one round of every cell takes about
40 minutes. On a CPU without instructions for bfloat16 they take 20 GB, and twice the time, with
`--engine-args '{"dtype": "float32", "kv_cache_memory_bytes": 1000000000, "max_num_batched_tokens": 256}'`, the last since no turn
is short where a step is not.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from vllm_specplugin.bench.candidates import PLAIN, PLAIN_DECODING, Candidate
from vllm_specplugin.bench.lineup import Lineup, Load
from vllm_specplugin.bench.run import environment, require_plain
from vllm_specplugin.bench.samples import Interval, Sample, acceptance_length, interval, ratio
from vllm_specplugin.bench.table import markdown_table
from vllm_specplugin.bench.traffic import KINDS, RANDOM, built_in
from vllm_specplugin.neighbours import NeighbourMeter
from vllm_specplugin.progress import progress_bars
from vllm_specplugin.validate.plots import GREY, INK, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADAPTIVE, AGAIN = "adaptive", "plain again"
PER_KIND = 2048
SETTLING = 12
"""Requests of a cell's traffic, at least, that adaptive drafting gets used to first."""
NO_HARM = 0.97
"""Adaptive over plain decoding must not be below."""
NEAR = 0.97
"""Adaptive over the best fixed length, in cells where it is not ahead."""
AHEAD_SHARE = 0.8
"""Of the cells, in which it must be ahead."""
# Okabe and Ito's colours and markers that a grey printer tells apart.
LINES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"))
HEADINGS = (
    "traffic",
    "at once",
    "plain, tokens/s",
    "plain again : plain",
    "adaptive : plain",
    "acceptance length",
    "best fixed k",
    "it : plain",
    "adaptive : best fixed",
    "rounds",
)

Cell = tuple[str, int]
"""A kind of traffic and a concurrency."""
Samples = Mapping[str, Sample]


@dataclass(frozen=True, slots=True)
class Result:
    """One cell."""

    kind: str
    concurrency: int
    plain_per_second: float
    over_plain: Interval
    again_over_plain: Interval
    """A second plain engine: what the measurement itself makes of no difference."""
    acceptance_length: float
    """Of adaptive drafting."""
    best_fixed: str
    fixed_over_plain: Interval
    over_fixed: Interval


# -- measuring ---------------------------------------------------------------------------------------------


def candidates(proposer: str, lengths: Sequence[int]) -> list[Candidate]:
    fixed = [Candidate(f"k={k}", {"proposer": proposer, "num_speculative_tokens": k, "control": "fixed"}) for k in lengths]
    return [PLAIN_DECODING, Candidate(ADAPTIVE, {"proposer": proposer, "control": "adaptive"}), *fixed, Candidate(AGAIN, None)]


def measure(options: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Run rounds of every cell until its time is up, each appended to the file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    traffic = {kind: built_in(tokenizer, [kind], PER_KIND, options.seed) for kind in {kind for kind, _ in cells}}
    longest = max(traffic.values(), key=lambda one: one.longest)
    lineup_of = candidates(options.proposer, options.fixed)
    load = Load(tuple(options.concurrency), options.max_tokens, ignore_eos=True, uneven=True, per_place=options.per_place)
    logs = Path(tempfile.mkdtemp(prefix="do-no-harm-"))
    with (
        progress_bars(True) as bars,
        Lineup(options.model, load, longest, options.engine_args, len(lineup_of), logs, bars) as lineup,
    ):
        lineup.start(lineup_of)
        meter = NeighbourMeter([engine.process.pid for engine in lineup.engines.values()])
        task = bars.add_task("cells", total=len(cells))
        for kind, concurrency in sorted(cells, key=lambda cell: cell[1]):
            bars.update(task, description=f"cells: {kind}, {concurrency} at once")
            lineup.traffic = traffic[kind]
            lineup.load = replace(load, temperature=1.0 if kind == RANDOM else 0.0)
            spent = options.spent.get((kind, concurrency), 0.0)
            lineup.settle(ADAPTIVE, concurrency, SETTLING)
            while spent < options.seconds_per_cell:
                samples = lineup.race(concurrency)
                require_plain(lineup)
                if lineup.failed:
                    raise SystemExit(f"{lineup.failed[0].name} failed: {lineup.failed[0].why}")
                spent += sum(sample.seconds for sample in samples.values())
                facts = environment(lineup.facts, [meter.share() or 0.0])
                append(options, kind, concurrency, samples, facts)
            bars.advance(task)
    logs.rmdir()  # empty, where no engine failed


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all rounds of a file must share."""
    names = ("model", "proposer", "fixed", "max_tokens", "per_place", "engine_args")
    return {name: getattr(options, name) for name in names}


def append(options: argparse.Namespace, kind: str, concurrency: int, samples: Samples, facts: Mapping[str, Any]) -> None:
    line = {
        "settings": settings(options),
        "kind": kind,
        "concurrency": concurrency,
        "samples": {name: asdict(sample) for name, sample in samples.items()},
        "environment": dict(facts),
    }
    with options.rounds.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def end_last_line(file: Path) -> None:
    """So that what is appended does not continue a line that was cut off."""
    if file.exists() and not file.read_bytes().endswith(b"\n"):
        with file.open("a", encoding="utf-8") as stream:
            stream.write("\n")


def read(file: Path) -> dict[Cell, list[Samples]]:
    """Every cell's rounds; a line that was cut off by an interrupt is left out."""
    found: dict[Cell, list[Samples]] = {}
    for line in lines_of(file):
        samples = {name: Sample.load(values) for name, values in line["samples"].items()}
        found.setdefault((line["kind"], line["concurrency"]), []).append(samples)
    return found


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


# -- evaluating --------------------------------------------------------------------------------------------


def result(cell: Cell, rounds: Sequence[Samples]) -> Result:
    """The figures of a cell. The best fixed length is picked from the same rounds, which favours it a little."""
    fixed = [name for name in rounds[0] if name not in (PLAIN, AGAIN, ADAPTIVE)]
    over_plain = {name: interval(samples[name].rate / plain_rate(samples) for samples in rounds) for name in (ADAPTIVE, *fixed)}
    best = max(fixed, key=lambda name: over_plain[name].value)
    return Result(
        kind=cell[0],
        concurrency=cell[1],
        plain_per_second=median(map(plain_rate, rounds)),
        over_plain=over_plain[ADAPTIVE],
        again_over_plain=interval(ratio(samples[AGAIN], samples[PLAIN]) for samples in rounds),
        acceptance_length=acceptance_length([samples[ADAPTIVE] for samples in rounds]),
        best_fixed=best,
        fixed_over_plain=over_plain[best],
        over_fixed=interval(ratio(samples[ADAPTIVE], samples[best]) for samples in rounds),
    )


def plain_rate(samples: Samples) -> float:
    """Tokens per second of plain decoding. Of two engines that do the same one may be 2 % faster for good."""
    return geometric_mean([samples[PLAIN].rate, samples[AGAIN].rate])


def verdict(results: Sequence[Result]) -> list[str]:
    """What was promised, and whether it was kept."""
    harmed = [r for r in results if r.over_plain.value < NO_HARM]
    lowest = min(results, key=lambda r: r.over_plain.value)
    ahead = [r for r in results if r.over_fixed.value >= 1]
    far = [r for r in results if r.over_fixed.value < NEAR]
    share = len(ahead) / len(results)
    return [
        f"{_kept(not harmed)}: adaptive over plain decoding is at least {NO_HARM} in every cell. "
        f"Lowest: {lowest.over_plain.value:.3f} ({_cell(lowest)}); below in {len(harmed)} of {len(results)} cells.",
        f"{_kept(share >= AHEAD_SHARE)}: ahead of the best fixed k in at least {AHEAD_SHARE:.0%} of the cells. "
        f"Ahead in {len(ahead)} of {len(results)} ({share:.0%}).",
        f"{_kept(not far)}: within {1 - NEAR:.0%} of it in the others. Further behind in {len(far)}"
        + "".join(f"; {_cell(r)}: {r.over_fixed.value:.3f} of {r.best_fixed}" for r in far)
        + ".",
    ]


def noise(results: Sequence[Result]) -> str:
    """How far two engines that do the same came apart."""
    ratios = sorted(r.again_over_plain.value for r in results)
    off = median(abs(math.log(ratio)) for ratio in ratios)
    return f"It came to {ratios[0]:.3f} to {ratios[-1]:.3f} of the first, in the median cell {math.expm1(off):.1%} away from it."


def _kept(kept: bool) -> str:
    return "Kept" if kept else "**Not kept**"


def _cell(one: Result) -> str:
    return f"{one.kind}, {one.concurrency} at once"


def rows(results: Sequence[Result]) -> list[list[str]]:
    """A row for each cell, under `HEADINGS`."""
    return [
        [
            r.kind,
            str(r.concurrency),
            f"{r.plain_per_second:,.1f}",
            str(r.again_over_plain),
            str(r.over_plain),
            f"{r.acceptance_length:.2f}",
            r.best_fixed.removeprefix("k="),
            str(r.fixed_over_plain),
            str(r.over_fixed),
            str(r.over_plain.rounds),
        ]
        for r in results
    ]


def page(options: argparse.Namespace, results: Sequence[Result], facts: Mapping[str, Any], plots: Sequence[Path]) -> str:
    """The Markdown page."""
    others = f"; other processes took up to {facts['others_share']:.0%} of the processors" if facts["others_share"] else ""
    machine = f"vLLM {facts['vllm']}, {facts['dtype']}, {facts['device']}, {facts['cores']} cores{others}"
    command = f"python benchmarks/do_no_harm.py MODEL --proposer {options.proposer} --max-tokens {options.max_tokens}"
    command += f" --per-place {options.per_place}"
    lines = [
        "# Do no harm: adaptive drafting over load and traffic",
        "",
        f"`{command}`, {Path(options.model).name}, {machine}.",
        "",
        "Plain decoding, adaptive drafting and drafting with each fixed k answer the same requests in turns; a ratio is the",
        "median over the rounds of a cell, in brackets its interval. In a round another request takes the place of one that",
        f"ends until {options.per_place} times as many as run at once are done. Answers are as long from every engine; prompts",
        f"never repeat. Before a cell the adaptive engine answers {SETTLING} requests of its kind, or as many as run at once:",
        "cells are of steady traffic. The best fixed k is picked cell by cell from the same rounds, which nobody who serves",
        "can do. *Plain* is the mean of two engines, and *plain again* the ratio of these two: how far it is from 1 says how",
        "far to trust the others.",
        noise(results),
        "",
        *(f"- {line}" for line in verdict(results)),
        "",
        *(f"![{file.stem.replace('-', ' ')}]({file.name})\n" for file in plots),
        *markdown_table(HEADINGS, rows(results)),
    ]
    return "\n".join(lines) + "\n"


@svg
def plot(results: Sequence[Result], attribute: str, label: str, limit: float) -> Figure:
    """A ratio against the concurrency, a line for each kind of traffic, its intervals as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    kinds = list(dict.fromkeys(r.kind for r in results))
    for number, (kind, (colour, marker)) in enumerate(zip(kinds, LINES, strict=False)):
        points = sorted((r for r in results if r.kind == kind), key=lambda r: r.concurrency)
        values: list[Interval] = [getattr(r, attribute) for r in points]
        at = [math.log2(r.concurrency) + 0.06 * (number - 1.5) for r in points]  # side by side, or the bars hide each other
        spread = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
        axes.errorbar(at, [v.value for v in values], yerr=spread, color=colour, marker=marker, markersize=4, linewidth=1.3,
                      elinewidth=0.8, label=kind)  # fmt: skip
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.axhline(limit, color=GREY, linewidth=0.8, linestyle="--")
    concurrencies = sorted({r.concurrency for r in results})
    axes.set_xticks([math.log2(c) for c in concurrencies], [str(c) for c in concurrencies])
    axes.set_xlabel("requests at once")
    axes.set_ylabel(label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)
    return figure


def write_plots(folder: Path, results: Sequence[Result]) -> list[Path]:
    files = [folder / "do-no-harm-plain.svg", folder / "do-no-harm-fixed.svg"]
    files[0].write_text(plot(results, "over_plain", "adaptive over plain", NO_HARM), encoding="utf-8")
    files[1].write_text(plot(results, "over_fixed", "adaptive over the best fixed k", NEAR), encoding="utf-8")
    return files


# -- the command line --------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=Path, required=True, help="JSON lines; what it holds is gone on with")
    parser.add_argument("--proposer", default="ngram")
    parser.add_argument("--fixed", type=numbers, default=[1, 2, 4, 8], metavar="K,K,...")
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32, 64], metavar="N,N,...")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seconds-per-cell", type=float, default=60.0, help="of all engines' work together")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--per-place", type=int, default=3, help="requests of a round for each that runs at once")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="further arguments of vllm.LLM")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plots", type=Path, metavar="DIR")
    options = parser.parse_args()

    cells = [(kind, concurrency) for kind in options.kinds for concurrency in options.concurrency]
    if any(line["settings"] != settings(options) for line in lines_of(options.rounds)):
        parser.error(f"--rounds {options.rounds} holds rounds of another model, proposer, length or batch; name another file")
    known = read(options.rounds)
    options.spent = {cell: sum(s.seconds for samples in found for s in samples.values()) for cell, found in known.items()}
    todo = [cell for cell in cells if options.spent.get(cell, 0.0) < options.seconds_per_cell]
    if todo:
        end_last_line(options.rounds)
        try:
            measure(options, todo)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on")
    found = read(options.rounds)
    results = [result(cell, found[cell]) for cell in cells if cell in found]
    if not results:
        return
    facts = [line["environment"] for line in lines_of(options.rounds)]
    busiest = {**facts[-1], "others_share": max(fact["others_share"] for fact in facts)}
    plots = [] if options.plots is None else write_plots(options.plots, results)
    text = page(options, results, busiest, plots)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
