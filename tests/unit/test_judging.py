"""What drafts were drawn from, kept and put together for a verifier; who is judged; what ranks and engines have in common."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import LogitsProcessors

from vllm_specplugin.guard import CheckedDrafts
from vllm_specplugin.noise import DraftNoise, owner_of
from vllm_specplugin.registry import VERIFIERS
from vllm_specplugin.runtime import control, judging, v2_sampler
from vllm_specplugin.runtime.judging import Drafted, DraftLogits, Judge
from vllm_specplugin.runtime.spec_config import seed_of
from vllm_specplugin.runtime.v1 import _Hooks
from vllm_specplugin.runtime.v1_sampler import _JudgedStep, _Layout, _RowProcessors
from vllm_specplugin.runtime.v2 import Drafting
from vllm_specplugin.runtime.v2_sampler import Verification
from vllm_specplugin.types import Request

VOCAB, K, SLOTS = 7, 3, 6
NAMES = ["a", "b", "c"]


def requests(*names: str) -> list[Request]:
    return [Request(name, temperature=1.0) for name in names]


def native(slots: list[int], k: int = K, seed: int = 0) -> DraftLogits:
    """As one of vLLM's drafters leaves it: more places, columns and ids than count."""
    logits = torch.randn(SLOTS, K + 1, VOCAB + 2, generator=torch.Generator().manual_seed(seed))
    heat = torch.linspace(0.5, 2.0, len(slots))
    return DraftLogits(logits, torch.tensor(slots), heat, k, VOCAB)


def told(drafted: Drafted, names: list[str], width: int, ids: Any = None, lengths: Any = None) -> torch.Tensor | None:
    ids = torch.zeros(len(names), width, dtype=torch.int64) if ids is None else torch.tensor(ids)
    lengths = torch.full((len(names),), width) if lengths is None else torch.tensor(lengths)
    return drafted.stacked(requests(*names), ids, lengths)


# -- what drafts were drawn from ---------------------------------------------------------------------------


def test_a_drafters_own_logits_become_probabilities_when_they_are_read() -> None:
    kept = native([4, 0, 2])
    found = kept.probabilities([2, 0])
    for place, (row, slot) in enumerate([(2, 2), (0, 4)]):
        wanted = torch.softmax(kept.logits[slot, :K, :VOCAB] / kept.temperature[row], dim=-1)
        torch.testing.assert_close(found[place], wanted)
    assert found.dtype == torch.float32


def test_no_copy_of_them_is_kept() -> None:
    kept, drafted = native([0, 1, 2]), Drafted()
    drafted.keep_all(NAMES, kept)
    before = told(drafted, NAMES, K)
    kept.logits[1] = 0.0
    kept.logits[1, :, 3] = 5.0
    after = told(drafted, NAMES, K)
    assert before is not None
    assert after is not None
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert after[1].argmax(dim=-1).tolist() == [3] * K
    assert torch.equal(after[1], drafted.get("b"))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [1, 4 * K * VOCAB * 2, 1 << 30])
def test_what_is_no_distribution_is_found_in_pieces_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "CHUNK_BYTES", chunk)
    kept = native([5, 1, 3, 0, 2])
    kept.logits[3, 1, 4] = torch.nan
    kept.logits[0, 2, :] = -torch.inf
    kept.logits[2, 0, VOCAB] = torch.nan  # an id that does not count
    assert kept.sound().tolist() == [[True] * 3, [True] * 3, [True, False, True], [True, True, False], [True] * 3]


@pytest.mark.parametrize("source", ["tensor", "native"])
@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "a"], ["b"]])
def test_rows_of_one_step_in_any_order(source: str, names: list[str]) -> None:
    kept, drafted = native([0, 1, 2]), Drafted()
    whole = kept.probabilities(range(3))
    if source == "native":
        drafted.keep_all(NAMES, kept)
    else:
        drafted.keep(NAMES, CheckedDrafts(np.zeros((3, K), dtype=np.int64), np.full(3, K), whole))
    rows = [NAMES.index(name) for name in names]
    for width in (K, 2):
        found = told(drafted, names, width)
        assert found is not None
        torch.testing.assert_close(found, whole[rows, :width])


