"""The target's distribution at one place: the sampling parameters applied to its raw logits, by the validator's own code.

It shares nothing with what it checks, neither vLLM's samplers nor the plugin's verifiers. The order of operations is vLLM's:
allowed tokens, logit bias, penalties (repetition, frequency, presence), temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_specplugin.validate.membership import MIN_P_ROUNDING, TIE_ROUNDING, TOP_P_ROUNDING
from vllm_specplugin.validate.sampling import Sampling

Ties = Literal["keep", "cut", "skip"]
"""What the engine does with tokens as likely as the k-th: PyTorch's path keeps them all, the Triton kernel keeps exactly k.
`skip` is for engines that use more than one path: places where it matters are not tested."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What each row's token is drawn from."""

    probabilities: torch.Tensor
    """`[rows, vocab]` float32."""
    clear: torch.Tensor
    """`[rows]` bool: rounding cannot move a token in or out; the other rows are not to be tested."""
    tied: torch.Tensor | None
    """`[rows, vocab]` bool: equally likely tokens of which only some stay, and engines differ in which. None for no such."""


def distribution(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    ties: Ties = "keep",
) -> Distribution:
    """Apply `sampling` to raw logits.

    Args:
        logits: `[rows, vocab]`, as the model gave them; left as they are.
        sampling: the same for every row.
        prompt_mask: `[rows, vocab]` bool, which tokens the prompt has; wanted for a repetition penalty.
        output_counts: `[rows, vocab]`, how often each token stands in the output before the row; wanted for any penalty.
        ties: the engine's rule at the k-th token.
    """
    values = scaled(logits, sampling, prompt_mask, output_counts)
    clear = torch.ones(len(values), dtype=torch.bool, device=values.device)
    if sampling.min_p > 0:
        threshold = values.amax(dim=-1, keepdim=True) + torch.log(torch.tensor(sampling.min_p, device=values.device))
        clear &= ~((values - threshold).abs() < MIN_P_ROUNDING).any(dim=-1)
        values.masked_fill_(values < threshold, -torch.inf)
    tied = None
    if sampling.truncated:
        values, certain, tied = _truncate(values, sampling, ties)
        clear &= certain
    return Distribution(values.softmax(dim=-1), clear, tied)


def scaled(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[rows, vocab]` float32: all of `sampling` but min-p, top-k and top-p applied; arguments as of `distribution`.

    Which tokens those three leave depends on rounding, so it is decided later where the rounding is known.
    """
    values = logits.float().clone()
    if sampling.allowed_token_ids is not None:
        allowed = torch.zeros_like(values, dtype=torch.bool)
        allowed[:, list(sampling.allowed_token_ids)] = True
        values.masked_fill_(~allowed, -torch.inf)
    for token, bias in sampling.logit_bias.items():
        values[:, token] += bias
    if sampling.penalised:
        assert output_counts is not None
        _penalise(values, sampling, prompt_mask, output_counts)
    values /= sampling.temperature
    return values


def _penalise(values: torch.Tensor, sampling: Sampling, prompt_mask: torch.Tensor | None, counts: torch.Tensor) -> None:
    """In place: repetition scales what prompt or output has, frequency and presence subtract for the output alone."""
    said = counts > 0
    if sampling.repetition_penalty != 1:
        assert prompt_mask is not None
        penalty = sampling.repetition_penalty
        scaled = torch.where(values > 0, values / penalty, values * penalty)
        values.copy_(torch.where(said | prompt_mask, scaled, values))
    values -= sampling.frequency_penalty * counts
    values -= sampling.presence_penalty * said


def _truncate(values: torch.Tensor, sampling: Sampling, ties: Ties) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Top-k, then top-p: the truncated logits, which rows are certain, and the ties at the boundary."""
    vocab = values.shape[1]
    ranked, order = values.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=values.device)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    certain = torch.ones(len(values), dtype=torch.bool, device=values.device)
    if 0 < sampling.top_k < vocab:
        kth = ranked[:, sampling.top_k - 1, None]
        keep = ranked >= kth if ties == "keep" else (rank < sampling.top_k).expand_as(ranked)
        if ties == "keep" and sampling.penalised:  # whether the next one is equal to the k-th, and stays, is a matter of rounding
            certain = ~(_near(ranked, kth) & (rank >= sampling.top_k)).any(dim=-1)
    if sampling.top_p < 1:
        mass = ranked.masked_fill(~keep, -torch.inf).softmax(dim=-1).double()
        before = mass.cumsum(dim=-1) - mass  # [rows, vocab]: what stands ahead of each token
        certain = certain & ~(((before - sampling.top_p).abs() < TOP_P_ROUNDING) & keep).any(dim=-1)
        keep = keep & (before < sampling.top_p)
    last = ranked.gather(1, keep.sum(dim=-1, keepdim=True) - 1)  # [rows, 1]: the smallest value that stays
    split = (_near(ranked, last) & ~keep).any(dim=-1)  # [rows]: not all tokens of about that value stay
    if ties == "skip":
        certain = certain & ~split
    kept = torch.zeros_like(keep).scatter(1, order, keep)
    tied = _near(values, last) & split[:, None] if bool(split.any()) else None
    return values.masked_fill(~kept, -torch.inf), certain, tied


def _near(values: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`[rows, vocab]`: as good as equal to the row's `value` `[rows, 1]`."""
    return (values - value).abs() <= TIE_ROUNDING * value.abs().clamp(min=10)
