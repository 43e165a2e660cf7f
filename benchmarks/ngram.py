"""N-gram drafting, one thread: stock vLLM 0.32's search against this plugin's index, in the same run on the same tokens.

    python benchmarks/ngram.py [--markdown FILE] [--json FILE] [--steps N] [--case 64x8192 ...]

Every step appends 1 to 3 tokens to each request and then lets each contender draft, in turns. Timed is the call that the
engine makes: stock's `propose(k, sampled ids, lengths, token table)`, ours from a `Step`, bare and behind the guard (which
hands it to a worker thread and checks the drafts). All cases together take about three minutes and 1.5 GB of memory.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import pydoc_data.topics
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_specplugin import Drafts, Host, Request, Step
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.guard import Guard
from vllm_specplugin.noise import DraftNoise
from vllm_specplugin.proposers.ngram import NgramOptions, NgramProposer

K = 5
VOCAB = 49_152
CASES = [(1, 2048), (64, 8192), (64, 32_768), (256, 32_768)]
NEW_PER_STEP = (1, 3)
CONTENDERS = ("stock", "ours", "guarded")
WARM_UP = 5
"""Steps before the clock counts."""
CHECKED = 3
"""Steps whose drafts are compared with a search by hand."""


# -- tokens --------------------------------------------------------------------


def stream(random: np.random.Generator, length: int, frequencies: NDArray[np.float64]) -> NDArray[np.int32]:
    """Passages of 8 to 63 tokens, by turns new (drawn by Zipf's law) and copied from anywhere before: `[length]`."""
    new = random.choice(VOCAB, size=length, p=frequencies).astype(np.int32)
    tokens = np.empty(length + 64, dtype=np.int32)
    filled = 0
    while filled < length:
        size = int(random.integers(8, 64))
        if filled > 64 and random.random() < 0.5:
            place = int(random.integers(0, filled - size)) if filled > size else 0
            tokens[filled : filled + size] = tokens[place : place + size]
        else:
            tokens[filled : filled + size] = new[filled : filled + size] if filled + size <= length else 0
        filled += size
    return tokens[:length]


def streams(rows: int, length: int) -> NDArray[np.int32]:
    """`[rows, length]`"""
    random = np.random.default_rng(rows * length)
    weights = 1 / (np.arange(VOCAB) + 2.7)
    return np.stack([stream(random, length, weights / weights.sum()) for _ in track(range(rows), "tokens", transient=True)])


def natural_texts() -> Iterator[tuple[str, list[int]]]:
    """Texts that every Python brings along, a number for each word, space or sign."""
    library = Path(sysconfig.get_paths()["stdlib"])
    code = "".join(file.read_text(errors="ignore") for file in sorted(library.glob("*.py")))
    prose = "".join(pydoc_data.topics.topics.values())
    for name, text in (("Python code", code), ("English prose", prose)):
        vocabulary: dict[str, int] = {}
        yield name, [vocabulary.setdefault(word, len(vocabulary)) for word in re.findall(r"\w+|\s+|[^\w\s]", text)]
    yield "never repeats", list(range(40_000))
    yield "one word", [7] * 40_000


# -- the contenders ------------------------------------------------------------


def stock_proposer(rows: int, max_model_len: int, options: NgramOptions) -> Callable[..., list[list[int]]]:
    """vLLM's own, built with the few settings that it reads."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer as StockProposer

    settings = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=options.min_n, prompt_lookup_max=options.max_n, num_speculative_tokens=K
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
    )
    return StockProposer(settings).propose


def our_proposer(rows: int, max_model_len: int, options: NgramOptions) -> NgramProposer:
    host = Host(
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        max_num_seqs=rows,
        num_speculative_tokens=K,
        hidden_size=1,
        device="cpu",
        dtype="bfloat16",
        seed=0,
        runner="v1",
        config=SpecConfig(proposer="ngram"),
    )
    proposer = NgramProposer(host, options)
    proposer.load(None)  # type: ignore[arg-type]
    return proposer


@dataclass
class TokenTable:
    """The engine's table of tokens `[rows, max_model_len]`, which is also the steps' history."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def host(self, row: int) -> NDArray[np.int32]:
        return self.tokens[row, : self.lengths[row]]

    def device(self, row: int) -> None:
        raise NotImplementedError

    def step(self, requests: list[Request], new: NDArray[np.int64]) -> Step:
        """The step that committed each row's last `new` tokens."""
        lengths = self.lengths.astype(np.int64)
        committed = [self.tokens[row, lengths[row] - count : lengths[row]] for row, count in enumerate(new)]
        return Step(
            requests=requests,
            k=K,
            committed_ids=np.concatenate(committed),
            committed_offsets=np.cumsum([0, *new], dtype=np.int64),
            lengths=lengths,
            limits=np.full(len(requests), K, dtype=np.int64),
            history=self,  # type: ignore[arg-type]
            noise=DraftNoise(0, requests, lengths),
        )


# -- one case ------------------------------------------------------------------


@dataclass
class Case:
    """One batch and context; milliseconds per step of each contender, by the clock and of the processor."""

    rows: int
    context: int
    wall: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CONTENDERS})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CONTENDERS})
    drafted: int = 0
    """Rows that both drafted for, over all steps; the others got nothing from either."""
    same: int = 0
    asked: int = 0
    bytes_per_token: float = 0.0
    index_ns_per_token: float = 0.0
    """Nanoseconds for each token of a new request."""

    @staticmethod
    def ratio(times: dict[str, list[float]]) -> str:
        return f"{np.median(times['stock']) / np.median(times['ours']):.0f}"


