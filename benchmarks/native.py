"""vLLM's own drafters, one step: under this plugin's proposers and as stock vLLM runs them, in real engines, in turns.

    python benchmarks/native.py [--markdown FILE] [--json FILE] [--rounds N] [--batch 1 8 32] [--method eagle mtp]

Tiny targets (hidden size 64, 258 tokens) in float32 on one thread, where next to nothing is arithmetic, so that the fixed cost
of a step shows. The drafter is the same code on the same checkpoint in both; what differs is who asks it, what becomes of its
drafts and who verifies them. About two minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_steps import Times, machine, start, take_turns
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import natives  # noqa: E402
from tests.support.cache import cache_root  # noqa: E402
from tests.support.tiny import tiny_model  # noqa: E402

K = 3
BATCHES = (1, 8, 32)
METHODS = ("eagle", "mtp", "draft_model")
ROUNDS, STEPS = 20, 20
MAX_MODEL_LEN = 2048

Row = tuple[str, int, dict[str, Times]]


def target_and_drafter(method: str) -> tuple[Path, Path | None]:
    """Drafters that are mostly right, or a step would emit one token and verify next to nothing."""
    folder = cache_root() / "tiny"
    if method == "eagle":
        return natives.shallow(folder), natives.eagle(folder, fitted=True, layers=1)
    if method == "mtp":
        return natives.mimo(folder, fitted=True), None
    return tiny_model(), tiny_model(perturb=0.1)


def measure(method: str, batches: list[int], rounds: int) -> list[Row]:
    """The step times of both contenders, and of no drafts, at each batch size."""
    target, drafter = target_and_drafter(method)
    keys = {"num_speculative_tokens": K} | ({} if drafter is None else {"model": str(drafter)})
    contenders: dict[str, dict[str, Any] | None] = {"stock": {"method": method, **keys}, "ours": {"proposer": method, **keys}}
    size = {"max_num_seqs": max(batches), "max_num_batched_tokens": 2048, "max_model_len": MAX_MODEL_LEN}
    with tempfile.TemporaryDirectory() as logs:
        processes = start({**contenders, "plain": None}, target, Path(logs), **size)
        try:
            rows = []
            for batch in batches:
                prompts = [[(7 * row + place) % 251 for place in range(8)] for row in range(batch)]
                rows.append((method, batch, take_turns(processes, prompts, rounds, STEPS, tokens_per_step=K + 1)))
            drafted = {name: processes[name].call("counters") for name in contenders}
        finally:
            for process in processes.values():
                process.close()
    if drafted["stock"] != drafted["ours"]:
        raise SystemExit(f"the contenders did not do the same work: {drafted}")
    return rows


def cells(row: Row) -> list[str]:
    method, batch, times = row
    texts = [method, str(batch)]
    for name in ("stock", "ours", "plain"):
        low, high = times[name].middle_half
        texts.append(f"{times[name].median:.2f} ({low:.2f} to {high:.2f})")
    return [*texts, f"{times['ours'].median / times['stock'].median:.2f}"]


HEADINGS = ["method", "batch", "stock, ms per step", "ours, ms per step", "no drafts, ms per step", "ours : stock"]


def markdown(rows: list[Row], rounds: int) -> str:
    table = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, rows)]
    lines = "\n".join("| " + " | ".join(row) + " |" for row in table)
    return f"""# vLLM's own drafters: stock vLLM 0.32 against this plugin

{datetime.date.today()}, `python benchmarks/native.py`. {rounds * STEPS} steps of each engine per batch size, in turns of {STEPS},
k = {K}, greedy, V1, one thread. CPU time per step, median and middle half. Machine: {machine()}.

{lines}

The targets are tiny (one or two layers, hidden size 64, 258 tokens, float32), so nearly all of a step is the engine's own
bookkeeping: what is compared is the fixed cost of the proposer, the guard and the verification. Both engines run the same drafter
on the same checkpoint; that they drafted and accepted the same number of tokens is checked.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=METHODS)
    said = parser.parse_args()
    if (said.rounds * STEPS + 20) * (K + 1) > MAX_MODEL_LEN:
        parser.error(f"--rounds {said.rounds}: the requests would not fit into {MAX_MODEL_LEN} tokens")
    rows = [row for method in said.method for row in measure(method, said.batch, said.rounds)]
    text = markdown(rows, said.rounds)
    Console().print(text, highlight=False, markup=False)
    if said.markdown:
        said.markdown.write_text(text, encoding="utf-8")
    if said.json:
        found = [
            {"method": method, "batch": batch, "times": {name: vars(times) for name, times in row.items()}}
            for method, batch, row in rows
        ]
        said.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
