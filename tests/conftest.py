"""Shared fixtures: a tiny model, and one engine process per model runner for the whole session."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # tests.support must be importable however pytest was called
    sys.path.insert(0, str(ROOT))

from tests.support import tiny  # noqa: E402
from tests.support.engine import EngineWorker  # noqa: E402
from tests.support.hosts import RELEASES  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm-host",
        default="0.32",
        choices=["0.32", *RELEASES],
        help="the vLLM that the fixtures v1 and v2 run on; 0.33 is 0.33's Python over 0.32's compiled files",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: runs the real vLLM in a process of its own (set by folder)")
    config.addinivalue_line("markers", "device: needs a GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent / "engine" in item.path.parents:
            item.add_marker("engine")


@pytest.fixture(scope="session")
def tiny_model(pytestconfig: pytest.Config) -> Path:
    """The folder of the tiny random Llama (see tests/support/tiny.py)."""
    return tiny.tiny_model(pytestconfig.cache.mkdir("tiny"))


def _worker(runner: Literal["v1", "v2"], config: pytest.Config) -> Iterator[EngineWorker]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with EngineWorker(runner, config.getoption("--vllm-host")) as worker:
        yield worker


@pytest.fixture(scope="session")
def v1(pytestconfig: pytest.Config) -> Iterator[EngineWorker]:
    """A worker on the V1 model runner; its process starts with the first open()."""
    yield from _worker("v1", pytestconfig)


@pytest.fixture(scope="session")
def v2(pytestconfig: pytest.Config) -> Iterator[EngineWorker]:
    """The same on the V2 model runner, under Triton's interpreter."""
    yield from _worker("v2", pytestconfig)


@pytest.fixture(params=["v1", "v2"])
def worker(request: pytest.FixtureRequest) -> EngineWorker:
    """Both, one after the other."""
    chosen: EngineWorker = request.getfixturevalue(request.param)
    return chosen
