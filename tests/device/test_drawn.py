"""Drafts that vLLM's own drafter draws on a GPU: lengths that are planned ahead, and a batch that nobody joins for long."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.device.test_cuda import run
from tests.support.tiny import tiny_model

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

LONG = 300  # tokens: enough for control to try every length
ENGINE: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 32}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_lengths_that_are_planned_ahead(verifier: str) -> None:
    """`token` by the host's kernels, but for steps with a seeded request. Those who have a seed get plain decoding's tokens."""
    target, drafter = tiny_model(), tiny_model(perturb=0.1)
    hot = {"temperature": 1.0, "max_tokens": LONG, "ignore_eos": True}
    free = [{"prompt": [10 + place, 20, 30], "params": hot} for place in range(12)]
    seeded = [{"prompt": [7, 8, place], "params": hot | {"seed": place, "temperature": 0.3}} for place in range(3)]
    greedy = [{"prompt": [9] * (place + 1), "params": hot | {"temperature": 0.0}} for place in range(3)]
    drafting = {"proposer": "draft_model", "model": str(drafter), "draft_sampling": "probabilistic", "verifier": verifier}
    plain, _ = run(target, ENGINE, None, seeded + greedy)
    for requests, known in ((free[:1], None), (free, None), (seeded + greedy, plain), (free + seeded + greedy, plain)):
        outputs, counters = run(target, ENGINE, drafting, requests)
        assert [len(tokens) for tokens in outputs] == [LONG] * len(requests)
        assert counters["vllm:spec_decode_num_accepted_tokens"] > 0
        if known is not None:
            assert outputs[-len(known) :] == known
