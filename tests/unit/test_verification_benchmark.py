"""The benchmark of verification runs, on sizes too small to say anything about speed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks" / "verification.md"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, which it is compared with")
def test_it_measures_every_contender_and_fills_the_document(tmp_path: Path) -> None:
    document, numbers = tmp_path / "verification.md", tmp_path / "verification.json"
    document.write_text(DOCUMENT.read_text())
    cells = ["--cell", "2x2x1500", "--cell", "3x1x64", "--cell", "64x8x151936"]
    options = ["--repeat", "2", "--memory", "0.01", "--threads", "1", "--markdown", str(document), "--json", str(numbers)]
    command = [sys.executable, str(ROOT / "benchmarks" / "verification.py"), *cells, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False)
    if "not a build for CPUs" in done.stderr:
        pytest.skip("it times the kernels of vLLM's CPU build")
    assert done.returncode == 0, done.stderr
    measured = json.loads(numbers.read_text())
    assert [(cell["rows"], cell["k"], cell["vocab"]) for cell in measured["cells"]] == [(2, 2, 1500), (3, 1, 64)]
    assert measured["skipped"] == [[64, 8, 151_936]]
    for cell in measured["cells"]:
        assert {len(times) for times in cell["times"].values()} == {2}
        assert all(time > 0 for times in cell["times"].values() for time in times)
        assert set(cell["accepted"]) == {"stock", "token", "block", "stock one-hot", "one_hot"}
        assert all(0 <= accepted <= cell["k"] for accepted in cell["accepted"].values())
    text = document.read_text()
    assert "| 2 | 2 | 1,500 |" in text
    assert "64 x 8 x 151,936" in text
    assert "token : stock" in text


def test_a_document_without_a_place_for_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    fill = importlib.import_module("verification_report").fill
    document = "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n"
    filled = fill(document, {"one": "new", "two": r"\1"})
    assert filled == "a\n<!-- one -->\nnew\n<!-- end -->\nb\n<!-- two -->\n\\1\n<!-- end -->\n"
    assert fill(filled, {"one": "new", "two": r"\1"}) == filled
    with pytest.raises(SystemExit, match="<!-- three -->"):
        fill(document, {"three": "new"})
