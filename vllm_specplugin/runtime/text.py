"""The target's tokenizer, for what a request or a corpus says as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def encoder(model_config: ModelConfig) -> Callable[[str], list[int]] | None:
    """Text to token ids without special tokens; the tokenizer is loaded when the first text comes. None without a tokenizer."""
    if model_config.skip_tokenizer_init:
        return None

    def encode(text: str) -> list[int]:
        from vllm.tokenizers import cached_tokenizer_from_config

        return list(cached_tokenizer_from_config(model_config).encode(text, add_special_tokens=False))

    return encode
