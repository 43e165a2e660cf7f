"""Head options and multi-token prediction, ablated on a tiny model: what each does to the main head and to drafts.

    python benchmarks/head_options.py [--quick] [--seeds N] [--steps N] [--markdown FILE] [--plot FILE] [--json FILE]

Every run is a Llama of two layers that learns an invented language, a minute or less on one core. A row is trained once per
seed, and differences are taken between runs of the same seed, which see the same texts in the same order from the same trunk.
`--quick` is a smoke test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from verification_report import fill

from vllm_specplugin.train.batch import Batch, TokenSource
from vllm_specplugin.train.loop import Loop
from vllm_specplugin.train.mtp import FrozenMTP, FrozenParts, JointMTP, MTPObjective
from vllm_specplugin.train.objective import acceptance, acceptance_length
from vllm_specplugin.train.options import MTPOptions, parse_options
from vllm_specplugin.train.pretrain import make_heads, weights_of
from vllm_specplugin.train.progress import Screen
from vllm_specplugin.train.trunk import Trunk, trunk_of

DEPTH = 4
LENGTH = 64
"""Tokens per text."""
HELD_OUT = 400
"""Texts."""
BATCH_TOKENS = 2048

# -- the language ------------------------------------------------------------------------------------------

KEYS, VALUES, LETTERS = 8, 12, 76
VOCAB = KEYS + VALUES + LETTERS
WORDS, FOLLOWERS = 64, 4
FOLLOWER_ODDS = np.array([0.55, 0.25, 0.12, 0.08])


class Language:
    """Words of two to four letters, each followed by one of four others; and keys, each followed by its value in this text.

    Within a word the next letters are certain, between words there is chance, and what follows a key that has occurred before
    can only be known from the text: three kinds of token, as real text has them.
    """

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        first = KEYS + VALUES
        self.words = [random.integers(first, VOCAB, size=random.integers(2, 5)).tolist() for _ in range(WORDS)]
        self.followers = [random.choice(WORDS, size=FOLLOWERS, replace=False) for _ in range(WORDS)]

    def text(self, random: np.random.Generator) -> tuple[list[int], list[int], list[int]]:
        """`LENGTH` tokens, the places of values whose key has occurred before, and those of letters from a word's third on."""
        tokens: list[int] = []
        recalled: list[int] = []
        spelt: list[int] = []
        value_of: dict[int, int] = {}
        word = int(random.integers(WORDS))
        while len(tokens) < LENGTH:
            if random.random() < 0.3:
                key = int(random.choice(list(value_of))) if value_of and random.random() < 0.6 else int(random.integers(KEYS))
                if key in value_of:
                    recalled.append(len(tokens) + 1)
                value_of.setdefault(key, KEYS + int(random.integers(VALUES)))
                tokens += [key, value_of[key]]
            else:
                word = int(random.choice(self.followers[word], p=FOLLOWER_ODDS))
                spelt += range(len(tokens) + 2, len(tokens) + len(self.words[word]))
                tokens += self.words[word]
        return tokens[:LENGTH], [place for place in recalled if place < LENGTH], [place for place in spelt if place < LENGTH]


@dataclass(frozen=True)
class Corpus:
    train: TokenSource
    held_out: TokenSource
    recalled: Tensor
    """`[held-out texts, LENGTH]` bool: values that the text holds already."""
    spelt: Tensor
    """`[held-out texts, LENGTH]` bool: letters from a word's third on."""


def make_corpus(texts: int) -> Corpus:
    language, random = Language(), np.random.default_rng(1)
    made = [language.text(random) for _ in range(texts + HELD_OUT)]
    recalled, spelt = torch.zeros(2, HELD_OUT, LENGTH, dtype=torch.bool)
    for row, (_, recalls, spellings) in enumerate(made[texts:]):
        recalled[row, recalls] = True
        spelt[row, spellings] = True

    def source(part: Sequence[tuple[list[int], list[int], list[int]]]) -> TokenSource:
        return TokenSource([np.array(tokens, dtype=np.int32) for tokens, *_ in part], [0] * len(part))

    return Corpus(source(made[:texts]), source(made[texts:]), recalled, spelt)


# -- a run -------------------------------------------------------------------------------------------------

MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Figures:
    """Of one trained run, on the held-out texts."""

    loss: float
    """The main head's, in nats per token."""
    recall: float
    """The share of values which the text already holds that are the main head's first choice."""
    spelling: float
    """The same of letters from a word's third on."""
    accepted: list[float]
    """Of each draft, given those before it."""
    length: float
    """The acceptance length that these come to."""
    seconds: float


class States:
    """A source with the hidden states of a trunk that does not learn."""

    def __init__(self, tokens: TokenSource, trunk: Trunk) -> None:
        self.tokens, self.trunk = tokens, trunk

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.tokens.lengths

    @torch.no_grad()
    def read(self, examples: Sequence[int]) -> Batch:
        batch = self.tokens.read(examples)
        return Batch(batch.token_ids, batch.valid, batch.counts, self.trunk(batch.token_ids).after_norm)


