"""Columns as bytes: how an engine's worker hands its records over, and how they lie in a file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from vllm_specplugin.validate.records import Tokens

NO_TOKENS = Tokens(
    request=np.zeros(0, np.int32),
    position=np.zeros(0, np.int32),
    token=np.zeros(0, np.int32),
    kind=np.zeros(0, np.int8),
    draft_position=np.zeros(0, np.int16),
    logprob=np.zeros(0, np.float32),
    p_draft=np.zeros(0),
    in_draft=np.zeros(0, np.bool_),
    p_residual=np.zeros(0),
    in_residual=np.zeros(0, np.bool_),
    p_top=np.zeros(0),
    in_top=np.zeros(0, np.bool_),
    p_processed=np.zeros(0),
    in_processed=np.zeros(0, np.bool_),
)


def pack(arrays: Mapping[str, Any]) -> bytes:
    """Named arrays as the bytes of an .npz file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def unpack(packed: bytes) -> dict[str, Any]:
    """The arrays that `pack` was given."""
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return dict(arrays)


def pack_tokens(tokens: Tokens) -> bytes:
    """Records as the bytes of an .npz file."""
    return pack({field.name: getattr(tokens, field.name) for field in fields(Tokens)})


def unpack_tokens(packed: bytes) -> Tokens:
    """The records that `pack_tokens` was given."""
    return Tokens(**unpack(packed))
