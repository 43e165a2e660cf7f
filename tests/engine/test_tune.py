"""`vllm-specplugin tune` on the real engine: a search of seconds ends with a configuration that is faster, and can be pasted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.engine import worker_environment
from tests.support.tiny import forgetful_model
from vllm_specplugin.bench.report import NOTHING_KNOWN
from vllm_specplugin.bench.samples import ROUNDS_FOR_CONFIDENCE
from vllm_specplugin.bench.tune import BEST, DROPPED, SLOWER, TuneReport
from vllm_specplugin.cli.main import app
from vllm_specplugin.config import SpecConfig, resolve

NGRAM = {"proposer": "ngram", "control": "fixed", "options": {"min_n": 1}, "draft_budget_ms": 60_000}  # patience: others compute
MAX_TOKENS = 256  # more than enough to make up for what each engine pays once


def pasted(flag: str) -> dict[str, Any]:
    """The configuration as a shell hands it to `vllm serve`; one that the plugin takes."""
    option, text = shlex.split(flag)
    assert option == "--speculative-config"
    config: dict[str, Any] = json.loads(text)
    resolve(SpecConfig.parse(config))
    return config


def test_a_short_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its texts go in a circle of four tokens, so that drafts save most passes: no clock is too rough to see it."""
    for name, value in worker_environment("v1", "0.32").items():
        monkeypatch.setenv(name, value)
    prompts, page = tmp_path / "prompts.txt", tmp_path / "tuning.md"
    prompts.write_text("".join(f"number {number}\n" for number in range(40)))
    arguments = ["tune", "--model", str(forgetful_model(seed=4)), "--prompts", str(prompts), "--concurrency", "1"]
    arguments += ["--max-tokens", str(MAX_TOKENS), "--minutes", "0.4", "--engines-at-once", "4"]
    arguments += ["--engine-args", '{"dtype": "float32"}', "--markdown", str(page), "--json"]
    started_from = [NGRAM, {**NGRAM, "num_speculative_tokens": 1}]
    for config in started_from:
        arguments += ["--config", json.dumps(config)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    report = TuneReport.model_validate_json(done.stdout)

    assert not report.interrupted
    assert [pasted(one.flag) for one in report.tried if one.stage == "proposer"] == started_from
    assert len({one.flag for one in report.tried}) == len(report.tried)
    assert {one.outcome for one in report.tried} <= {BEST, SLOWER, DROPPED}
    for one in report.tried:  # neighbours, as far as the time allowed for them
        assert pasted(one.flag)["proposer"] == "ngram"
        assert 0 < one.speed.low <= one.speed.value <= one.speed.high
    best = max(report.tried, key=lambda one: one.outcome == BEST)
    assert best.outcome == BEST
    assert best.speed.value > 1

    assert report.confirmed is not None
    plain, *measured = report.confirmed.cells
    assert (plain.candidate, plain.acceptance_length) == ("plain", 1.0)
    assert best.candidate in {cell.candidate for cell in measured}
    for cell in measured:
        config = next(pasted(one.flag) for one in report.tried if one.candidate == cell.candidate)
        drafts = resolve(SpecConfig.parse(config)).num_speculative_tokens
        assert cell.acceptance_rate is not None
        assert 0.9 < cell.acceptance_rate <= 1  # all but the first drafts are right
        assert 1.5 < cell.acceptance_length <= 1 + drafts
    if report.recommendation.known:
        assert report.recommendation.candidate in {cell.candidate for cell in measured}
        assert pasted(report.recommendation.flag)["proposer"] == "ngram"
    else:  # so short a time may have room for few rounds
        assert plain.speed.rounds < ROUNDS_FOR_CONFIDENCE
        assert report.recommendation.line == NOTHING_KNOWN
    assert page.read_text().rstrip().splitlines()[-1].strip() == report.recommendation.line
