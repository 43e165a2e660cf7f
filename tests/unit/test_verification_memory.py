"""What the verifiers hold beyond their arguments: pieces of the vocabulary, never rows of it for a whole batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_specplugin.registry import VERIFIERS
from vllm_specplugin.scorers.drawing import BLOCK, PIECE_ON_CPU
from vllm_specplugin.scorers.uniforms import uniforms

K = 3
VOCAB = 20_000  # no multiple of a block
PER_DRAW = 28 * 1024
"""Bytes for each distribution that is drawn from, as docs/benchmarks/verification.md states: one block of the vocabulary as
float32, the places of its tokens as int64 twice over (before and after those past the end are dealt with), its running sum as
float64."""
PER_BLOCK = 24
"""Bytes for each distribution that is drawn from and each block of the vocabulary: its sum, twice, and the running sum."""
SMALL = 64 * 1024
"""For everything whose size does not depend on the vocabulary."""

CASES = [(name, draft) for name in ("token", "block") for draft in (True, False)] + [("one_hot", False), ("typical", False)]
ROWS = [1, 64, 300]
"""One, some, and more than fit into a piece with one block each."""


@pytest.fixture
def peak_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], int]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    benchmark: ModuleType = importlib.import_module("verification")
    return benchmark.peak_bytes


def verification(name: str, with_draft: bool, rows: int, vocab: int = VOCAB) -> Callable[[], Any]:
    """A call of a verifier in which some rows are refused early, some late and some not at all."""
    generator = torch.Generator().manual_seed(rows)
    target = torch.rand(rows, K + 1, vocab, generator=generator)
    draft = target[:, :K] * torch.rand(rows, K, vocab, generator=generator).mul_(2)
    target /= target.sum(-1, keepdim=True)
    draft /= draft.sum(-1, keepdim=True)
    ids = torch.randint(0, vocab, (rows, K), generator=generator)
    lengths = torch.arange(rows) % (K + 1) if rows > 1 else torch.tensor([K])
    noise = uniforms(torch.arange(rows), torch.arange(rows), K)
    verifier = VERIFIERS.resolve(name)()
    return lambda: verifier.verify(target, draft if with_draft else None, ids, lengths, noise)


def most_bytes(name: str, rows: int, vocab: int) -> int:
    """What the documentation promises: two pieces, and something for each distribution that is drawn from."""
    draws = rows * (K + 1) if name == "one_hot" else rows
    piece = min(max(PIECE_ON_CPU, rows * BLOCK), rows * vocab)
    return 2 * 4 * piece + draws * (PER_DRAW + PER_BLOCK * (vocab // BLOCK + 1)) + SMALL


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("name", "with_draft"), CASES)
def test_the_stated_bound(peak_bytes: Callable[..., int], name: str, with_draft: bool, rows: int) -> None:
    assert peak_bytes(verification(name, with_draft, rows)) <= most_bytes(name, rows, VOCAB)


@pytest.mark.parametrize(("name", "with_draft"), CASES)
def test_a_larger_vocabulary_takes_no_more_but_for_the_sums_of_its_blocks(
    peak_bytes: Callable[..., int], name: str, with_draft: bool
) -> None:
    rows, small, large = 64, 40 * BLOCK, 80 * BLOCK
    draws = rows * (K + 1) if name == "one_hot" else rows
    grown = peak_bytes(verification(name, with_draft, rows, large)) - peak_bytes(verification(name, with_draft, rows, small))
    # Both fill a piece, whose size varies by less than a block for each draw.
    assert grown <= draws * (PER_BLOCK * (large - small) // BLOCK + 2 * 4 * BLOCK)


def test_the_measure_sees_a_copy_of_the_vocabulary(peak_bytes: Callable[..., int]) -> None:
    rows = torch.rand(8, VOCAB)
    assert peak_bytes(lambda: rows * 2) >= 4 * rows.numel()
    # A temporary within an operation, which no Python hook sees.
    assert peak_bytes(lambda: rows.sum(dim=1, dtype=torch.float64)) >= 8 * rows.numel()


class LargestFloat64(TorchDispatchMode):
    """Looks at the output of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("name", "with_draft"), CASES)
def test_no_float64_over_the_vocabulary(name: str, with_draft: bool, rows: int) -> None:
    verify = verification(name, with_draft, rows)
    with LargestFloat64() as seen:
        verify()
    draws = rows * (K + 1) if name == "one_hot" else rows
    assert 0 < seen.numel <= draws * BLOCK < draws * VOCAB
