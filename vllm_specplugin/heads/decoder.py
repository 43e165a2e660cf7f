"""A Llama decoder layer in plain PyTorch: the body of EAGLE, EAGLE-3 and MTP heads.

It has to be the host's own layer to the last bit of meaning, because a head is trained here and served there. Its
parameters therefore carry Hugging Face's names. What a place may look at is not the layer's business but that of the
`Context` that it is handed: the text so far (training), a cache (drafting), or the unrolled steps of a training-time test.

Shapes: `rows` texts of `length` places; `heads` query heads share `kv_heads` keys and values of `head_dim`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vllm_specplugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) and how it is stretched to longer texts."""

    theta: float = 10_000.0
    kind: str = "default"
    """'default', 'linear' (positions divided by `factor`), or 'llama3' (low frequencies only, blended)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    """The length that a 'llama3' model was trained on before it was stretched."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Rope:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises:
            ConfigError: the model stretches positions in a way that a head cannot follow.
        """
        said = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = str(said.get("rope_type") or said.get("type") or "default")
        if kind not in ("default", "linear", "llama3"):
            raise ConfigError(f"'rope_type' is {kind!r}; heads can be trained with 'default', 'linear' or 'llama3' positions.")
        if said.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ConfigError("'partial_rotary_factor' is not 1; heads rotate whole attention heads.")
        known = cls()
        return cls(
            theta=float(said.get("rope_theta") or config.get("rope_theta") or known.theta),
            kind=kind,
            factor=float(said.get("factor", known.factor)),
            low_freq_factor=float(said.get("low_freq_factor", known.low_freq_factor)),
            high_freq_factor=float(said.get("high_freq_factor", known.high_freq_factor)),
            original_length=int(said.get("original_max_position_embeddings", known.original_length)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The keys of a Hugging Face configuration, in the form that every version of transformers reads."""
        if self.kind == "default":
            return {"rope_theta": self.theta}
        scaling: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            scaling |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_length,
            }
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per place of each rotated pair: `[head_dim / 2]`, float32."""
        plain = self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.kind == "default":
            return plain
        slow = plain / self.factor
        if self.kind == "linear":
            return slow
        # Turns that a pair makes over the original length: many keep their speed, few are slowed, in between is blended.
        turns = self.original_length * plain / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return kept * plain + (1.0 - kept) * slow


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes of one Llama decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on attention's output projection."""
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, config: Any) -> DecoderConfig:
        """Read the configuration of a Llama-like model: a mapping, or transformers' object.

        Raises:
            ConfigError: a size is missing, or the model's layers are of another make.
        """
        said: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        said = said.get("text_config") or said
        activation = said.get("hidden_act") or said.get("hidden_activation") or "silu"
        if activation not in ("silu", "swish"):
            raise ConfigError(f"'hidden_act' is {activation!r}; a head's decoder layer is Llama's, which has 'silu'.")
        missing = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if not said.get(key)]
        if missing:
            raise ConfigError(
                f"the target's configuration has no {missing[0]!r}: no Llama-like decoder layer can be sized by it."
            )
        hidden, heads = int(said["hidden_size"]), int(said["num_attention_heads"])
        bias = bool(said.get("attention_bias"))
        return cls(
            hidden_size=hidden,
            intermediate_size=int(said["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(said.get("num_key_value_heads") or heads),
            head_dim=int(said.get("head_dim") or hidden // heads),
            norm_eps=float(said.get("rms_norm_eps") or 1e-6),  # Llama's own where a configuration is silent
            rope=Rope.from_hf(said),
            qkv_bias=bias or said.get("model_type") in ("qwen2", "mimo"),
            output_bias=bias and said.get("model_type") == "llama",
            mlp_bias=bool(said.get("mlp_bias")),
        )

    def to_hf(self) -> dict[str, Any]:
        """The keys by which transformers and vLLM build the same layer as Llama's."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "attention_bias": self.qkv_bias and self.output_bias,
            "mlp_bias": self.mlp_bias,
            **self.rope.to_hf(),
        }


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, the statistics in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., size]` -> `[..., size]` of the same type."""
        wide = hidden.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(hidden.dtype) * normal.to(hidden.dtype)


class Context(ABC):
    """What the places of a pass may look at. One object serves one attention layer over one batch of texts."""

    @abstractmethod
    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Mix the values that each query may see; a context with a memory takes the keys and values into it.

        Args:
            queries: `[rows, heads, length, head_dim]`, rotated.
            keys: `[rows, kv_heads, length, head_dim]`, rotated.
            values: `[rows, kv_heads, length, head_dim]`.

        Returns:
            `[rows, heads, length, head_dim]`
        """


class WholeText(Context):
    """Each place sees itself and the places before it; nothing is remembered. Padding on the right needs no mask."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=_grouped(queries, keys))


class Cached(Context):
    """Each pass goes on where the one before it ended, as a drafter does when it serves."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None  # [rows, kv_heads, places so far, head_dim]
        self.values: Tensor | None = None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        new, known = queries.shape[2], keys.shape[2]
        seen = torch.ones(new, known, dtype=torch.bool, device=queries.device).tril(known - new)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=_grouped(queries, keys))


class Unrolled(Context):
    """The steps of a training-time test (EAGLE-3, arXiv 2503.01840, section 3.2), many places of a text at once.

    Step 0 runs over the whole text. From a place t of it a chain starts, which in step j stands at position t + j, having
    drafted j tokens. Its query then sees what a drafter's cache would hold: step 0 of the places up to t (they were computed
    from the target's states) and the steps 1 .. j of its own chain, never those of another. So step j's scores are a causal
    block over step 0 beside j diagonals.
    """

    def __init__(self, places: Tensor | None = None) -> None:
        """Begin a test.

        Args:
            places: `[rows, chains]` int64: where chains start, whose outputs every pass is asked for; None for everywhere.
        """
        self.places = places
        self.keys: list[Tensor] = []  # step by step: [rows, kv_heads, length or chains, head_dim]
        self.values: list[Tensor] = []

    @property
    def step(self) -> int:
        """The number of passes so far: the next pass is this step."""
        return len(self.keys)

    def keep(self, chains: Tensor) -> None:
        """Go on with some of the chains: `[rows, chains left]` int64, their numbers in each row.

        Raises:
            ValueError: chains start everywhere.
        """
        if self.places is None:
            raise ValueError("chains that start everywhere cannot be dropped: name their places")
        self.places = self.places.take_along_dim(chains, dim=1)
        index = chains[:, None, :, None]
        self.keys[1:] = [keys.take_along_dim(index, dim=2) for keys in self.keys[1:]]
        self.values[1:] = [values.take_along_dim(index, dim=2) for values in self.values[1:]]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.keys.append(keys)
        self.values.append(values)
        if self.step == 1 and self.places is None:
            return WholeText().attend(queries, keys, values)
        text = torch.arange(self.keys[0].shape[2], device=queries.device)
        places = text[None] if self.places is None else self.places
        rows, chains = places.shape
        own = torch.eye(chains, dtype=torch.bool, device=queries.device).expand(rows, -1, -1)
        seen = torch.cat([text <= places[..., None], *[own] * (self.step - 1)], dim=2)  # [rows, chains, all keys]
        return F.scaled_dot_product_attention(
            queries,
            torch.cat(self.keys, dim=2),
            torch.cat(self.values, dim=2),
            attn_mask=seen[:, None],
            enable_gqa=_grouped(queries, keys),
        )


def _grouped(queries: Tensor, keys: Tensor) -> bool:
    return queries.shape[1] != keys.shape[1]


class Attention(nn.Module):
    """Grouped-query attention with rotated queries and keys."""

    def __init__(self, config: DecoderConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.register_buffer("frequencies", config.rope.frequencies(config.head_dim), persistent=False)

    def forward(self, inputs: Tensor, positions: Tensor, context: Context, places: Tensor | None = None) -> Tensor:
        """`[rows, length, input_size]` at positions `[length]` or `[rows, length]` -> `[rows, length or places, hidden]`."""
        asking = inputs if places is None else at_places(inputs, places)
        queries, keys, values = (
            projection(read).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, read in ((self.q_proj, asking), (self.k_proj, inputs), (self.v_proj, inputs))
        )
        angles = positions[..., None].float() * self.frequencies  # [.., length, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1).expand(len(inputs), -1, -1)
        keys = _rotate(keys, angles)
        queries = _rotate(queries, angles if places is None else at_places(angles, places))
        mixed = context.attend(queries, keys, values)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of `[rows, heads, length, head_dim]` by `[rows, length, head_dim]`."""
    cos, sin = angles.cos().to(heads.dtype)[:, None], angles.sin().to(heads.dtype)[:, None]
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def at_places(sequence: Tensor, places: Tensor) -> Tensor:
    """`[rows, length, size]` at `[rows, places]` -> `[rows, places, size]`."""
    return sequence.take_along_dim(places[..., None], dim=1)


class MLP(nn.Module):
    """Llama's gated feed-forward network (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`"""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """One layer: attention and a feed-forward network, each added to what came in.

    `input_norm=False` leaves out the norm before attention, as EAGLE's first layer does. `input_size` is what attention
    reads where that is not the residual stream itself (EAGLE-3: twice the hidden size); the caller then hands it over.
    """

    def __init__(self, config: DecoderConfig, input_size: int | None = None, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size or config.hidden_size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps) if input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        context: Context | None = None,
        inputs: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Run the layer over places of a batch of texts.

        Args:
            hidden: `[rows, length, hidden]`, the residual stream.
            positions: `[length]`, the same in every row, or `[rows, length]`.
            context: what each place may see; None for itself and all places before it.
            inputs: `[rows, length, input_size]`, what attention reads; None for the normed `hidden`.
            places: `[rows, places]` int64, where an output is wanted; the others only give keys and values, which takes a
                context that knows it (`Unrolled`). None: everywhere.

        Returns:
            `[rows, length or places, hidden]`: the residual stream; no final norm.
        """
        context = WholeText() if context is None else context
        inputs = self.input_layernorm(hidden) if inputs is None else inputs
        attended = self.self_attn(inputs, positions, context, places)
        hidden = attended + (hidden if places is None else at_places(hidden, places))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
