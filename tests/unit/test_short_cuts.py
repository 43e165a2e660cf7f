"""Short cuts for steps in which nobody has drafts: they say what vLLM's own code says."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_specplugin.runtime import v2
from vllm_specplugin.runtime.v1 import _Hooks


class Runner:
    """As much of V1's runner as its two methods touch."""

    def __init__(self) -> None:
        self.max_num_reqs = 4
        self.device = torch.device("cpu")
        self.arange_np = np.arange(64)
        self._arange_scratch = np.zeros(64, dtype=np.int64)
        self.input_ids = SimpleNamespace(gpu=torch.arange(100, 164, dtype=torch.int32))
        self.num_spec_tokens = 3
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self._draft_token_ids: Any = []
        self._draft_token_req_ids: list[str] | None = None
        self._update_states = lambda scheduler_output: None

    _get_cumsum_and_arange = GPUModelRunner._get_cumsum_and_arange
    _calc_spec_decode_metadata = GPUModelRunner._calc_spec_decode_metadata
    take_draft_token_ids = GPUModelRunner.take_draft_token_ids
    _get_draft_token_ids_cpu = GPUModelRunner._get_draft_token_ids_cpu


@pytest.mark.parametrize(
    ("drafts", "scheduled"),
    [([0], [1]), ([0, 0, 0], [1, 7, 1]), ([0, 0, 0, 0], [1, 1, 1, 1]), ([2, 0, 1], [3, 5, 2])],
    ids=["one request", "a prompt among them", "as many as there may be", "some drafts"],
)
def test_a_step_s_rows_are_those_of_vllm(drafts: list[int], scheduled: list[int]) -> None:
    runner = Runner()
    hooks = _Hooks(runner, SimpleNamespace())  # type: ignore[arg-type]
    counts, ends = np.array(drafts, dtype=np.int32), np.cumsum(scheduled, dtype=np.int32)
    ours, theirs = hooks.calc_spec_decode_metadata(counts, ends), runner._calc_spec_decode_metadata(counts, ends)
    for field in fields(theirs):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        assert torch.equal(one, other) and one.dtype == other.dtype if torch.is_tensor(other) else one == other, field.name
    assert ours.max_spec_len == theirs.max_spec_len == max(drafts)


def test_the_scheduler_hears_of_drafts_and_of_none_where_there_are_none() -> None:
    runner = Runner()
    hooks = _Hooks(runner, SimpleNamespace())  # type: ignore[arg-type]
    runner._draft_token_req_ids = ["a", "b"]
    runner._draft_token_ids = [[], [5, 6]]
    assert hooks.take_draft_token_ids() == DraftTokenIds(["a", "b"], [[], [5, 6]])
    runner._draft_token_ids = [[], []]
    assert hooks.take_draft_token_ids() is None


class V2Runner:
    """As much of V2's runner as `attach` touches, with two requests that have two places each."""

    def __init__(self) -> None:
        self.speculator: Any = object.__new__(v2.PluginSpeculator)
        self.scheduler_config = SimpleNamespace(async_scheduling=False)
        drafting = vars(self.speculator)["drafting"] = object.__new__(v2.Drafting)
        drafting.runtime = SimpleNamespace(
            meter=SimpleNamespace(attach=lambda *_: None), capabilities=SimpleNamespace(hidden_states="none")
        )
        drafting._last = ((), ())
        v2.attach(self)  # type: ignore[arg-type]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return DraftTokenIds(["a", "b"], [[-1, -1], [-1, -1]])


@pytest.mark.parametrize(
    ("lengths", "heard"),
    [([0, 2], [[], [-1, -1]]), ([0, 0], None), (torch.tensor([1, 0]), [[-1], []]), (torch.tensor([0, 0]), [[], []])],
    ids=["some", "none", "some, as the device knows", "none, as the device knows"],
)
def test_v2_s_scheduler_hears_of_them_likewise(lengths: list[int] | torch.Tensor, heard: list[list[int]] | None) -> None:
    """Where only the device knows how many there are nobody asks it just to say that there are none."""
    runner = V2Runner()
    runner.speculator.drafting._last = (["a", "b"], lengths)
    taken = runner.take_draft_token_ids()
    assert (None if taken is None else taken.draft_token_ids) == heard
