"""The plugin on vLLM 0.33's Python, over 0.32's compiled files (see tests/support/hosts.py; not a real 0.33 build)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, Counters, Forecast, PluginCounters, assert_same, forecast, script
from tests.support import natives
from tests.support.engine import EngineWorker, Result
from tests.support.hosts import host_tree

K = 4
NUM_TOKENS = 14
SCRIPTED = {"proposer": "scripted", "num_speculative_tokens": K}
NGRAM = {"proposer": "ngram", "num_speculative_tokens": K, "options": {"min_n": 1}}

BATCH = [*PROMPTS[2:5], [7, 8, 9] * 6]
ASKED: list[dict[str, Any]] = [
    GREEDY,
    GREEDY | {"logprobs": 2, "frequency_penalty": 1.0},
    SEEDED,
    SEEDED | {"temperature": 0.8, "top_k": 50, "min_p": 0.02, "logit_bias": {5: 2.0}},
]


@pytest.fixture(scope="module", params=["v1", "v2"])
def newer(request: pytest.FixtureRequest) -> Iterator[EngineWorker]:
    try:
        host_tree("0.33")
    except RuntimeError as error:
        pytest.skip(f"vLLM 0.33's wheel cannot be had here: {str(error).splitlines()[0]}")
    with EngineWorker(request.param, "0.33") as worker:
        yield worker


@pytest.fixture(scope="module")
def known(newer: EngineWorker, tiny_model: Path) -> list[Result]:
    """Plain decoding on the same host, a little further than the tests go."""
    newer.open(tiny_model, NGRAM)  # an engine with a proposer comes first: what it brings in must not stand in the way of others
    newer.open(tiny_model)
    assert newer.info["vllm"] == "0.33.0"
    return newer.generate(BATCH, [asked | {"max_tokens": NUM_TOKENS + K} for asked in ASKED])


def check(
    newer: EngineWorker, tiny_model: Path, known: list[Result], spec: dict[str, Any], said: list[dict[str, Any]]
) -> Counters:
    """With drafts the engine emits what it emits without, shortened."""
    newer.open(tiny_model, spec)
    results = newer.generate(BATCH, [asked | {"max_tokens": NUM_TOKENS} | more for asked, more in zip(ASKED, said, strict=True)])
    assert [result.token_ids for result in results] == [result.token_ids[:NUM_TOKENS] for result in known]
    metrics = newer.metrics()
    counters = Counters.read(metrics)
    PluginCounters.read(metrics).check(results, counters)
    return counters


@pytest.mark.parametrize("mode", ["oracle", "half_oracle"])
def test_scripted(newer: EngineWorker, tiny_model: Path, known: list[Result], mode: str) -> None:
    said = [script(mode, prompt, result.token_ids) for prompt, result in zip(BATCH, known, strict=True)]
    counters = check(newer, tiny_model, known, SCRIPTED, said)
    expected = Forecast()
    for prompt, result, more in zip(BATCH, known, said, strict=True):
        expected += forecast(prompt, result.token_ids, GREEDY | more, K, emitted=NUM_TOKENS)
    expected.check(counters)
    assert counters.accepted > 0


def test_ngram(newer: EngineWorker, tiny_model: Path, known: list[Result]) -> None:
    counters = check(newer, tiny_model, known, NGRAM, [{}] * len(BATCH))
    assert 0 < counters.accepted < counters.draft_tokens


@pytest.mark.parametrize("proposer", ["hybrid", "eagle"])
def test_native_drafters(
    newer: EngineWorker, tiny_model: Path, known: list[Result], pytestconfig: pytest.Config, proposer: str
) -> None:
    """The target as its own draft model is right nearly always, here where no n-gram drafts; a random EAGLE head hardly ever."""
    model = tiny_model if proposer == "hybrid" else natives.eagle(pytestconfig.cache.mkdir("tiny"))
    spec: dict[str, Any] = {"proposer": proposer, "num_speculative_tokens": K, "model": str(model)}
    if proposer == "hybrid":
        spec["options"] = {"proposers": ["ngram", "draft_model"]}
    counters = check(newer, tiny_model, known, spec, [{}] * len(BATCH))
    assert (counters.accepted > NUM_TOKENS) == (proposer == "hybrid")


@pytest.mark.parametrize("newer", ["v2"], indirect=True)
def test_steps_that_are_planned_ahead(newer: EngineWorker, tiny_model: Path, known: list[Result]) -> None:
    """Under asynchronous scheduling, all of a step's requests are given what pays: here k drafts, and then none."""
    spec = {"proposer": "draft_model", "num_speculative_tokens": K, "model": str(tiny_model), "control": "adaptive"}
    newer.open(tiny_model, spec, force_async=True)
    asked = [each | {"max_tokens": NUM_TOKENS + K} for each in ASKED]
    drafted = []
    for costs in (([1, 512], [0.010, 0.011]), ([1, 512], [0.010, 10.24])):
        newer.call("tests.engine.inside:plan_by", *costs)
        for _ in range(2):  # the first may begin with what was planned before
            before = Counters.read(newer.metrics())
            assert_same(newer.generate(BATCH, asked), known)
            counters = Counters.read(newer.metrics()).since(before)
        drafted.append((counters.draft_tokens, counters.accepted))
    (cheap, accepted), (dear, _) = drafted
    assert cheap > accepted > NUM_TOKENS
    assert dear == 0


def test_log_probabilities(newer: EngineWorker, tiny_model: Path, known: list[Result]) -> None:
    newer.open(tiny_model, SCRIPTED)
    asked = ASKED[1] | {"max_tokens": NUM_TOKENS + K}
    said = script("half_oracle", BATCH[1], known[1].token_ids)
    assert_same(newer.generate(BATCH[1:2], asked | said), known[1:2])
