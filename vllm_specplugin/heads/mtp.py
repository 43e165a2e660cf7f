"""Sequential multi-token prediction modules, in the form in which MiMo's checkpoints hold them.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2. With depth 1 the main head, which predicts
x_{t+1} at place t, the module of depth d joins the hidden state of depth d-1 at t with the embedding of x_{t+d-1}, and predicts
x_{t+d} through the target's own output layer. It never sees a later token.

The target's state that goes in is the one *before* its final norm: that is what vLLM hands to MiMo's module. The norm of the
module makes it independent of its size.

Two ways to go deeper than one module, both exact in training:
- "shared": the module is fed its own hidden state, as engines serve a checkpoint with one module for several drafts. In the
  steps of one chain it sees what its cache holds then, as in a training-time test (`decoder.Unrolled`).
- "separate": DeepSeek's pre-training, a module per depth, each over its own states of all places before.

The parallel kind of multi-token prediction (arXiv 2404.19737), whose heads see the hidden state at t alone, needs no module of
its own: its heads are Medusa's (`medusa.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.decoder import Context, DecoderConfig, DecoderLayer, RMSNorm, Unrolled, WholeText, at_places


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """What a set of sequential modules is made of."""

    decoder: DecoderConfig
    num_drafts: int = 1
    """Tokens predicted beyond the main head's, D - 1."""
    modules: Literal["shared", "separate"] = "shared"
    gated: bool = False
    """A learnable gate per channel on the residual branches, closed at the start of training."""
    output_scale: bool = False
    """A learnable factor on the state that the output layer reads."""

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ConfigError(f"the depth of multi-token prediction is {self.num_drafts + 1}; at least 2 is expected.")
        if self.modules not in ("shared", "separate"):
            raise ConfigError(f"'modules' is {self.modules!r}; use 'shared' or 'separate'.")

    @property
    def num_modules(self) -> int:
        return 1 if self.modules == "shared" else self.num_drafts


class GatedDecoderLayer(DecoderLayer):
    """A decoder layer with a gate per channel on each residual branch, h + g * f(h).

    The gates start at 0, so that the layer begins as the identity; its own weights must then not be zero, or neither would ever
    see a gradient. A gate scales the rows of the branch's last matrix, and so needs no place in a checkpoint (`fold`).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.attention_gate = nn.Parameter(torch.zeros(config.hidden_size))
        self.mlp_gate = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        context: Context | None = None,
        inputs: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """As `DecoderLayer.forward`."""
        context = WholeText() if context is None else context
        inputs = self.input_layernorm(hidden) if inputs is None else inputs
        attended = self.attention_gate * self.self_attn(inputs, positions, context, places)
        hidden = attended + (hidden if places is None else at_places(hidden, places))
        return hidden + self.mlp_gate * self.mlp(self.post_attention_layernorm(hidden))


class MTPModule(nn.Module):
    """One module: both inputs normed and joined, a decoder layer, a final norm. Parameters carry MiMo's names but for `layer`."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        sizes = config.decoder
        self.token_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.hidden_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.input_proj = nn.Linear(2 * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.layer = GatedDecoderLayer(sizes) if config.gated else DecoderLayer(sizes)
        self.final_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.scale = nn.Parameter(torch.ones(())) if config.output_scale else None

    def forward(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, context: Context | None = None) -> Tensor:
        """Predict one token further.

        Args:
            hidden: `[rows, length, hidden]`, of the depth before.
            embeddings: `[rows, length, hidden]`, of the token after those that `hidden` has seen.
            positions: `[length]` or `[rows, length]`.
            context: what each place may see; None for itself and all places before it.

        Returns:
            `[rows, length, hidden]`: what the output layer reads, and what the next depth is fed.
        """
        # As the engine does: the first place of a text has no token before it, and its embedding is left out.
        embeddings = embeddings.masked_fill((positions == 0)[..., None], 0.0)
        joined = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embeddings)), dim=-1)
        state = self.final_layernorm(self.layer(self.input_proj(joined), positions, context))
        return state if self.scale is None else state * self.scale

    @torch.no_grad()
    def fold(self) -> dict[str, Tensor]:
        """The tensors of the module as MiMo's layout has them: gates and scale become part of the matrices beside them."""
        tensors = {name.removeprefix("layer."): tensor.clone() for name, tensor in self.state_dict().items()}
        if isinstance(self.layer, GatedDecoderLayer):
            for matrix, gate in (("self_attn.o_proj", "attention_gate"), ("mlp.down_proj", "mlp_gate")):
                tensors[f"{matrix}.weight"] *= tensors.pop(gate)[:, None]
        if self.scale is not None:
            tensors["final_layernorm.weight"] *= tensors.pop("scale")
        return tensors


class SequentialMTP(nn.Module):
    """All depths beyond the main head."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.config = config
        self.mtp_layers = nn.ModuleList(MTPModule(config) for _ in range(config.num_modules))

    def forward(self, hidden: Tensor, embeddings: Tensor, positions: Tensor) -> Iterator[Tensor]:
        """The states of one depth after another, as they are asked for.

        Args:
            hidden: `[rows, length, hidden]`, the target's states before its final norm.
            embeddings: `[rows, length, hidden]`, of the texts' tokens x_t.
            positions: `[length]`.

        Yields:
            for d = 2, 3, ...: `[rows, length, hidden]`, whose place t predicts x_{t+d}. Of the last d - 1 places the token to be
            joined is unknown; what stands there is of no use, and no other place sees it.
        """
        unrolled = Unrolled()
        for draft in range(self.config.num_drafts):
            following = F.pad(embeddings[:, draft + 1 :], (0, 0, 0, min(draft + 1, embeddings.shape[1])))
            if self.config.modules == "shared":
                hidden = self.mtp_layers[0](hidden, following, positions + draft, unrolled)
            else:
                hidden = self.mtp_layers[draft](hidden, following, positions)
            yield hidden

    @torch.no_grad()
    def initialise(self, final_norm: Tensor | None = None) -> None:
        """Start every module near the main head: it passes the hidden state through, and adds a little of the token.

        Its layer starts at random, whose branches are small beside the state. A layer of the target, which is used to states of
        another size, takes longer to learn from here.

        Args:
            final_norm: `[hidden]`, the weight of the target's final norm, so that states have the size that the output layer
                was trained on.
        """
        for module in self.mtp_layers:
            assert isinstance(module, MTPModule)
            size = module.input_proj.out_features
            nn.init.normal_(module.input_proj.weight, std=0.5 * size**-0.5)
            module.input_proj.weight[:, :size] += torch.eye(size)
            if final_norm is not None:
                module.final_layernorm.weight.copy_(final_norm)