@pytest.mark.parametrize("source", ["tensor", "native"])
def test_fewer_drafts_than_may_be_leave_zeros_behind_them(source: str) -> None:
    """A planned step had two drafts for each request; the verifier asks for as many as there may ever be."""
    kept, drafted = native([0, 1, 2], k=2), Drafted()
    whole = kept.probabilities(range(3))
    if source == "native":
        drafted.keep_all(NAMES, kept)
    else:
        drafted.keep(NAMES, CheckedDrafts(np.zeros((3, 2), dtype=np.int64), np.full(3, 2), whole))
    found = told(drafted, NAMES, K, lengths=[2, 2, 2])
    assert found is not None
    assert found.shape == (3, K, VOCAB)
    torch.testing.assert_close(found[:, :2], whole)
    assert not found[:, 2:].any()


def test_rows_of_several_steps_and_deterministic_ones() -> None:
    drafted, first, second = Drafted(), native([0, 1, 2]), native([3, 4], k=2, seed=1)
    drafted.keep_all(NAMES, first)
    drafted.keep_all(["b", "d"], second)
    ids = [[1, 2, 3], [4, 5, 6], [0, 1, 2], [3, 4, 5], [6, 5, 4]]
    found = told(drafted, ["a", "e", "b", "c", "d"], K, ids, lengths=[3, 2, 2, 3, 2])
    assert found is not None
    torch.testing.assert_close(found[[0, 3]], first.probabilities([0, 2]))
    torch.testing.assert_close(found[[2, 4], :2], second.probabilities([0, 1]))
    assert not found[[2, 4], 2:].any()
    one_hot = torch.nn.functional.one_hot(torch.tensor([4, 5]), VOCAB).float()
    assert torch.equal(found[1], torch.cat([one_hot, torch.zeros(1, VOCAB)]))


def test_who_was_drawn_for() -> None:
    drafted = Drafted()
    drafted.keep_all(NAMES, native([0, 1, 2]))
    drafted.keep(["b"], CheckedDrafts(np.zeros((1, K), dtype=np.int64), np.array([K]), None, frozenset([0])))
    drafted.drop("c")
    assert [drafted.drawn(name) for name in NAMES] == [True, False, False]
    assert [drafted.unknown(name) for name in NAMES] == [False, True, False]
    assert told(drafted, ["b", "c"], K) is None


# -- who is judged -----------------------------------------------------------------------------------------


def judge(name: str, runner: str = "v2", ranks: int = 1, sharded: bool = False) -> Judge:
    drafted = Drafted()
    drafted.keep_all(NAMES, native([0, 1, 2]))
    host = SimpleNamespace(runner=runner, device="cpu", tensor_parallel_size=ranks)
    runtime: Any = SimpleNamespace(verifier=VERIFIERS.resolve(name)(), host=host, drafted=drafted, shards_sampling=sharded)
    return Judge(runtime)


GRAMMAR = SamplingParams(temperature=1.0, structured_outputs=StructuredOutputsParams(regex="[ab]+"))


@pytest.mark.parametrize(("verifier", "judged"), [("token", False), ("block", False), ("typical", True)])
def test_whose_drafts_a_grammar_may_cut_is_walked(verifier: str, judged: bool) -> None:
    """Unless the verifier is lossy anyhow."""
    free, bound = (Request("a", temperature=1.0, sampling=params) for params in (SamplingParams(temperature=1.0), GRAMMAR))
    found = judge(verifier).choose([free, bound], np.array([K, K]), torch.device("cpu"))
    assert found is not None
    assert found.places == ([0, 1] if judged else [0])
    assert judge(verifier).nobody_is_walked([free], np.array([K]))
    assert judge(verifier).nobody_is_walked([free, bound], np.array([K, K])) is judged


