"""The do-no-harm benchmark over simulated engines: what it promises, how it goes on after an interrupt, what it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulated_engines import Simulation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("do_no_harm", ROOT / "benchmarks" / "do_no_harm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def speed(config: dict[str, Any] | None, concurrency: int) -> float:
    """Drafting pays where few run at once, the more the longer; adaptive drafting knows it."""
    if config is None:
        return 1.0
    if config["control"] == "adaptive":
        return 1.31 if concurrency < 4 else 0.99
    k = config["num_speculative_tokens"]
    return 1 + 0.1 * k if concurrency < 4 else 1 - 0.1 * k


def run(benchmark: Any, monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path, *more: str) -> None:
    arguments = [str(model), "--rounds", str(folder / "rounds.jsonl"), "--fixed", "1,3", "--concurrency", "1,4", *more]
    monkeypatch.setattr(sys, "argv", ["do_no_harm.py", *arguments])
    benchmark.main()


def test_a_grid_is_measured_interrupted_and_gone_on_with(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "PER_KIND", 40)
    machine = Simulation(speed).install(monkeypatch)
    options = ("--kinds", "chat", "random text", "--seconds-per-cell", "22.5", "--max-tokens", "20")

    def interrupt(number: int) -> None:
        # Warming up of five engines at two concurrencies, settling of one, seven rounds, half of another.
        if number == 10 + 1 + 5 * 7 + 2:
            raise KeyboardInterrupt

    machine.before_batch = interrupt
    run(benchmark, monkeypatch, tiny_model, tmp_path, *options)
    rounds = tmp_path / "rounds.jsonl"
    assert len(rounds.read_text().splitlines()) == 7
    assert "interrupted" in capsys.readouterr().out
    assert machine.alive == []
    with rounds.open("a") as file:
        file.write('{"kind": "chat", "conc')  # as a kill in the middle of a line would leave it

    with pytest.raises(SystemExit):  # the rounds of a file are of one experiment
        run(benchmark, monkeypatch, tiny_model, tmp_path, *options[:-1], "30")
    capsys.readouterr()
    again = Simulation(speed).install(monkeypatch)
    page = tmp_path / "page.md"
    run(benchmark, monkeypatch, tiny_model, tmp_path, *options, "--markdown", str(page), "--plots", str(tmp_path))
    lines = rounds.read_text().splitlines()
    assert not lines.pop(7).endswith("}")
    cells = [(line["kind"], line["concurrency"]) for line in map(json.loads, lines)]
    assert cells[:7] == [("chat", 1)] * 7
    assert [cells.count(cell) for cell in dict.fromkeys(cells)] == pytest.approx([11, 11, 7, 7], abs=1)
    assert list(dict.fromkeys(cells)) == [("chat", 1), ("random text", 1), ("chat", 4), ("random text", 4)]
    answered = {name: len(prompts) for name, prompts in again.prompts.items()}
    assert answered.pop("adaptive") == answered["plain"] + 4 * benchmark.SETTLING
    assert set(answered.values()) == {answered["plain"]}
    assert again.started == ["plain", "adaptive", "k=1", "k=3", "plain again"]

    text = page.read_text()
    assert "Kept: adaptive over plain decoding is at least 0.97 in every cell. Lowest: 0.990 (chat, 4 at once)" in text
    assert "Kept: ahead of the best fixed k in at least 80% of the cells. Ahead in 4 of 4" in text
    assert "| chat | 1 | 100.0 | 1.00x (1.00 to 1.00) | 1.31x (1.31 to 1.31) | 1.00 | 3 | 1.30x (1.30 to 1.30) | 1.01x" in text
    assert "| random text | 4 | 400.0 | 1.00x (1.00 to 1.00) | 0.99x (0.99 to 0.99) | 1.00 | 1 | 0.90x" in text
    for name in ("do-no-harm-plain.svg", "do-no-harm-fixed.svg"):
        assert f"]({name})" in text
        assert "<svg" in (tmp_path / name).read_text()


def test_broken_promises_are_said(benchmark: Any) -> None:
    def result(kind: str, over_plain: float, over_fixed: float) -> Any:
        def interval(value: float) -> Any:
            return benchmark.interval([value])

        return benchmark.Result(
            kind, 8, 10.0, interval(over_plain), interval(1.0), 1.0, "k=2", interval(1.0), interval(over_fixed)
        )

    lines = benchmark.verdict([result("a", 1.1, 1.1), result("b", 0.969, 0.98), result("c", 1.0, 0.96)])
    assert lines[0].startswith("**Not kept**")
    assert "Lowest: 0.969 (b, 8 at once); below in 1 of 3" in lines[0]
    assert lines[1].startswith("**Not kept**")
    assert "Ahead in 1 of 3 (33%)" in lines[1]
    assert lines[2].startswith("**Not kept**")
    assert lines[2].endswith("Further behind in 1; c, 8 at once: 0.960 of k=2.")
    kept = benchmark.verdict([result("a", 0.97, 1.0)] * 4 + [result("b", 0.97, 0.97)])
    assert all(line.startswith("Kept") for line in kept)
