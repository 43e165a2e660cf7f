"""Medusa heads as they lie in files.

| | FasterDecoding | vLLM to 0.32, and what `save` writes |
|---|---|---|
| matrix of a block | `{head}.{layer}.linear.weight`, `.bias` | `blocks.{head}.layers.{layer}.weight`, `.bias` |
| output of a head | `{head}.{layers}.weight` | `lm_heads.{head}.weight` |
| one output for all heads | - | `lm_head.weight`, and `token_map` where it is for a part of the tokens |

FasterDecoding's later files have the prefix `medusa_head.` or `medusa_heads.`, and may hold the whole target beside the heads.
What vLLM's layout has no name for lies beside its keys: `blocks.{head}.gates.{layer}`, `blocks.{head}.norms.{layer}`, `scale`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.medusa import MedusaConfig, MedusaHeads

if TYPE_CHECKING:
    from collections.abc import Iterable

Shapes = Mapping[str, tuple[int, ...]]


class Key(NamedTuple):
    """What one tensor of a checkpoint is."""

    part: Literal["weight", "bias", "gate", "norm", "output", "shared_output", "token_map", "scale"]
    head: int = 0
    layer: int = 0


_PREFIX = r"(?:model\.)?(?:medusa_heads?\.)?"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(_PREFIX + pattern), part)
    for pattern, part in (
        (r"(\d+)\.(\d+)\.linear\.weight", "weight"),
        (r"(\d+)\.(\d+)\.linear\.bias", "bias"),
        (r"(\d+)\.\d+\.weight", "output"),
        (r"blocks\.(\d+)\.layers\.(\d+)\.weight", "weight"),
        (r"blocks\.(\d+)\.layers\.(\d+)\.bias", "bias"),
        (r"blocks\.(\d+)\.gates\.(\d+)", "gate"),
        (r"blocks\.(\d+)\.norms\.(\d+)", "norm"),
        (r"lm_heads\.(\d+)\.weight", "output"),
        (r"lm_head\.weight", "shared_output"),
        (r"token_map", "token_map"),
        (r"scale", "scale"),
    )
)


def key_of(name: str) -> Key | None:
    """What a tensor's name says; None where it is none of Medusa heads."""
    for pattern, part in _PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            return Key(part, *map(int, match.groups()))  # type: ignore[arg-type]
    return None


def keys_of(names: Iterable[str], shared: bool = False) -> dict[Key, str]:
    """The tensors that belong to the heads; others (a whole model's beside them) are left out.

    Where a file holds outputs of heads and one for all, the latter is the base model's, unless it is said to be `shared`.
    """
    found = {key: name for name in names if (key := key_of(name)) is not None}
    if not shared and any(key.part == "output" for key in found):
        found.pop(Key("shared_output"), None)
    return found


def are_medusa(names: Iterable[str]) -> bool:
    """Whether tensors of these names are Medusa heads."""
    parts = {key.part for key in map(key_of, names) if key is not None}
    return bool(parts & {"weight", "output"})


def config_of(shapes: Shapes, said: Mapping[str, Any], where: str) -> MedusaConfig:
    """What the heads are made of: from the tensors' shapes, and held against what `config.json` says.

    Args:
        shapes: of every tensor in the checkpoint.
        said: config.json, empty where there is none.
        where: the checkpoint, for errors.

    Raises:
        ConfigError: a part is missing, or the two contradict each other.
    """
    keys = keys_of(shapes, shared=bool(said.get("original_lm_head")))
    heads = 1 + max((key.head for key in keys if key.part in ("weight", "output")), default=-1)
    layers = 1 + max((key.layer for key in keys if key.part == "weight"), default=-1)
    output = _output(keys, heads, said)
    if layers == 0:
        raise ConfigError(f"'model' is {where!r}: its Medusa heads lack the matrices of their residual blocks.")
    missing = [(head, layer) for head in range(heads) for layer in range(layers) if Key("weight", head, layer) not in keys]
    if missing:
        raise ConfigError(f"'model' is {where!r}: Medusa head {missing[0][0]} lacks the matrix of block {missing[0][1]}.")
    rows = None
    if output != "target":
        for head in range(heads if output == "own" else 1):
            key = _output_key(keys, output, head)
            if key is None:
                raise ConfigError(f"'model' is {where!r}: Medusa head {head} lacks its output layer.")
            rows = rows or shapes[keys[key]][0]
    hidden = shapes[keys[Key("weight")]][1]
    vocab, draft_vocab = _vocabulary(keys, shapes, rows, said, where)
    config = MedusaConfig(
        num_heads=heads,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        output=output,
        gated=Key("gate") in keys,
        norm=_norm(keys, said, where),
        output_scale=Key("scale") in keys,
        bias=Key("bias") in keys,
    )
    _agrees(config, said, where)
    _fits(config, keys, shapes, where)
    return config


