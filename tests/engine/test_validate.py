"""`vllm-specplugin validate` on the real engine: what is lossless passes, what is not is found, an interrupt loses nothing.

The model has 16 tokens, so drafts are frequent, most of them refused. Every run below draws other samples than the others
(its seed), but always the same ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.support.engine import worker_environment
from tests.support.tiny import tiny_model
from vllm_specplugin.engine_process import EngineProcess
from vllm_specplugin.validate.first_tokens import probabilities_at
from vllm_specplugin.validate.membership import membership
from vllm_specplugin.validate.plan import make_plan
from vllm_specplugin.validate.records import Kind, Tokens
from vllm_specplugin.validate.report import Report
from vllm_specplugin.validate.run import ENGINE, run
from vllm_specplugin.validate.sampling import Sampling
from vllm_specplugin.validate.verdict import Verdict
from vllm_specplugin.validate.wire import unpack_tokens

VOCABULARY = 16
FLOAT32 = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
NGRAM = {
    "proposer": "ngram",
    "control": "fixed",
    "options": {"min_n": 1},
    "draft_budget_ms": 60_000,
}  # patience on a busy machine
PATIENCE = 280.0  # seconds for a command
SIGMAS = 5.0
"""Of sampling noise; a wrong row or a shifted draft is off by tens of them."""


@pytest.fixture(scope="module")
def narrow_model(pytestconfig: pytest.Config) -> str:
    return str(tiny_model(pytestconfig.cache.mkdir("tiny"), vocab_size=VOCABULARY, logit_std=2.0))


@pytest.fixture
def on_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, "v1")


def environment(monkeypatch: pytest.MonkeyPatch, runner: Literal["v1", "v2"]) -> None:
    """That of the test harness's own engines, for those that `run` starts."""
    for name, value in worker_environment(runner, "0.32").items():
        monkeypatch.setenv(name, value)


# -- lossless, and interrupted -------------------------------------------------------------------------------


def command(model: str, out: Path, *more: str) -> subprocess.Popen[str]:
    """`vllm-specplugin validate` in a process of its own."""
    # What a shell starts in the background ignores Ctrl-C, and its children inherit that: these tests may run so.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heed}; from vllm_specplugin.cli.main import run; run()"
    arguments = ["validate", model, "--speculative-config", json.dumps(NGRAM), "--out", str(out), "--json", *more]
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def state_of(out: Path) -> dict[str, Any]:
    file = out / "state" / "state.json"
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rounds": 0}
    return state


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on_to_lossless(
    narrow_model: str, tmp_path: Path, on_v1: None
) -> None:
    options = ("--tokens", "60000", "--engine-args", json.dumps(FLOAT32))
    interrupted = command(narrow_model, tmp_path, *options)
    deadline = time.monotonic() + PATIENCE / 2
    while state_of(tmp_path)["rounds"] == 0:
        assert interrupted.poll() is None, interrupted.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    interrupted.send_signal(signal.SIGINT)
    printed, _ = interrupted.communicate(timeout=PATIENCE)
    first = Report.model_validate_json(printed)
    assert interrupted.returncode == 2
    assert (first.verdict, first.interrupted) == (Verdict.INCONCLUSIVE, True)
    assert 0 < first.martingale.tokens < 60_000
    assert Report.read_json(tmp_path / "report.json") == first

    resumed = command(narrow_model, tmp_path, *options)
    printed, said = resumed.communicate(timeout=PATIENCE)
    report = Report.model_validate_json(printed)
    assert resumed.returncode == 0, report.reason + said
    assert (report.verdict, report.interrupted) == (Verdict.LOSSLESS, False)
    evidence = report.martingale
    assert evidence.tokens >= 60_000
    assert evidence.crossed_at is None
    assert evidence.drafted > 0.5 * evidence.tokens
    assert min(evidence.kinds.values()) > 100  # every kind of token was seen
    assert evidence.power.probability > 0.95
    assert evidence.path.tokens[-1] == evidence.tokens
    assert report.greedy is not None
    assert report.greedy.equal == len(report.greedy.prompts) == 8  # exact: float32
    assert report.chi_square is not None
    assert report.chi_square.samples > 10_000
    assert report.settings.verifier == "one_hot"
    assert (report.settings.engine["model_runner"], report.settings.engine["dtype"]) == ("V1", "float32")
    page = (tmp_path / "report.html").read_text()
    assert "LOSSLESS" in page
    assert "://" not in page.replace("http://www.w3.org", "")  # it needs no network


# -- biased --------------------------------------------------------------------------------------------------


def test_a_verifier_that_overlooks_one_refusal_in_a_hundred_is_biased(narrow_model: str, tmp_path: Path, on_v1: None) -> None:
    plan = make_plan(narrow_model, NGRAM | {"verifier": "biased_one_hot"}, engine_args=FLOAT32, tokens=100_000, seed=3)
    report = run(plan, tmp_path, progress=False)
    assert report.verdict is Verdict.BIASED
    assert report.martingale.crossed_at is not None
    assert report.martingale.crossed_at < 100_000
    accepted, _, bonus = report.martingale.families
    assert accepted.log10_max > 3
    assert bonus.log10_max < 3  # it is not the bonus tokens that are wrong
    assert report.martingale.worst[0].set == "draft"
    assert not report.settings.lossy  # by its own account


def test_stock_ngram_is_biased_on_the_cpu(narrow_model: str, tmp_path: Path, on_v1: None) -> None:
    """Stock V1 reads uninitialised memory there for the temperature of verified rows."""
    stock = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    report = run(make_plan(narrow_model, stock, engine_args=FLOAT32, tokens=50_000), tmp_path, progress=False)
    assert report.verdict is Verdict.BIASED
    assert report.martingale.crossed_at is not None
    assert report.martingale.kinds["plain"] > 0
    assert report.settings.verifier == "vLLM's own (standard)"


