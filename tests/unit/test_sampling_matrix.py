"""The matrix of sampling parameters: whole, backed by tests that exist, and printed as it is."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.matrix import NOT_SAMPLING, ROWS, RUNNERS, VERIFIERS, Answer
from tests.support.hosts import RELEASES, host_tree, host_tree_is_there

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "sampling_matrix.py"


def fields_of(package: Path) -> set[str]:
    """The fields of `SamplingParams`, read from vLLM's source."""
    tree = ast.parse((package / "sampling_params.py").read_text(encoding="utf-8"))
    (definition,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    return {node.target.id for node in definition.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


@pytest.fixture(params=["installed", *RELEASES])
def vllm(request: pytest.FixtureRequest) -> Path:
    """The folder of vLLM's Python."""
    if request.param == "installed":
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            pytest.skip("vLLM is not installed")
        return Path(spec.origin).parent
    if importlib.util.find_spec("vllm") is None or not host_tree_is_there(request.param):
        pytest.skip(f"vLLM {request.param} is not unpacked here; the engine tests do it")
    return host_tree(request.param) / "vllm"


def test_no_field_is_missing(vllm: Path) -> None:
    ours = {field for row in ROWS for field in row.fields}
    assert not ours & NOT_SAMPLING.keys()
    assert fields_of(vllm) == ours | NOT_SAMPLING.keys()


def test_every_cell_is_filled() -> None:
    for row in ROWS:
        assert row.cells.keys() == {(runner, verifier) for runner in RUNNERS for verifier in VERIFIERS}, row.name
        for place, cell in row.cells.items():
            assert cell.tests, f"{row.name} at {place} has no test"
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_lossy_verifier_is_nowhere_said_to_be_lossless() -> None:
    for row in ROWS:
        for (_, verifier), cell in row.cells.items():
            assert cell.answer is not (Answer.DISTRIBUTION if verifier == "typical" else Answer.LOSSY), row.name


def test_every_test_exists_and_is_of_its_runner_and_verifier() -> None:
    named = {test for row in ROWS for cell in row.cells.values() for test in cell.tests}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert named <= set(done.stdout.splitlines())
    for row in ROWS:
        for (runner, verifier), cell in row.cells.items():
            for test in cell.tests:
                case = test.partition("[")[2].rstrip("]").split("-")
                assert runner in case, f"{row.name} on {runner} is backed by {test}"
                assert verifier in case or not set(VERIFIERS).intersection(case), f"{row.name} by {verifier} is backed by {test}"


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
