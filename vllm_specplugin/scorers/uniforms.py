"""The verifiers' noise: uniform numbers keyed by (request, pass, position, use), computed where the target runs.

A counter-based generator: the number is a hash of its key, so that it does not depend on the batch around it, on the order
of requests or on what was drawn before. The hash is splitmix64's finaliser (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014, figure 15), applied once per part of the key.
"""

from __future__ import annotations

from hashlib import blake2b

import torch

from vllm_specplugin.types import Use

_GAMMA = -0x61C8864680B583EB  # 0x9e3779b97f4a7c15 as a signed number: PyTorch multiplies int64, and wraps as unsigned would
_FIRST = -0x40A7B892E31B1A47  # 0xbf58476d1ce4e5b9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94d049bb133111eb
_DRAFTING = int.from_bytes(b"drafting", "little", signed=True)
"""Sets the keys of `pass_keys` apart from those that a host may make of the same seeds."""


def key_of(owner: str) -> int:
    """A request's key, a signed 64-bit number; equal names give equal keys.

    The name is hashed under a label of its own, so that no key of a verifier is one of drafting (`noise.DraftNoise`).
    """
    return int.from_bytes(blake2b(owner.encode(), digest_size=8, person=b"specplug-verify").digest(), "little", signed=True)


def uniforms(keys: torch.Tensor, passes: torch.Tensor, k: int) -> torch.Tensor:
    """The uniform numbers of one step.

    Args:
        keys: `[rows]` int64, see `key_of`.
        passes: `[rows]` int64, what tells this pass of a request from every other: the number of tokens known before it.
        k: the most drafts of a row.

    Returns:
        `[rows, k + 1, 3]` float64 in [0, 1), multiples of 2^-53.
    """
    position = torch.arange(k + 1, device=keys.device)
    use = torch.arange(len(Use), device=keys.device)
    of_pass = _mix(_mix(keys) + passes)  # [rows]
    # Two small numbers in one part of the key: positions are below 2^32.
    bits = _mix(of_pass[:, None, None] + (position[:, None] << 8) + use + 1)
    return _shifted(bits, 11).double().mul_(2.0**-53)


def pass_keys(keys: torch.Tensor, passes: torch.Tensor) -> torch.Tensor:
    """A key for each pass of each request, for noise that somebody else makes of it.

    Args:
        keys: `[slots]` int64, the requests' own (their seeds).
        passes: `[slots]` integers, what tells this pass of a request from every other: the number of tokens known before it.

    Returns:
        `[slots]` int64.
    """
    return _mix(_mix(keys.long() + _DRAFTING) + passes)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """The `value`-th number that splitmix64 gives from the seed 0."""
    value = value * _GAMMA  # a new tensor, so that the rest can be done in place
    value.bitwise_xor_(_shifted(value, 30)).mul_(_FIRST)
    value.bitwise_xor_(_shifted(value, 27)).mul_(_SECOND)
    return value.bitwise_xor_(_shifted(value, 31))


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right (PyTorch's keeps the sign)."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
