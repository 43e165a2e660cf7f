"""Steps for tests that need no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_specplugin import Host, Request, Step
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.noise import DraftNoise


def host(vocab_size: int = 100, max_model_len: int = 512, k: int = 4, **more: Any) -> Host:
    """The engine around a proposer under test."""
    fields: dict[str, Any] = {
        "max_num_seqs": 8,
        "hidden_size": 16,
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "runner": "v1",
        "config": SpecConfig(proposer="ngram"),
    }
    return Host(vocab_size=vocab_size, max_model_len=max_model_len, num_speculative_tokens=k, **(fields | more))


class Tokens:
    """`History` over lists."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = [np.asarray(row, dtype=np.int32) for row in rows]

    def host(self, row: int) -> NDArray[np.int32]:
        return self.rows[row]

    def device(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[row])


def step(
    known: dict[str, Sequence[int]],
    committed: dict[str, int] | None = None,
    k: int = 4,
    limits: Sequence[int] | None = None,
    requests: dict[str, Request] | None = None,
    hidden_size: int = 16,
) -> Step:
    """A step over requests by id: all their known tokens, and how many of them are new (1 unless said)."""
    rows = [requests[name] if requests else Request(name) for name in known]
    tokens = [np.asarray(row, dtype=np.int32) for row in known.values()]
    counts = [1 if committed is None else committed.get(name, 1) for name in known]
    lengths = np.array([len(row) for row in tokens], dtype=np.int64)
    return Step(
        requests=rows,
        k=k,
        committed_ids=np.concatenate([row[len(row) - count :] for row, count in zip(tokens, counts, strict=True)]),
        committed_offsets=np.cumsum([0, *counts], dtype=np.int64),
        lengths=lengths,
        limits=np.full(len(rows), k, dtype=np.int64) if limits is None else np.asarray(limits, dtype=np.int64),
        history=Tokens(list(known.values())),
        noise=DraftNoise(0, rows, lengths),
        hidden_states=torch.stack([state_after(row, hidden_size) for row in tokens]) if tokens else None,
    )


def state_after(tokens: Sequence[int] | NDArray[np.int32], hidden_size: int = 16) -> torch.Tensor:
    """`[hidden]`: the last hidden state of a made-up target, by its last two tokens and how many there are."""
    generator = torch.Generator().manual_seed(hash((len(tokens), *map(int, tokens[-2:]))) & 0x7FFF_FFFF)
    return torch.randn(hidden_size, generator=generator)
