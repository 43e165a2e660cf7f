"""Tiny random checkpoints for the host's own drafters, to go with the tiny Llama of `tiny.py`.

Random ones fit the target in shape only, so a drafter with one is mostly wrong. Two ways to have drafts that are mostly right: a
draft model of the target's own recipe (with a little noise, `tiny_model(perturb=...)`), and a target of one layer, `shallow`,
whose layer a drafter can have for its own (`fitted`).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from tests.support.cache import make_once
from tests.support.tiny import Recipe, config_of, tiny_model

# The number of these recipes: raise it when they should give other weights.
_RECIPE = 1

_EAGLE3_AUX = [0, 1, 2]  # the embedding and both layers: vLLM's default needs a target of more layers


def shallow(cache: Path, **recipe: float) -> Path:
    """A target of one layer whose embedding has rows of mean square 1, which a norm leaves as they are."""
    wanted = _recipe(recipe | {"layers": 1})
    deep = tiny_model(cache, **recipe | {"layers": 1})

    def fill(folder: Path) -> None:
        tensors = _load(deep)
        embedding = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = embedding / embedding.square().mean(dim=1, keepdim=True).sqrt()
        _write(folder, tensors, json.loads((deep / "config.json").read_text()))
        _copy_tokenizer(deep, folder)

    return make_once(cache / f"shallow-{_key(wanted)}", fill)


def eagle(cache: Path, *, seed: int = 0, fitted: bool = False, **recipe: float) -> Path:
    """An EAGLE head in the layout of SafeAILab's: no embedding and no output layer, which are the target's.

    `fitted`: it is `shallow`'s one layer over the token alone. All that it lacks is the request's first token, which EAGLE never
    sees.
    """
    wanted = _recipe(recipe)

    def fill(folder: Path) -> None:
        draw = _drawer(seed)
        tensors = {"fc.weight": draw("fc", wanted.hidden, 2 * wanted.hidden)}
        tensors |= dict(_layer("layers.0.", wanted, draw))
        if fitted:
            tensors["fc.weight"] = torch.cat([torch.eye(wanted.hidden), torch.zeros(wanted.hidden, wanted.hidden)], dim=1)
            tensors |= _layer_of(shallow(cache, **recipe), "layers.0.")
        del tensors["layers.0.input_layernorm.weight"]
        _write(folder, tensors, config_of(wanted, num_hidden_layers=1))

    return make_once(cache / f"eagle-{'fitted-' if fitted else ''}{_key(wanted, seed)}", fill)


def eagle3(
    cache: Path,
    *,
    seed: int = 0,
    layout: Literal["safeailab", "speculators"] = "safeailab",
    draft_vocabulary: int | None = None,
    **recipe: float,
) -> Path:
    """An EAGLE-3 head; `draft_vocabulary`: of so many tokens that lie as far apart in the target's as they can."""
    wanted = _recipe(recipe)

    def fill(folder: Path) -> None:
        draw = _drawer(seed)
        vocabulary = draft_vocabulary or wanted.vocab_size
        inner = "layers.0." if layout == "speculators" else "midlayer."
        tensors = {
            "fc.weight": draw("fc", wanted.hidden, 3 * wanted.hidden),
            "norm.weight": torch.ones(wanted.hidden),
            "lm_head.weight": wanted.logit_std * draw("lm_head", vocabulary, wanted.hidden),
            f"{inner}hidden_norm.weight": torch.ones(wanted.hidden),
            **dict(_layer(inner, wanted, draw, inputs=2)),
        }
        if draft_vocabulary is not None:
            drafted = torch.arange(vocabulary) * (wanted.vocab_size // vocabulary)
            tensors["d2t"] = drafted - torch.arange(vocabulary)
            tensors["t2d"] = torch.isin(torch.arange(wanted.vocab_size), drafted)
        said: dict[str, Any] = {"draft_vocab_size": vocabulary, "eagle_aux_hidden_state_layer_ids": _EAGLE3_AUX}
        config = config_of(wanted, num_hidden_layers=1)
        if layout == "safeailab":
            config |= said | {"architectures": ["LlamaForCausalLMEagle3"]}
        else:
            config = said | {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.3.0",
                "norm_before_residual": False,
                "transformer_layer_config": config,
                "speculators_config": {
                    "algorithm": "eagle3",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 2}],
                    "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
                },
            }
        _write(folder, tensors, config)

    return make_once(cache / f"eagle3-{layout}-{draft_vocabulary or 'whole'}-{_key(wanted, seed)}", fill)


