"""The layers that several heads share: one product for all of them, since each is too small to be worth a kernel of its own.

Training uses these modules as they are. Serving makes subclasses of them that lie on several devices (`runtime/layers.py`),
so the mathematics of a head is written once, over a `ProjectionFactory`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from vllm_specplugin.heads.graphs import RowFunction, RowGraphs, batch_sizes, cuda_capture

if TYPE_CHECKING:
    from collections.abc import Iterator


class Projection(nn.Module):
    """One matrix per head, `[heads, outputs, inputs]`, applied to all heads at once."""

    def __init__(self, heads: int, inputs: int, outputs: int, bias: bool = False, *, empty: bool = False) -> None:
        """Random matrices and no bias, or with `empty` whatever lies in memory, for weights that are loaded anyhow."""
        super().__init__()
        self.heads, self.inputs, self.outputs = heads, inputs, outputs
        self.weight = nn.Parameter(torch.empty(heads, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(heads, outputs)) if bias else None
        if not empty:
            nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, heads, inputs]` -> `[n, heads, outputs]`.

        Where either side has one entry for all heads (`[n, 1, inputs]`, or one matrix), it is used for every head of the other.
        """
        return project(states, self.weight, self.bias)

    def best(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, heads, inputs]` -> `[n, heads]` int64: the number of the largest output."""
        return self(states).argmax(dim=-1)  # type: ignore[no-any-return]

    @torch.no_grad()
    def load(self, head: int, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copy one head's matrix `[outputs, inputs]` and bias `[outputs]` in."""
        self.weight[head].copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias[head].copy_(bias)

    def finish(self) -> None:
        """Everything is loaded: bring the matrices into the form in which they are used fastest."""

    def extra_repr(self) -> str:
        return f"heads={self.heads}, inputs={self.inputs}, outputs={self.outputs}, bias={self.bias is not None}"


class ProjectionFactory(Protocol):
    """What makes projections: the class itself in training, the host's layers in serving."""

    def __call__(self, heads: int, inputs: int, outputs: int, bias: bool = False) -> Projection: ...


class HostLayers:
    """How the engine around a proposer builds and runs layers; here, as PyTorch does on one device."""

    eager = False
    """The user wants no graphs."""

    def projection(self, heads: int, inputs: int, outputs: int, bias: bool = False) -> Projection:
        """One matrix per head, spread over the tensor-parallel ranks where there are several; each gets the whole result."""
        return Projection(heads, inputs, outputs, bias, empty=True)

    def recorded(self, function: RowFunction, example: torch.Tensor) -> RowFunction:
        """The same function, repeated from graphs where the device has them; it reads `example` `[most rows, ...]` then."""
        if example.device.type != "cuda" or self.eager:
            return function
        with self.capturing():
            return RowGraphs(function, example, batch_sizes(len(example)), cuda_capture(example.device))

    def capturing(self) -> AbstractContextManager[object]:
        """Surrounds the capture of CUDA graphs: they are captured on a stream of their own."""
        return torch.cuda.stream(torch.cuda.Stream())


@contextmanager
def made_on(device: str | torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Modules that are built inside lie on a device and have a type at once, with no copy in float32 on the host before."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(previous)


def project(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[n, heads or 1, inputs]` by `[heads or 1, outputs, inputs]` -> `[n, heads, outputs]`."""
    if weight.shape[0] == 1:
        result = nn.functional.linear(states, weight[0])
    elif states.shape[1] == 1:  # one state for all heads: one product with all of their rows
        result = nn.functional.linear(states[:, 0], weight.flatten(0, 1)).unflatten(1, weight.shape[:2])
    else:
        result = torch.bmm(states.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    return result if bias is None else result + bias


class HeadNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467) with a weight per head, `[heads, hidden]`; the statistics are in float32."""

    def __init__(self, heads: int, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, hidden))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, heads or 1, hidden]` -> `[n, heads, hidden]`."""
        wide = states.float()
        return (wide * (wide.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()).to(states.dtype) * self.weight
