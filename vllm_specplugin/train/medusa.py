"""The objective Medusa-1: heads on a frozen trunk, a cross-entropy for each.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774, section
2.2.1: L = sum over heads k of decay^k times the cross-entropy of head k, where the authors take a decay of about 0.8.

Which token a head learns: the target's hidden state at place t chose token t + 1. When the engine asks for drafts, that token
is already there, so head k (from 0) drafts token t + 2 + k.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_specplugin.heads import checkpoint, medusa_files
from vllm_specplugin.heads.medusa import MedusaConfig, MedusaHeads
from vllm_specplugin.train.batch import Batch
from vllm_specplugin.train.losses import CrossEntropy, SoftLabels, cross_entropy
from vllm_specplugin.train.objective import Losses, Objective, chained
from vllm_specplugin.train.options import MedusaOptions
from vllm_specplugin.train.target import Setting, most_frequent

OUTSIDE = -1
"""What stands for a token that cannot be drafted, in place of its number in the draft vocabulary."""


class MedusaObjective(Objective):
    """Medusa-1 over a set of heads."""

    name = "medusa"
    target_output: torch.Tensor
    """`[vocab, hidden]`, frozen."""
    target_to_draft: torch.Tensor | None
    """`[vocab]`: the number of each token in the draft vocabulary, or `OUTSIDE`; None where every token can be drafted."""
    drafted_output: torch.Tensor
    """`[draft_vocab, hidden]`: the target's output rows of the tokens that can be drafted; frozen."""

    def __init__(self, heads: MedusaHeads, target_output: torch.Tensor, decay: float, distill_soft: bool) -> None:
        """Train these heads, which must be initialised.

        Args:
            heads: what is trained.
            target_output: `[vocab, hidden]`.
            decay: head k's loss counts decay to the power k.
            distill_soft: learn the target's distribution at each place instead of the token that it wrote there.
        """
        super().__init__()
        self.heads, self.decay, self.distill_soft = heads, decay, distill_soft
        drafted, numbers = heads.draft_to_target, None
        if drafted is not None:
            numbers = torch.full((len(target_output),), OUTSIDE)
            numbers[drafted] = torch.arange(len(drafted))
        self.register_buffer("target_output", target_output, persistent=False)
        self.register_buffer("target_to_draft", numbers, persistent=False)
        self.register_buffer("drafted_output", target_output if drafted is None else target_output[drafted], persistent=False)

    @classmethod
    def build(cls, options: MedusaOptions, setting: Setting) -> MedusaObjective:
        """Fresh heads, which begin as the target's own output (see `MedusaHeads.initialise`).

        Raises:
            ConfigError: the options do not go together, or do not fit the target.
        """
        target = setting.target
        heads = MedusaHeads(
            MedusaConfig(
                num_heads=options.num_heads,
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                num_layers=options.num_layers,
                draft_vocab_size=options.draft_vocab_size,
                output=options.output,
                gated=options.gated,
                norm=options.norm,
                output_scale=options.output_scale,
            )
        )
        drafted = None if options.draft_vocab_size is None else most_frequent(setting.counts, options.draft_vocab_size)
        heads.initialise(target.output, drafted)
        if heads.output is not None:
            heads.output.requires_grad_(not options.freeze_output)
        return cls(heads, target.output.to(setting.dtype), options.decay, options.distill_soft)

    @property
    def depth(self) -> int:
        return self.heads.config.num_heads

    def loss(self, batch: Batch) -> Losses:
        """Places whose next token the target wrote, as in serving; heads reach as far as the text does."""
        hidden, labels, known = places(batch, self.depth)
        states = self.heads(hidden)  # [n, heads, hidden]
        matrices = self._matrices()
        following = places_of_labels(batch, self.depth) if self.distill_soft else None
        total = states.new_zeros((), dtype=torch.float32)
        parts: dict[str, torch.Tensor] = {}
        right, counted = torch.zeros_like(known), batch.num_counted
        for head in range(self.depth):
            numbers = labels[:, head] if self.target_to_draft is None else self.target_to_draft[labels[:, head]]
            # A token that cannot be drafted teaches nothing, but it counts as one that is not accepted.
            rows = (known[:, head] & (numbers != OUTSIDE)).nonzero()[:, 0]
            weights = torch.full((len(rows),), self.decay**head / counted, device=states.device)
            soft = None if following is None else SoftLabels(following[rows, head], self.drafted_output)
            of_head: CrossEntropy = cross_entropy(
                states[rows, head], matrices[head], weights, labels=None if soft else numbers[rows], soft=soft
            )
            total = total + of_head.total
            parts[f"head_{head + 1}"] = of_head.nats.sum() / counted
            right[rows, head] = of_head.best == numbers[rows]
        return Losses(total, parts, *chained(right, known))

    def _matrices(self) -> list[torch.Tensor]:
        """The output matrix of each head. Taken apart once, so that the gradient is put together once, too."""
        if self.heads.output is None:
            return [self.target_output] * self.depth
        matrices = list(self.heads.output.weight.unbind())
        return matrices * (self.depth // len(matrices))

    def decays(self, name: str, parameter: torch.nn.Parameter) -> bool:
        return name.endswith(("linear.weight", "output.weight"))

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        tensors, config = medusa_files.dump(self.heads)
        checkpoint.save(folder, tensors, config, provenance)


def places(batch: Batch, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where drafts are made, as in serving: the places whose next token the target wrote.

    Returns:
        The hidden states there `[n, hidden]`; the tokens to draft `[n, depth]`, of which the first is two places further on;
        and whether each of them is in the text and counts, `[n, depth]` bool.
    """
    asked = torch.zeros_like(batch.counts)
    asked[:, :-1] = batch.counts[:, 1:]
    labels = torch.stack([_ahead(batch.token_ids, 2 + d) for d in range(depth)], dim=-1)  # [rows, length, depth]
    known = torch.stack([_ahead(batch.counts, 2 + d) for d in range(depth)], dim=-1)
    return batch.last[asked], labels[asked], known[asked]


def places_of_labels(batch: Batch, depth: int) -> torch.Tensor:
    """The hidden states that chose the tokens to draft, at the same places: `[n, depth, hidden]`."""
    asked = torch.zeros_like(batch.counts)
    asked[:, :-1] = batch.counts[:, 1:]
    return torch.stack([_ahead(batch.last, 1 + d)[asked] for d in range(depth)], dim=1)


def _ahead(values: torch.Tensor, by: int) -> torch.Tensor:
    """`[rows, length, ...]` shifted to the left, zeros where the text has ended."""
    result = torch.zeros_like(values)
    result[:, : max(0, values.shape[1] - by)] = values[:, by:]
    return result
