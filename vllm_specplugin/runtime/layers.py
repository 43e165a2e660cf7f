"""The layers of heads as vLLM builds them: spread over the tensor-parallel ranks, and in the form that its kernels like best.

Every rank gets the whole result of a projection, and the same one: each number is computed by one rank and sent to the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.distributed.parallel_state import graph_capture
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_specplugin.heads.layers import HostLayers, Projection, project


class VllmLayers(HostLayers):
    """vLLM's layers on one device."""

    def __init__(self, device: torch.device, eager: bool) -> None:
        self.device = device
        self.eager = eager

    def projection(self, heads: int, inputs: int, outputs: int, bias: bool = False) -> Projection:
        """One matrix for all heads is vLLM's own output layer; one for each is a batch of them, which it has no layer for."""
        if heads == 1 and not bias:
            return OutputProjection(inputs, outputs)
        if get_tensor_model_parallel_world_size() == 1:
            return super().projection(heads, inputs, outputs, bias)
        return ShardedProjection(heads, inputs, outputs, bias)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """On a stream of its own, and with the ranks' communication recorded, too."""
        with graph_capture(self.device):
            yield


class _Sharded(Projection):
    """A projection of which each rank has some rows."""

    first: int
    """The first row of this rank."""
    count: int
    """How many it has; the rest of its matrix is padding."""

    def partial(self, states: torch.Tensor) -> torch.Tensor:
        """This rank's part of the outputs, padding included: `[n, heads, rows per rank]`."""
        raise NotImplementedError

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        partial = self.partial(states)
        if get_tensor_model_parallel_world_size() > 1:
            partial = tensor_model_parallel_all_gather(partial.contiguous(), dim=-1)
        return partial[..., : self.outputs]

    def best(self, states: torch.Tensor) -> torch.Tensor:
        """Each rank finds its own largest output, so that two numbers per rank are sent and not the whole vocabulary."""
        if get_tensor_model_parallel_world_size() == 1:
            return self.forward(states).argmax(dim=-1)
        partial = self.partial(states)
        if self.count == 0:
            largest = partial.new_full(partial.shape[:-1], -torch.inf)
            place = torch.zeros_like(largest, dtype=torch.int64)
        else:
            largest, place = partial[..., : self.count].max(dim=-1)
        # As float32, in which token ids are exact up to 2^24, and so is what any narrower type holds.
        pair = torch.stack([largest.float(), (place + self.first).float()], dim=-1)  # [n, heads, 2]
        pairs = tensor_model_parallel_all_gather(pair, dim=-1).unflatten(-1, (-1, 2))  # [n, heads, ranks, 2]
        winner = pairs[..., 0].argmax(dim=-1, keepdim=True)
        return pairs[..., 1].gather(-1, winner).squeeze(-1).long()


class ShardedProjection(_Sharded):
    """A batch of matrices; each rank has the same rows of all of them."""

    def __init__(self, heads: int, inputs: int, outputs: int, bias: bool) -> None:
        nn.Module.__init__(self)
        self.heads, self.inputs, self.outputs = heads, inputs, outputs
        rows = -(-outputs // get_tensor_model_parallel_world_size())
        self.first = min(get_tensor_model_parallel_rank() * rows, outputs)
        self.count = min(rows, outputs - self.first)
        self.weight = nn.Parameter(torch.zeros(heads, rows, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(heads, rows), requires_grad=False) if bias else None

    def partial(self, states: torch.Tensor) -> torch.Tensor:
        return project(states, self.weight, self.bias)

    @torch.no_grad()
    def load(self, head: int, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        mine = slice(self.first, self.first + self.count)
        self.weight[head, : self.count].copy_(weight[mine])
        if self.bias is not None and bias is not None:
            self.bias[head, : self.count].copy_(bias[mine])


class OutputProjection(_Sharded):
    """One matrix for all heads, as vLLM's output layer, which brings its kernels and whatever a platform puts in its place."""

    bias = None

    def __init__(self, inputs: int, outputs: int) -> None:
        nn.Module.__init__(self)
        self.heads, self.inputs, self.outputs = 1, inputs, outputs
        self.layer = ParallelLMHead(outputs, inputs, prefix="specplugin.heads.output")
        indices = self.layer.shard_indices
        self.first = indices.org_vocab_start_index
        self.count = indices.org_vocab_end_index - self.first

    def partial(self, states: torch.Tensor) -> torch.Tensor:
        logits = self.layer.quant_method.apply(self.layer, states.flatten(0, 1))
        return logits.unflatten(0, states.shape[:2])  # type: ignore[no-any-return]

    def load(self, head: int, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.layer.weight_loader(self.layer.weight, weight)

    def finish(self) -> None:
        self.layer.quant_method.process_weights_after_loading(self.layer)
