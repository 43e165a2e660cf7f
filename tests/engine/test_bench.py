"""`vllm-specplugin bench` on the real engine: its samples are the engine's own figures, and a run ends with what to paste."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.engine import worker_environment
from vllm_specplugin.bench.lineup import ENGINE
from vllm_specplugin.bench.report import Report
from vllm_specplugin.cli.main import app
from vllm_specplugin.engine_process import EngineProcess

MAX_TOKENS = 48
NGRAM = {"proposer": "ngram", "control": "fixed", "options": {"min_n": 1}, "draft_budget_ms": 60_000}  # patience: others compute
TOO_LONG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 9, "prompt_lookup_max": 2}
"""vLLM refuses it, when its engine starts."""
REPETITIVE = "one two three four one two three four one two three four one two three"


@pytest.fixture
def on_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment("v1", "0.32").items():
        monkeypatch.setenv(name, value)


def test_a_run_on_the_users_own_prompts(tiny_model: Path, tmp_path: Path, on_v1: None) -> None:
    prompts, page = tmp_path / "prompts.txt", tmp_path / "report.md"
    prompts.write_text("".join(f"{REPETITIVE} {number}\n" for number in range(40)))
    arguments = ["bench", "--model", str(tiny_model), "--prompts", str(prompts), "--concurrency", "1,3", "--repeat", "2"]
    arguments += ["--max-tokens", str(MAX_TOKENS), "--engine-args", '{"dtype": "float32"}', "--markdown", str(page), "--json"]
    for config in (NGRAM, TOO_LONG):
        arguments += ["--config", json.dumps(config)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    report = Report.model_validate_json(done.stdout)

    ngram, refused = "ngram control=fixed", [lost for lost in report.left_out if lost.candidate.startswith("vllm:ngram")]
    assert [(cell.candidate, cell.concurrency) for cell in report.cells] == [
        ("plain", 1),
        (f"{ngram} draft_budget_ms=60000 min_n=1", 1),
        ("plain", 3),
        (f"{ngram} draft_budget_ms=60000 min_n=1", 3),
    ]
    assert len(refused) == 1
    assert "prompt_lookup" in refused[0].why
    assert Path(refused[0].why.split("log: ")[1]).is_file()
    for cell in report.cells:
        assert cell.speed.rounds == 2
        assert 0 < cell.first_token_ms[0] <= cell.first_token_ms[1]
        assert 0 < cell.per_token_ms[0] <= cell.per_token_ms[1]
        assert cell.tokens_per_second > 0
        if cell.candidate == "plain":
            assert (cell.acceptance_length, cell.acceptance_rate) == (1.0, None)
        else:
            assert cell.acceptance_rate is not None
            assert 0 < cell.acceptance_rate <= 1
            # vLLM's counters and the steps that the requests were seen in tell the same story.
            assert 1 < cell.acceptance_length <= 1 + 5 * cell.acceptance_rate
    assert report.environment["vllm"] == "0.32.0"
    assert not [note for note in report.notes if "KV cache" in note]
    assert page.read_text().rstrip().splitlines()[-1].strip() == report.recommendation.line


def test_the_kv_cache_has_room_for_the_layers_of_a_draft_model(tiny_model: Path, on_v1: None) -> None:
    """By vLLM's own configuration; no engine is started."""
    drafter = {"model": str(tiny_model), "num_speculative_tokens": 3}
    drafters = [
        None,
        {"proposer": "ngram"},
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        {"proposer": "draft_model", **drafter},
        {"method": "draft_model", **drafter},
    ]
    settings = {"model": str(tiny_model), "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
    code = (
        "import json, sys\n"
        "from vllm_specplugin.bench import engine\n"
        "engine.LEAST_KV = 0\n"
        "settings, drafters = json.loads(sys.argv[1])\n"
        "print(json.dumps([engine.kv_bytes({**settings, 'speculative_config': one}) for one in drafters]))"
    )
    command = [sys.executable, "-c", code, json.dumps([settings, drafters])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    plain, *beside = json.loads(done.stdout.splitlines()[-1])
    assert plain > 0
    assert beside == [plain, plain, 2 * plain, 2 * plain], "the draft model is as large as the target"


def test_a_batch_in_slices_is_the_same_batch_and_waiting_takes_no_time(tiny_model: Path, tmp_path: Path, on_v1: None) -> None:
    settings = {
        "model": str(tiny_model),
        "engine_args": {"dtype": "float32"},
        "max_model_len": 128,
        "max_num_seqs": 4,
        "engines": 1,
        "speculative_config": NGRAM,
    }
    load = {"prompts": [[1, 2, 3, 4, 1, 2, 3]] * 6, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "at_once": 2}
    engine = EngineProcess("sliced", ENGINE, settings, tmp_path / "log", every_core=True)
    try:
        assert engine.wait()["pausable"]
        engine.call("begin", **load)
        engine.call("go_on", seconds=None)  # compiles what is compiled on first use
        engine.call("begin", **load)
        whole = engine.call("go_on", seconds=None)
        engine.call("begin", **load)
        began, parts = time.perf_counter(), [engine.call("go_on", seconds=0.0)]
        while parts[-1]["sample"] is None:
            time.sleep(0.1)
            parts.append(engine.call("go_on", seconds=0.0))
        seconds = time.perf_counter() - began
    finally:
        engine.close()
    assert len(parts) > 3 * 24 / 6, "a step each, with at most five drafts"
    done, sliced = whole["sample"], parts[-1]["sample"]
    for name in ("requests", "tokens", "passes", "draft_tokens", "accepted_tokens"):
        assert sliced[name] == done[name], name
    assert [part["tokens"] for part in parts] == sorted(part["tokens"] for part in parts)
    assert parts[-1]["tokens"] == sliced["tokens"] == 6 * 24
    waited = 0.1 * (len(parts) - 1)
    assert parts[-1]["seconds"] == sliced["seconds"] <= seconds - waited
    assert 24 * max(sliced["per_token"]) < sliced["seconds"]
    assert all(0 < first < sliced["seconds"] for first in sliced["first_token"])