def _output(keys: Mapping[Key, str], heads: int, said: Mapping[str, Any]) -> Literal["own", "shared", "target"]:
    own = sum(key.part == "output" for key in keys)
    if Key("shared_output") in keys or (own == 1 and heads > 1 and said.get("original_lm_head")):
        return "shared"
    return "own" if own else "target"


def _output_key(keys: Mapping[Key, str], output: str, head: int) -> Key | None:
    candidates = [Key("output", head)] if output == "own" else [Key("shared_output"), Key("output")]
    return next((key for key in candidates if key in keys), None)


def _vocabulary(
    keys: Mapping[Key, str], shapes: Shapes, rows: int | None, said: Mapping[str, Any], where: str
) -> tuple[int, int | None]:
    """The target's vocabulary, and how much of it can be drafted where it is not all."""
    mapped = shapes[keys[Key("token_map")]][0] if Key("token_map") in keys else None
    vocab = said.get("vocab_size")
    if vocab is None:
        if rows is None or rows == mapped:
            raise ConfigError(f"'model' is {where!r}: its config.json must name the target's 'vocab_size'.")
        vocab = rows
    if mapped is None and rows is not None and rows != vocab:
        raise ConfigError(
            f"'model' is {where!r}: its output layer has {rows} rows, its config.json names a vocabulary of {vocab}, and "
            "no 'token_map' says which tokens the rows are."
        )
    return int(vocab), mapped


def _norm(keys: Mapping[Key, str], said: Mapping[str, Any], where: str) -> Literal["none", "pre", "post"]:
    if Key("norm") not in keys:
        return "none"
    norm = said.get("norm")
    if norm not in ("pre", "post"):
        raise ConfigError(f"'model' is {where!r}: it has norms, and its config.json must say 'norm': 'pre' or 'post'.")
    return norm  # type: ignore[no-any-return]


def _agrees(config: MedusaConfig, said: Mapping[str, Any], where: str) -> None:
    """Hold the weights against config.json."""
    layers = said.get("medusa_num_layers", said.get("num_hidden_layers") if said.get("model_type") == "medusa" else None)
    claims = {
        "hidden size": (config.hidden_size, said.get("hidden_size")),
        "residual blocks per head": (config.num_layers, layers),
    }
    for what, (here, claimed) in claims.items():
        if claimed is not None and claimed != here:
            raise ConfigError(f"'model' is {where!r}: its config.json names {what} {claimed}, but its weights have {here}.")
    heads = said.get("num_heads", said.get("medusa_num_heads"))
    # Fewer than there are is common: published configurations count the heads that their authors used.
    if heads is not None and heads > config.num_heads:
        raise ConfigError(f"'model' is {where!r}: its config.json names {heads} heads, but its weights hold {config.num_heads}.")


def _fits(config: MedusaConfig, keys: Mapping[Key, str], shapes: Shapes, where: str) -> None:
    """Every tensor has the shape that the configuration means."""
    hidden = config.hidden_size
    expected: dict[str, tuple[tuple[int, ...], ...]] = {
        "weight": ((hidden, hidden),),
        "bias": ((hidden,),),
        "gate": ((hidden,), (1,), ()),
        "norm": ((hidden,),),
        "output": ((config.num_draftable, hidden), (config.vocab_size, hidden)),
        "shared_output": ((config.num_draftable, hidden), (config.vocab_size, hidden)),
        "scale": ((config.num_heads,),),
        "token_map": ((config.num_draftable,),),
    }
    for key, name in keys.items():
        if shapes[name] not in expected[key.part]:
            raise ConfigError(
                f"'model' is {where!r}: {name} has the shape {list(shapes[name])}, not {list(expected[key.part][0])}."
            )


