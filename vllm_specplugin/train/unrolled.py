"""What the objectives of EAGLE and EAGLE-3 share: running a head as it will draft, several tokens on, from every place at once.

EAGLE-3 (arXiv 2503.01840, section 3.2) calls it the training-time test: step j reads what step j - 1 put out in place of the
target's state, as in serving. The tokens are those of the text and not the head's own drafts: where a draft was wrong
nothing after it counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm_specplugin.heads.decoder import Unrolled
from vllm_specplugin.heads.eagle import DraftHead
from vllm_specplugin.train.batch import Batch
from vllm_specplugin.train.losses import CrossEntropy, SoftLabels, cross_entropy
from vllm_specplugin.train.objective import Losses, Objective, chained
from vllm_specplugin.train.options import UnrolledOptions
from vllm_specplugin.train.target import FrozenTarget


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Where drafting starts: the places after which the target wrote the next token, packed to the left of each row."""

    places: Tensor
    """`[rows, chains]` int64, ascending."""
    live: Tensor
    """`[rows, chains]` bool: False where a row has fewer than others."""

    @classmethod
    def of(cls, batch: Batch) -> Chains:
        # At serving a place is drafted from once the target has chosen the token after it; the one after that is known here.
        starts = batch.counts[:, 1:-1]
        number = int(starts.sum(dim=1).max())
        places = starts.int().argsort(dim=1, descending=True, stable=True)[:, :number]
        return cls(places, starts.take_along_dim(places, dim=1))

    def ahead(self, sequence: Tensor, by: int) -> Tensor:
        """What stands `by` places after each: `[rows, length, ...]` -> `[rows, chains, ...]`; past the end the last one."""
        index = (self.places + by).clamp(max=sequence.shape[1] - 1)
        return sequence.take_along_dim(index.reshape(*index.shape, *[1] * (sequence.ndim - 2)), dim=1)

    def reach(self, marks: Tensor, by: int) -> Tensor:
        """Whether there is a place `by` places after each, and it is marked: `[rows, length]` bool -> `[rows, chains]`."""
        return self.live & (self.places + by < marks.shape[1]) & self.ahead(marks, by)


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The places of one unrolled step that are learnt from."""

    hidden: Tensor
    """`[n, hidden]`: what the head put out there."""
    target: Tensor
    """`[n, hidden]`: the target's last state from which it chose the token that is to be drafted."""
    labels: Tensor
    """`[n]` int64: that token, as the output layer in use numbers it."""


class UnrolledObjective(Objective):
    """Trains a `DraftHead` on `ttt_steps` drafts from every place whose next token the target wrote."""

    label_of: Tensor
    """`[vocab]` int64: the row of the output layer that stands for each of the target's tokens; -1 where none does."""

    def __init__(self, head: DraftHead, target: FrozenTarget, options: UnrolledOptions) -> None:
        super().__init__()
        self.head = head
        self.ttt_steps, self.step_decay = options.ttt_steps, options.step_decay
        self.soft, self.accepted_only = options.labels == "soft", options.chains == "accepted"
        self.max_position_embeddings = int(target.config.get("max_position_embeddings", 8192))
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("label_of", torch.arange(target.vocab_size), persistent=False)

    @property
    def depth(self) -> int:
        return self.ttt_steps

    @abstractmethod
    def states_of(self, batch: Batch) -> Tensor:
        """The target's states that the head reads: `[rows, length, ...]`."""

    def labels(self, tokens: Tensor) -> Tensor:
        """The rows of the output layer for some of the target's tokens, -1 where there is none."""
        return self.label_of[tokens]

    @abstractmethod
    def judge(self, judged: Judged, weights: Tensor) -> tuple[CrossEntropy, Mapping[str, Tensor]]:
        """The loss of one step's places (`total` as cross_entropy makes it, by `weights [n]`), and its parts beside it."""

    def loss(self, batch: Batch) -> Losses:
        chains = Chains.of(batch)
        alive, right, known = chains.live, [], []
        parts: dict[str, Tensor] = {}
        total = batch.last.new_zeros((), dtype=torch.float32)
        for step, hidden in enumerate(self.unroll(batch, chains)):
            # Draft `step` of the chain from place t is to be token t + 2 + step, which the target chose one place before.
            there = chains.reach(batch.counts, 2 + step)
            labels = self.labels(chains.ahead(batch.token_ids, 2 + step))
            learnt = there & alive & (labels >= 0)
            judged = Judged(hidden[learnt], chains.ahead(batch.last, 1 + step)[learnt], labels[learnt])
            weights = hidden.new_full((len(judged.labels),), self.step_decay**step / batch.num_counted, dtype=torch.float32)
            entropy, more = self.judge(judged, weights)
            total = total + entropy.total
            for name, part in {"cross-entropy": entropy.nats.sum() / batch.num_counted, **more}.items():
                parts[name] = parts.get(name, 0) + part.detach()
            guessed = torch.zeros_like(there)
            guessed[learnt] = entropy.best == judged.labels
            # A held-out loss runs over every draft: else a head that is right more often, and so goes on to more of them, would
            # have more terms in its sum, and the higher loss.
            alive = guessed if self.accepted_only and self.training else alive
            right.append(guessed[chains.live])
            known.append(there[chains.live])
        return Losses(total, parts, *chained(torch.stack(right, dim=1), torch.stack(known, dim=1)))

    def unroll(self, batch: Batch, chains: Chains) -> Iterator[Tensor]:
        """Each step's output where chains start: `[rows, chains, hidden]`."""
        states = self.states_of(batch)[:, :-1]
        text, context = torch.arange(states.shape[1], device=states.device), Unrolled(chains.places)
        hidden = self.head(self._embed(batch.token_ids[:, 1:]), self.head.fuse(states), text, context, chains.places)
        yield hidden
        for step in range(1, self.ttt_steps):
            embeddings = self._embed(chains.ahead(batch.token_ids, 1 + step))
            hidden = self.head(embeddings, hidden, chains.places + step, context)
            yield hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.embedding)

    def cross_entropy(
        self, states: Tensor, output: Tensor, judged: Judged, weights: Tensor, target_output: Tensor
    ) -> CrossEntropy:
        """The head's distribution against the target's own at those places, or against the tokens that it wrote."""
        if self.soft:
            return cross_entropy(states, output, weights, soft=SoftLabels(judged.target, target_output))
        return cross_entropy(states, output, weights, labels=judged.labels)
