"""A random mixture of experts in Mixtral's layout: a token takes two of many experts, so more rows read more weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from tests.support.cache import make_once
from tests.support.tiny import BOS, EOS, VOCAB_SIZE, Recipe, write_tokenizer

_RECIPE = 1  # raise it when the same arguments should give other weights


def mixture(
    cache: str | os.PathLike[str],
    *,
    experts: int = 8,
    hidden: int = 64,
    mlp: int = 64,
    layers: int = 2,
    dtype: str = "float32",
) -> Path:
    """The folder of such a model, made below `cache` if it is not there yet."""
    sizes = {"experts": experts, "hidden": hidden, "mlp": mlp, "layers": layers, "dtype": dtype}
    key = hashlib.sha256(f"{_RECIPE} {sizes}".encode()).hexdigest()[:12]

    def fill(folder: Path) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            head_dim=32,
            num_local_experts=experts,
            num_experts_per_tok=2,
            max_position_embeddings=2048,
            initializer_range=hidden**-0.5,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
        torch.manual_seed(0)
        MixtralForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
        write_tokenizer(folder, Recipe())

    return make_once(Path(cache) / f"mixtral-{experts}x{mlp}-{key}", fill)