def mimo(cache: Path, *, seed: int = 0, mtp_layers: int = 1, fitted: bool = False, **recipe: float) -> Path:
    """The tiny Llama in MiMo's layout (its attention has biases, here zero), with MTP layers; a whole model.

    `fitted`: the target is `shallow`, and the MTP layer is its one layer over the token alone, as in `eagle`. Qwen2's layers,
    which are MiMo's, take the hidden size over the number of heads for the size of a head.
    """
    recipe = {"heads": 2, "kv_heads": 1} | recipe | ({"layers": 1} if fitted else {})
    wanted = _recipe(recipe)
    llama = (shallow if fitted else tiny_model)(cache, **recipe)

    def fill(folder: Path) -> None:
        draw = _drawer(seed)
        tensors = _load(llama)
        for layer in range(wanted.layers):
            tensors |= _biases(f"model.layers.{layer}.", wanted)
        for layer in range(mtp_layers):
            prefix = f"model.mtp_layers.{layer}."
            for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
                tensors[f"{prefix}{norm}.weight"] = torch.ones(wanted.hidden)
            tensors[f"{prefix}input_proj.weight"] = draw(f"{layer} input_proj", wanted.hidden, 2 * wanted.hidden)
            tensors |= dict(_layer(prefix, wanted, draw)) | _biases(prefix, wanted)
            if fitted:
                tensors[f"{prefix}input_proj.weight"] = torch.eye(2 * wanted.hidden)[wanted.hidden :]
                tensors |= _layer_of(llama, prefix)
        config = json.loads((llama / "config.json").read_text())
        # transformers knows no "mimo" without code from a hub; its layers are Qwen2's.
        config |= {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": mtp_layers,
            "attention_bias": True,
        }
        _write(folder, tensors, config)
        _copy_tokenizer(llama, folder)

    return make_once(cache / f"mimo-{mtp_layers}-{'fitted-' if fitted else ''}{_key(wanted, seed)}", fill)


# -- parts -------------------------------------------------------------------------------------------------


Drawer = Callable[[str, int, int], torch.Tensor]


def _recipe(recipe: dict[str, float]) -> Recipe:
    return Recipe(**recipe)  # type: ignore[arg-type]


def _key(recipe: Recipe, seed: int = 0) -> str:
    return f"v{recipe.vocab_size}-{zlib.crc32(f'{_RECIPE} {recipe} {seed}'.encode()):08x}"


def _drawer(seed: int) -> Drawer:
    """Matrices that keep the size of what they are applied to, each from a generator of its own name."""

    def draw(name: str, rows: int, columns: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"native {name} {seed}".encode()))
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    return draw


def _layer(prefix: str, recipe: Recipe, draw: Drawer, inputs: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """A Llama layer's tensors; its attention reads `inputs` vectors of the hidden size, side by side."""
    hidden, mlp = recipe.hidden, recipe.mlp
    queries, keys = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    yield prefix + "input_layernorm.weight", torch.ones(hidden)
    yield prefix + "post_attention_layernorm.weight", torch.ones(hidden)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{prefix}self_attn.{name}_proj.weight", draw(prefix + name, rows, inputs * hidden)
    yield prefix + "self_attn.o_proj.weight", draw(prefix + "o", hidden, queries)
    yield prefix + "mlp.gate_proj.weight", draw(prefix + "gate", mlp, hidden)
    yield prefix + "mlp.up_proj.weight", draw(prefix + "up", mlp, hidden)
    yield prefix + "mlp.down_proj.weight", draw(prefix + "down", hidden, mlp)


def _biases(prefix: str, recipe: Recipe) -> dict[str, torch.Tensor]:
    rows = {"q": recipe.heads, "k": recipe.kv_heads, "v": recipe.kv_heads}
    return {f"{prefix}self_attn.{name}_proj.bias": torch.zeros(count * recipe.head_dim) for name, count in rows.items()}


def _layer_of(target: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a target's first layer, under another name."""
    first = "model.layers.0."
    return {prefix + name.removeprefix(first): tensor for name, tensor in _load(target).items() if name.startswith(first)}


def _load(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for file in source.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
