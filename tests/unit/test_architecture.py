"""How the parts may depend on each other: read from the sources, nothing is run but two imports in a fresh Python."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_specplugin.runtime import seams

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_specplugin"
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT_VLLM_IN_FUNCTIONS = {
    "vllm_specplugin.bench.engine",
    "vllm_specplugin.demo.engine",
    "vllm_specplugin.train.distill_engine",
    "vllm_specplugin.train.evaluate_engine",
    "vllm_specplugin.validate.engine",
}
"""What runs in a process of its own, and so is no part of the import graph."""

GROUND = {"errors", "types"}
CONTRACTS = GROUND | {"proposers.base", "scorers.base"}
LEAVES = {"heads", "proposers", "scorers", "control"}
COMMANDS = {"arithmetic", "cache", "engine_process", "neighbours", "progress", "prompt_files"}
"""What the parts behind the long-running commands share."""
PURE = CONTRACTS | LEAVES | {"alarm", "config", "counts", "guard", "noise", "proposers.hybrid", "registry", "request_args"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "noise": GROUND,
    "request_args": {"errors", "registry"},
    "proposers.base": GROUND,
    "scorers.drawing": GROUND,
    "scorers.base": GROUND | {"scorers.drawing"},
    "registry": CONTRACTS,
    "config": CONTRACTS | {"registry"},
    "guard": CONTRACTS | {"noise"},
    "alarm": set(),
    "arithmetic": set(),
    "counts": {"alarm"},
    "heads": CONTRACTS,
    "proposers": CONTRACTS | {"compiled", "heads", "scorers.drawing"},
    "proposers.hybrid": CONTRACTS | {"compiled", "config", "guard", "proposers", "registry"},
    "scorers": CONTRACTS | {"scorers.drawing"},
    "control": CONTRACTS | {"compiled"},
    "reference": PURE,
    "kv_cache": set(),
    "runtime": PURE | {"arithmetic", "kv_cache", "reference"},
    "plugin": {"runtime"},
    "engine_process": {"errors"},
    "cache": set(),
    "compiled": set(),
    "neighbours": set(),
    "progress": set(),
    "prompt_files": {"errors"},
    "demo": GROUND | COMMANDS | {"control"},
    "train": PURE | COMMANDS | {"reference"},
    "validate": PURE | COMMANDS | {"reference"},
    "bench": PURE | COMMANDS | {"kv_cache", "reference"},
    "cli": PURE | COMMANDS | {"reference", "runtime", "demo", "train", "validate", "bench"},
    "": CONTRACTS,
}
"""Part -> the parts it may import, itself aside. `""` is the package's own `__init__`, which others may import for its names."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """`vllm_specplugin.cli.main` -> `cli`; the contracts are parts of their own, and so is what is made of other proposers."""
    inner = module.removeprefix("vllm_specplugin").removeprefix(".")
    if inner.startswith("proposers.hybrid"):
        return "proposers.hybrid"
    return inner if inner in ("proposers.base", "scorers.base", "scorers.drawing") else inner.split(".")[0]


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(node: ast.AST, module: str, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module that is imported below `node`, and whether inside a function; for type checkers alone does not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}: a relative import"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from ((name if is_module(name) else str(child.module), in_function) for name in names)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")):
            yield from ((str(name.value), in_function) for name in child.args[:1] if isinstance(name, ast.Constant))
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(child, module, inside)


def imports_of(path: Path) -> list[tuple[str, bool]]:
    return list(imports(ast.parse(path.read_text(encoding="utf-8")), module_of(path)))


def test_the_reader_of_imports_sees_every_kind() -> None:
    source = """
import a.b, c
from vllm_specplugin import types, Proposer
from vllm_specplugin.proposers import base
if TYPE_CHECKING:
    import unseen
def f():
    from vllm.config import VllmConfig
    class Inner:
        def g(self):
            return importlib.import_module("vllm.late")
"""
    assert list(imports(ast.parse(source), "m")) == [
        ("a.b", False),
        ("c", False),
        ("vllm_specplugin.types", False),
        ("vllm_specplugin", False),
        ("vllm_specplugin.proposers.base", False),
        ("vllm.config", True),
        ("vllm.late", True),
    ]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_runtime_imports_vllm(path: Path) -> None:
    module = module_of(path)
    if part_of(module) == "runtime":
        return
    of_vllm = [(name, inside) for name, inside in imports_of(path) if name.split(".")[0] == "vllm"]
    if module in MAY_IMPORT_VLLM_IN_FUNCTIONS:
        assert all(inside for _, inside in of_vllm)
    else:
        assert of_vllm == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(module_of(path))
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT where it stands"
    ours = {part_of(name) for name, _ in imports_of(path) if name.split(".")[0] == "vllm_specplugin"}
    # Whoever imports a module runs the package's __init__ anyhow, so its names are free for all that it does not need itself.
    free = set() if part in CONTRACTS else {""}
    assert ours - {part} - free <= MAY_IMPORT[part]


def test_the_directions_have_no_circle() -> None:
    done: set[str] = set()
    left = dict(MAY_IMPORT)
    while left:
        ready = {part for part, needs in left.items() if needs - done <= {part}}
        assert ready, f"a circle among {sorted(left)}"
        done |= ready
        left = {part: needs for part, needs in left.items() if part not in ready}


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh Python has loaded after some code; `.pth` hooks of the environment run in it, too."""
    command = f"{code}\nimport sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    return set(done.stdout.split())


def test_the_package_and_the_entry_point_are_light() -> None:
    heavy = {"vllm", "torch", "numba", "transformers"}
    assert not heavy & loaded_after("import vllm_specplugin, vllm_specplugin.config")
    # vLLM calls this in each of its processes, when it has imported what it needs; nothing may be pulled in before.
    assert not heavy & loaded_after("from vllm_specplugin.plugin import register; register()")


def test_no_proposer_or_verifier_loads_vllm() -> None:
    code = "from vllm_specplugin.registry import *; names = [(r, n) for r in (PROPOSERS, VERIFIERS) for n in r.names()]\n"
    loaded = loaded_after(code + "[r.resolve(n) for r, n in names]")
    assert "vllm_specplugin.proposers.ngram" in loaded
    assert "vllm" not in loaded


# -- packaging ---------------------------------------------------------------------------------------------


def of_setup_py(name: str) -> object:
    """A constant of setup.py, or an argument of its `setup(...)`."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
        if isinstance(node, ast.keyword) and node.arg == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"no {name} in setup.py")


def test_setup_py_and_the_seams_claim_the_same_vllm() -> None:
    assert tuple(str(of_setup_py("VLLM")).split(",")) == seams.SUPPORTED


def test_setup_py_lists_every_package_once() -> None:
    assert of_setup_py("packages") == sorted({module_of(path.parent / "__init__.py") for path in FILES})
    assert all((path.parent / "__init__.py").is_file() for path in FILES)


def test_the_links_at_the_root_lead_into_the_package() -> None:
    for name in ("proposers", "scorers"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == PACKAGE / name
