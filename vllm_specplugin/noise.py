"""Randomness for drafting, kept apart from the target's.

Speculative sampling is lossless only while the draft's choice is independent of the noise that accepts it or draws its
replacement (arXiv 2211.17192, appendix A.1). So drafting never touches the host's generators: every draw has a stream of
its own, named by (seed, request, pass, draft, use).

Why by the pass, and not by the place in the request: block verification decides by drafts behind the one that it refuses. Were
they drawn again from the same stream in the next pass, they would be known not to have been good enough, and so no longer
follow their law (`tests/contract/test_noise_independence.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm_specplugin.types import Request


def owner_of(request: Request, engine_seed: int) -> str:
    """Whose noise a request draws from: its seed's alone, where it has one; else the engine's, by order of arrival.

    A host may put something random into request ids, which would keep a run with the same engine seed from repeating.
    """
    if request.seed is not None:
        return f"seed:{request.seed}"
    return f"{engine_seed}:{request.request_id if request.arrival is None else request.arrival}"


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """The noise source of one step: `rows` requests, each at the position of its first draft."""

    engine_seed: int
    requests: Sequence[Request]
    """`[rows]`"""
    positions: NDArray[np.int64]
    """`[rows]`: the place of the first drafted token in its request."""

    def generator(self, row: int, draft: int = 0, use: str = "draft") -> np.random.Generator:
        """A fresh generator for draft number `draft` of a row; equal arguments give an equal stream in any batch.

        A request with a seed draws from its seed and where its pass begins, not from its id or neighbours.
        """
        owner = owner_of(self.requests[row], self.engine_seed)
        name = f"{use}|{owner}|{int(self.positions[row])}|{draft}".encode()
        key = int.from_bytes(blake2b(name, digest_size=16, person=b"specplugin-draft").digest(), "little")
        return np.random.Generator(np.random.Philox(key=key))

    def select(self, rows: Sequence[int]) -> DraftNoise:
        """The noise of some of the rows, in the order given."""
        chosen = [self.requests[row] for row in rows]
        return DraftNoise(self.engine_seed, chosen, self.positions[np.asarray(rows, dtype=np.int64)])
