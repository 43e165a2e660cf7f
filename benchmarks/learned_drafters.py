"""Learned drafters on a real model: acceptance length and tokens per second against plain decoding, by kind of prompt.

    python benchmarks/learned_drafters.py --target MODEL --medusa DIR --eagle DIR --eagle3 DIR --mtp DIR [--ngram]
                                          [--k medusa=4 ...] [--repeat N] [--max-tokens N] [--markdown FILE] [--json FILE]

Each drafter's engine and a plain one answer the demo's eight prompts in turns, one request at a time, at temperature 0 and 1;
no prompt is among those that heads are trained on by `examples/learned_drafters`. Acceptance length is tokens per target pass
after the first token, bonus token included. Speeds are tokens per second after the first token, plain and with drafts, by the
medians over the repetitions of a prompt; behind them stands their ratio.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_specplugin.demo.prompts import demo_prompts
from vllm_specplugin.engine_process import EngineProcess
from vllm_specplugin.progress import progress_bars
from vllm_specplugin.prompt_files import Prompt, encode
from vllm_specplugin.train.evaluate import ENGINE, SLACK, Request

FAMILIES = ("medusa", "eagle", "eagle3", "mtp")
TEMPERATURES = (0.0, 1.0)
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One drafter on one kind of prompt at one temperature."""

    drafter: str
    kind: str
    temperature: float
    length: float
    """Tokens per target pass, bonus included."""
    plain_per_second: float
    """Tokens of plain decoding per second; prompts count alike."""
    per_second: float
    """The same with drafts."""
    same: str
    """How many greedy answers are plain decoding's, token for token."""

    @property
    def speed_up(self) -> float:
        return self.per_second / self.plain_per_second


def measure(
    drafter: str,
    config: Mapping[str, Any],
    target: str,
    plain: EngineProcess,
    prompts: Sequence[Prompt],
    options: argparse.Namespace,
) -> list[Cell]:
    """One drafter on all prompts."""
    ids = options.ids
    drafting = EngineProcess(drafter, ENGINE, settings(target, config, options), options.logs / f"{drafter}.log")
    try:
        drafting.wait()
        found: dict[tuple[str, float], list[tuple[list[Request], list[Request]]]] = {}
        total = len(TEMPERATURES) * len(prompts) * options.repeat
        with progress_bars(True) as bars:
            task = bars.add_task(drafter, total=total)
            for temperature in TEMPERATURES:
                for engine in (plain, drafting):
                    engine.call("decode", prompt=ids[0], max_tokens=WARM_UP_TOKENS, temperature=temperature)
                for prompt, tokens in zip(prompts, ids, strict=True):
                    pairs: tuple[list[Request], list[Request]] = ([], [])
                    for _ in range(options.repeat):
                        for engine, requests in zip((plain, drafting), pairs, strict=True):
                            arguments = {"prompt": tokens, "max_tokens": options.max_tokens, "temperature": temperature}
                            requests.append(Request(**engine.call("decode", **arguments)))
                        bars.advance(task)
                    found.setdefault((prompt.kind, temperature), []).append(pairs)
        return [cell(drafter, kind, temperature, pairs) for (kind, temperature), pairs in found.items()]
    finally:
        drafting.close()


def cell(drafter: str, kind: str, temperature: float, pairs: Sequence[tuple[list[Request], list[Request]]]) -> Cell:
    """The figures of some prompts, each answered several times by both engines."""
    drafted = [request for _, requests in pairs for request in requests]
    # Seconds per token of each prompt, as the median over its repetitions; prompts count alike.
    per_token = [[statistics.median(r.seconds / max(len(r.token_ids) - 1, 1) for r in side) for side in pair] for pair in pairs]
    plain, ours = (math.exp(statistics.fmean(math.log(seconds) for seconds in side)) for side in zip(*per_token, strict=True))
    same = sum(a[0].token_ids == b[0].token_ids for a, b in pairs)
    return Cell(
        drafter=drafter,
        kind=kind,
        temperature=temperature,
        length=sum(len(r.token_ids) - 1 for r in drafted) / sum(r.passes for r in drafted),
        plain_per_second=1 / plain,
        per_second=1 / ours,
        same=f"{same} of {len(pairs)}" if temperature == 0 else "",
    )


def settings(model: str, config: Mapping[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """Of one engine."""
    longest = max(map(len, options.ids)) + options.max_tokens + SLACK
    arguments = {"dtype": options.dtype, "max_model_len": longest, "max_num_seqs": 4}
    return {"model": model, "speculative_config": config, "engine_args": arguments}


def drafters(options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> the target's folder (MTP's has the layers in it) and the configuration."""
    chosen: dict[str, tuple[str, dict[str, Any]]] = {}
    lengths = dict(entry.split("=") for entry in options.k)
    if options.ngram:
        chosen["ngram"] = (options.target, {"proposer": "ngram"})
    for family in FAMILIES:
        folder = getattr(options, family)
        if folder is not None:
            with_model = {} if family == "mtp" else {"model": folder}
            chosen[family] = (folder if family == "mtp" else options.target, {"proposer": family, **with_model})
    for name, k in lengths.items():
        chosen[name][1]["num_speculative_tokens"] = int(k)
    return chosen


def table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a row per drafter and kind."""
    headings = ["drafter", "prompts", "length T=0", "length T=1", "tokens/s T=0", "tokens/s T=1", "same answers"]
    rows = []
    for drafter, kind in dict.fromkeys((c.drafter, c.kind) for c in cells):
        greedy, sampled = (
            next(c for c in cells if (c.drafter, c.kind, c.temperature) == (drafter, kind, t)) for t in TEMPERATURES
        )
        speeds = [f"{c.plain_per_second:.1f} -> {c.per_second:.1f} ({c.speed_up:.2f}x)" for c in (greedy, sampled)]
        rows.append([drafter, kind, f"{greedy.length:.2f}", f"{sampled.length:.2f}", *speeds, greedy.same])
    return headings, rows


def markdown(cells: Sequence[Cell]) -> str:
    headings, rows = table(cells)
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    for family in FAMILIES:
        parser.add_argument(f"--{family}", metavar="DIR")
    parser.add_argument("--ngram", action="store_true", help="also measure n-gram drafting, which needs no training")
    parser.add_argument("--k", nargs="*", default=[], metavar="NAME=K", help="drafts per step, where not the drafter's default")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from transformers import AutoTokenizer

    prompts = demo_prompts()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    options.ids = [encode(prompt, tokenizer) for prompt in prompts]
    options.logs = Path(tempfile.mkdtemp(prefix="learned-drafters-"))
    plain = EngineProcess("plain", ENGINE, settings(options.target, None, options), options.logs / "plain.log")
    cells: list[Cell] = []
    try:
        facts = plain.wait()
        for name, (target, config) in drafters(options).items():
            cells += measure(name, config, target, plain, prompts, options)
    finally:
        plain.close()
    headings, rows = table(cells)
    shown = Table(*headings, title=f"vLLM {facts['vllm']}, {facts['dtype']}, {platform.processor() or platform.machine()}")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
    if options.markdown:
        options.markdown.write_text(markdown(cells), encoding="utf-8")
    if options.json:
        measured = [asdict(c) | {"speed_up": c.speed_up} for c in cells]
        options.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
