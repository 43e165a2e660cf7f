"""A small target and text that heads can learn in seconds, for tests of training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from tests.support import tiny
from vllm_specplugin.train.batch import TokenSource
from vllm_specplugin.train.data import Example
from vllm_specplugin.train.options import MedusaOptions, OptionsT
from vllm_specplugin.train.progress import Screen
from vllm_specplugin.train.states import token_source

VOCAB_SIZE = 61
"""A prime of which 7 is a generator, so that the law below goes around."""
LAYERS = 8
"""Enough that EAGLE-3's three layers, 2, 4 and 5, are different ones."""


def law(token: int) -> int:
    """The text's only rule: each token decides the next one. All tokens lie on one circle, but for 30, which follows itself."""
    return (token * 7 + 3) % VOCAB_SIZE


def text(start: int, length: int) -> list[int]:
    ids = [start]
    while len(ids) < length:
        ids.append(law(ids[-1]))
    return ids


def examples(count: int = 40, seed: int = 0, prompt: int = 4) -> list[Example]:
    """Texts of different lengths, the first `prompt` tokens of which do not count."""
    draw = random.Random(seed)
    return [Example(tuple(text(draw.randrange(30), draw.randint(12, 40))), prompt) for _ in range(count)]


def write_data(file: Path, count: int = 40, seed: int = 0) -> Path:
    """The same as `distill` writes it."""
    lines = [
        {"prompt_token_ids": e.token_ids[: e.answer_from], "token_ids": e.token_ids[e.answer_from :]}
        for e in examples(count, seed)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def target(layers: int = LAYERS) -> Path:
    """A random target over this vocabulary: its states tell the tokens apart (the better the fewer layers), as the law needs."""
    return tiny.tiny_model(vocab_size=VOCAB_SIZE, layers=layers)


def run_options(kind: type[OptionsT], folder: Path, **more: Any) -> OptionsT:
    """Options of a run of seconds in float32, its data and cache below `folder`."""
    data = folder / "data.jsonl"
    if not data.exists():
        write_data(data)
    said: dict[str, Any] = {
        "target": str(target()),
        "data": data,
        "out": folder / "out",
        "cache": folder / "cache",
        "steps": 40,
        "batch_tokens": 512,
        "lr": 2e-2,
        "dtype": "float32",
        "evaluations": 2,
        **more,
    }
    return kind(**said)


def medusa_options(folder: Path, **more: Any) -> MedusaOptions:
    """The same for three Medusa heads."""
    return run_options(MedusaOptions, folder, **{"num_heads": 3, **more})


def silent() -> Screen:
    return Screen(enabled=False)


def tokens_of(count: int = 40) -> TokenSource:
    return token_source(examples(count))


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