@pytest.mark.parametrize(
    ("verifier", "ranks", "sharded", "shared"),
    [("token", 2, False, True), ("token", 2, True, False), ("token", 1, False, False), ("one_hot", 2, False, False)],
)
def test_ranks_agree_where_they_verify_the_same_requests(verifier: str, ranks: int, sharded: bool, shared: bool) -> None:
    assert judge(verifier, ranks=ranks, sharded=sharded).shared is shared


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_that_share_a_step_draw_from_no_generator(shared: bool) -> None:
    sampler = SimpleNamespace(use_flashinfer=True)
    verification: Any = SimpleNamespace(sampler=sampler, judge=SimpleNamespace(shared=shared))
    with Verification._noise_by_position(verification):
        assert sampler.use_flashinfer is not shared
    assert sampler.use_flashinfer


def test_on_v1_what_the_scheduler_fills_up_is_no_draft() -> None:
    layout = _Layout(np.array([3, 2, 0, 3]), torch.device("cpu"))
    drafts = torch.tensor([[5, 6, 1], [-1, -1, 0], [0, 0, 0], [4, -1, 2]])
    judged = judging.Judged(requests("a", "b", "c", "d"), [0, 1, 2, 3], torch.arange(4), every=True)
    step = _JudgedStep(judged, layout, drafts, torch.zeros(4), np.array([], dtype=np.int64))
    assert step.lengths.tolist() == [3, 0, 0, 1]


class TwoRanks:
    """A group in which the first rank's numbers are `first`."""

    def __init__(self, first: torch.Tensor) -> None:
        self.first = first

    def broadcast(self, packed: torch.Tensor, src: int) -> torch.Tensor:
        assert src == 0
        assert packed.shape == self.first.shape
        return self.first


def test_ranks_that_came_by_a_verdict_differently_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's kernels count what was sampled, a verdict what was accepted; the first rank walked, this one did not."""
    first = torch.tensor([[1, 5, 6, 0], [0, 7, 0, 0]])  # accepted, then the tokens
    monkeypatch.setattr(judging, "get_tp_group", lambda: TwoRanks(first))
    sampled, counted = torch.tensor([[5, 9, 9], [7, 9, 9]]), torch.tensor([3, 2], dtype=torch.int32)
    monkeypatch.setattr(v2_sampler, "rejection_sample", lambda *_, **__: (sampled, counted))
    deciding = judge("token", ranks=2)
    states = SimpleNamespace(temperature=SimpleNamespace(gpu=torch.ones(2)), seeds=SimpleNamespace(gpu=torch.zeros(2)))
    verification: Any = SimpleNamespace(
        sampler=SimpleNamespace(sampling_states=states, use_fp64_gumbel=False),
        runtime=deciding.runtime,
        judge=deciding,
        num_speculative_steps=K,
    )
    verification._as_wide_as_k = partial(Verification._as_wide_as_k, verification)
    rows = torch.zeros(6, dtype=torch.int64)
    _, found, number = Verification._by_host_kernels(
        verification, torch.zeros(6, VOCAB), requests("a", "b"), np.array([2, 2]), rows, torch.tensor([0, 3, 6]), rows,
        torch.arange(2), rows,
    )  # fmt: skip
    assert number.tolist() == [2, 1]
    assert found.tolist() == [[5, 6, 0, 0], [7, 0, 0, 0]]  # as wide as k, though two drafts were planned


# -- requests and engines ----------------------------------------------------------------------------------


