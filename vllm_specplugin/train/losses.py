"""Cross-entropy over a large vocabulary without ever holding the logits of all places.

The logits of a few thousand places over 50,000 tokens are gigabytes that a CPU has to move several times. Here they are made for
some rows at a time, few enough to stay in the cache, and used at once for the loss *and* for its gradients, so backward has
nothing to do but to scale. Products run in the autocast type, statistics in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Logits held at a time, by device: 16 MiB in float32 on a CPU, 1 GiB on a GPU."""
MIN_CHUNK_ROWS = 256
"""Fewer rows would read the whole output matrix, and write its whole gradient, for too little arithmetic."""


@dataclass(frozen=True, slots=True, eq=False)
class SoftLabels:
    """A distribution per place: softmax over `states @ output.T`, where the label itself would be one draw from it."""

    states: torch.Tensor
    """`[n, hidden]`: the target's hidden states that chose the labels."""
    output: torch.Tensor
    """`[vocab, hidden]`: the target's output matrix; its rows for the drafted tokens alone restrict and renormalise."""


@dataclass(frozen=True, slots=True, eq=False)
class CrossEntropy:
    """A loss and what is shown of it."""

    total: torch.Tensor
    """Scalar: the sum over places of `row_weights` times nats; the only differentiable part."""
    nats: torch.Tensor
    """`[n]` float32: the cross-entropy at each place."""
    best: torch.Tensor
    """`[n]` int64: the likeliest token, as a row of the output matrix."""


def cross_entropy(
    states: torch.Tensor,
    output: torch.Tensor,
    row_weights: torch.Tensor,
    labels: torch.Tensor | None = None,
    soft: SoftLabels | None = None,
) -> CrossEntropy:
    """Cross-entropy of softmax(states @ output.T) with labels, either tokens or distributions.

    Args:
        states: `[n, hidden]`; a gradient is computed if it wants one.
        output: `[vocab, hidden]`; likewise (a frozen matrix costs no gradient).
        row_weights: `[n]`: what each place counts in the total.
        labels: `[n]` int64, rows of `output`.
        soft: instead of `labels`.
    """
    if (labels is None) == (soft is None):
        raise ValueError("give either labels or soft labels")
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    if not torch.is_grad_enabled():  # which the function itself cannot see
        states, output = states.detach(), output.detach()
    soft_states, soft_output = (None, None) if soft is None else (soft.states, soft.output)
    total, nats, best = _ChunkedCrossEntropy.apply(states, output, row_weights, labels, soft_states, soft_output, dtype)
    return CrossEntropy(total, nats, best)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        output: torch.Tensor,
        row_weights: torch.Tensor,
        labels: torch.Tensor | None,
        soft_states: torch.Tensor | None,
        soft_output: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wants_states, wants_output = ctx.needs_input_grad[:2]
        matrix = output.to(dtype)
        soft_matrix = None if soft_output is None else soft_output.to(dtype)
        n = len(states)
        nats = states.new_empty(n, dtype=torch.float32)
        best = torch.empty(n, dtype=torch.int64, device=states.device)
        grad_states = torch.empty_like(states) if wants_states else None
        grad_output = torch.zeros_like(output) if wants_output else None
        for start in range(0, n, rows := chunk_rows(output)):
            part = slice(start, start + rows)
            h = states[part].to(dtype)
            wanted = None
            if soft_states is not None and soft_matrix is not None:
                wanted = (soft_states[part].to(dtype) @ soft_matrix.T).softmax(dim=1, dtype=torch.float32)
            nats[part], best[part], error = _judge(h @ matrix.T, None if labels is None else labels[part], wanted)
            weight = row_weights[part, None].float()
            # softmax - label is rounded only here, so that small errors stay small and do not vanish.
            error = error.to(dtype)
            if grad_states is not None:
                grad_states[part] = (error @ matrix) * weight
            if grad_output is not None:
                grad_output += error.T @ (h * weight).to(dtype)
        ctx.save_for_backward(grad_states, grad_output)
        ctx.mark_non_differentiable(nats, best)
        return (nats * row_weights).sum(), nats, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_output = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_states is None else grad_states * scale,
            None if grad_output is None else grad_output * scale,
            *[None] * 5,
        )


def _judge(
    logits: torch.Tensor, labels: torch.Tensor | None, wanted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nats `[rows]`, likeliest tokens `[rows]`, and the gradient by the logits, softmax - label, `[rows, vocab]` in float32.

    Args:
        logits: `[rows, vocab]`.
        labels: `[rows]`, or
        wanted: `[rows, vocab]`, distributions.
    """
    largest, best = logits.max(dim=1)
    error = logits.softmax(dim=1, dtype=torch.float32)
    log_sums = largest - error.gather(1, best[:, None])[:, 0].log()  # log of the sum of exp(logits)
    if labels is not None:
        at_label = logits.gather(1, labels[:, None])[:, 0]
        error.scatter_add_(1, labels[:, None], error.new_full((len(labels), 1), -1.0))
        return log_sums - at_label, best, error
    assert wanted is not None
    return log_sums - torch.linalg.vecdot(wanted, logits.float()), best, error.sub_(wanted)


def chunk_rows(output: torch.Tensor) -> int:
    """How many rows of logits over this output matrix are made at a time."""
    return max(MIN_CHUNK_ROWS, CHUNK_LOGITS.get(output.device.type, CHUNK_LOGITS["cuda"]) // len(output))
