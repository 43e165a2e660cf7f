"""Suffix decoding: this plugin against the arctic-inference package's SuffixDecodingCache, in the same run on the same tokens.

    python benchmarks/suffix.py TOKENIZER [--markdown FILE] [--json FILE] [--requests N] [--k K] [--batch B ...]

`TOKENIZER` is a tokenizer.json, such as the one in the folder that `vllm-specplugin demo-model` prints. The package is asked as
vLLM's own method `suffix` asks it, with that method's defaults; it comes from `pip install arctic-inference`, or from building
`csrc/suffix_decoding` of its source distribution alone (CMake and nanobind), which is all that is needed here.

Answers are known beforehand and replayed (`suffix_traffic`): a draft is accepted as far as it is the answer's. Each contender
moves at its own pace through the same queue of requests, and they take turns, a step at a time. All cases together take about
ten minutes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from ngram import machine, markdown_table
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from suffix_traffic import MAX_ANSWER, MAX_PROMPT, TRAFFIC, Exchange
from tokenizers import Tokenizer

from vllm_specplugin import Host, Request, Step
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.noise import DraftNoise
from vllm_specplugin.proposers.suffix import SuffixOptions, SuffixProposer

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:
    SuffixDecodingCache = None

VOCAB = 49_152
BATCHES = (1, 16, 64)
CAUTIOUS = 0.5
"""A `min_token_prob` at which few drafts are refused."""

# vLLM's defaults for its method `suffix`.
ARCTIC_DEPTH, ARCTIC_CACHED, ARCTIC_FACTOR, ARCTIC_LEAST = 24, 10_000, 1.0, 0.1


@dataclass
class Tally:
    """What a contender did in one case; milliseconds per step, by the clock and of the thread, of steps with a full batch."""

    kind: str
    batch: int
    contender: str
    tokens: int = 0
    passes: int = 0
    """Of single rows, the first one of each request left out: nothing could be drafted for it."""
    drafted: int = 0
    accepted: int = 0
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def per_pass(self) -> float:
        return self.tokens / self.passes

    def cells(self) -> list[str]:
        low, middle, high = np.percentile(self.wall, [25, 50, 75])
        return [
            self.kind,
            str(self.batch),
            self.contender,
            f"{self.per_pass:.2f}",
            f"{self.drafted / self.passes:.1f}",
            f"{self.accepted / self.drafted:.0%}" if self.drafted else "none drafted",
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            f"{np.median(self.cpu):.3f}",
            f"{np.mean(self.cpu):.3f}",
            f"{np.mean(self.cpu) * 1000 / self.batch / self.per_pass:.1f}",
        ]


HEADINGS = [
    "traffic",
    "batch",
    "drafts by",
    "tokens per pass",
    "drafts per pass",
    "accepted",
    "ms per step, median (middle half)",
    "CPU ms per step, median",
    "mean",
    "CPU us per token",
]


@dataclass
class Row:
    """A running request."""

    request: Request
    answer: Sequence[int]
    done: int = 0
    drafts: list[int] = field(default_factory=list)


class Watch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.thread_time()

    def read(self) -> tuple[float, float]:
        """Seconds by the clock, and of this thread alone, whatever else the machine does."""
        return time.perf_counter() - self.wall, time.thread_time() - self.cpu


class Replay(ABC):
    """One contender's way through a queue of requests."""

    def __init__(self, exchanges: Sequence[Exchange], k: int, tally: Tally) -> None:
        self.k, self.tally = k, tally
        self.waiting = list(enumerate(exchanges))[::-1]
        self.tokens = np.zeros((tally.batch, MAX_PROMPT + MAX_ANSWER), dtype=np.int32)
        self.lengths = np.zeros(tally.batch, dtype=np.int64)
        self.slots: list[Row | None] = [None] * tally.batch

    def step(self) -> bool:
        """Commit what the target makes of the last drafts, and draft anew; False when all is answered."""
        ended = []
        for slot, row in enumerate(self.slots):
            if row is not None and row.done == len(row.answer):
                ended.append(row.request.request_id)
                self.slots[slot] = None
            if self.slots[slot] is None and self.waiting:
                number, exchange = self.waiting.pop()
                self.slots[slot] = Row(Request(f"request-{number}", arrival=number), exchange.answer)
                self.tokens[slot, : len(exchange.prompt)] = exchange.prompt
                self.lengths[slot] = len(exchange.prompt)
        places = [slot for slot, row in enumerate(self.slots) if row is not None]
        if not places:
            return False
        counts = np.array([self._commit(slot) for slot in places])
        drafts, wall, cpu = self.draft(places, counts, ended)
        for slot, ids in zip(places, drafts, strict=True):
            row = self.slots[slot]
            assert row is not None
            row.drafts = ids
        if len(places) == self.tally.batch:
            self.tally.wall.append(wall * 1e3)
            self.tally.cpu.append(cpu * 1e3)
        return True

    def _commit(self, slot: int) -> int:
        row, tally = self.slots[slot], self.tally
        assert row is not None
        left = row.answer[row.done :]
        accepted = 0
        while accepted < min(len(row.drafts), len(left)) and row.drafts[accepted] == left[accepted]:
            accepted += 1
        count = min(accepted + 1, len(left))
        if row.done:
            tally.tokens += count
            tally.passes += 1
            tally.drafted += len(row.drafts)
            tally.accepted += accepted
        length = self.lengths[slot]
        self.tokens[slot, length : length + count] = left[:count]
        self.lengths[slot] += count
        row.done += count
        return count

    @abstractmethod
    def draft(self, places: list[int], counts: NDArray[np.int64], ended: list[str]) -> tuple[list[list[int]], float, float]:
        """Drafts for the rows at `places`, which committed so many tokens, and what a `Watch` read."""


