"""What is written down of each token that the engine under test emits: columns, so that a million of them stay small.

Under losslessness an emitted token x follows p, the target's distribution at its place, whatever was known before the
draft was looked at. So for a set A of tokens chosen from p and q alone, 1{x in A} has the mean p(A); each record holds such
pairs for a few sets that are chosen to be sensitive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Kind(IntEnum):
    """How a token came to be."""

    ACCEPTED = 0
    """A draft that was accepted."""
    RESIDUAL = 1
    """It replaced a refused draft."""
    BONUS = 2
    """It followed the last draft, all of them accepted."""
    PLAIN = 3
    """Its pass verified no draft."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Emitted tokens, in the order in which each request emitted them; every column is `[tokens]`.

    A set's two columns hold p(A) and whether the token is in A; NaN and False where the set does not apply.
    """

    request: NDArray[np.int32]
    """Numbered by the validator."""
    position: NDArray[np.int32]
    """In the request's output, from 0."""
    token: NDArray[np.int32]
    kind: NDArray[np.int8]
    """A `Kind`."""
    draft_position: NDArray[np.int16]
    """Which draft of its pass was tested here, from 1; 0 for BONUS and PLAIN."""
    logprob: NDArray[np.float32]
    """log p(token) by the pass's own logits, before any sampling parameter."""
    p_draft: NDArray[np.float64]
    """A = {x: q(x) > p(x)}, at drafted places: what too lenient an acceptance emits too often."""
    in_draft: NDArray[np.bool_]
    p_residual: NDArray[np.float64]
    """A = the token with the largest p - q, at drafted places: where a refusal leads to."""
    in_residual: NDArray[np.bool_]
    p_top: NDArray[np.float64]
    """A = the likeliest token, at BONUS and PLAIN places: what a greedy choice emits too often."""
    in_top: NDArray[np.bool_]
    p_processed: NDArray[np.float64]
    """A = {x: p(x) > softmax(logits)(x)}, everywhere: what unprocessed logits emit too rarely. NaN where nothing is processed."""
    in_processed: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.token)

    @classmethod
    def concatenate(cls, parts: Sequence[Tokens]) -> Tokens:
        """One after the other."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})