def options_of(seed: int, steps: int, folder: Path, **given: Any) -> MTPOptions:
    general = {"target": "tiny", "data": "language", "out": folder, "steps": steps, "batch_tokens": BATCH_TOKENS}
    more = {"dtype": "float32", "device": "cpu", "depth": DEPTH, "seed": seed, "lr": 4e-3, "checkpoint_minutes": 1e6}
    return parse_options(MTPOptions, {**general, **more, "evaluations": 0, **given})


def train(objective: MTPObjective, source: Any, options: MTPOptions) -> float:
    """Seconds of training."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        here = options.model_copy(update={"out": Path(folder)})
        Loop(objective, source, None, here, torch.device("cpu"), Screen(enabled=False)).run()
    return time.perf_counter() - began


@torch.no_grad()
def look(objective: MTPObjective, trunk: Trunk, corpus: Corpus, seconds: float) -> Figures:
    objective.eval()
    batch = States(corpus.held_out, trunk).read(range(HELD_OUT))
    losses = objective.loss(batch)
    states = trunk(batch.token_ids)
    logits = states.after_norm[:, :-1] @ states.output.T
    labels = batch.token_ids[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    right = (logits.argmax(dim=-1) == labels).float()
    recall, spelling = (float(right[asked[:, 1:]].mean()) for asked in (corpus.recalled, corpus.spelt))
    rates = acceptance(losses.right, losses.tested)
    return Figures(float(loss), recall, spelling, rates, acceptance_length(rates), seconds)


def joint(corpus: Corpus, seed: int, steps: int, **given: Any) -> tuple[Figures, JointMTP]:
    """The trunk and its heads from scratch."""
    options = options_of(seed, steps, Path("."), trunk="scratch", **given)
    torch.manual_seed(seed)
    trunk = trunk_of(MODEL)
    heads = make_heads(options, MODEL, trunk.output.detach(), trunk.final_norm.detach())
    objective = JointMTP(trunk, heads, weights_of(options), lambda *arguments: None)
    seconds = train(objective, corpus.train, options)
    return look(objective, trunk, corpus, seconds), objective


def frozen(corpus: Corpus, trunk: Trunk, seed: int, steps: int, **given: Any) -> Figures:
    """Heads for a trunk that has been trained without them."""
    options = options_of(seed, steps, Path("."), **given)
    torch.manual_seed(1000 + seed)
    output, norm = trunk.output.detach(), trunk.final_norm.detach()
    heads = make_heads(options, MODEL, output, norm)
    embedding = trunk.model.get_input_embeddings().weight.detach()  # type: ignore[operator, union-attr]
    objective = FrozenMTP(FrozenParts(embedding, output, norm), heads, weights_of(options), lambda *arguments: None)
    seconds = train(objective, States(corpus.train, trunk), options)
    return look(objective, trunk, corpus, seconds)


# -- the tables --------------------------------------------------------------------------------------------

NONE, PARALLEL, SEQUENTIAL = "none (lambda 0)", "parallel", "sequential, shared"
PRETRAINING: dict[str, dict[str, Any]] = {
    NONE: {"lambdas": "0", "variant": "parallel"},
    PARALLEL: {"variant": "parallel"},
    "parallel, lambda 1": {"variant": "parallel", "lambdas": "1"},
    SEQUENTIAL: {"variant": "sequential"},
    "sequential, separate": {"variant": "sequential", "modules": "separate"},
}
"""lambda is 0.3 where nothing is said."""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    PARALLEL: {
        "gated": {"gated": True},
        "norm pre": {"norm": "pre"},
        "norm post": {"norm": "post"},
        "output scale": {"output_scale": True},
    },
    SEQUENTIAL: {"gated": {"gated": True}, "output scale": {"output_scale": True}},
}


@dataclass
class Table:
    """Rows of figures, one per seed; the first row is what the others are held against."""

    title: str
    joint: bool
    rows: dict[str, list[Figures]] = field(default_factory=dict)


def measure(seeds: int, steps: int, texts: int, told: Callable[[list[Table]], None], console: Console) -> list[Table]:
    """All tables; `told` is called with what there is after each run."""
    corpus = make_corpus(texts)
    trunks: dict[int, Trunk] = {}  # by seed: trained without heads
    tables: list[Table] = []

    def note(table: Table, name: str, seed: int, found: Figures) -> None:
        table.rows.setdefault(name, []).append(found)
        figures = f"loss {found.loss:.4f}, spelling {found.spelling:.3f}, length {found.length:.3f} ({found.seconds:.0f} s)"
        console.print(f"{table.title}: {name}, seed {seed}: {figures}", style="dim")
        told(tables)

    pretraining = Table("Pre-training, equal tokens", joint=True)
    tables.append(pretraining)
    for seed in range(seeds):
        for name, given in PRETRAINING.items():
            found, objective = joint(corpus, seed, steps, **given)
            note(pretraining, name, seed, found)
            if name == NONE:
                trunks[seed] = objective.trunk.requires_grad_(False)
    for variant, options in OPTIONS.items():
        table = Table(f"Options, {variant}, trunk frozen", joint=False)
        tables.append(table)
        for seed in range(seeds):
            for name, given in {"plain": {}, **options}.items():
                note(table, name, seed, frozen(corpus, trunks[seed], seed, steps, **PRETRAINING[variant], **given))
    for variant, options in OPTIONS.items():
        table = Table(f"Options, {variant}, trained with the trunk", joint=True)
        tables.append(table)
        for seed in range(seeds):
            note(table, "plain", seed, pretraining.rows[variant][seed])  # the same run
            for name, given in options.items():
                note(table, name, seed, joint(corpus, seed, steps, **PRETRAINING[variant], **given)[0])
    return tables


def over_seeds(values: Sequence[float], digits: int = 3) -> str:
    """Mean, and the range where it is not one value."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{mean(values):.{digits}f}" + (f" ({low} to {high})" if low != high else "")


