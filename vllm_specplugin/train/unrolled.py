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

from vllm_specplugin.heads.decoder import Unrolled, at_places
from vllm_specplugin.heads.eagle import DraftHead
from vllm_specplugin.train.batch import Batch
from vllm_specplugin.train.losses import CrossEntropy, SoftLabels, cross_entropy
from vllm_specplugin.train.objective import Losses, Objective
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
        places = _packed(starts)
        return cls(places, starts.take_along_dim(places, dim=1))

    def ahead(self, sequence: Tensor, by: int) -> Tensor:
        """What stands `by` places after each: `[rows, length, ...]` -> `[rows, chains, ...]`; past the end the last one."""
        index = (self.places + by).clamp(max=sequence.shape[1] - 1)
        return sequence.take_along_dim(index.reshape(*index.shape, *[1] * (sequence.ndim - 2)), dim=1)

    def reach(self, marks: Tensor, by: int) -> Tensor:
        """Whether there is a place `by` places after each, and it is marked: `[rows, length]` bool -> `[rows, chains]`."""
        return self.live & (self.places + by < marks.shape[1]) & self.ahead(marks, by)


class Drafting:
    """A head's run over a batch: an iterator of what each step puts out at the chains that are left, `[rows, chains, hidden]`."""

    def __init__(self, objective: UnrolledObjective, batch: Batch) -> None:
        self.objective, self.batch = objective, batch
        self.chains = Chains.of(batch)
        self.right = self.chains.live
        """`[rows, chains]` bool: every draft before this step's is right."""
        self._context = Unrolled(self.chains.places)
        self._hidden: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        head, tokens = self.objective.head, self.batch.token_ids
        states = self.objective.states_of(self.batch)[:, :-1]
        text = torch.arange(states.shape[1], device=states.device)
        embedded = self._embed(tokens[:, 1:])
        self._hidden = head(embedded, head.fuse(states), text, self._context, self.chains.places)
        yield self._hidden
        for step in range(1, self.objective.ttt_steps):
            if not self.chains.places.shape[1]:
                return
            embedded = self._embed(self.chains.ahead(tokens, 1 + step))
            self._hidden = head(embedded, self._hidden, self.chains.places + step, self._context)
            yield self._hidden

    def go_on(self, right: Tensor, drop_others: bool) -> None:
        """Say where this step's drafts and those before them are right, `[rows, chains]`, and perhaps compute no others again."""
        self.right = right
        if drop_others and self._hidden is not None:
            order = _packed(right)
            self.right = right.take_along_dim(order, dim=1)
            self.chains = Chains(self.chains.places.take_along_dim(order, dim=1), self.right)
            self._hidden = at_places(self._hidden, order)
            self._context.keep(order)

    def _embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.objective.embedding)


def _packed(marks: Tensor) -> Tensor:
    """Where the marks of each row are, ascending; the rows with fewer than others have other places behind: `[rows, most]`."""
    return marks.int().argsort(dim=1, descending=True, stable=True)[:, : int(marks.sum(dim=1).max())]


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
        drafting = Drafting(self, batch)
        right, tested = (torch.zeros(self.ttt_steps, dtype=torch.int64, device=batch.token_ids.device) for _ in range(2))
        parts: dict[str, Tensor] = {}
        total = batch.last.new_zeros((), dtype=torch.float32)
        # Serving, and training with it, goes on where all drafts are right. A held-out loss runs over every draft: else a head
        # that is right more often, and so goes on to more of them, would have more terms in its sum, and the higher loss.
        accepted_only = self.accepted_only and self.training
        for step, hidden in enumerate(drafting):
            chains, reached = drafting.chains, drafting.right
            # Draft `step` of the chain from place t is to be token t + 2 + step, which the target chose one place before.
            there = chains.reach(batch.counts, 2 + step)
            labels = self.labels(chains.ahead(batch.token_ids, 2 + step))
            learnt = there & (labels >= 0)
            judged = Judged(hidden[learnt], chains.ahead(batch.last, 1 + step)[learnt], labels[learnt])
            weights = hidden.new_full((len(judged.labels),), self.step_decay**step / batch.num_counted, dtype=torch.float32)
            entropy, more = self.judge(judged, weights)
            total = total + entropy.total
            for name, part in {"cross-entropy": entropy.nats.sum() / batch.num_counted, **more}.items():
                parts[name] = parts.get(name, 0) + part.detach()
            guessed = torch.zeros_like(there)
            guessed[learnt] = entropy.best == judged.labels
            right[step], tested[step] = (guessed & reached).sum(), (there & reached).sum()
            drafting.go_on(guessed & reached, drop_others=accepted_only)
        return Losses(total, parts, right, tested)

    def cross_entropy(
        self, states: Tensor, output: Tensor, judged: Judged, weights: Tensor, target_output: Tensor
    ) -> CrossEntropy:
        """The head's distribution against the target's own at those places, or against the tokens that it wrote."""
        if self.soft:
            return cross_entropy(states, output, weights, soft=SoftLabels(judged.target, target_output))
        return cross_entropy(states, output, weights, labels=judged.labels)
