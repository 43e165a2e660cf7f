"""The chunked cross-entropy against PyTorch's own, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from vllm_specplugin.train import losses
from vllm_specplugin.train.losses import SoftLabels, cross_entropy

N, HIDDEN, VOCAB = 37, 12, 53
TIGHT = {"rtol": 1e-5, "atol": 5e-6}
"""float32, summed in another order, which differs between machines: terms of size 10 are rounded to 1e-6 each."""
BFLOAT16 = {"rtol": 0.02, "atol": 0.02}
"""Logits, errors and products rounded to 8 bits."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks, the last one not full."""
    monkeypatch.setattr(losses, "chunk_rows", lambda output: 10)


def inputs(train_output: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "states": torch.randn(N, HIDDEN).requires_grad_(),
        "output": torch.randn(VOCAB, HIDDEN).requires_grad_(train_output),
        "row_weights": torch.rand(N),
    }


def reference(states: torch.Tensor, output: torch.Tensor, row_weights: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Labels are tokens or distributions, as PyTorch takes them."""
    return functional.cross_entropy(states @ output.T, labels, reduction="none") @ row_weights


def gradients(total: torch.Tensor, given: dict[str, torch.Tensor], scale: float = 1.0) -> dict[str, torch.Tensor | None]:
    (total * scale).backward()
    found = {name: given[name].grad for name in ("states", "output")}
    for name in found:
        given[name].grad = None
    return found


def compare(given: dict[str, torch.Tensor], labels: torch.Tensor, said: dict[str, Any], tolerance: dict[str, float]) -> None:
    ours = cross_entropy(**given, **said)
    theirs = reference(**given, labels=labels)
    torch.testing.assert_close(ours.total, theirs, **tolerance)
    torch.testing.assert_close(ours.nats @ given["row_weights"], theirs.detach(), **tolerance)
    found, wanted = gradients(ours.total, given, scale=3.0), gradients(theirs, given, scale=3.0)
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name], gradient, **tolerance)


@pytest.mark.parametrize("train_output", [False, True])
def test_tokens_as_labels(train_output: bool) -> None:
    given, labels = inputs(train_output), torch.randint(VOCAB, (N,))
    compare(given, labels, {"labels": labels}, TIGHT)


@pytest.mark.parametrize("train_output", [False, True])
def test_distributions_as_labels(train_output: bool) -> None:
    given = inputs(train_output)
    states, output = torch.randn(N, 7), torch.randn(VOCAB, 7)
    compare(given, (states @ output.T).softmax(dim=1), {"soft": SoftLabels(states, output)}, TIGHT)


def test_a_part_of_the_vocabulary_is_the_target_restricted_and_renormalised() -> None:
    given = inputs(train_output=True)
    states, whole = torch.randn(N, 7), torch.randn(90, 7)
    drafted = torch.randperm(90)[:VOCAB]
    probabilities = (states @ whole.T).softmax(dim=1)[:, drafted]
    wanted = probabilities / probabilities.sum(dim=1, keepdim=True)
    compare(given, wanted, {"soft": SoftLabels(states, whole[drafted])}, TIGHT)


def test_bfloat16_by_autocast() -> None:
    given, labels = inputs(train_output=True), torch.randint(VOCAB, (N,))
    with torch.autocast("cpu", torch.bfloat16):
        ours = cross_entropy(**given, labels=labels)
    theirs = reference(**given, labels=labels)
    assert ours.nats.dtype == torch.float32
    torch.testing.assert_close(ours.total, theirs, **BFLOAT16)
    found, wanted = gradients(ours.total, given), gradients(theirs, given)
    for name, gradient in wanted.items():
        assert gradient is not None
        assert found[name] is not None
        assert found[name].dtype == torch.float32
        assert (found[name] - gradient).norm() < 0.02 * gradient.norm()


def test_small_errors_keep_their_gradient_in_bfloat16() -> None:
    # A label with probability 1 - 3e-4: in bfloat16 that probability is 1, and the error would be 0.
    states, output = torch.tensor([[8.0, 0.0]], requires_grad=True), torch.eye(2)
    with torch.autocast("cpu", torch.bfloat16):
        found = cross_entropy(states, output, torch.ones(1), labels=torch.tensor([0]))
    found.total.backward()
    error = 1 - torch.sigmoid(torch.tensor(8.0))
    torch.testing.assert_close(found.nats, error[None], rtol=1e-2, atol=0)
    torch.testing.assert_close(states.grad, torch.tensor([[-float(error), float(error)]]), rtol=1e-2, atol=0)


def test_the_likeliest_token() -> None:
    given = inputs(train_output=False)
    best = cross_entropy(**given, labels=torch.zeros(N, dtype=torch.int64)).best
    assert torch.equal(best, (given["states"] @ given["output"].T).argmax(dim=1))


@pytest.mark.parametrize(
    ("train_output", "gradient", "products"),
    [(True, True, 3), (False, True, 2), (True, False, 1)],
    ids=["output trained", "output frozen", "evaluation"],
)
def test_no_product_is_computed_for_nothing(train_output: bool, gradient: bool, products: int) -> None:
    given = inputs(train_output)
    with FlopCounterMode(display=False) as counted, torch.set_grad_enabled(gradient):
        cross_entropy(**given, labels=torch.zeros(N, dtype=torch.int64))
    assert counted.get_total_flops() == products * 2 * N * HIDDEN * VOCAB


def test_no_places() -> None:
    empty = torch.zeros(0, HIDDEN, requires_grad=True)
    found = cross_entropy(empty, torch.randn(VOCAB, HIDDEN), torch.zeros(0), labels=torch.zeros(0, dtype=torch.int64))
    found.total.backward()
    assert found.total.item() == 0


def test_either_kind_of_labels() -> None:
    given = inputs(train_output=False)
    with pytest.raises(ValueError, match="either"):
        cross_entropy(**given)


def test_a_large_vocabulary_still_has_chunks_worth_a_product() -> None:
    rows = losses.CHUNK_LOGITS["cpu"] // 8192
    assert rows > losses.MIN_CHUNK_ROWS
