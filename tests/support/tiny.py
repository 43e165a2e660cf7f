"""Tiny random Llama checkpoints for the engine tests.

A recipe gives the same weights on every machine with the same torch, so a folder is made once and kept.
The weights are scaled so that greedy decoding wanders (it neither sticks to one token nor ignores its
context) and the two top logits lie far apart compared with fp32 noise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support.cache import cache_root, make_once

BYTES = 256
BOS, EOS = BYTES, BYTES + 1
VOCAB_SIZE = BYTES + 2

# The recipe's number: raise it when the same arguments should give other weights or another folder layout.
_RECIPE = 1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that the checkpoint depends on."""

    vocab_size: int = VOCAB_SIZE
    seed: int = 0
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32  # the smallest that vLLM's CPU attention has
    mlp: int = 128
    max_position_embeddings: int = 2048
    # Standard deviation of the logits: about how sharp softmax(logits) is.
    logit_std: float = 2.0
    # Relative noise on every weight. A draft model of the same seed with perturb=0.1 agrees often, not always.
    perturb: float = 0.0

    @property
    def has_tokenizer(self) -> bool:
        """Smaller vocabularies have no room for the bytes: open them with skip_tokenizer_init=True."""
        return self.vocab_size >= VOCAB_SIZE


def tiny_model(cache: str | os.PathLike[str] | None = None, **recipe: float) -> Path:
    """The folder of the tiny model with this `Recipe`, made below `cache` if it is not there yet."""
    wanted = Recipe(**recipe)  # type: ignore[arg-type]
    key = hashlib.sha256(f"{_RECIPE} {wanted}".encode()).hexdigest()[:12]
    folder = (Path(cache) if cache is not None else cache_root() / "tiny") / f"llama-v{wanted.vocab_size}-{key}"

    def fill(fresh: Path) -> None:
        _write_config(fresh, wanted)
        _write_weights(fresh, wanted)
        if wanted.has_tokenizer:
            write_tokenizer(fresh, wanted)

    return make_once(folder, fill)


def forgetful_model(cache: str | os.PathLike[str] | None = None, **recipe: float) -> Path:
    """The same model, but each of its tokens depends on the one before it alone: a greedy text soon goes in a circle."""
    whole = tiny_model(cache, **recipe)

    def fill(fresh: Path) -> None:
        from safetensors.torch import load_file, save_file

        shutil.copytree(whole, fresh, dirs_exist_ok=True)
        tensors = load_file(fresh / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # what a layer adds to the embedding
                tensor.zero_()
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})

    return make_once(whole.with_name(f"forgetful-{whole.name}"), fill)


def config_of(recipe: Recipe, **more: Any) -> dict[str, Any]:
    """The config.json of a Llama of this size; `more` is added to it, or put in the place of its entries."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.mlp,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": recipe.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **more,
    }


def _write_config(folder: Path, recipe: Recipe) -> None:
    # Without the byte tokenizer no token means "end": nothing may stop early.
    ends = {"bos_token_id": BOS, "eos_token_id": EOS} if recipe.has_tokenizer else {"bos_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config_of(recipe, **ends), indent=1))


def _weights(recipe: Recipe) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, each drawn from a generator of its own name.

    So a recipe with fewer layers shares its remaining weights with the larger one.
    """
    hidden, mlp = recipe.hidden, recipe.mlp
    q_rows, kv_rows = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim

    def normal(name: str, rows: int, columns: int, std: float) -> tuple[str, torch.Tensor]:
        def draw(purpose: str) -> torch.Tensor:
            seed = zlib.crc32(f"{purpose} {name} {recipe.seed}".encode())
            return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * std

        weight = draw("weight")
        if recipe.perturb:
            weight += recipe.perturb * draw("perturb")
        return name, weight

    yield normal("model.embed_tokens.weight", recipe.vocab_size, hidden, 1.0)
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", torch.ones(hidden)
        yield prefix + "post_attention_layernorm.weight", torch.ones(hidden)
        # Queries and keys a little large: attention then picks positions instead of averaging the context away.
        yield normal(prefix + "self_attn.q_proj.weight", q_rows, hidden, 1.5 / math.sqrt(hidden))
        yield normal(prefix + "self_attn.k_proj.weight", kv_rows, hidden, 1.5 / math.sqrt(hidden))
        yield normal(prefix + "self_attn.v_proj.weight", kv_rows, hidden, 1.0 / math.sqrt(hidden))
        yield normal(prefix + "self_attn.o_proj.weight", hidden, q_rows, 1.0 / math.sqrt(q_rows))
        yield normal(prefix + "mlp.gate_proj.weight", mlp, hidden, 1.0 / math.sqrt(hidden))
        yield normal(prefix + "mlp.up_proj.weight", mlp, hidden, 1.0 / math.sqrt(hidden))
        yield normal(prefix + "mlp.down_proj.weight", hidden, mlp, 1.0 / math.sqrt(mlp))
    yield "model.norm.weight", torch.ones(hidden)
    yield normal("lm_head.weight", recipe.vocab_size, hidden, recipe.logit_std / math.sqrt(hidden))


def _write_weights(folder: Path, recipe: Recipe) -> None:
    from safetensors.torch import save_file

    save_file(dict(_weights(recipe)), folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, recipe: Recipe) -> None:
    """A byte-level tokenizer: token id = byte value, then BOS and EOS, then fillers up to the vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: byte for byte, symbol in _byte_symbols().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", *(f"<extra_{i}>" for i in range(recipe.vocab_size - VOCAB_SIZE))]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.max_position_embeddings,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _byte_symbols() -> dict[int, str]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(BYTES) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(BYTES + i) for i, byte in enumerate(hidden)}
