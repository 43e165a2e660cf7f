"""The plugin in processes of its own: a spawned engine core, AsyncLLM, tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, Counters, PluginCounters, script
from tests.support.engine import ENGINE_DEFAULTS, EngineWorker, Result

START = 240.0  # seconds: each process imports vLLM anew, several at a time
NUM_TOKENS = 16
SCRIPTED = {"proposer": "scripted", "num_speculative_tokens": 4}
ASKED = [GREEDY | {"max_tokens": NUM_TOKENS}] * 2 + [SEEDED | {"max_tokens": NUM_TOKENS}] * 2


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return PROMPTS[2:6]


@pytest.fixture(scope="module")
def known(v1: EngineWorker, tiny_model: Path, prompts: list[list[int]]) -> list[Result]:
    """Plain decoding in one process: two greedy requests and two with a seed."""
    v1.open(tiny_model)
    return v1.generate(prompts, ASKED)


def scripted(prompts: list[list[int]], known: list[Result]) -> list[dict[str, Any]]:
    """Drafts that are right, and drafts that are right for a while, for each kind of request."""
    modes = ["oracle", "half_oracle"] * 2
    rows = zip(modes, prompts, known, ASKED, strict=True)
    return [asked | script(mode, prompt, result.token_ids) for mode, prompt, result, asked in rows]


def check(worker: EngineWorker, prompts: list[list[int]], known: list[Result]) -> None:
    results = worker.generate(prompts, scripted(prompts, known))
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    counters = Counters.read(worker.metrics())
    PluginCounters.read(worker.metrics()).check(results, counters)  # counts cross from process to process
    assert 0 < counters.accepted < counters.draft_tokens
    assert counters.accepted > len(prompts) * NUM_TOKENS // 3  # the oracle's requests alone bring half of the tokens


@pytest.fixture(scope="module")
def spawning() -> Iterator[EngineWorker]:
    """A worker whose engine core is a process of its own, made without forking."""
    env: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with EngineWorker("v1", env=env) as worker:
        yield worker


def test_a_spawned_engine_core(spawning: EngineWorker, tiny_model: Path, prompts: list[list[int]], known: list[Result]) -> None:
    spawning.open(tiny_model, SCRIPTED, timeout=START)
    assert spawning.call("tests.engine.test_processes:core_is_elsewhere")
    check(spawning, prompts, known)
    spawning.shut()


def core_is_elsewhere(llm: Any) -> bool:
    """Runs in the worker: the engine core is reached by messages."""
    return type(llm.llm_engine.engine_core).__name__ == "SyncMPClient"


def test_async_llm(spawning: EngineWorker, tiny_model: Path, prompts: list[list[int]], known: list[Result]) -> None:
    arguments = ENGINE_DEFAULTS | {"model": str(tiny_model), "speculative_config": SCRIPTED}
    asked = scripted(prompts, known)
    served = spawning.call("tests.engine.starting:run_async", arguments, prompts, asked, timeout=START)
    assert [tuple(tokens) for tokens in served["tokens"]] == [result.token_ids for result in known]
    assert served["accepted"] > len(prompts) * NUM_TOKENS // 3
    figures = served["speculation"]
    assert [each["emitted"] for each in figures] == [NUM_TOKENS] * len(prompts)
    assert sum(each["by_source"]["scripted"]["accepted"] for each in figures) == served["accepted"]
    assert served["kv_transfer_params"] == [None] * len(prompts)  # in which they came


def test_tensor_parallel(tiny_model: Path, prompts: list[list[int]]) -> None:
    """Two ranks, each with a proposer of its own, against plain decoding on two ranks."""
    env: dict[str, str | None] = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with EngineWorker("v1", env=env) as worker:
        worker.open(tiny_model, timeout=START, **parallel)
        known = worker.generate(prompts, ASKED)
        worker.open(tiny_model, SCRIPTED, timeout=START, **parallel)
        check(worker, prompts, known)


def test_pipeline_parallel(tiny_model: Path, prompts: list[list[int]]) -> None:
    """Two stages on V2, which needs asynchronous scheduling (see `NEEDS_ASYNC_FOR_STAGES`); vLLM's V1 has none on a CPU."""
    parallel = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "force_async": True}
    with EngineWorker("v2", env={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}) as worker:
        worker.open(tiny_model, timeout=START, **parallel)
        known = worker.generate(prompts, ASKED)
        worker.open(tiny_model, SCRIPTED, timeout=START, **parallel)
        check(worker, prompts, known)
        # Where all requests of a step are judged, none is walked by the host's sampler.
        worker.open(tiny_model, SCRIPTED | {"verifier": "typical"}, timeout=START, **parallel)
        free = [asked | {"temperature": 1.0, "seed": None} for asked in scripted(prompts, known)]
        results = worker.generate(prompts, free)
        assert [len(result.token_ids) for result in results] == [NUM_TOKENS] * len(prompts)
        assert Counters.read(worker.metrics()).accepted > 0