def run(rows: int, context: int, steps: int, options: NgramOptions) -> Case:
    case = Case(rows, context)
    max_model_len = context + (steps + 1) * NEW_PER_STEP[1] + K
    text = streams(rows, max_model_len)
    table = TokenTable(np.zeros((rows, max_model_len), dtype=np.int32), np.full(rows, context, dtype=np.int32))
    table.tokens[:, :context] = text[:, :context]
    requests = [Request(f"request-{row}") for row in range(rows)]
    stock = stock_proposer(rows, max_model_len, options)
    ours, behind = our_proposer(rows, max_model_len, options), our_proposer(rows, max_model_len, options)
    guard = Guard(behind, "ngram", budget_ms=60_000)
    random = np.random.default_rng(1)
    nothing = np.zeros(rows, dtype=np.int64)

    started = time.perf_counter()
    ours.propose(table.step(requests, nothing))
    case.index_ns_per_token = (time.perf_counter() - started) * 1e9 / (rows * context)
    guard.propose(table.step(requests, nothing))
    for number in range(steps):
        new = random.integers(NEW_PER_STEP[0], NEW_PER_STEP[1] + 1, size=rows)
        for row, count in enumerate(new):
            length = table.lengths[row]
            table.tokens[row, length : length + count] = text[row, length : length + count]
        table.lengths += new.astype(np.int32)
        answers: dict[str, object] = {}
        for place in range(3):
            name = CONTENDERS[(place + number) % 3]
            # What the engine hands over is made just before the call, as in the engine.
            step = table.step(requests, new)
            sampled = [step.committed(row).tolist() for row in range(rows)]
            started, cpu_started = time.perf_counter(), time.process_time()
            if name == "stock":
                answers[name] = stock(K, sampled, table.lengths, table.tokens)
            else:
                answers[name] = (ours if name == "ours" else guard).propose(step)
            ended, cpu_ended = time.perf_counter(), time.process_time()
            if number >= WARM_UP:
                case.wall[name].append((ended - started) * 1e3)
                case.cpu[name].append((cpu_ended - cpu_started) * 1e3)
        compare(case, table, options, answers, number < CHECKED)
    assert not guard.faults, guard.faults
    case.bytes_per_token = ours.index.used_bytes / int(table.lengths.sum())
    return case


def compare(case: Case, table: TokenTable, options: NgramOptions, answers: dict[str, object], by_hand: bool) -> None:
    """Count where both draft the same; stop if either drafts what its rule does not say."""
    drafts = answers["ours"]
    assert isinstance(drafts, Drafts)
    assert drafts.lengths is not None
    ours = [drafts.token_ids[row][: drafts.lengths[row]].tolist() for row in range(case.rows)]  # type: ignore[union-attr]
    stock: list[list[int]] = answers["stock"]  # type: ignore[assignment]
    assert answers["guarded"].rows() == ours  # type: ignore[attr-defined]
    case.asked += case.rows
    for row in range(case.rows):
        assert bool(ours[row]) == bool(stock[row]), "one drafts where the other does not"
        case.drafted += bool(ours[row])
        case.same += bool(ours[row]) and ours[row] == stock[row]
        if by_hand:
            tokens = table.host(row)
            ends = occurrences(tokens, options)
            assert stock[row] == (tokens[ends[0] : ends[0] + K].tolist() if len(ends) else [])
            known = tokens.tolist()
            for place in range(int(ends[-1]), int(ends[-1]) + K) if len(ends) else []:
                known.append(known[place])
            assert ours[row] == known[len(tokens) :]


def occurrences(tokens: NDArray[np.int32], options: NgramOptions) -> NDArray[np.int64]:
    """Where the earlier occurrences of the longest suffix that has any end, in order."""
    ends = np.arange(1, len(tokens))
    found = ends[:0]
    for n in range(1, options.max_n + 1):
        ends = ends[ends >= n]
        ends = ends[tokens[ends - n] == tokens[len(tokens) - n]]
        if len(ends) == 0:
            break
        found = ends if n >= options.min_n else found
    return found


# -- report --------------------------------------------------------------------


def milliseconds(times: list[float]) -> str:
    """Median and the middle half."""
    low, middle, high = np.percentile(times, [25, 50, 75])
    digits = 3 if middle < 1 else 2
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


HEADINGS = [
    "batch x context",
    "stock, ms per step",
    "ours, ms per step",
    "stock : ours",
    "the same, CPU time",
    "ours behind the guard, ms",
    "rows drafted for",
    "of these the same drafts",
    "bytes per token",
    "a new request, ns per token",
]