@torch.no_grad()
def load(heads: MedusaHeads, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Copy a checkpoint into heads of its configuration, or of fewer heads than it has.

    Raises:
        ConfigError: the map of drafted tokens leads outside the target's vocabulary.
    """
    config = heads.config
    keys = keys_of(tensors, shared=config.output == "shared")

    def tensor(part: str, head: int = 0, layer: int = 0) -> torch.Tensor | None:
        name = keys.get(Key(part, head, layer))  # type: ignore[arg-type]
        return None if name is None else tensors[name]

    token_map = tensor("token_map")
    if token_map is not None and heads.draft_to_target is not None:
        if int(token_map.min()) < 0 or int(token_map.max()) >= config.vocab_size:
            raise ConfigError(f"'model' is {where!r}: its 'token_map' leads outside the vocabulary of {config.vocab_size}.")
        if token_map.unique().numel() < token_map.numel():
            raise ConfigError(f"'model' is {where!r}: its 'token_map' names a token twice.")
        heads.draft_to_target.copy_(token_map)
    for head in range(config.num_heads):
        for layer, block in enumerate(heads.blocks):
            weight = tensor("weight", head, layer)
            assert weight is not None  # `config_of` has seen it
            block.linear.load(head, weight, tensor("bias", head, layer))
            for part, parameter in (("gate", block.gate), ("norm", None if block.norm is None else block.norm.weight)):
                value = tensor(part, head, layer)
                if parameter is not None and value is not None:
                    parameter[head].copy_(value)
    scale = tensor("scale")
    if heads.scale is not None and scale is not None:
        heads.scale.copy_(scale[: config.num_heads, None])
    if heads.output is None:
        return
    for head in range(heads.output.heads):
        key = _output_key(keys, config.output, head)
        assert key is not None
        rows = tensors[keys[key]]
        if token_map is not None and rows.shape[0] > config.num_draftable:
            rows = rows[token_map]
        heads.output.load(head, rows)


def dump(heads: MedusaHeads) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and config.json of heads: read by `load`, and by vLLM up to 0.32 where it has all that they are made of."""
    config = heads.config
    tensors: dict[str, torch.Tensor] = {}
    for layer, block in enumerate(heads.blocks):
        for head in range(config.num_heads):
            prefix = f"blocks.{head}"
            tensors[f"{prefix}.layers.{layer}.weight"] = block.linear.weight[head]
            if block.linear.bias is not None:
                tensors[f"{prefix}.layers.{layer}.bias"] = block.linear.bias[head]
            if block.gate is not None:
                tensors[f"{prefix}.gates.{layer}"] = block.gate[head]
            if block.norm is not None:
                tensors[f"{prefix}.norms.{layer}"] = block.norm.weight[head]
    if heads.output is not None and config.output == "shared":
        tensors["lm_head.weight"] = heads.output.weight[0]
    elif heads.output is not None:
        tensors.update({f"lm_heads.{head}.weight": heads.output.weight[head] for head in range(config.num_heads)})
    if heads.scale is not None:
        tensors["scale"] = heads.scale[:, 0]
    if heads.draft_to_target is not None:
        tensors["token_map"] = heads.draft_to_target
    plain = replace(config, output="own", gated=False, norm="none", output_scale=False, draft_vocab_size=None)
    stock = config == plain or (config.output == "shared" and replace(config, output="own", draft_vocab_size=None) == plain)
    said = {
        # vLLM builds whatever it knows the name of, and would leave out a gate, a norm or a scale without a word.
        "architectures": ["MedusaModel" if stock else "SpecPluginMedusa"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.num_draftable,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.output == "shared",
        "norm": config.norm,
    }
    return {name: tensor.detach() for name, tensor in tensors.items()}, said