class Ours(Replay):
    def __init__(self, exchanges: Sequence[Exchange], k: int, tally: Tally, options: SuffixOptions) -> None:
        super().__init__(exchanges, k, tally)
        around = Host(
            vocab_size=VOCAB,
            max_model_len=MAX_PROMPT + MAX_ANSWER,
            max_num_seqs=tally.batch,
            num_speculative_tokens=k,
            hidden_size=1,
            device="cpu",
            dtype="bfloat16",
            seed=0,
            runner="v1",
            config=SpecConfig(proposer="suffix"),
        )
        self.proposer = SuffixProposer(around, options)
        self.proposer.load(None)  # type: ignore[arg-type]
        self.places: list[int] = []

    def host(self, row: int) -> NDArray[np.int32]:
        slot = self.places[row]
        return self.tokens[slot, : self.lengths[slot]]

    def device(self, row: int) -> None:
        raise NotImplementedError

    def draft(self, places: list[int], counts: NDArray[np.int64], ended: list[str]) -> tuple[list[list[int]], float, float]:
        self.places = places
        lengths = self.lengths[places]
        requests = [row.request for slot in places if (row := self.slots[slot]) is not None]
        step = Step(
            requests=requests,
            k=self.k,
            committed_ids=np.concatenate([self.host(row)[-count:] for row, count in enumerate(counts)]),
            committed_offsets=np.cumsum([0, *counts], dtype=np.int64),
            lengths=lengths,
            limits=np.full(len(places), self.k, dtype=np.int64),
            history=self,  # type: ignore[arg-type]
            noise=DraftNoise(0, requests, lengths),
        )
        watch = Watch()
        if ended:
            self.proposer.forget(ended)
        drafts = self.proposer.propose(step)
        times = watch.read()
        rows = [drafts.token_ids[row, : drafts.lengths[row]].tolist() for row in range(len(places))]  # type: ignore[index, union-attr, call-overload]
        return rows, *times


class Arctic(Replay):
    def __init__(self, exchanges: Sequence[Exchange], k: int, tally: Tally) -> None:
        super().__init__(exchanges, k, tally)
        self.cache = SuffixDecodingCache(max_tree_depth=ARCTIC_DEPTH, max_cached_requests=ARCTIC_CACHED)

    def draft(self, places: list[int], counts: NDArray[np.int64], ended: list[str]) -> tuple[list[list[int]], float, float]:
        names = [row.request.request_id for slot in places if (row := self.slots[slot]) is not None]
        lengths = self.lengths[places].tolist()
        new = [
            self.tokens[slot, length - count : length].tolist()
            for slot, length, count in zip(places, lengths, counts, strict=True)
        ]
        drafts = []
        watch = Watch()
        for name, slot, length, ids in zip(names, places, lengths, new, strict=True):
            if name not in self.cache.active_requests:
                self.cache.start_request(name, self.tokens[slot, : length - len(ids)])
            self.cache.add_active_response(name, ids)
            context = self.tokens[slot, max(0, length - ARCTIC_DEPTH) : length]
            draft = self.cache.speculate(
                name, context, max_spec_tokens=self.k, max_spec_factor=ARCTIC_FACTOR, min_token_prob=ARCTIC_LEAST
            )
            drafts.append(draft.token_ids)
        for name in self.cache.active_requests - set(names):
            self.cache.stop_request(name)
        return drafts, *watch.read()


