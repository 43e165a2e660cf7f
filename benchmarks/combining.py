"""`predicted` and `hybrid`: tokens per target pass on edits of known texts, and what drafting costs per step.

    python benchmarks/combining.py --tokenizer FOLDER [--markdown FILE] [--texts N] [--steps N]

Answers are given, so that acceptance is exact and no model is needed: a pass accepts the drafts that agree with the answer, as
greedy verification does. The texts are stretches of Python's standard library in the tokenizer's tokens (any Hugging Face
tokenizer; the demo model's folder has one: `vllm-specplugin demo-model`). About a minute.
"""

from __future__ import annotations

import argparse
import datetime
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from vllm_specplugin import Host, Request, Step
from vllm_specplugin.config import SpecConfig, resolve
from vllm_specplugin.guard import Guard
from vllm_specplugin.noise import DraftNoise

K = 16
LINES = 60
PARTS = ["predicted", "suffix"]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "predicted": {"proposer": "predicted"},
    "suffix": {"proposer": "suffix"},
    "hybrid": {"proposer": "hybrid", "options": {"proposers": PARTS}},
}
WARM_UP = 5
"""Steps before the clock counts."""


# -- edits ---------------------------------------------------------------------

Edit = Callable[[list[str], random.Random], list[str]]


def renamed(lines: list[str], dice: random.Random) -> list[str]:
    names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", "\n".join(lines))))
    old, new = dice.choice(names), dice.choice(["total", "widget_count", "x", "handler"])
    return [re.sub(rf"\b{old}\b", new, line) for line in lines]


def five_lines(lines: list[str], dice: random.Random) -> list[str]:
    lines = list(lines)
    for _ in range(5):
        place = dice.randrange(len(lines))
        match dice.randrange(3):
            case 0:
                del lines[place]
            case 1:
                lines.insert(place, "    # " + dice.choice(["note that this is new", "check the bounds first", "later"]))
            case 2:
                lines[place] = lines[place].replace("=", "==", 1)
    return lines


def moved(lines: list[str], dice: random.Random) -> list[str]:
    first = dice.randrange(10, 30)
    return lines[first + 15 :] + lines[first : first + 15] + lines[:first]


def every_third(lines: list[str], dice: random.Random) -> list[str]:
    return [line if place % 3 else line[::-1] for place, line in enumerate(lines)]


EDITS: dict[str, Edit] = {
    "none": lambda lines, dice: lines,
    "a name renamed everywhere": renamed,
    "five lines changed, inserted or deleted": five_lines,
    "parts moved about": moved,
    "every third line turned round": every_third,
}


def stretches(count: int, dice: random.Random) -> list[list[str]]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found: list[list[str]] = []
    while len(found) < count:
        lines = dice.choice(files).read_text(errors="replace").splitlines()
        if len(lines) > LINES:
            first = dice.randrange(len(lines) - LINES)
            found.append(lines[first : first + LINES])
    return found


# -- replaying -----------------------------------------------------------------


class Texts:
    """`History` over each row's tokens so far."""

    def __init__(self, rows: Sequence[NDArray[np.int32]]) -> None:
        self.rows = rows

    def host(self, row: int) -> NDArray[np.int32]:
        return self.rows[row]

    def device(self, row: int) -> Any:
        raise NotImplementedError


def guarded(raw: dict[str, Any], k: int, vocab: int, rows: int, max_model_len: int) -> Guard:
    resolved = resolve(SpecConfig.parse({**raw, "num_speculative_tokens": k, "draft_budget_ms": 60_000.0}))
    host = Host(
        vocab_size=vocab,
        max_model_len=max_model_len,
        max_num_seqs=rows,
        num_speculative_tokens=k,
        hidden_size=1,
        device="cpu",
        dtype="bfloat16",
        seed=0,
        runner="v1",
        config=resolved.config,
    )
    proposer = resolved.proposer(host, resolved.options)
    proposer.load(None)  # type: ignore[arg-type]
    return Guard(proposer, resolved.config.proposer, 60_000.0)


def step_of(requests: list[Request], texts: list[NDArray[np.int32]], new: Sequence[int], k: int) -> Step:
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    return Step(
        requests=requests,
        k=k,
        committed_ids=np.concatenate([text[len(text) - count :] for text, count in zip(texts, new, strict=True)]),
        committed_offsets=np.cumsum([0, *new], dtype=np.int64),
        lengths=lengths,
        limits=np.full(len(texts), k, dtype=np.int64),
        history=Texts(texts),
        noise=DraftNoise(0, requests, lengths),
    )


