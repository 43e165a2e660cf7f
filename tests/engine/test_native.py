"""EAGLE, EAGLE-3, MTP and draft models: vLLM's own drafters behind the plugin's proposers, verifiers and guard.

The target as its own draft model drafts what the target says, to the token, as long as the drafter's KV cache has seen every
token in its place: so in whatever situation, its drafts are those of an oracle. An EAGLE head and an MTP layer that are fitted
(see `tests/support/natives.py`) are right more often than not, random ones hardly ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine import test_doctor
from tests.engine.common import GREEDY, PROMPTS, SEEDED, Counters, SideBySide, assert_same, prompt_of
from tests.support import natives
from tests.support.engine import EngineError, EngineWorker
from tests.support.tiny import tiny_model

K = 3
NUM_TOKENS = {"v1": 24, "v2": 10}  # V2's interpreter is slow
BLOCK = 32  # tokens per block of the KV cache


@dataclass(frozen=True)
class Case:
    """A target, and a drafter for it."""

    target: Path
    method: str
    checkpoint: Path | None
    least: float = 0.0
    """The share of drafts that must be accepted."""
    most: float = 1.0
    keys: dict[str, Any] = field(default_factory=dict)

    def plugin(self, **more: Any) -> dict[str, Any]:
        model = {} if self.checkpoint is None else {"model": str(self.checkpoint)}
        return {"proposer": self.method, **model, **self.keys, **more}

    def stock(self, k: int) -> dict[str, Any]:
        """vLLM's own configuration of the same drafter."""
        keys = self.plugin(num_speculative_tokens=k)
        return {"method": keys.pop("proposer"), **keys}


MAKE: dict[str, Callable[[Path], Case]] = {
    "draft_model": lambda folder: Case(tiny_model(folder), "draft_model", tiny_model(folder, perturb=0.1), 0.1, 0.9),
    "itself": lambda folder: Case(tiny_model(folder), "draft_model", tiny_model(folder), 0.8),
    "eagle": lambda folder: Case(natives.shallow(folder), "eagle", natives.eagle(folder, fitted=True, layers=1), 0.5),
    "eagle3": lambda folder: Case(tiny_model(folder), "eagle3", natives.eagle3(folder, draft_vocabulary=40), most=0.2),
    "speculators": lambda folder: Case(tiny_model(folder), "eagle3", natives.eagle3(folder, layout="speculators"), most=0.2),
    "mtp": lambda folder: Case(natives.mimo(folder, fitted=True), "mtp", None, 0.5),
}