def test_on_v1_a_session_that_goes_on_is_a_new_request() -> None:
    """It may bring other sampling parameters, and its history has changed."""
    forgotten: list[str] = []
    runner: Any = SimpleNamespace(
        max_num_reqs=1,
        device=torch.device("cpu"),
        _update_states=lambda output: output,
        _calc_spec_decode_metadata=None,
        take_draft_token_ids=None,
    )
    hooks = _Hooks(runner, SimpleNamespace(forget=forgotten.extend))  # type: ignore[arg-type]
    new = [SimpleNamespace(req_id="goes on")]
    hooks.update_states(SimpleNamespace(finished_req_ids={"ended"}, preempted_req_ids=None, scheduled_new_reqs=new))  # type: ignore[arg-type]
    assert forgotten == ["ended", "goes on"]


def test_engines_of_a_data_parallel_group_draw_apart() -> None:
    """vLLM starts them with one seed; the same requests in the same order must not be answered alike."""
    assert seed_of(5, 0) == 5
    seeds = [seed_of(5, index) for index in range(8)]
    assert len(set(seeds)) == 8
    request = Request("x", temperature=1.0, arrival=3)
    assert len({owner_of(request, seed) for seed in seeds}) == 8
    draws = {DraftNoise(seed, [request], np.array([4])).generator(0).random() for seed in seeds}
    assert len(draws) == 8
    seeded = Request("x", temperature=1.0, seed=9)
    assert {owner_of(seeded, seed) for seed in seeds} == {"seed:9"}


# -- before and beside serving -----------------------------------------------------------------------------


def test_while_vllm_warms_up_nobody_drafts() -> None:
    class Runner:
        pass

    runner, runtime = Runner(), SimpleNamespace(warming_up=False)
    control.remember(runner, runtime)  # type: ignore[arg-type]
    drafting: Any = SimpleNamespace(runtime=runtime, kept=[], device=torch.device("cpu"))
    drafting.keep_lengths = lambda batch, lengths: drafting.kept.append(lengths.tolist())
    out = torch.ones(2, 3, dtype=torch.int64)
    with control.warming_up(runner):
        Drafting.propose(drafting, SimpleNamespace(), None, None, None, None, 3, out)  # type: ignore[arg-type]
    assert out.tolist() == [[0] * 3] * 2
    assert drafting.kept == [[0, 0]]
    assert not runtime.warming_up
    with control.warming_up(Runner()):  # none of ours
        pass


def test_a_pass_that_fails_leaves_the_kv_connector_on() -> None:
    switched: list[bool] = []
    runner: Any = SimpleNamespace(kv_connector=SimpleNamespace(set_disabled=switched.append), execute_model_state=1)
    control._tidy_up(runner)
    assert switched == [False]
    assert runner.execute_model_state is None
    control._tidy_up(SimpleNamespace())  # V1 has none


@pytest.mark.parametrize(
    ("device", "sampling", "taken"), [("cpu", "probabilistic", 0), ("cuda", "greedy", 0), ("cuda", "probabilistic", 3)]
)
def test_room_for_drawn_drafts_is_taken_when_memory_is_measured(
    device: str, sampling: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: asked.append(size))
    host = SimpleNamespace(max_num_seqs=5, vocab_size=VOCAB)
    runtime = SimpleNamespace(resolved=SimpleNamespace(config=SimpleNamespace(draft_sampling=sampling)), host=host)
    Drafting.reserve(SimpleNamespace(device=SimpleNamespace(type=device), runtime=runtime, k=K))  # type: ignore[arg-type]
    assert sum(asked) == taken * 5 * K * VOCAB


def test_a_long_answer_is_copied_only_for_processors_that_look_at_it() -> None:
    rows, output = _RowProcessors(LogitsProcessors()), list(range(100))
    assert rows._output(SamplingParams(min_p=0.1), output, [7]) == []
    assert rows._output(SamplingParams(min_tokens=200, max_tokens=300), output, [7]) == [*output, 7]
    assert rows._output(SamplingParams(min_tokens=50, max_tokens=300), output, [7]) is output
    rows._any_request = True
    assert rows._output(SamplingParams(min_p=0.1), output, [7]) == [*output, 7]
