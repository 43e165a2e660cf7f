"""Randomness for drafting, kept apart from the target's.

Speculative sampling is lossless only while the draft's choice is independent of the noise that accepts it or draws its
replacement (arXiv 2211.17192, appendix A.1). So drafting never touches the host's generators: every draw has a stream of
its own, named by (seed, request, pass, draft, use).

Why by the pass, and not by the place in the request: block verification decides by drafts behind the one that it refuses. Were
they drawn again from the same stream in the next pass, they would be known not to have been good enough, and so no longer
follow their law (`tests/contract/test_noise_independence.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm_specplugin.types import Request

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


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

    def uniforms(self, k: int) -> NDArray[np.float64]:
        """`[rows, k]` numbers in [0, 1), multiples of 2^-53: for proposers that draw all drafts of a step at once.

        One hash per row names its stream, by the same things as `generator`; the numbers are splitmix64's (Steele, Lea, Flood,
        "Fast splittable pseudorandom number generators", OOPSLA 2014) from the hash as seed.
        """
        names = (f"{owner_of(request, self.engine_seed)}|{position}" for request, position in self._passes())
        digests = (blake2b(name.encode(), digest_size=8, person=b"specplugin-unif").digest() for name in names)
        seeds = np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
        bits = seeds[:, None] + np.arange(1, k + 1, dtype=np.uint64) * _GAMMA  # wraps, as it should
        bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
        bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
        return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53

    def _passes(self) -> Iterator[tuple[Request, int]]:
        return zip(self.requests, self.positions.tolist(), strict=True)

    def select(self, rows: Sequence[int]) -> DraftNoise:
        """The noise of some of the rows, in the order given."""
        chosen = [self.requests[row] for row in rows]
        return DraftNoise(self.engine_seed, chosen, self.positions[np.asarray(rows, dtype=np.int64)])