@pytest.fixture
def case(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Case:
    return MAKE[request.param](pytestconfig.cache.mkdir("tiny"))


def with_case(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", names, indirect=True)


# -- the same tokens, and the same drafts as in stock ------------------------------------------------------


@with_case(*MAKE)
def test_greedy_parity_and_the_drafts_of_stock(engines: SideBySide, case: Case) -> None:
    prompts = PROMPTS if engines.runner == "v1" else PROMPTS[1:5]
    params = GREEDY | {"max_tokens": NUM_TOKENS[engines.runner]}
    engines.open(K, model=str(case.target), plugin=case.plugin())
    known = engines.baseline(prompts, params)
    results, counters = engines.draft(prompts, params)
    assert_same(results, known)
    assert case.least * counters.draft_tokens <= counters.accepted <= case.most * counters.draft_tokens
    assert counters.draft_tokens == K * counters.drafts
    if engines.runner == "v2":
        return  # the same methods of the same drafters; a third engine would take its time
    engines.drafting.open(case.target, case.stock(K))
    assert_same(engines.drafting.generate(prompts, params), known)
    stock = Counters.read(engines.drafting.metrics())
    engines.replaced()
    assert (stock.drafts, stock.by_position) == (counters.drafts, counters.by_position)


@with_case("itself", "eagle")
def test_every_parameter(engines: SideBySide, case: Case) -> None:
    """What changes the target's distribution row by row, min_p and logit_bias among it; and a grammar."""
    engines.open(K, model=str(case.target), plugin=case.plugin())
    prompts = PROMPTS[1:7]
    asked: list[dict[str, Any]] = [
        SEEDED,
        SEEDED | {"min_p": 0.1, "top_k": 20},
        GREEDY | {"logit_bias": {65: 4.0}, "logprobs": 2},
        SEEDED | {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        GREEDY | {"structured_outputs": {"regex": "(foo|bar){2}[a-c]{3}"}, "ignore_eos": False},
        GREEDY | {"min_tokens": 6, "bad_words": ["a"], "presence_penalty": -1.0},
    ]
    asked = [each | {"max_tokens": 12} for each in asked]
    results, counters = engines.draft(prompts, asked)
    assert_same(results, engines.baseline(prompts, asked))
    assert counters.accepted > 0


# -- the drafter's KV cache keeps up -----------------------------------------------------------------------

SITUATIONS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 64},
    "cached": {"enable_prefix_caching": True, "block_size": BLOCK},
    "preempted": {"num_gpu_blocks_override": 14, "block_size": BLOCK, "max_model_len": 128},
}


@pytest.mark.parametrize("situation", SITUATIONS)
@with_case("itself", "eagle", "eagle3", "mtp")
def test_situations(engines: SideBySide, case: Case, situation: str) -> None:
    """Chunks of long prompts beside requests that decode; cached prefixes; requests that lose their KV cache and start again."""
    if engines.runner == "v2" and case.method == "eagle3" and situation != "chunked":
        pytest.skip("slow under the interpreter, and a random head has no acceptance to lose")
    engines.open(K, model=str(case.target), plugin=case.plugin(), **SITUATIONS[situation])
    prompts = [prompt_of(length, length) for length in (3, 96, 64, 65, 20, 63)]
    params = GREEDY | {"max_tokens": 40 if situation == "preempted" else 16}
    modes = ["oracle"] * len(prompts)
    _, counters, plan = engines.draft_as_planned(prompts, params, modes, max_model_len=128)
    assert (counters.preemptions > 0) == (situation == "preempted")
    if situation == "cached":
        first, counters = counters, engines.draft_as_planned(prompts, params, modes)[1]
        assert counters.cache_hits >= 64
        # What the drafter saw of a prefix is cached, too; EAGLE's last block is not, and is read again.
        assert counters.accepted == first.accepted
    if case.method != "draft_model":
        assert case.least * counters.draft_tokens <= counters.accepted <= case.most * counters.draft_tokens
        return
    # A pass that shares its budget with a chunk may get fewer drafts scheduled than were made, and one that starts again after a
    # preemption none. But no draft is wrong, except that vLLM fills up the first pass of a request with a single new token.
    assert counters.accepted >= 0.8 * plan.accepted
    assert counters.draft_tokens - counters.accepted <= plan.draft_tokens - plan.accepted + K * (situation == "cached")


EDGE = 100


@with_case("itself", "eagle", "eagle3", "mtp")
def test_the_edge_of_max_model_len(engines: SideBySide, case: Case) -> None:
    """Case 8: nothing at or beyond the edge, and a short neighbour keeps its drafts, where stock V1 stops drafting for all."""
    engines.open(K, model=str(case.target), plugin=case.plugin(), max_model_len=EDGE)
    lengths = list(range(EDGE - 1, EDGE - K - 3, -1))
    prompts = [*(prompt_of(length, length) for length in lengths), prompt_of(5)]
    results, counters, plan = engines.draft_as_planned(
        prompts, GREEDY | {"max_tokens": 20}, ["oracle"] * len(prompts), max_model_len=EDGE
    )
    assert [len(result.token_ids) for result in results] == [*(EDGE - length for length in lengths), 20]
    if case.method == "draft_model":
        plan.check(counters)
    else:
        assert case.least * plan.accepted <= counters.accepted <= case.most * counters.draft_tokens


@with_case("itself")
def test_what_one_request_says_about_its_drafts(engines: SideBySide, case: Case) -> None:
    engines.open(K, model=str(case.target), plugin=case.plugin())
    params = GREEDY | {"max_tokens": 13}
    says: list[dict[str, Any]] = [{"enabled": False}, {"max_draft_tokens": 1}, {}]
    prompts = PROMPTS[1:4]
    known = engines.baseline(prompts, params)
    asked = [params | {"extra_args": {"specplugin": said}} for said in says]
    results, counters = engines.draft(prompts, asked)
    assert_same(results, known)
    # 12 tokens after the first: in passes of 2 tokens each, and of 4
    assert (counters.drafts, counters.draft_tokens, counters.accepted) == (6 + 3, 6 + 3 * K, 6 + 3 * K)


@with_case("itself")
def test_a_proposer_that_fails(engines: SideBySide, case: Case) -> None:
    """Its steps go without drafts, but the drafter has run in them: afterwards every draft is right again.

    The proposer also checks what it is told of its requests' tokens (see `FailingNative`).
    """
    engines.open(K, model=str(case.target), plugin=case.plugin() | {"proposer": "failing_native"}, max_num_batched_tokens=64)
    params = GREEDY | {"max_tokens": 24}
    prompts = [*PROMPTS[1:4], prompt_of(150)]  # the last one is read in chunks
    engines.inside("fail_native_steps", [2, 3, 5])
    known = engines.baseline(prompts, params)
    results, counters = engines.draft(prompts, params)
    assert_same(results, known)
    assert engines.inside("guard")["faults"] == {"exception": 3}
    assert not engines.inside("guard")["switched_off"]
    assert counters.accepted == counters.draft_tokens > 3 * 12


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
@with_case("itself", "mtp")
def test_asynchronous_scheduling(engines: SideBySide, case: Case) -> None:
    """The scheduler runs ahead, and the host never asks what was sampled in order to draft."""
    engines.open(K, model=str(case.target), plugin=case.plugin(draft_sampling="probabilistic"), force_async=True)
    assert engines.inside("scheduler") == "AsyncScheduler"
    engines.inside("forbid_steps_on_the_host")
    prompts = PROMPTS[1:5]
    params = [
        each | {"max_tokens": 12} for each in (GREEDY, SEEDED, GREEDY, {"temperature": 1.0, "top_k": 1, "ignore_eos": True})
    ]
    params[2] |= {"extra_args": {"specplugin": {"enabled": False}}}
    results, counters = engines.draft(prompts, params)
    assert_same(results, engines.baseline(prompts, params))
    assert counters.accepted > 8


# -- before anything starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
@with_case("eagle", "mtp")
def test_the_doctor(engines: SideBySide, case: Case) -> None:
    """The k that an engine would have, and what the drafter costs in the KV cache that vLLM sizes."""
    plugin = case.plugin()
    engines.open(K, model=str(case.target), plugin=plugin)
    flags = ["--dtype=float32", "--max-model-len=256", "--max-num-seqs=16", "--json"]
    code, out, err = engines.drafting.call(test_doctor.INSIDE, [str(case.target), "-sc", json.dumps(plugin), *flags], {})
    assert (code, err) == (0, ""), out
    said = json.loads(out)
    assert said["reasons"] == []
    assert said["method"]["num_speculative_tokens"] == {"eagle": 3, "mtp": 1}[case.method]
    bill = {item["what"]: item for item in said["memory"]}
    # one layer, keys and values of two heads (MTP: one) of 32 numbers of 4 bytes
    assert bill["draft KV cache"]["bytes"] == 2 * {"eagle": 2, "mtp": 1}[case.method] * 32 * 4 * 16 * 256
    assert (bill["draft weights"]["bytes"] is None) == (case.method == "mtp")
    engines.replaced()


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
@with_case("itself", "mtp")
def test_the_configuration_travels(engines: SideBySide, case: Case) -> None:
    """Pickled, spawned or copied, it says vLLM's own method and keeps the plugin's keys and the proposer's k."""
    engines.open(K, model=str(case.target), plugin=case.plugin())
    found = engines.drafting.call("tests.engine.starting:round_trips", str(case.target), case.plugin())
    expected = {
        "class": "PluginSpeculativeConfig",
        "plugin": case.plugin(),
        "k": {"draft_model": 5, "mtp": 1}[case.method],
        "method": case.method,
    }
    for how, facts in found.items():
        assert {key: facts[key] for key in expected} == expected, how


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_what_does_not_fit_is_refused_at_start(engines: SideBySide, pytestconfig: pytest.Config) -> None:
    """One line that names both; a head under another family's name, another target's, and a target without MTP layers."""
    folder = pytestconfig.cache.mkdir("tiny")
    head = natives.eagle3(folder, draft_vocabulary=40)
    for spec, said in (
        ({"proposer": "eagle", "model": str(head)}, "EAGLE-3 head, but the proposer 'eagle'"),
        ({"proposer": "eagle3", "model": str(natives.eagle3(folder, hidden=32))}, "a hidden size of 32"),
        ({"proposer": "draft_model", "model": str(tiny_model(folder, vocab_size=16))}, "a vocabulary of 16 tokens"),
        ({"proposer": "mtp"}, "has no layers for multi-token prediction"),
    ):
        with pytest.raises(EngineError, match=said) as caught:
            engines.drafting.open(tiny_model(folder), spec)
        assert "\n" not in caught.value.message.strip(), caught.value.message
    engines.replaced()


def test_tensor_parallel(pytestconfig: pytest.Config) -> None:
    """Two ranks, each with half of the target and half of the drafter, against plain decoding on one."""
    folder = pytestconfig.cache.mkdir("tiny")
    params = [GREEDY | {"max_tokens": 12}, {"temperature": 0.1, "top_k": 1, "max_tokens": 12, "ignore_eos": True}]
    plugin = {"proposer": "draft_model", "model": str(tiny_model(folder)), "draft_sampling": "probabilistic"}
    with EngineWorker("v1", env={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}) as worker:
        worker.open(tiny_model(folder))
        known = worker.generate(PROMPTS[1:3], params)
        worker.open(tiny_model(folder), plugin, timeout=240, tensor_parallel_size=2, distributed_executor_backend="mp")
        results = worker.generate(PROMPTS[1:3], params)
        counters = Counters.read(worker.metrics())
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    assert counters.accepted > 12