def against(values: Sequence[float], base: Sequence[float], digits: int = 3) -> str:
    """The paired difference: its mean, and how many seeds agree with its sign."""
    apart = [one - other for one, other in zip(values, base, strict=True)]
    sign = sum(difference * mean(apart) > 0 for difference in apart)
    return f"{mean(apart):+.{digits}f} ({sign} of {len(apart)})"


def markdown(tables: Sequence[Table], facts: str) -> str:
    lines = [facts, ""]
    for table in tables:
        lines += [f"### {table.title}", ""]
        titles = ["", "acceptance length", "difference", "accepted, draft 1, 2, 3"]
        if table.joint:
            titles += ["main loss", "difference", "spelling", "recall"]
        lines += [f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}"]
        base = next(iter(table.rows.values()))
        for name, runs in table.rows.items():
            trained = name != NONE
            rates = [mean(run.accepted[draft] for run in runs) for draft in range(DEPTH - 1)]
            first = table.rows.get(PARALLEL, base)  # the first row that has drafts
            lengths = [run.length for run in runs]
            first, start = first[: len(runs)], base[: len(runs)]  # of the same seeds
            cells = [
                name,
                over_seeds(lengths) if trained else "-",
                against(lengths, [run.length for run in first]) if trained and lengths != [run.length for run in first] else "-",
                " ".join(f"{rate:.1%}" for rate in rates) if trained else "-",
            ]
            if table.joint:
                losses = [run.loss for run in runs]
                cells += [
                    over_seeds(losses, 4),
                    against(losses, [run.loss for run in start], 4) if runs is not base else "-",
                    over_seeds([run.spelling for run in runs]),
                    over_seeds([run.recall for run in runs]),
                ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def plot(tables: Sequence[Table], file: Path) -> None:
    """Main loss against acceptance length for what is trained together; acceptance length by option for frozen trunks."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left, right = axes
    for name, runs in tables[0].rows.items():
        if name == NONE:
            losses = [run.loss for run in runs]
            left.axhspan(min(losses), max(losses), color="0.85", label="without extra depths")
        else:
            left.plot([run.length for run in runs], [run.loss for run in runs], "o", label=name)
    left.set(xlabel="acceptance length", ylabel="main loss (nats/token)", title="Pre-training, a point per seed")
    left.legend(fontsize=7)
    labels, place = [], 0
    for table, colour in zip(tables[1:], ("C0", "C1", "C2", "C3"), strict=False):
        base = [run.length for run in next(iter(table.rows.values()))]
        kind = f"{'parallel' if PARALLEL in table.title else 'sequential'}, {'joint' if table.joint else 'frozen'}"
        for name, runs in list(table.rows.items())[1:]:
            apart = [run.length - first for run, first in zip(runs, base, strict=False)]
            right.plot(apart, [place] * len(apart), "o", color=colour)
            labels.append(f"{name} ({kind})")
            place += 1
    right.axvline(0.0, color="0.6", linewidth=1)
    right.set_yticks(range(place), labels, fontsize=7)
    right.invert_yaxis()
    right.set(xlabel="acceptance length, difference to plain", title="Options, a point per seed")
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and a few steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--texts", type=int, default=6000)
    for name in ("--markdown", "--plot", "--json"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.steps, given.texts = 1, 5, 200
    console = Console(highlight=False)
    facts = (
        f"{datetime.date.today().isoformat()}, torch {torch.__version__}: {given.steps} steps of {BATCH_TOKENS} tokens, "
        f"D = {DEPTH}; figures over {HELD_OUT} held-out texts of {LENGTH} tokens."
    )

    def write(tables: list[Table]) -> None:
        if given.markdown:
            page = given.markdown.read_text(encoding="utf-8")
            given.markdown.write_text(fill(page, {"measured": markdown(tables, facts)}), encoding="utf-8")
        if given.json:
            found = {table.title: {name: [asdict(run) for run in runs] for name, runs in table.rows.items()} for table in tables}
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")

    tables = measure(given.seeds, given.steps, given.texts, write, console)
    console.print(markdown(tables, facts))
    if given.plot:
        plot(tables, given.plot)


if __name__ == "__main__":
    main()
