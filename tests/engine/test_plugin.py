"""Installed but not named, the plugin changes nothing; where vLLM lacks its seams, it steps aside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, Counters, assert_same
from tests.support import tiny
from tests.support.doctored import doctored_vllm
from tests.support.engine import EngineError, EngineWorker, Result

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PLUGIN_NGRAM = {"proposer": "ngram", "num_speculative_tokens": 4, "options": {"min_n": 1}}
CUSTOM_CLASS = {"method": "custom_class", "model": "nowhere.Drafter", "num_speculative_tokens": 2}
LOOPS = [[7, 8, 9] * 6, [30, 31] * 10]  # repetition for n-gram drafting
BATCH = [*PROMPTS[3:6], *LOOPS]
NUM_TOKENS = 16


def asked(**params: Any) -> dict[str, Any]:
    return GREEDY | {"max_tokens": NUM_TOKENS} | params


# Plain decoding under many parameters, one request each.
PLAIN = [
    asked(),
    asked(logprobs=3, prompt_logprobs=2),
    SEEDED | asked(temperature=1.0, top_p=0.8, top_k=40),
    SEEDED | asked(temperature=0.7, min_p=0.05, logit_bias={5: 3.0}),
    asked(frequency_penalty=1.5, min_tokens=4, bad_words=["a"]),
]


# -- installed, not named ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """vLLM's own draft_model method, with a model that agrees with the target often."""
    folder = tiny.tiny_model(tmp_path_factory.mktemp("draft"), perturb=0.1)
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


@pytest.fixture(scope="module", params=["v1", "v2"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[EngineWorker, EngineWorker]]:
    """Two processes of one runner: with the plugin, and kept from loading it."""
    with_plugin: EngineWorker = request.getfixturevalue(request.param)
    with EngineWorker(with_plugin.runner, with_plugin.host, env={"VLLM_PLUGINS": ""}) as without:
        yield with_plugin, without


def decode(
    worker: EngineWorker, model: Path, spec: dict[str, Any] | None, params: Any, **engine: Any
) -> tuple[list[Result], Counters]:
    worker.open(model, spec, **engine)
    return worker.generate(BATCH, params), Counters.read(worker.metrics())


def test_plain_decoding_is_untouched(pair: tuple[EngineWorker, EngineWorker], tiny_model: Path) -> None:
    (here, counters), (there, others) = (decode(worker, tiny_model, None, PLAIN) for worker in pair)
    assert_same(here, there)
    assert counters == others
    assert [worker.call("tests.engine.starting:plugin_is_loaded") for worker in pair] == [True, False]
    assert pair[0].call("tests.engine.starting:register_again")


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_stock_speculation_is_untouched(
    pair: tuple[EngineWorker, EngineWorker], tiny_model: Path, draft_model: dict[str, Any], method: str
) -> None:
    spec = NGRAM if method == "ngram" else draft_model
    (here, counters), (there, others) = (decode(worker, tiny_model, spec, asked()) for worker in pair)
    assert_same(here, there)
    assert counters == others
    assert counters.accepted > 0


def test_stock_refusals_are_untouched(
    pair: tuple[EngineWorker, EngineWorker], tiny_model: Path, draft_model: dict[str, Any]
) -> None:
    """What the plugin serves or allows for its own proposers, vLLM still refuses for its own, in its own words."""

    def refusals(worker: EngineWorker) -> list[tuple[str, str]]:
        found = []
        worker.open(tiny_model, draft_model)
        for params in (asked(min_p=0.2, temperature=1.0), asked(logit_bias={5: -100.0})):
            with pytest.raises(EngineError) as caught:
                worker.generate(BATCH[:1], params)
            found.append((caught.value.kind, caught.value.message))
        starts: list[dict[str, Any]] = [
            {"speculative_config": CUSTOM_CLASS},
            {"speculative_config": CUSTOM_CLASS, "async_scheduling": True},
            {"speculative_config": {"method": "ngrm", "num_speculative_tokens": 2}},
            {"speculative_config": NGRAM | {"options": {}}},
            {"speculative_config": {"verifier": "one_hot", "num_speculative_tokens": 2}},
        ]
        for start in starts:
            with pytest.raises(EngineError) as caught:
                worker.open(tiny_model, **start)
            found.append((caught.value.kind, caught.value.message))
        return found

    here, there = (refusals(worker) for worker in pair)
    assert here == there
    assert all("min_p and logit_bias" in message for _, message in here[:2])
    assert pair[0].runner == "v1" or "custom_class" in here[2][1]


def test_a_proposer_is_unknown_where_the_plugin_is_kept_out(pair: tuple[EngineWorker, EngineWorker], tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="proposer") as caught:
        pair[1].open(tiny_model, PLUGIN_NGRAM)
    assert caught.value.kind == "ValidationError"


# -- a vLLM without the seams ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doctored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWorker]:
    """A vLLM in which three things that the plugin attaches to have other names; it runs all the same."""
    renamed = {
        "sampling_params.py": ("_validate_spec_decode", "_look_at_spec_decode"),  # a method that is replaced at import
        "v1/worker/gpu_model_runner.py": ("_input_fits_in_drafter", "_has_room_in_drafter"),  # replaced on the runner
        "v1/worker/gpu/spec_decode/__init__.py": ("req_states", "request_states"),  # a parameter
    }
    folder = doctored_vllm(tmp_path_factory.mktemp("doctored"), renamed)
    with EngineWorker("v1", env={"PYTHONPATH": str(folder)}) as worker:
        yield worker


def test_without_a_seam_a_proposer_is_refused_and_the_seam_named(doctored: EngineWorker, tiny_model: Path) -> None:
    with pytest.raises(EngineError) as caught:
        doctored.open(tiny_model, PLUGIN_NGRAM)
    message = caught.value.message
    assert caught.value.kind == "SeamError"
    assert "\n" not in message
    for seam in (
        "min_p and logit_bias: no SamplingParams._validate_spec_decode in sampling_params.py",
        "V1 length edge: no GPUModelRunner._input_fits_in_drafter",
        "V2 factory: init_speculator takes (vllm_config, device, request_states)",
        "vLLM 0.32",
        ">=0.32 and <0.34",
        "drop 'proposer'",
    ):
        assert seam in message


@pytest.mark.parametrize("spec", [None, NGRAM], ids=["plain", "stock-ngram"])
def test_without_a_seam_everything_else_runs(
    doctored: EngineWorker, v1: EngineWorker, tiny_model: Path, spec: dict[str, Any] | None
) -> None:
    (here, counters), (there, others) = (decode(worker, tiny_model, spec, asked()) for worker in (doctored, v1))
    assert_same(here, there)
    assert counters == others
    assert "A seam into vLLM is missing" in doctored.log()
    assert "_validate_spec_decode" in doctored.log()
