"""Two engine processes per model runner: one decodes plainly, the other through the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.common import SideBySide
from tests.support.engine import EngineWorker


def _second(first: EngineWorker) -> Iterator[EngineWorker]:
    with EngineWorker(first.runner, first.host) as worker:
        yield worker


@pytest.fixture(scope="session")
def drafting_v1(v1: EngineWorker) -> Iterator[EngineWorker]:
    yield from _second(v1)


@pytest.fixture(scope="session")
def drafting_v2(v2: EngineWorker) -> Iterator[EngineWorker]:
    yield from _second(v2)


@pytest.fixture(scope="module", params=["v1", "v2"])
def engines(request: pytest.FixtureRequest, tiny_model: Path) -> SideBySide:
    """Both engines of a runner, not open yet."""
    plain, drafting = request.getfixturevalue(request.param), request.getfixturevalue(f"drafting_{request.param}")
    return SideBySide(plain, drafting, tiny_model)
