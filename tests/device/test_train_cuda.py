"""Training on a GPU: the same heads as on the CPU, up to rounding, and a run that is gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import training
from vllm_specplugin.train.losses import SoftLabels, cross_entropy
from vllm_specplugin.train.medusa import MedusaObjective
from vllm_specplugin.train.run import train_heads

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_medusa_heads_learn_on_cuda(tmp_path: Path) -> None:
    training.write_data(tmp_path / "data.jsonl", count=100)
    said = {"target": str(training.target(layers=2)), "lr": 1e-2, "device": "cuda", "dtype": "bfloat16"}
    outcome = train_heads(training.medusa_options(tmp_path, **said), MedusaObjective.build, training.silent())
    assert outcome.results["acceptance_length"] > 3.5  # of at most 4


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_on_cuda_is_the_one_on_the_cpu(soft: bool) -> None:
    torch.manual_seed(0)
    states, output = torch.randn(300, 32), torch.randn(1000, 32)
    labels, target_states = torch.randint(1000, (300,)), torch.randn(300, 32)
    found = []
    for device in ("cpu", "cuda"):
        h, w = (tensor.to(device).detach().requires_grad_() for tensor in (states, output))
        wanted = SoftLabels(target_states.to(device), output.to(device))
        said = {"soft": wanted} if soft else {"labels": labels.to(device)}
        cross_entropy(h, w, torch.full((300,), 1 / 300, device=device), **said).total.backward()
        assert h.grad is not None
        assert w.grad is not None
        found.append((h.grad.cpu(), w.grad.cpu()))
    # float32 products in another order; TF32 is off unless it is asked for.
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-6)
