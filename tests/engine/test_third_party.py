"""The example under examples/third_party_proposer: installed by setup, found, listed, used by name. And what wheels hold."""

from __future__ import annotations

import ast
import configparser
import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.common import GREEDY, PROMPTS, SEEDED, SideBySide, assert_same
from tests.support import steps
from tests.support.engine import ROOT, EngineError, EngineWorker
from vllm_specplugin import Proposer, Verdict
from vllm_specplugin.registry import PROPOSERS, Entry

EXAMPLE = ROOT / "examples" / "third_party_proposer"
COPYCAT = Entry("copycat", "specplugin_copycat:CopycatProposer", "specplugin-example-copycat")


# -- installed, found, used --------------------------------------------------------------------------------


def test_it_is_installed_and_registered() -> None:
    assert COPYCAT in PROPOSERS.entries(), "run `make setup` (or pip install --no-deps -e examples/third_party_proposer)"
    proposer = PROPOSERS.resolve("copycat")
    assert issubclass(proposer, Proposer)
    assert Path(sys.modules[proposer.__module__].__file__ or "").parent == EXAMPLE


def test_it_imports_from_the_public_contract_only() -> None:
    tree = ast.parse((EXAMPLE / "specplugin_copycat.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert [module for module in modules if module and module.startswith("vllm")] == ["vllm_specplugin"]


def test_the_command_line_lists_it() -> None:
    command = [Path(sys.executable).with_name("vllm-specplugin"), "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (found,) = [part for part in json.loads(done.stdout)["proposers"] if part["name"] == "copycat"]
    assert found["package"] == COPYCAT.distribution
    assert [option["name"] for option in found["options"]] == ["context", "max_entries"]


def test_by_name_it_drafts_in_a_real_engine_and_answers_stay(engines: SideBySide) -> None:
    """Three rounds of the same requests: greedy, greedy again (which it remembers), seeded."""
    engines.open(5, again=True, plugin={"proposer": "copycat", "options": {"context": 2}})
    prompts = PROMPTS[3:7]
    greedy, seeded = GREEDY | {"max_tokens": 20}, SEEDED | {"max_tokens": 20}

    first, before = engines.draft(prompts, greedy)
    second, after = engines.draft(prompts, greedy)
    for results in (first, second):
        assert_same(results, engines.baseline(prompts, greedy))
    assert after.accepted > before.accepted
    assert after.accepted > after.generated // 2  # the last of a request's tokens, and its first one, come without drafts

    sampled, counters = engines.draft(prompts, seeded)
    assert_same(sampled, engines.baseline(prompts, seeded))
    assert counters.draft_tokens > 0
    assert engines.inside("guard")["faults"] == {}
    assert engines.inside("guard")["switched_off"] is False


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"contxt": 3}, ["'options.contxt' is no option of the proposer 'copycat'", "did you mean 'context'?", "max_entries"]),
        ({"context": 0}, ["'options.context' is 0", "greater than or equal to 1"]),
        ({"max-entries": "many"}, ["'options.max_entries' is 'many'", "integer"]),
    ],
)
def test_wrong_options_are_refused_at_start(
    drafting_v1: EngineWorker, tiny_model: Path, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(EngineError) as caught:
        drafting_v1.open(tiny_model, {"proposer": "copycat", "options": options, "control": "fixed"})
    assert caught.value.kind == "ConfigError"
    assert all(part in caught.value.message for part in parts), caught.value.message
    assert "\n" not in caught.value.message


# -- the example's own behaviour ---------------------------------------------------------------------------


def copycat(**options: Any) -> Proposer[Any]:
    proposer = PROPOSERS.resolve("copycat")
    return proposer(steps.host(k=4), proposer.Options(**options))


def drafts(proposer: Proposer[Any], known: dict[str, list[int]]) -> list[list[int]]:
    rows = proposer.propose(steps.step(known, k=4)).token_ids
    return [list(map(int, row)) for row in rows]


def test_memory_goes_from_request_to_request_and_outlives_them() -> None:
    proposer = copycat(context=2)
    assert drafts(proposer, {"a": [1, 2, 3, 4, 5, 6]}) == [[]]
    proposer.forget(["a"])
    assert drafts(proposer, {"b": [9, 2, 3], "c": [8, 8, 8], "d": [7, 6]}) == [[4, 5, 6], [8, 8, 8, 8], []]
    assert drafts(proposer, {"c": [8, 8, 8, 2], "b": [9, 2, 3, 7]}) == [[], []]  # rows change places; 3 7 is new
    assert drafts(proposer, {"e": [2, 3]}) == [[7]]  # the last time counts


def test_memory_is_bounded() -> None:
    proposer = copycat(context=1, max_entries=3)
    assert drafts(proposer, {"a": [1, 2, 3, 4, 5, 6]}) == [[]]
    assert drafts(proposer, {"b": [1], "c": [4]}) == [[], [5, 6]]


def test_it_reaches_less_far_where_it_was_wrong() -> None:
    proposer = copycat(context=1)

    def told(tested: int, accepted: int) -> int:
        """How much it drafts next, told of so many accepted."""
        verdict = Verdict(torch.tensor([accepted]), torch.zeros(1, 5), torch.tensor([tested]), ["a"])
        proposer.observe(verdict)
        return len(drafts(proposer, {"a": [1, 1, 1, 1]})[0])

    assert len(drafts(proposer, {"a": [1, 1, 1]})[0]) == 4
    assert [told(4, 0), told(2, 0), told(1, 0), told(1, 1), told(2, 1), told(2, 2)] == [2, 1, 1, 2, 2, 4]


# -- wheels ------------------------------------------------------------------------------------------------


def build(source: Path, folder: Path) -> zipfile.ZipFile:
    """The wheel that `pip install` would make of `source`."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def contents(wheel: zipfile.ZipFile) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Its files but for the metadata, and its entry points by group."""
    (points,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(wheel.read(points).decode())
    files = sorted(name for name in wheel.namelist() if ".dist-info/" not in name)
    return files, {group: dict(parser[group]) for group in parser.sections()}


def copied(names: list[str], folder: Path, source: Path = ROOT) -> Path:
    """A copy to build in: builds leave folders behind, and read what an earlier one left."""
    for name in names:
        if (source / name).is_symlink():
            (folder / name).symlink_to((source / name).readlink())
        elif (source / name).is_dir():
            shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source / name, folder / name)
    return folder


def test_the_plugins_wheel_holds_every_module_once(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    tree.mkdir()
    names = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "proposers", "scorers", "vllm_specplugin"]
    files, points = contents(build(copied(names, tree), out))
    ours = (path for path in (ROOT / "vllm_specplugin").rglob("*") if path.suffix == ".py" or path.name == "py.typed")
    assert files == sorted(str(path.relative_to(ROOT)) for path in ours)
    assert "vllm_specplugin/py.typed" in files

    for group, entries in points.items():
        for name, target in entries.items():
            assert target.split(":")[0].replace(".", "/") + ".py" in files, f"{group}: {name}"
    installed = {point.name for point in entry_points(group="vllm_specplugin.proposers") if point.dist.name == "vllm-specplugin"}
    assert set(points["vllm_specplugin.proposers"]) == installed, "setup.py has changed since `make setup`"
    assert points["vllm.general_plugins"] == {"specplugin": "vllm_specplugin.plugin:register"}


def test_the_examples_wheel(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    files, points = contents(build(copied(["pyproject.toml", "specplugin_copycat.py"], tree, EXAMPLE), tmp_path / "out"))
    assert files == ["specplugin_copycat.py"]
    assert points == {"vllm_specplugin.proposers": {COPYCAT.name: COPYCAT.target}}
