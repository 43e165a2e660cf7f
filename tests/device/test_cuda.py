"""What only a GPU can show: the tensor code on CUDA, and the real engine with CUDA graphs and asynchronous scheduling."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.test_verifiers import batch
from tests.support.steps import host, step
from vllm_specplugin import Drafts, Proposer, Step
from vllm_specplugin.guard import Guard
from vllm_specplugin.proposers.base import ProposerOptions
from vllm_specplugin.scorers.one_hot import OneHotVerifier

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_one_hot_on_cuda_equals_the_cpu() -> None:
    arguments = batch(rows=512, k=7, vocab=32_000)
    on_cpu = OneHotVerifier().verify(**arguments)
    on_gpu = OneHotVerifier().verify(**{name: value.cuda() for name, value in arguments.items()})
    assert on_gpu.token_ids.is_cuda
    # The race is decided by p / -log(u), whose last bit may differ between devices; a tie in it is rarer than one in 1,000.
    same = (on_gpu.token_ids.cpu() == on_cpu.token_ids).all(dim=1).float().mean()
    assert same > 0.999


def test_guard_takes_drafts_from_the_device() -> None:
    class OnCuda(Proposer):
        def propose(self, step: Step) -> Drafts:
            ids = torch.tensor([[7, 8, 200, 1], [9, 1, 1, 1]], device="cuda")
            return Drafts(ids, lengths=torch.tensor([4, 1], device="cuda"))

    guard = Guard(OnCuda(host(vocab_size=100, device="cuda"), ProposerOptions()), "on_cuda", 60_000)
    assert guard.propose(step({"a": [1, 2], "b": [3]})).rows() == [[7, 8], [9]]


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, engine, speculative, requests = json.loads(sys.argv[1])
    llm = LLM(model, max_model_len=512, gpu_memory_utilization=0.3, speculative_config=speculative, **engine)
    out = llm.generate([{"prompt_token_ids": r["prompt"]} for r in requests], [SamplingParams(**r["params"]) for r in requests])
    counters = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    print("RESULT" + json.dumps([[list(o.outputs[0].token_ids) for o in out], counters]))

if __name__ == "__main__":
    main()
"""


def run(model: Path, engine: dict[str, Any], speculative: dict[str, Any] | None, requests: list[dict[str, Any]]) -> Any:
    arguments = json.dumps([str(model), {"disable_log_stats": False} | engine, speculative, requests])
    scripted = Path(__file__).parents[1] / "support" / "scripted"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(scripted), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT"))


@pytest.mark.timeout(1500)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_parity_on_the_real_engine(tiny_model: Path, asynchronous: bool, eager: bool) -> None:
    engine = {"dtype": "float32", "enforce_eager": eager, "async_scheduling": asynchronous}
    prompts = [[10, 20, 30] * 8, [7] * 40, [1, 2, 3]]
    params = [{"temperature": 0.0, "max_tokens": 48}, {"temperature": 0.8, "seed": 11, "top_k": 20, "max_tokens": 48}]
    requests = [{"prompt": prompt, "params": one} for prompt in prompts for one in params]
    plain, _ = run(tiny_model, engine, None, requests)
    for request, tokens in zip(requests, plain, strict=True):
        script = {"mode": "half_oracle", "prompt": len(request["prompt"]), "tokens": tokens}
        request["params"] = request["params"] | {"extra_args": {"specplugin": {"script": script}}}
    for proposer in ("scripted", "ngram"):
        ours, counters = run(tiny_model, engine, {"proposer": proposer, "num_speculative_tokens": 4}, requests)
        assert ours == plain
        assert counters["vllm:spec_decode_num_accepted_tokens"] > 0
