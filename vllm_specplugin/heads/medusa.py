"""Medusa heads: each drafts one of the next tokens from the target's last hidden state alone.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774,
section 3.1. The state from which the target chose token t lets head i draft token t + 1 + i (i from 0).

A head is a few residual blocks, x + silu(W x), and an output layer. What this adds, all off by default: a gate on the block
(x + g * silu(W x), g starting at 0, so that a head begins as the target's own output), an RMSNorm before or behind the block,
a learnable scale of the state that the output layer reads, and one output layer for all heads over a part of the vocabulary,
which is what makes drafting cheap: an output layer over a large vocabulary costs more than all the rest of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.layers import HeadNorm, Projection, ProjectionFactory, project

TargetOutput: TypeAlias = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
"""The target's output layer: its matrix `[vocab, hidden]`, or what maps `[n, hidden]` to logits `[n, vocab]`."""


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """What a set of Medusa heads is made of."""

    num_heads: int
    hidden_size: int
    """Of the target, whose states they read."""
    vocab_size: int
    """Of the target."""
    num_layers: int = 1
    """Residual blocks per head."""
    draft_vocab_size: int | None = None
    """How many of the target's tokens can be drafted; None for all of them."""
    output: Literal["own", "shared", "target"] = "own"
    """Whose output layer turns a state into logits: each head's own, one for all heads, or the target's."""
    gated: bool = False
    """A learnable gate per channel on the residual branch, closed at the start of training."""
    norm: Literal["none", "pre", "post"] = "none"
    """RMSNorm before a block's matrix, behind the whole block, or nowhere."""
    output_scale: bool = False
    """A learnable factor per head on the state that the output layer reads."""
    bias: bool = False
    """The blocks' matrices have a bias."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "hidden_size", "vocab_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"'{name}' of Medusa heads is {getattr(self, name)}; it must be at least 1.")
        if self.output not in ("own", "shared", "target"):
            raise ConfigError(f"'output' of Medusa heads is {self.output!r}; use 'own', 'shared' or 'target'.")
        if self.norm not in ("none", "pre", "post"):
            raise ConfigError(f"'norm' of Medusa heads is {self.norm!r}; use 'none', 'pre' or 'post'.")
        if self.draft_vocab_size is None:
            return
        if self.output == "target":
            raise ConfigError(
                "'draft_vocab_size' does not go with 'output': 'target', whose output layer has every token; use 'shared'."
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"'draft_vocab_size' is {self.draft_vocab_size}; it must be from 1 to the target's vocabulary, {self.vocab_size}."
            )

    @property
    def num_draftable(self) -> int:
        """How many tokens can be drafted."""
        return self.draft_vocab_size or self.vocab_size


class MedusaBlock(nn.Module):
    """The residual blocks of one depth, of all heads."""

    def __init__(self, config: MedusaConfig, projection: ProjectionFactory) -> None:
        super().__init__()
        heads, hidden = config.num_heads, config.hidden_size
        self.linear = projection(heads, hidden, hidden, bias=config.bias)
        self.gate = nn.Parameter(torch.zeros(heads, hidden)) if config.gated else None
        self.norm = HeadNorm(heads, hidden) if config.norm != "none" else None
        self.norm_first = config.norm == "pre"

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, heads or 1, hidden]` -> `[n, heads, hidden]`."""
        inner = self.norm(states) if self.norm is not None and self.norm_first else states
        branch = nn.functional.silu(self.linear(inner))
        states = states + (branch if self.gate is None else self.gate * branch)
        return self.norm(states) if self.norm is not None and not self.norm_first else states


class MedusaHeads(nn.Module):
    """All heads of one checkpoint."""

    draft_to_target: torch.Tensor | None
    """`[draft_vocab]` int64: the target's id of each token that can be drafted; None where all can."""

    def __init__(self, config: MedusaConfig, projection: ProjectionFactory = Projection) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(MedusaBlock(config, projection) for _ in range(config.num_layers))
        self.output: Projection | None = None
        if config.output != "target":
            matrices = 1 if config.output == "shared" else config.num_heads
            self.output = projection(matrices, config.hidden_size, config.num_draftable)
        self.scale = nn.Parameter(torch.ones(config.num_heads, 1)) if config.output_scale else None
        mapping = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_to_target", mapping)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's last hidden states `[n, hidden]` -> what the output layers read, `[n, heads, hidden]`."""
        states = hidden[:, None]
        for block in self.blocks:
            states = block(states)
        if self.scale is not None:
            states = states * self.scale
        return states

    def logits(self, states: torch.Tensor, target_output: TargetOutput | None = None) -> torch.Tensor:
        """States `[n, heads, hidden]` -> logits `[n, heads, draft_vocab]`; `target_output` is read where `output` is 'target'."""
        if self.output is not None:
            return self.output(states)  # type: ignore[no-any-return]
        if target_output is None:
            raise ValueError("these heads share the target's output layer, which was not given")
        if isinstance(target_output, torch.Tensor):
            return project(states, target_output[None])
        return target_output(states.flatten(0, 1)).unflatten(0, states.shape[:2])

    def best(self, states: torch.Tensor, target_output: TargetOutput | None = None) -> torch.Tensor:
        """States `[n, heads, hidden]` -> the likeliest token of each, as the target numbers it: `[n, heads]` int64."""
        if self.output is None:
            return self.logits(states, target_output).argmax(dim=-1)
        best = self.output.best(states)
        return best if self.draft_to_target is None else self.draft_to_target[best]

    def finish(self) -> None:
        """All weights are loaded; see `Projection.finish`."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.finish()

    def output_matrix(self, head: int) -> torch.Tensor | None:
        """The head's output layer, `[draft_vocab, hidden]`; None where it is the target's. Heads may share it."""
        if self.output is None:
            return None
        return self.output.weight[0 if self.config.output == "shared" else head]

    @torch.no_grad()
    def initialise(self, target_output: torch.Tensor, draft_to_target: torch.Tensor | None = None) -> None:
        """Start every head as the target's own output: what each head learns is then the difference to the next token.

        Args:
            target_output: `[vocab, hidden]`, the target's output matrix.
            draft_to_target: `[draft_vocab]`, where only a part of the vocabulary is drafted.
        """
        if draft_to_target is not None:
            if self.draft_to_target is None:
                raise ValueError("these heads draft the whole vocabulary, so there is nothing to map")
            self.draft_to_target.copy_(draft_to_target)
        if self.output is not None:
            rows = target_output if self.draft_to_target is None else target_output[self.draft_to_target]
            self.output.weight.copy_(rows[None].expand_as(self.output.weight))
        for block in self.blocks:
            # Behind a closed gate the matrix must not be zero too, or neither would ever see a gradient.
            if block.gate is None:
                nn.init.zeros_(block.linear.weight)
