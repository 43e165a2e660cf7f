"""EAGLE and EAGLE-3 heads: one decoder layer that goes on from the target's hidden states, token by token.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077;
Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv 2503.01840.

Both run the same way, here and in vLLM. At place t they read the token *after* it, x[t+1], which the target has chosen, and
what the target thought at t; they stand at position t, keep keys and values of their own, and put out a state from which
x[t+2] is drafted. For the next draft that state takes the place of the target's. The names of the parameters are those of
SafeAILab's checkpoints, which vLLM loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm_specplugin.heads.decoder import Context, DecoderConfig, DecoderLayer, RMSNorm

AUX_LAYERS = 3
"""How many of the target's layers EAGLE-3 fuses."""


class DraftHead(nn.Module):
    """What EAGLE and EAGLE-3 have in common: the pass, over any number of places."""

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: Context | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """One pass of the head.

        Args:
            embeddings: `[rows, length, hidden]`, the target's embedding of the token after each place.
            hidden: `[rows, length, hidden]`, what `fuse` makes of the target's states, or what the pass before put out.
            positions: `[length]` or `[rows, length]`, of each place, not of the token after it.
            context: what each place may see; None for itself and all places before it.
            places: `[rows, places]` int64, where an output is wanted; None: everywhere.

        Returns:
            `[rows, length or places, hidden]`, for `logits` and for the next pass.
        """
        raise NotImplementedError

    def fuse(self, states: Tensor) -> Tensor:
        """What the first pass reads, from the target's states: `[..., hidden]`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, target_output: Tensor) -> Tensor:
        """`[..., hidden]` by the target's output matrix `[vocab, hidden]`, where it is used, -> `[..., draft_vocab]`."""
        raise NotImplementedError


class EagleHead(DraftHead):
    """EAGLE: extrapolates the target's last hidden state, and drafts with the target's own output layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = replace(config, qkv_bias=False, output_bias=False, mlp_bias=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        # The embedding and the state are already as large as the layer expects: no norm before attention.
        self.layers = nn.ModuleList([DecoderLayer(self.config, input_norm=False)])

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: Context | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        joined = self.fc(torch.cat((embeddings, hidden), dim=-1))
        return self.layers[0](joined, positions, context, places=places)  # type: ignore[no-any-return]

    def fuse(self, states: Tensor) -> Tensor:
        """The target's last hidden states after its final norm, as they are: `[..., hidden]`."""
        return states

    def logits(self, hidden: Tensor, target_output: Tensor) -> Tensor:
        # What is extrapolated is the state *after* the target's final norm, so none comes here.
        return nn.functional.linear(hidden, target_output)

    def to_hf(self, target: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint's config.json.

        Args:
            target: `vocab_size` and `max_position_embeddings` of the target.
        """
        return {"architectures": ["LlamaForCausalLM"], **_llama(self.config, target)}


class Eagle3Layer(DecoderLayer):
    """EAGLE-3's layer: attention reads the normed embedding beside the normed state; the state is the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, input_size=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)


class Eagle3Head(DraftHead):
    """EAGLE-3: fuses three layers of the target, and drafts with an output layer of its own over part of the vocabulary."""

    d2t: Tensor | None
    """`[draft_vocab]` int64: what is added to a draft token's number to get the target's; None where all can be drafted."""
    t2d: Tensor | None
    """`[vocab]` bool: the target's tokens that can be drafted."""

    def __init__(self, config: DecoderConfig, vocab_size: int, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        self.config = config = replace(config, qkv_bias=False, output_bias=False, mlp_bias=False)
        self.vocab_size, self.draft_vocab_size = vocab_size, draft_vocab_size or vocab_size
        self.fc = nn.Linear(AUX_LAYERS * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, self.draft_vocab_size, bias=False)
        # vLLM has no room for a mapping where the whole vocabulary can be drafted.
        part = self.draft_vocab_size != vocab_size
        self.register_buffer("d2t", torch.zeros(self.draft_vocab_size, dtype=torch.int64) if part else None)
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool) if part else None)
        if part:
            self.set_draft_tokens(torch.arange(self.draft_vocab_size))

    def set_draft_tokens(self, tokens: Tensor) -> None:
        """Choose what can be drafted: `[draft_vocab]` ids of the target, ascending."""
        if self.d2t is None or self.t2d is None:
            raise ValueError("this head drafts the whole vocabulary: there is nothing to choose")
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()[tokens] = True

    @property
    def draft_tokens(self) -> Tensor:
        """`[draft_vocab]` int64: the target's id of each token that can be drafted."""
        numbers = torch.arange(self.draft_vocab_size, device=self.fc.weight.device)
        return numbers if self.d2t is None else numbers + self.d2t

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: Context | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        layer = self.midlayer
        inputs = torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(hidden)), dim=-1)
        return layer(hidden, positions, context, inputs, places)  # type: ignore[no-any-return]

    def fuse(self, states: Tensor) -> Tensor:
        """The inputs of three of the target's layers, side by side `[..., 3 * hidden]`, -> `[..., hidden]`."""
        return self.fc(states)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor, target_output: Tensor | None = None) -> Tensor:
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    def to_hf(self, target: dict[str, Any], aux_layers: Sequence[int]) -> dict[str, Any]:
        """The checkpoint's config.json.

        Args:
            target: `vocab_size` and `max_position_embeddings` of the target.
            aux_layers: the target's layers whose inputs are fused.
        """
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **_llama(self.config, target),
            "draft_vocab_size": self.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        }

    def last_layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """What `initialise` wants of a target's last layer: names and shapes."""
        hidden = self.config.hidden_size
        shapes = {name: tuple(p.shape) for name, p in self.midlayer.named_parameters() if name != "hidden_norm.weight"}
        # Attention's projections have columns for the embedding, too.
        wide = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
        return {name: (*shape[:-1], hidden) if name in wide else shape for name, shape in shapes.items()}

    @torch.no_grad()
    def initialise(self, layer: Mapping[str, Tensor], final_norm: Tensor) -> None:
        """Start as the target's last layer on the topmost fused state, the token after it not yet read.

        Args:
            layer: the target's last decoder layer, its weights by their names in transformers.
            final_norm: `[hidden]`, the weight of the target's final norm.
        """
        hidden = self.config.hidden_size
        for name, parameter in self.midlayer.named_parameters():
            if name in layer and name != "input_layernorm.weight":
                # Attention's projections have columns for the embedding before those for the state.
                parameter.zero_()
                parameter[..., -layer[name].shape[-1] :].copy_(layer[name])
        self.midlayer.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
        self.norm.weight.copy_(final_norm)
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:].fill_diagonal_(1.0)


def _llama(config: DecoderConfig, target: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **config.to_hf(),
        "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": False,
    }
