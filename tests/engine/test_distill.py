"""`vllm-specplugin distill` on the real engine: the answers are the target's own, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.engine import EngineWorker
from vllm_specplugin.cli.main import app

pytestmark = pytest.mark.engine


def test_answers_are_the_targets_own(tmp_path: Path, tiny_model: Path, v1: EngineWorker) -> None:
    data, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    data.write_text("hello there\nabc abc abc\n\n" + "x" * 300 + "\n")
    arguments = ["distill", "--target", str(tiny_model), "--data", str(data), "--out", str(out), "--max-tokens", "12"]
    engine_args = '{"max_model_len": 128, "kv_cache_memory_bytes": 16777216, "dtype": "float32"}'
    done = CliRunner().invoke(app, [*arguments, "--engine-args", engine_args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "1 prompts were longer than the context" in " ".join(done.output.split())
    _, first, second, third = [json.loads(line) for line in out.read_text().splitlines()]
    assert "skipped" in third
    v1.open(tiny_model)
    prompts = [entry["prompt_token_ids"] for entry in (first, second)]
    plain = v1.generate(prompts, {"temperature": 0.0, "max_tokens": 12})
    assert bytes(prompts[0]).decode() == "user: hello there\nassistant: "
    assert [entry["token_ids"] for entry in (first, second)] == [list(result.token_ids) for result in plain]
