"""Control over real drafts without an engine: known answers are replayed on a clock of their own, in seconds instead of an hour.

    python benchmarks/control_replay.py --answers FILE [--model MODEL] [--times N] [--markdown FILE]

The answers are a model's to `bench`'s built-in traffic; where the file is not there, `--model` writes it (plain decoding, two
minutes on two cores). N-gram drafts are made for them, as many requests at once as a cell says, each followed by another; a pass
accepts the drafts that agree, and takes as long as `MILLISECONDS` says of its rows, 3 % of noise included. Plain decoding,
adaptive and fixed draft lengths serve the same requests. One control lives through all cells, so that in each it has to unlearn
what the one before has taught. Prompts cost nothing here, and the clock stops when nobody is left to take a free place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from combining import guarded, step_of
from numpy.typing import NDArray

from vllm_specplugin import Request
from vllm_specplugin.arithmetic import fast_type
from vllm_specplugin.bench.table import markdown_table
from vllm_specplugin.bench.traffic import KINDS, RANDOM, built_in
from vllm_specplugin.control.controller import Controller

PER_KIND, TOKENS = 96, 32
K_ADAPTIVE, KS = 10, (1, 2, 4, 8)
REQUESTS = {1: 14, 2: 24, 4: 32, 8: 48, 16: 64, 32: 96, 64: 192}
"""Concurrency -> requests of a cell."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 117, 205, 408, 700)
MILLISECONDS = (27.5, 28, 29, 33, 42, 68, 115, 183, 259, 503, 860)
"""Of a pass over so many rows: SmolLM2-135M in bfloat16 on two cores of an AMD EPYC."""
START_UP = ((1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (49.7, 31.4, 32.7, 36.9, 51.1, 74.2, 132, 204, 359, 598))
"""Rows and milliseconds as control once timed them at start-up, beside six other engines that were starting."""
ASKING = 1e-4
"""Seconds that drafting takes."""
NOISE = 0.03
HEADINGS = ("traffic", "at once", "adaptive : plain", "drafts per pass", "best fixed k", "it : plain", "adaptive : best fixed")

Answers = dict[str, list[tuple[list[int], list[int]]]]
"""Kind -> prompt and answer of each request."""


@dataclass
class Running:
    """One request that is served."""

    request: Request
    text: NDArray[np.int32]
    answer: list[int]
    at: int = 0
    new: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


@dataclass
class Cell:
    """What one engine did in one cell."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    drafts: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Replay:
    """An engine that answers what is known already."""

    def __init__(self, k: int, adaptive: bool = False) -> None:
        self.k, self.now = k, 0.0
        self._noise = np.random.default_rng(0)
        self._guard = guarded({"proposer": "ngram"}, k, 1 << 17, max(REQUESTS), 4096) if k else None
        self._control = Controller("ngram", k, max(REQUESTS), clock=lambda: self.now) if adaptive else None
        if self._control is not None:
            self._control.calibrate(START_UP[0], [each / 1e3 for each in START_UP[1]])
        self._served = 0

    def serve(self, pairs: Sequence[tuple[list[int], list[int]]], at_once: int) -> Cell:
        """Serve requests, so many at any time."""
        cell, waiting, live = Cell(), list(pairs), list[Running]()
        while waiting or live:
            live += [self._begin(*waiting.pop(0)) for _ in range(min(at_once - len(live), len(waiting)))]
            began, tested = self.now, np.array([len(each.drafts) for each in live], dtype=np.int64)
            pass_seconds = float(np.interp(len(live) + tested.sum(), ROWS, MILLISECONDS)) / 1e3
            self.now += pass_seconds * float(np.exp(self._noise.normal(0, NOISE)))
            for each in live:
                accepted = agreeing(each.drafts, each.answer[each.at :])
                each.new, each.drafts = each.answer[each.at : each.at + accepted + 1], []
                each.at += len(each.new)
                each.text = np.concatenate([each.text, np.array(each.new, dtype=np.int32)])
            self._draft(live, tested)
            if waiting:  # afterwards the load falls
                cell.tokens, cell.seconds = cell.tokens + sum(len(each.new) for each in live), cell.seconds + self.now - began
                cell.passes, cell.drafts = cell.passes + len(live), cell.drafts + int(tested.sum())
            self._forget([each.request.request_id for each in live if each.at >= len(each.answer)])
            live = [each for each in live if each.at < len(each.answer)]
        return cell

    def _begin(self, prompt: list[int], answer: list[int]) -> Running:
        self._served += 1
        request = Request(request_id=f"r{self._served}", temperature=0.0, seed=None)
        return Running(request, np.array([*prompt, answer[0]], dtype=np.int32), answer[:TOKENS], at=1)

    def _draft(self, running: Sequence[Running], tested: NDArray[np.int64]) -> None:
        """Drafts for the next pass, as many of them as control wants verified."""
        if self._guard is None:
            return
        ids = [each.request.request_id for each in running]
        new = [len(each.new) for each in running]
        step = step_of([each.request for each in running], [each.text for each in running], new, self.k)
        control = self._control
        if control is not None:
            committed = np.array([token for each in running for token in each.new])
            control.begin(ids, committed, np.concatenate([[0], np.cumsum(new)]), tested)
            if not control.asks(ids):
                self._guard.skip(ids)
                control.end()
                return
        drafts = self._guard.propose(step)
        self.now += ASKING
        lengths = drafts.lengths
        if control is not None:
            left = np.array([max(len(each.answer) - each.at - 1, 0) for each in running])
            limits = np.minimum(step.limits, left)
            lengths = control.lengths(ids, drafts.token_ids, drafts.lengths, limits, ASKING, None, drafts.expected)
            control.end()
        for each, ids_of_row, length in zip(running, drafts.token_ids.tolist(), lengths.tolist(), strict=True):
            each.drafts = ids_of_row[:length]

    def _forget(self, gone: list[str]) -> None:
        if gone and self._guard is not None:
            self._guard.forget(gone)
        if gone and self._control is not None:
            self._control.forget(gone)


def agreeing(drafts: Sequence[int], answer: Sequence[int]) -> int:
    """How many drafts, from the first on, are the answer's tokens."""
    for place, (draft, token) in enumerate(zip(drafts, answer, strict=False)):
        if draft != token:
            return place
    return min(len(drafts), len(answer))


def run(engine: Replay, answers: Answers, times: int) -> dict[tuple[str, int], Cell]:
    """All cells, one after the other."""
    found = {}
    taken = 0
    for at_once, requests in REQUESTS.items():
        places = range(taken, taken + times * requests)
        for kind, pairs in answers.items():
            found[kind, at_once] = engine.serve([pairs[place % len(pairs)] for place in places], at_once)
        taken = places.stop
    return found


def answers_of(model: str) -> Answers:
    """Let a model answer the traffic by plain decoding."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    dtype: Any = fast_type(str(current_platform.device_type))
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_seqs": max(REQUESTS),
        "kv_cache_memory_bytes": 2**31,  # on a CPU it would take all that is free,
        "gpu_memory_utilization": 0.5,  # or refuse to, where others have some
    }
    llm = LLM(model, dtype=dtype, **arguments)
    found: Answers = {}
    for kind in KINDS:
        prompts = built_in(llm.get_tokenizer(), [kind], PER_KIND, 0).take(PER_KIND)
        params = SamplingParams(temperature=1.0 if kind == RANDOM else 0.0, max_tokens=TOKENS, ignore_eos=True)
        outputs: list[Any] = llm.generate([TokensPrompt(prompt_token_ids=each) for each in prompts], params)
        found[kind] = [(prompt, list(out.outputs[0].token_ids)) for prompt, out in zip(prompts, outputs, strict=True)]
    return found


def report(cells: dict[str, dict[tuple[str, int], Cell]]) -> list[str]:
    """The table as Markdown, and what it comes to."""
    rows, over_plain, over_best = [], [], []
    for (kind, at_once), plain in cells["plain"].items():
        adaptive = cells["adaptive"][kind, at_once]
        k, best = max(((k, cells[f"k={k}"][kind, at_once].rate) for k in KS), key=lambda pair: pair[1])
        over_plain.append(adaptive.rate / plain.rate)
        over_best.append(adaptive.rate / best)
        rows.append(
            [
                kind,
                str(at_once),
                f"{over_plain[-1]:.3f}",
                f"{adaptive.drafts / adaptive.passes:.2f}",
                str(k),
                f"{best / plain.rate:.3f}",
                f"{over_best[-1]:.3f}",
            ]
        )
    ahead = sum(ratio >= 1 for ratio in over_best)
    summary = (
        f"Adaptive over plain decoding: {min(over_plain):.3f} to {max(over_plain):.3f}. Over the best fixed k of each cell: "
        f"{min(over_best):.3f} at least, ahead in {ahead} of {len(rows)}."
    )
    return [*markdown_table(HEADINGS, rows), "", summary]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=Path, required=True, help="JSON; written if it is not there")
    parser.add_argument("--model", help="who answers then")
    parser.add_argument("--times", type=int, default=1, help="as many requests in each cell")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if not options.answers.exists():
        if options.model is None:
            parser.error(f"{options.answers} is not there; name a --model to answer")
        options.answers.write_text(json.dumps(answers_of(options.model)), encoding="utf-8")
    answers: Answers = json.loads(options.answers.read_text(encoding="utf-8"))
    engines = {"plain": Replay(0), "adaptive": Replay(K_ADAPTIVE, adaptive=True), **{f"k={k}": Replay(k) for k in KS}}
    text = "\n".join(report({name: run(engine, answers, options.times) for name, engine in engines.items()}))
    print(text)
    if options.markdown:
        command = f"`python benchmarks/control_replay.py --answers answers.json --model MODEL --times {options.times}`"
        title = f"# Control over replayed answers\n\n{command}; what is replayed and what a pass takes stands in the script.\n\n"
        options.markdown.write_text(title + text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
