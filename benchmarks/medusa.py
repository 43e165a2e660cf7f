"""Medusa, one step: this plugin's proposer against stock vLLM 0.32's, in real engines on the same heads, in turns.

    python benchmarks/medusa.py [--markdown FILE] [--json FILE] [--rounds N] [--batch 1 8 32]

A tiny target (2 layers, hidden size 64, 258 tokens) in float32 on one thread, where next to nothing is arithmetic, so that the
fixed cost of a step shows. The heads are random, have an output layer each, and lie in one checkpoint that both read.
About a minute.
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

from tests.support.heads import random_medusa  # noqa: E402
from tests.support.tiny import VOCAB_SIZE, tiny_model  # noqa: E402
from vllm_specplugin.heads.medusa import MedusaConfig  # noqa: E402

K = 4
BATCHES = (1, 8, 32)
ROUNDS, STEPS = 20, 20
MAX_MODEL_LEN = 2048

Row = tuple[int, dict[str, Times]]


def contenders(heads: Path) -> dict[str, dict[str, Any] | None]:
    return {
        "stock": {"method": "medusa", "model": str(heads), "num_speculative_tokens": K},
        "ours": {"proposer": "medusa", "model": str(heads), "num_speculative_tokens": K},
        "plain": None,
    }


def measure(batches: list[int], rounds: int) -> list[Row]:
    """The step times of every contender at each batch size."""
    heads = random_medusa(MedusaConfig(num_heads=K, hidden_size=64, vocab_size=VOCAB_SIZE))
    size = {"max_num_seqs": max(batches), "max_num_batched_tokens": 2048, "max_model_len": MAX_MODEL_LEN}
    with tempfile.TemporaryDirectory() as logs:
        processes = start(contenders(heads), tiny_model(), Path(logs), **size)
        try:
            rows = []
            for batch in batches:
                prompts = [[(7 * row + place) % 251 for place in range(8)] for row in range(batch)]
                rows.append((batch, take_turns(processes, prompts, rounds, STEPS, tokens_per_step=K + 1)))
            drafted = {name: processes[name].call("counters") for name in ("stock", "ours")}
        finally:
            for process in processes.values():
                process.close()
    stock, ours = drafted["stock"], drafted["ours"]
    # The first pass after a prompt may be filled up with drafts that nobody made, and each engine counts that its own way.
    if stock["accepted"] != ours["accepted"] or abs(stock["draft"] / ours["draft"] - 1) > 0.01:
        raise SystemExit(f"the contenders did not do the same work: {drafted}")
    return rows


def cells(row: Row) -> list[str]:
    batch, times = row
    texts = [str(batch)]
    for name in ("stock", "ours", "plain"):
        low, high = times[name].middle_half
        texts.append(f"{times[name].median:.2f} ({low:.2f} to {high:.2f})")
    return [*texts, f"{times['ours'].median / times['stock'].median:.2f}"]


HEADINGS = ["batch", "stock, ms per step", "ours, ms per step", "no drafts, ms per step", "ours : stock"]


def markdown(rows: list[Row], rounds: int) -> str:
    table = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, rows)]
    lines = "\n".join("| " + " | ".join(row) + " |" for row in table)
    return f"""# Medusa: stock vLLM 0.32 against this plugin

{datetime.date.today()}, `python benchmarks/medusa.py`. {rounds * STEPS} steps of each engine per batch size, in turns of {STEPS},
k = {K}, greedy, V1, one thread. CPU time per step, median and middle half.
Machine: {machine()}.

{lines}

The target is tiny (2 layers, hidden size 64, 258 tokens, float32), so nearly all of a step is the engine's own bookkeeping: what
is compared is the fixed cost of drafting and verifying, guard and checks included. Both engines read one checkpoint of {K} random
heads with an output layer each; that they accept the same number of drafts is checked.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    said = parser.parse_args()
    if (said.rounds * STEPS + 20) * 2 > MAX_MODEL_LEN:
        parser.error(f"--rounds {said.rounds}: the requests would not fit into {MAX_MODEL_LEN} tokens")
    rows = measure(said.batch, said.rounds)
    text = markdown(rows, said.rounds)
    Console().print(text, highlight=False, markup=False)
    if said.markdown:
        said.markdown.write_text(text, encoding="utf-8")
    if said.json:
        found = [{"batch": batch, "times": {name: vars(times) for name, times in row.items()}} for batch, row in rows]
        said.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