def run(kind: str, exchanges: list[Exchange], batch: int, k: int) -> list[Tally]:
    """One case: every contender answers all requests."""
    names = ("arctic-inference", "ours", f"ours, min_token_prob {CAUTIOUS}")
    arctic, ours, cautious = (Tally(kind, batch, name) for name in names)
    contenders: list[Replay] = [
        Arctic(exchanges, k, arctic),
        Ours(exchanges, k, ours, SuffixOptions()),
        Ours(exchanges, k, cautious, SuffixOptions(min_token_prob=CAUTIOUS)),
    ]
    running, number = contenders, 0
    while running:
        first = number % len(running)
        running = [contender for contender in running[first:] + running[:first] if contender.step()]
        number += 1
    return [arctic, ours, cautious]


def by_k(traffic: dict[str, list[Exchange]], ks: Sequence[int], batch: int) -> list[list[str]]:
    """Tokens per pass of ours by k."""
    lines = []
    for k in ks:
        cells = [str(k)]
        for kind, exchanges in traffic.items():
            tally = Tally(kind, batch, "ours")
            replay = Ours(exchanges, k, tally, SuffixOptions())
            while replay.step():
                pass
            cells.append(f"{tally.per_pass:.2f} ({tally.drafted / tally.passes:.1f} drafts)")
        lines.append(cells)
    return lines


TEXT = """# Suffix decoding: arctic-inference against this plugin

{date}, `python benchmarks/suffix.py`. One thread, k = {k}, {requests} requests per case; arctic-inference is asked as vLLM's
method `suffix` asks it, with that method's defaults. Answers are replayed: a draft is accepted as far as it is the known answer.
Each contender goes through the same queue at its own pace, and they take turns, a step at a time. Times are of steps with
a full batch, and of all that a step asks of the drafter: requests that end, that begin (whose prompts are taken in), committed
tokens, drafts; CPU time is the thread's own, and leaves out what the machine did besides. Machine: {machine}.

{table}

*Tokens per pass* counts the token that the target adds itself. *CPU us per token* is the mean step over the tokens that its batch
emits. The kinds of traffic (`benchmarks/suffix_traffic.py`): tool calls as JSON with a sentence before, arguments drawn anew;
code of Python's standard library that comes back with one line in eight changed, each passage asked for four times; Python's
manual, which repeats little; tokens by chance. Text is tokenised as by the demo's model.

**Why more is accepted.** Both look for the latest tokens in the request and in earlier answers. The package drafts as many tokens
as it matched (a factor of 1.0), along one path that a fixed threshold on counts prunes. Here each token is the better forecast
of two trees, and each forecast's odds are measured as they come true, so that a good one is followed for all of k and a bad one
is not followed at all: on random tokens nothing is drafted. `min_token_prob` trades drafts that are refused for tokens per pass:
at {cautious} tool calls and code edits still give more tokens per pass than the package, of drafts that are refused no more
often; new prose gives fewer.

**Time.** At a batch of 1 about 10 us of a step are the same whatever it holds: Python, and calling compiled code. So where
there is nothing to draft the package takes a few microseconds less there, and the mean of short requests, each of which needs a
tree of its own, is higher.

## How far to draft

Tokens per pass by k, at a batch of {by_k_batch}, all options at their defaults; the drafts per pass in brackets.

{by_k}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    parser.add_argument("--requests", type=int, default=256, help="per case (256)")
    parser.add_argument("--k", type=int, default=SuffixProposer.adaptive_num_speculative_tokens)
    parser.add_argument("--batch", type=int, action="append", help="again for more (1, 16, 64)")
    arguments = parser.parse_args()
    if SuffixDecodingCache is None:
        sys.exit("arctic_inference is not installed; how to get it: python benchmarks/suffix.py --help")
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    traffic = {
        kind: make(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), arguments.requests, 0)
        for kind, make in TRAFFIC.items()
    }
    console = Console() if sys.stdout.isatty() else Console(width=180)
    tallies = []
    for kind, exchanges in traffic.items():
        for batch in arguments.batch or BATCHES:
            console.print(f"{kind}, batch {batch} ...")
            tallies += run(kind, exchanges, batch, arguments.k)
            gc.collect()
    ks = by_k(traffic, (4, 8, 12, 16, 24), batch=16)
    lines = [tally.cells() for tally in tallies]
    for headings, rows in ((HEADINGS, lines), (["k", *traffic], ks)):
        table = Table(*headings)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(tally) for tally in tallies]))
    if arguments.markdown:
        arguments.markdown.write_text(
            TEXT.format(
                date=datetime.date.today().isoformat(),
                k=arguments.k,
                cautious=CAUTIOUS,
                requests=arguments.requests,
                machine=machine(),
                table=markdown_table(HEADINGS, lines),
                by_k_batch=16,
                by_k=markdown_table(["k", *traffic], ks),
            )
        )


if __name__ == "__main__":
    main()
