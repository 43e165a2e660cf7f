"""Batches of training examples: which examples go together, in which order, and the tensors that objectives see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

BUCKET_BATCHES = 16
"""Examples are sorted by length within so many batches' worth of them: little padding, and still a new order every epoch."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some examples side by side, padded on the right: `rows` examples, `length` places each."""

    token_ids: torch.Tensor
    """`[rows, length]` int64; 0 where padded."""
    valid: torch.Tensor
    """`[rows, length]` bool: False for padding."""
    counts: torch.Tensor
    """`[rows, length]` bool: the target wrote the token at this place, so predicting it counts."""
    hidden_states: torch.Tensor | None = None
    """`[rows, length, hidden]`: the target's last hidden state after its final norm, what its output layer reads and what
    the engine hands to drafters; None where the objective runs the trunk itself."""
    aux_hidden_states: torch.Tensor | None = None
    """`[rows, length, layers * hidden]`: the inputs of the auxiliary layers, joined; None unless the objective asks for them."""

    @property
    def num_counted(self) -> int:
        """Places that count, which losses are divided by: the same for each depth, so that batches can be added up."""
        return int(self.counts.sum())

    @property
    def last(self) -> torch.Tensor:
        """The hidden states, for objectives that asked for them."""
        if self.hidden_states is None:
            raise ValueError("this batch carries no hidden states; the objective's `states` must be 'last' or 'aux'")
        return self.hidden_states

    @property
    def aux(self) -> torch.Tensor:
        """The auxiliary hidden states, for objectives that asked for them."""
        if self.aux_hidden_states is None:
            raise ValueError("this batch carries no auxiliary hidden states; the objective's `states` must be 'aux'")
        return self.aux_hidden_states

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: tensor.to(device) for name, tensor in moved.items() if tensor is not None})


class Source(Protocol):
    """A set of examples of which batches can be read."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """`[examples]`: tokens of each."""
        ...

    def read(self, examples: Sequence[int]) -> Batch:
        """The batch of these examples, in this order, on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Tokens alone, for objectives that run the trunk themselves."""

    token_ids: Sequence[NDArray[np.integer]]
    """`[examples]` arrays."""
    answer_from: Sequence[int]
    """`[examples]`: the first token that the target wrote."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(ids) for ids in self.token_ids], dtype=np.int64)

    def read(self, examples: Sequence[int]) -> Batch:
        return pad([self.token_ids[i] for i in examples], [self.answer_from[i] for i in examples])


@dataclass(frozen=True, slots=True)
class Subset:
    """Some examples of a source, as a source of their own."""

    source: Source
    examples: Sequence[int]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.source.lengths[list(self.examples)]

    def read(self, examples: Sequence[int]) -> Batch:
        return self.source.read([self.examples[i] for i in examples])


def pad(token_ids: Sequence[NDArray[np.integer]], answer_from: Sequence[int]) -> Batch:
    """The batch of these examples, without hidden states."""
    shape = (len(token_ids), max(map(len, token_ids)))
    ids = torch.zeros(shape, dtype=torch.int64)
    places = torch.arange(shape[1])
    lengths = torch.tensor([len(row) for row in token_ids])
    for row, tokens in enumerate(token_ids):
        ids[row, : len(tokens)] = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    valid = places < lengths[:, None]
    return Batch(token_ids=ids, valid=valid, counts=valid & (places >= torch.tensor(answer_from)[:, None]))


def plan_epoch(lengths: NDArray[np.int64], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Which examples make up each batch of an epoch: every example once, in an order that (seed, epoch) decides.

    Neighbours in length share a batch, and a batch holds at most `batch_tokens` places, padding included (an example
    that is longer than that is a batch of its own).
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    window = max(1, round(BUCKET_BATCHES * batch_tokens / max(1.0, float(lengths.mean()))))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        batches += _cut(part[np.argsort(lengths[part], kind="stable")], lengths, batch_tokens)
    return [batches[i] for i in random.permutation(len(batches))]


def in_order(lengths: NDArray[np.int64], batch_tokens: int) -> list[list[int]]:
    """Batches of all examples, shortest first: for passes in which the order changes nothing."""
    return _cut(np.argsort(lengths, kind="stable"), lengths, batch_tokens)


def _cut(sorted_by_length: NDArray[np.int64], lengths: NDArray[np.int64], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for example in sorted_by_length.tolist():
        # The newest one is the longest, so it says how wide the whole batch would be.
        if batches and (len(batches[-1]) + 1) * int(lengths[example]) <= batch_tokens:
            batches[-1].append(example)
        else:
            batches.append([example])
    return batches
