"""Checkpoints of multi-token prediction that engines serve.

Sequential modules are written together with the model, in the layout of MiMo (`model.mtp_layers.{i}.`), which vLLM serves as
`{"method": "mtp"}` and the plugin as `{"proposer": "mtp"}`. A Llama model fits it as it is, with biases of zero. vLLM goes by
`architectures` alone, so `model_type` stays what it was: transformers loads the folder as the same model as before and, more
important, gives it the same tokenizer (for a "qwen2" it would cut text in Qwen's way, whatever the files say).

Parallel heads are Medusa heads: beside a frozen model alone, and with a trunk that has learnt too in a folder inside the model's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads import medusa_files
from vllm_specplugin.heads.checkpoint import save
from vllm_specplugin.heads.files import TOKENIZERS
from vllm_specplugin.heads.medusa import MedusaHeads
from vllm_specplugin.heads.mtp import SequentialMTP

HEADS_FOLDER = "medusa"
"""Where parallel heads lie inside the folder of the model that they were trained with."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "generation_config.json",
)
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "mimo")


def check_fits_mimo(config: Mapping[str, Any]) -> None:
    """Refuse a model that MiMo's layout cannot hold; said before training and not after.

    Raises:
        ConfigError: names what does not fit.
    """
    what = None
    head_dim = config.get("head_dim")
    if config.get("model_type") not in _LLAMA_LIKE:
        what = f"its 'model_type' is {config.get('model_type')!r}, not one of {', '.join(_LLAMA_LIKE)}"
    elif head_dim and head_dim * config["num_attention_heads"] != config["hidden_size"]:
        what = f"its 'head_dim' {head_dim} is not 'hidden_size' / 'num_attention_heads'"
    elif config.get("mlp_bias") or (config.get("attention_bias") and config.get("model_type") == "llama"):
        what = "it has biases outside the query, key and value projections"
    elif config.get("use_sliding_window") or (config.get("model_type") == "mistral" and config.get("sliding_window")):
        what = "it has sliding-window attention"
    if what is not None:
        raise ConfigError(
            f"--target does not fit MiMo's layout, in which MTP modules are served: {what}; use --variant parallel instead."
        )


def export_with_modules(
    modules: SequentialMTP,
    model: Mapping[str, Tensor],
    config: Mapping[str, Any],
    tokenizer: Path,
    folder: Path,
    provenance: Mapping[str, Any],
) -> None:
    """Write the model with its modules.

    Args:
        modules: what was trained.
        model: the model's tensors, by their names in a Llama or Qwen2 checkpoint.
        config: the model's config.json.
        tokenizer: a folder with the tokenizer's files.
        folder: where to.
        provenance: how it came about.
    """
    tensors = {name: model[name] for name in model if not _is_extra(name, config)}
    some = tensors["model.embed_tokens.weight"]
    for number, module in enumerate(modules.mtp_layers):
        for name, tensor in module.fold().items():  # type: ignore[operator]
            tensors[f"model.mtp_layers.{number}.{name}"] = tensor.to(some.dtype)
    tensors |= {
        name.replace("_proj.weight", "_proj.bias"): torch.zeros(len(tensor), dtype=some.dtype)
        for name, tensor in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        and name.replace("_proj.weight", "_proj.bias") not in tensors
    }
    layout = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": modules.config.num_modules}
    save(folder, tensors, {**config, **layout}, provenance)
    copy_tokenizer(tokenizer, folder)


def export_model(
    model: Mapping[str, Tensor], config: Mapping[str, Any], tokenizer: Path, folder: Path, provenance: Mapping[str, Any]
) -> None:
    """Write a model without modules, in the layout that it came in."""
    save(folder, {name: model[name] for name in model if not _is_extra(name, config)}, config, provenance)
    copy_tokenizer(tokenizer, folder)


def export_heads(heads: MedusaHeads, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write parallel heads as Medusa heads."""
    save(folder, *medusa_files.dump(heads), provenance)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """What a model needs beside its weights to take text."""
    of_tokenizers = {path.name for pattern in TOKENIZERS for path in source.glob(pattern)}
    for name in sorted({*TOKENIZER_FILES, *of_tokenizers}):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def stored_type(config: Mapping[str, Any]) -> torch.dtype:
    """The type that a configuration says its weights have; float32 where it does not say."""
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), torch.float32)
    assert isinstance(found, torch.dtype)
    return found


def _is_extra(name: str, config: Mapping[str, Any]) -> bool:
    """An output matrix that is the embedding, or modules from an earlier training."""
    return name.startswith("model.mtp_layers.") or (name == "lm_head.weight" and bool(config.get("tie_word_embeddings")))