@dataclass
class Tally:
    """What came of some requests."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    """Accepted tokens by part."""


def replay(
    guard: Guard, name: str, prompt: Sequence[int], answer: Sequence[int], prediction: Sequence[int], tally: Tally
) -> None:
    """One request, a pass after the other."""
    request = Request(name, prediction=tuple(prediction))
    text = np.array([*prompt, *answer], dtype=np.int32)
    done, new = 1, 1
    while done < len(answer):
        checked = guard.propose(step_of([request], [text[: len(prompt) + done]], [new], K))
        drafts = checked.rows()[0]
        right = [draft == token for draft, token in zip(drafts, answer[done:], strict=False)]
        accepted = right.index(False) if False in right else len(right)
        tally.drafted += len(drafts)
        tally.accepted += accepted
        if checked.sources:
            tally.sources[checked.sources[0]] += accepted
        new = min(accepted + 1, len(answer) - done)
        done += new
        tally.passes += 1
    tally.tokens += len(answer) - 1
    guard.forget([name])


def acceptance(encode: Callable[[str], list[int]], vocab: int, texts: list[list[str]]) -> list[list[str]]:
    """For each edit and configuration: tokens per pass and share accepted. The prompt holds the text, as an editor's would."""
    lines = []
    for title, edit in EDITS.items():
        cells = [title]
        for raw in CONFIGURATIONS.values():
            tally, dice = Tally(), random.Random(1)
            guard = guarded(raw, K, vocab, 1, 32_768)
            for place, text in enumerate(texts):
                old, new = encode("\n".join(text)), encode("\n" + "\n".join(edit(text, dice)))
                replay(guard, str(place), old, new, old, tally)
            assert not guard.faults
            cells.append(f"{tally.tokens / tally.passes:.1f} ({tally.accepted / max(tally.drafted, 1):.0%})")
        lines.append(cells)
    return lines


def step_times(rows: int, agreement: float, steps: int) -> list[str]:
    """Processor time per step behind the guard, in ms: k = 8, 4 tokens committed per row, so many of them as predicted."""
    dice = np.random.default_rng(0)
    length = 4 * (steps + 1)
    predictions = [dice.integers(0, 50_000, length) for _ in range(rows)]
    answers = [
        np.where(dice.random(length) < agreement, text, dice.integers(0, 50_000, length)).astype(np.int32) for text in predictions
    ]
    requests = [Request(f"r{row}", prediction=tuple(text.tolist())) for row, text in enumerate(predictions)]
    cells = [str(rows), f"{agreement:.0%}"]
    for raw in CONFIGURATIONS.values():
        guard, times = guarded(raw, 8, 50_000, rows, 2 * length), []
        for number in range(steps):
            step = step_of(requests, [answer[: 4 * number + 4] for answer in answers], [4] * rows, 8)
            started = time.process_time()
            guard.propose(step)
            times.append((time.process_time() - started) * 1e3)
        assert not guard.faults
        cells.append(f"{np.median(times[WARM_UP:]):.2f}")
    return cells


# -- report --------------------------------------------------------------------

TEXT = """# Predictions and hybrids: acceptance and cost

{date}, `{command}`.

Answers are given and drafts held against them, as greedy verification does; k = {k}. Each of {count} texts is {lines} lines of
Python's standard library, in the prompt and as the prediction; the answer is an edit of it. Tokens per target pass, and in
brackets the share of drafts that is accepted. The hybrid is made of {parts}.

{acceptance}

Processor time per step behind the guard in milliseconds, medians of {steps} steps at k = 8, on a shared and busy machine.
"Agreement" is how many
tokens of the answer are the prediction's: at 0 % it is looked for in vain in every step.

{times}
"""


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * len(headings), *rows))


def printed(title: str, headings: list[str], rows: list[list[str]]) -> None:
    table = Table(*headings, title=title)
    for cells in rows:
        table.add_row(*cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokenizer", required=True, help="folder of a Hugging Face tokenizer")
    parser.add_argument("--markdown", type=Path, help="write the report here")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.tokenizer)
    texts = stretches(asked.texts, random.Random(5))
    found = acceptance(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), len(tokenizer), texts)
    times = [step_times(rows, agreement, asked.steps) for rows in (1, 64, 256) for agreement in (0.95, 0.0)]
    headings = (["edit", *CONFIGURATIONS], ["batch", "agreement", *CONFIGURATIONS])
    printed("Tokens per pass (accepted)", headings[0], found)
    printed("CPU ms per step", headings[1], times)
    if asked.markdown:
        said = TEXT.format(
            date=datetime.date.today().isoformat(),
            command=f"python benchmarks/combining.py --tokenizer FOLDER {' '.join(sys.argv[3:])}".strip(),
            k=K,
            count=asked.texts,
            lines=LINES,
            parts=" and ".join(PARTS),
            acceptance=markdown(headings[0], found),
            steps=asked.steps,
            times=markdown(headings[1], times),
        )
        asked.markdown.write_text(said, encoding="utf-8")


if __name__ == "__main__":
    main()
