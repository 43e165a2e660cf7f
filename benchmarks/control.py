"""What a pass costs by its rows: a dense target beside a mixture of experts that is as large, and what control makes of both.

    python benchmarks/control.py [--markdown FILE] [--plot FILE] [--json FILE] [--most-rows N]

Random models in float32, each with 270 MB of weights in two layers; of the mixture's 64 experts a token takes two. The curves are
those that control measures at every start of an engine. About a minute on a quiet machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import numpy as np
from engine_steps import machine
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.cache import cache_root  # noqa: E402
from tests.support.engine import EngineWorker  # noqa: E402
from tests.support.mixtures import mixture  # noqa: E402
from tests.support.tiny import tiny_model  # noqa: E402
from vllm_specplugin.control.costs import CostTable  # noqa: E402
from vllm_specplugin.control.policy import choose  # noqa: E402

HIDDEN, LAYERS, EXPERTS, EXPERT_WIDTH = 512, 2, 64, 344
MOST_ROWS = 512
K = 8
ACCEPTANCE = (0.5, 0.8)
BATCHES = (1, 4, 16, 64)

Curve = dict[int, float]
"""Seconds of a pass by its rows."""


def measure(model: Path, most_rows: int) -> Curve:
    """The start-up measurement of an engine with this target."""
    rows = most_rows // (K + 1) + 1
    with EngineWorker("v1") as worker:
        config = {"proposer": "ngram", "control": "adaptive", "num_speculative_tokens": K}
        worker.open(model, config, max_num_seqs=rows, max_num_batched_tokens=max(2 * most_rows, 512))
        curve: Curve = worker.call("tests.engine.inside:start_up_curve")
    return curve


def best_length(curve: Curve, requests: int, acceptance: float) -> tuple[float, float]:
    """Drafts per request that bring most, where each is accepted with this probability; and the speed against none."""
    table = CostTable(list(curve), list(curve.values()))
    choice = choose(
        np.full((requests, K), acceptance), np.full(requests, K), requests, lambda most: table.seconds(requests, most)
    )
    return float(choice.lengths.mean()), choice.speedup


def markdown(curves: dict[str, Curve], plot: str) -> str:
    names = list(curves)
    rows = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    costs = [["rows", *(f"{name}, ms (as a multiple of one row)" for name in names)]]
    for size in rows:
        costs.append([str(size), *(f"{curve[size] * 1e3:.1f} ({curve[size] / curve[1]:.2f})" for curve in curves.values())])
    lengths = [["requests", "acceptance", *(f"{name}: drafts each, speed" for name in names)]]
    for requests in BATCHES:
        for acceptance in ACCEPTANCE:
            best = [best_length(curve, requests, acceptance) for curve in curves.values()]
            lengths.append([str(requests), f"{acceptance:.0%}", *(f"{drafts:.1f}, {speed:.2f}" for drafts, speed in best)])
    return f"""# What a pass costs: dense, and a mixture of experts

{datetime.date.today()}, `python benchmarks/control.py`. Two random targets with 270 MB of float32 weights each, as control times
them at start-up. Machine: {machine()}.

{table(costs)}

![Milliseconds of a pass by its rows]({plot})

The dense target reads all of its weights for one row as for many, so verifying more rows is nearly free until arithmetic takes
over. The mixture reads the experts that its rows chose: each further row costs a good part of the first until most experts are
read anyhow. What control makes of these curves, with up to {K} drafts for each request and every draft accepted with the
probability given:

{table(lengths)}
"""


def table(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def draw(curves: dict[str, Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, curve in curves.items():
        axes.plot(list(curve), [seconds * 1e3 for seconds in curve.values()], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="rows in the pass", ylabel="milliseconds")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--most-rows", type=int, default=MOST_ROWS)
    said = parser.parse_args()
    cache = cache_root() / "tiny"
    heads = {"heads": HIDDEN // 32, "kv_heads": HIDDEN // 64}
    targets = {
        "dense": tiny_model(cache, layers=LAYERS, hidden=HIDDEN, mlp=EXPERTS * EXPERT_WIDTH, **heads),
        "mixture of experts": mixture(cache, experts=EXPERTS, hidden=HIDDEN, mlp=EXPERT_WIDTH, layers=LAYERS),
    }
    curves = {name: measure(target, said.most_rows) for name, target in targets.items()}
    text = markdown(curves, said.plot.name if said.plot else "control.png")
    Console().print(text, highlight=False, markup=False)
    if said.markdown:
        said.markdown.write_text(text, encoding="utf-8")
    if said.plot:
        draw(curves, said.plot)
    if said.json:
        said.json.write_text(json.dumps(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
