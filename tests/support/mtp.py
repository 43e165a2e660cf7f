"""Small models with heads for multi-token prediction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_specplugin.heads.decoder import DecoderConfig
from vllm_specplugin.heads.medusa import MedusaConfig, MedusaHeads
from vllm_specplugin.heads.mtp import MTPConfig, SequentialMTP
from vllm_specplugin.train.mtp import DepthWeights, JointMTP
from vllm_specplugin.train.trunk import trunk_of

DEPTH = 4
"""D: the main head and three drafts."""

VARIANTS = ("parallel", "shared", "separate")

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
"""Of a model that runs in a millisecond; its weights are large, so that everything shows in its states."""


def joint(variant: str, lambdas: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125), seed: int = 0, **options: Any) -> JointMTP:
    """A fresh model with heads of a variant, whose parameters are all random.

    `options` are `MedusaConfig`'s for parallel heads and `MTPConfig`'s for modules.
    """
    torch.manual_seed(seed)
    trunk = trunk_of(SIZES)
    drafts = len(lambdas) - 1
    heads: MedusaHeads | SequentialMTP
    if variant == "parallel":
        sizes = {"hidden_size": SIZES["hidden_size"], "vocab_size": SIZES["vocab_size"]}
        heads = MedusaHeads(MedusaConfig(num_heads=drafts, output="target", **sizes, **options))
    else:
        heads = SequentialMTP(MTPConfig(DecoderConfig.from_hf(SIZES), drafts, modules=variant, **options))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in heads.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return JointMTP(trunk, heads, DepthWeights(lambdas), lambda *arguments: None)


def texts(rows: int, length: int, seed: int = 0) -> Tensor:
    """`[rows, length]` random token ids."""
    return torch.randint(SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
