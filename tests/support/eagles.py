"""A tiny target with text of its own, and EAGLE heads trained on it: what training and serving are tested on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.chains import Target
from tests.support.tiny import tiny_model
from vllm_specplugin.train.batch import Batch, pad
from vllm_specplugin.train.eagle import EagleObjective
from vllm_specplugin.train.eagle3 import Eagle3Objective
from vllm_specplugin.train.objective import acceptance, acceptance_length
from vllm_specplugin.train.options import Eagle3Options, EagleOptions, UnrolledOptions
from vllm_specplugin.train.target import FrozenTarget, Setting
from vllm_specplugin.train.unrolled import UnrolledObjective

VOCAB = 32
LAYERS = 7  # the fewest of which EAGLE-3 can read three different ones
AUX_LAYERS = (2, 3, 4)
PROMPT = 4  # tokens
DEFAULTS: Mapping[str, Any] = {"out": Path("unused"), "target": "tiny", "data": Path("unused"), "ttt_steps": 3}


@dataclass(frozen=True)
class Tiny:
    """A random target, which says what it says when it takes the likeliest token each time: hard to guess, easy to learn."""

    folder: Path

    @classmethod
    def make(cls) -> Tiny:
        return cls(tiny_model(vocab_size=VOCAB, layers=LAYERS))

    @cached_property
    def target(self) -> Target:
        return Target.load(self.folder)

    @cached_property
    def frozen(self) -> FrozenTarget:
        config = json.loads((self.folder / "config.json").read_text())
        output, embedding = self.target.output.detach(), self.target.embedding.detach()
        return FrozenTarget("tiny", self.folder, config, output=output, embedding=embedding, num_layers=LAYERS)

    def prompts(self, number: int, seed: int) -> list[list[int]]:
        return np.random.default_rng(seed).integers(VOCAB, size=(number, PROMPT)).tolist()

    def texts(self, number: int, tokens: int, seed: int = 0) -> list[list[int]]:
        """Prompts and the answers to them, of different lengths."""
        whole = self.target.greedy(self.prompts(number, seed), tokens)
        return [text[: len(text) - 3 * (i % 4)] for i, text in enumerate(whole)]

    def batch(self, texts: Sequence[Sequence[int]]) -> Batch:
        """The texts with the target's states."""
        padded = pad([np.array(text) for text in texts], [PROMPT] * len(texts))
        last, aux = [], []
        for row in padded.token_ids.tolist():
            last.append(self.target.states(row))
            aux.append(self.target.states(row, AUX_LAYERS))
        return replace(padded, hidden_states=torch.cat(last), aux_hidden_states=torch.cat(aux))

    def setting(self, batch: Batch) -> Setting:
        counts = torch.bincount(batch.token_ids[batch.counts], minlength=VOCAB)
        return Setting(self.frozen, counts, torch.float32)

    def options(self, family: str, **options: Any) -> UnrolledOptions:
        return {"eagle": EagleOptions, "eagle3": Eagle3Options}[family](**DEFAULTS | options)

    def objective(self, family: str, batch: Batch, **options: Any) -> UnrolledObjective:
        """A new objective, its head drawn from seed 0."""
        torch.manual_seed(0)
        objective: Any = {"eagle": EagleObjective, "eagle3": Eagle3Objective}[family]
        return objective.build(self.options(family, **options), self.setting(batch))  # type: ignore[no-any-return]


def fit(objective: UnrolledObjective, batch: Batch, steps: int, lr: float = 3e-3) -> None:
    """Train on one batch."""
    optimiser = torch.optim.AdamW(objective.parameters(), lr=lr)
    objective.train()
    for _ in range(steps):
        optimiser.zero_grad()
        objective.loss(batch).total.backward()
        optimiser.step()
    objective.eval()


@torch.no_grad()
def length_on(objective: UnrolledObjective, batch: Batch) -> float:
    """The estimated acceptance length."""
    losses = objective.eval().loss(batch)
    return acceptance_length(acceptance(losses.right, losses.tested))