def cells(case: Case) -> list[str]:
    return [
        f"{case.rows} x {case.context:,}",
        milliseconds(case.wall["stock"]),
        milliseconds(case.wall["ours"]),
        case.ratio(case.wall),
        case.ratio(case.cpu),
        milliseconds(case.wall["guarded"]),
        f"{case.drafted / case.asked:.0%}",
        f"{case.same / max(1, case.drafted):.0%}",
        f"{case.bytes_per_token:.0f}",
        f"{case.index_ns_per_token:.0f}",
    ]


def memory_rows(options: NgramOptions) -> list[list[str]]:
    """Bytes per token of texts of several lengths, and table entries per token of the longest."""
    lines = []
    for name, tokens in natural_texts():
        costs, entries = [], 0.0
        for length in (1000, 4000, 16_000, 40_000):
            table = TokenTable(np.array([tokens[:length]], dtype=np.int32), np.array([length], dtype=np.int32))
            proposer = our_proposer(1, length, options)
            proposer.propose(table.step([Request("one")], np.zeros(1, dtype=np.int64)))
            assert len(proposer.index) == 1
            costs.append(f"{proposer.index.used_bytes / length:.0f}")
            entries = proposer.index.entries / length
        lines.append([name, *costs, f"{entries:.2f}"])
    return lines


def machine() -> str:
    """In general terms."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    avx = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "no AVX2")
    return f"{os.cpu_count()} cores with {avx}, shared with other work (load average {os.getloadavg()[0]:.1f} at the end)"


TEXT = """# N-gram drafting: stock vLLM 0.32 against this plugin

{date}, `{command}`. One thread, k = {k}, suffixes of {min_n} to {max_n} tokens, {steps} steps per case in which every request
gets 1 to 3 tokens. Times are medians by the clock, with the middle half in brackets; the contenders take turns within each step,
in rotating order. CPU time leaves out what other processes took.
Machine: {machine}.

{table}

The tokens are passages of 8 to 63, by turns new (Zipf's law over {vocab:,} ids) and copied from anywhere before, so that some
suffixes occur before and some do not. Stock searches all known tokens in each step. Ours looks up what was committed; the last
column is what a request costs once, when it is first drafted for, and growing an index is part of the times.

*Behind the guard* is what a step of an engine pays: drafting in a thread of its own, with every check. The ratios leave it out;
with it, a single request of 2,048 tokens costs more than stock's scan, and everything larger less.

**Same drafts?** Both look for the longest suffix that occurs earlier, so both draft for the same rows (checked in every step).
Where that suffix occurs more than once, stock continues its *earliest* occurrence and ours its *latest*; and where the
occurrence is so recent that the known tokens end within the draft, stock stops there while ours goes on with its own copies.
In the first {checked} steps of each case every draft of both was compared with a search by hand under exactly these rules.
What the lengths of the suffix do to acceptance: [ngram-options.md](ngram-options.md).

## Memory

Bytes per token of one request, by its length, and table entries per token at the longest. Words and signs of the texts that come
with Python stand for tokens.

{memory}

A block is a power of two, so a request costs between one and two times what it needs: 16 to 32 bytes per token for text that
makes no more table entries than it has tokens, and 64 at the very most (no text makes more than two entries per token).
"""


def markdown_table(headings: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(headings)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *lines))


def parse_case(text: str) -> tuple[int, int]:
    rows, context = text.lower().split("x")
    return int(rows), int(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    parser.add_argument("--steps", type=int, default=60, help="steps per case (60)")
    parser.add_argument("--case", type=parse_case, action="append", help="batch x context, again for more (all four)")
    parser.add_argument("--min-n", type=int, default=NgramOptions().min_n)
    parser.add_argument("--max-n", type=int, default=NgramOptions().max_n)
    arguments = parser.parse_args()
    numba.set_num_threads(1)
    options = NgramOptions(min_n=arguments.min_n, max_n=arguments.max_n, index_tokens_per_step=1 << 30)

    console = Console() if sys.stdout.isatty() else Console(width=160)
    cases = []
    for rows, context in arguments.case or CASES:
        console.print(f"{rows} x {context:,} ...")
        cases.append(run(rows, context, arguments.steps + WARM_UP, options))
        gc.collect()
    memory_headings = ["text", "1,000", "4,000", "16,000", "40,000", "entries per token"]
    memory = memory_rows(options)
    for title, headings, lines in (
        ("one thread, medians (middle half)", HEADINGS, [cells(case) for case in cases]),
        ("bytes per token", memory_headings, memory),
    ):
        table = Table(*headings, title=title)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(case) for case in cases], indent=1))
    if arguments.markdown:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(
            TEXT.format(
                date=datetime.date.today().isoformat(),
                command="make bench",
                k=K,
                min_n=options.min_n,
                max_n=options.max_n,
                steps=arguments.steps,
                machine=machine(),
                vocab=VOCAB,
                checked=CHECKED,
                table=markdown_table(HEADINGS, [cells(case) for case in cases]),
                memory=markdown_table(memory_headings, memory),
            )
        )


if __name__ == "__main__":
    main()
