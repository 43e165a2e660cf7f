"""What a token takes in vLLM's KV cache: by the target's layers, and by those of a drafter that vLLM runs."""

from __future__ import annotations

from typing import Any

WIDE = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2}
"""Bytes of a number by vLLM's `cache_dtype`; the others (fp8 of several kinds, int8) have one, or less."""


def target_bytes(config: Any) -> int:
    """Bytes per token and rank that the target's layers keep, at most; `config` is a VllmConfig."""
    model, parallel = config.model_config, config.parallel_config
    return _bytes(model, parallel, model.get_num_layers(parallel), config.cache_config.cache_dtype)


def draft_bytes(config: Any) -> int:
    """The same of the drafter that vLLM runs; 0 where there is none with a KV cache of its own."""
    spec = config.speculative_config
    if spec is None or not spec.uses_draft_kv_cache():
        return 0
    draft = spec.draft_model_config
    # A target's own MTP layers come with its whole configuration, which counts all of its layers.
    layers = getattr(draft.hf_config, "n_predict", None) if spec.method == "mtp" else draft.get_total_num_hidden_layers()
    return _bytes(draft, spec.draft_parallel_config, layers or 1, spec.kv_cache_dtype or config.cache_config.cache_dtype)


def _bytes(model: Any, parallel: Any, layers: int, kept: str) -> int:
    vectors = 1 if model.use_mla else 2 * model.get_num_kv_heads(parallel)
    number = model.dtype.itemsize if kept == "auto" else WIDE.get(kept, 1)
    size: int = layers * vectors * model.get_head_size() * number
    return size