@pytest.mark.skipif("SPECPLUGIN_LONG" not in os.environ, reason="five minutes: make validate-long")
@pytest.mark.timeout(1800)
def test_a_lossless_engine_passes_a_million_tokens(narrow_model: str, tmp_path: Path, on_v1: None) -> None:
    report = run(make_plan(narrow_model, NGRAM, engine_args=FLOAT32, tokens=1_000_000), tmp_path, progress=False)
    assert report.verdict is Verdict.LOSSLESS, report.reason
    assert report.martingale.tokens >= 1_000_000
    assert report.martingale.power.detectable is not None
    assert report.martingale.power.detectable < 0.002


# -- the records themselves ----------------------------------------------------------------------------------

PROCESSED = {
    "temperature": 0.8,
    "top_k": 6,
    "min_p": 0.02,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.2,
    "logit_bias": {3: 1.0},
}


@pytest.fixture(scope="module", params=["v1", "v2"])
def engine(
    request: pytest.FixtureRequest, narrow_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    settings = {
        "model": narrow_model,
        "speculative_config": NGRAM,
        "engine_args": FLOAT32 | {"max_num_batched_tokens": 256, "max_num_seqs": 64, "enable_chunked_prefill": True},
        "prompts": [[1, 2, 1, 2, 1], [5] * 9, [7, 3, 7, 3], [0, 4]],
        "sampling": PROCESSED,
        "seed": 1,
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        environment(monkeypatch, request.param)
        process = EngineProcess("speculative", ENGINE, settings, tmp_path_factory.mktemp("engine") / "engine.log")
    try:
        assert process.wait()["engine"]["model_runner"] == request.param.upper()
        yield process
    finally:
        process.close()


def test_records_follow_every_sampling_parameter_on_both_runners(engine: EngineProcess, tmp_path: Path) -> None:
    """All of them at once: a parameter that the recorder applied at the wrong row would leave tokens without support."""
    requests = [[place % 4, 12] for place in range(40)]
    answer = engine.call("sample", requests=requests, file=str(tmp_path / "tokens.npz"))
    tokens = unpack_tokens((tmp_path / "tokens.npz").read_bytes())
    assert answer["unclear"] < 0.02 * len(tokens)
    assert set(np.bincount(tokens.request)) <= set(range(12, 12 + 6))  # a pass may emit more than was wanted
    for request in range(len(requests)):
        assert tokens.position[tokens.request == request].tolist() == list(range((tokens.request == request).sum()))
    plain, drafted = tokens.kind == Kind.PLAIN, tokens.draft_position > 0
    assert plain[tokens.position == 0].all()  # the first token comes from the prompt alone
    assert drafted.sum() > 100
    assert np.array_equal(drafted, np.isin(tokens.kind, [Kind.ACCEPTED, Kind.RESIDUAL]))
    assert (tokens.in_draft == (tokens.kind == Kind.ACCEPTED))[drafted & ~np.isnan(tokens.p_draft)].all()
    assert_possible(tokens)
    for name in ("draft", "residual", "top", "processed"):
        p, hits = getattr(tokens, f"p_{name}"), getattr(tokens, f"in_{name}")
        known = ~np.isnan(p)
        assert known.sum() > 100
        deviation = np.sqrt((p * (1 - p))[known].sum())
        assert abs(hits[known].sum() - p[known].sum()) < SIGMAS * deviation, name


def assert_possible(tokens: Tokens) -> None:
    """No token lies outside the support: in a set of probability 0, or outside one of probability 1."""
    for name in ("draft", "residual", "top", "processed"):
        p, hits = getattr(tokens, f"p_{name}"), getattr(tokens, f"in_{name}")
        assert not (hits & (p == 0)).any()
        assert not (~hits & (p == 1)).any()


def test_plain_and_speculative_distributions_agree(engine: EngineProcess, tmp_path: Path) -> None:
    """What `distributions` says of a place is what the records say of tokens drawn there."""
    file = tmp_path / "places.npy"
    engine.call("distributions", prefixes=[[0, []], [1, []], [1, [4, 4]]], file=str(file))
    values = np.load(file)
    assert values.shape == (3, VOCABULARY)
    assert np.isfinite(values).all()  # nothing is cut yet
    places = [membership(row, Sampling(**PROCESSED), slack=0) for row in values]
    assert all(np.array_equal(place.inside, place.possible) for place in places)
    assert all(place.possible.sum() <= PROCESSED["top_k"] for place in places)
    p = probabilities_at(values, Sampling(**PROCESSED))
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-5)
    engine.call("sample", requests=[[0, 3], [1, 3]], file=str(tmp_path / "tokens.npz"))
    tokens = unpack_tokens((tmp_path / "tokens.npz").read_bytes())
    first = tokens.p_top[tokens.position == 0]
    np.testing.assert_allclose(np.sort(first), np.sort(p[:2].max(axis=1)), rtol=1e-4)


# -- what goes wrong in an engine ----------------------------------------------------------------------------


def test_an_engine_that_does_not_start_is_one_line_with_its_log(narrow_model: str, tmp_path: Path, on_v1: None) -> None:
    failing = command(narrow_model, tmp_path, "--engine-args", '{"no_such_flag": 1}')
    printed, said = failing.communicate(timeout=PATIENCE)
    assert (failing.returncode, printed) == (2, "")
    assert len(said.strip().splitlines()) == 1
    assert "the plain engine failed (start)" in said
    assert "no_such_flag" in said
    assert str(tmp_path / "state" / "plain.log") in said
