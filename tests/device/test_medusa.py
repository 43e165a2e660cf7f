"""Medusa on a GPU: CUDA graphs give what the heads give without them, drawn drafts the law that they were drawn from."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.test_cuda import run
from tests.engine.common import prompt_of
from tests.support.heads import fitted_medusa, random_heads, write
from tests.support.steps import host, step
from vllm_specplugin import Drafts, Request, Step
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.heads.graphs import RowGraphs
from vllm_specplugin.heads.layers import HostLayers
from vllm_specplugin.heads.medusa import MedusaConfig
from vllm_specplugin.proposers.medusa import MedusaProposer

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS, HIDDEN, VOCAB = 4, 64, 1000
CONFIG = MedusaConfig(num_heads=HEADS, hidden_size=HIDDEN, vocab_size=VOCAB, output="shared", draft_vocab_size=300)


class Eager(HostLayers):
    eager = True


def proposer(tmp_path: Path, device: str, sampling: Any, layers: HostLayers | None = None) -> MedusaProposer:
    folder = write(tmp_path / "heads", random_heads(CONFIG))
    said = SpecConfig(proposer="medusa", model=str(folder), draft_sampling=sampling)
    around = host(vocab_size=VOCAB, k=HEADS, hidden_size=HIDDEN, device=device, config=said, layers=layers)
    made = MedusaProposer(around, MedusaProposer.Options())
    made.load(torch.nn.Module())
    return made


def asking(rows: int, device: str) -> Step:
    requests = {f"r{row}": Request(f"r{row}", temperature=1.0, seed=row) for row in range(rows)}
    now = step({name: [row, row + 1] for row, name in enumerate(requests)}, k=HEADS, requests=requests, hidden_size=HIDDEN)
    assert now.hidden_states is not None
    return replace(now, hidden_states=now.hidden_states.to(device))


def ids_of(drafts: Drafts) -> list[list[int]]:
    assert isinstance(drafts.token_ids, torch.Tensor)
    return drafts.token_ids.tolist()


def test_graphs_give_what_the_heads_give(tmp_path: Path) -> None:
    graphed, eager = (proposer(tmp_path, "cuda", "greedy", layers) for layers in (None, Eager()))
    on_cpu = proposer(tmp_path, "cpu", "greedy")
    assert isinstance(graphed._best, RowGraphs)
    assert not isinstance(eager._best, RowGraphs)
    for rows in (1, 3, 8, 5, 1, 9):  # the last is more than the host said
        drafts = ids_of(graphed.propose(asking(rows, "cuda")))
        assert drafts == ids_of(eager.propose(asking(rows, "cuda")))
        assert drafts == ids_of(on_cpu.propose(asking(rows, "cpu")))


def test_drawn_drafts_are_those_of_the_cpu(tmp_path: Path) -> None:
    there, here = (proposer(tmp_path, device, "probabilistic").propose(asking(64, device)) for device in ("cuda", "cpu"))
    assert there.probabilities is not None
    assert here.probabilities is not None
    torch.testing.assert_close(there.probabilities.cpu(), here.probabilities, atol=1e-5, rtol=1e-3)
    same = torch.tensor(ids_of(there)) == torch.tensor(ids_of(here))
    assert same.float().mean() > 0.99  # a number may lie within rounding of the edge between two tokens


@pytest.mark.timeout(1500)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_parity_on_the_real_engine(tiny_model: Path, tmp_path: Path, eager: bool) -> None:
    prompts = [prompt_of(length, length) for length in (5, 33, 20)]
    heads = fitted_medusa(tiny_model, prompts, 40, HEADS, tmp_path, output="shared", draft_vocab_size=100)
    engine = {"dtype": "float32", "enforce_eager": eager}
    requests = [{"prompt": prompt, "params": {"temperature": 0.0, "max_tokens": 40}} for prompt in prompts]
    plain, _ = run(tiny_model, engine, None, requests)
    for more in ({}, {"draft_sampling": "probabilistic"}):
        ours, counters = run(tiny_model, engine, {"proposer": "medusa", "model": str(heads), **more}, requests)
        assert ours == plain
        assert counters["vllm:spec_decode_num_accepted_tokens"] > 0.5 * counters["vllm:spec_decode_num_draft_tokens"]
