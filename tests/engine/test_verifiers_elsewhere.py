"""Verifiers that judge by probabilities on two tensor-parallel ranks, and on vLLM 0.33's Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, Counters, script
from tests.engine.test_processes import START
from tests.engine.test_verifiers import CERTAIN, HOT, PLUGINS
from tests.engine.test_vllm_033 import newer  # noqa: F401  (a fixture)
from tests.support.engine import EngineWorker, Result

K = 4
NUM_TOKENS = 12
SPEC = PLUGINS["token"] | {"num_speculative_tokens": K, "draft_budget_ms": 60_000.0}

ASKED: list[dict[str, Any]] = [
    each | {"max_tokens": NUM_TOKENS}
    for each in (
        CERTAIN,
        SEEDED | {"logprob_token_ids": [3, 65]},
        GREEDY,
        CERTAIN | {"logit_bias": {65: 9.0}, "min_p": 0.1},
    )
]
"""What plain decoding says to the token; a hot request without a seed goes beside them."""
BATCH = PROMPTS[2:6]


def drafted(known: list[Result], **more: Any) -> list[dict[str, Any]]:
    """ASKED and the hot one, each with drafts by chance that are often right."""
    rows = zip(ASKED, BATCH, known, strict=True)
    asked = [each | script("sampled", prompt, result.token_ids, trust=0.7, **more) for each, prompt, result in rows]
    return [*asked, HOT | {"max_tokens": NUM_TOKENS} | script("sampled", **more)]


def check(worker: EngineWorker, known: list[Result], **more: Any) -> Counters:
    before = Counters.read(worker.metrics())
    results = worker.generate([*BATCH, [1, 2, 3]], drafted(known, **more))
    assert [result.token_ids for result in results[:-1]] == [result.token_ids for result in known]
    assert len(results[-1].token_ids) == NUM_TOKENS
    counters = Counters.read(worker.metrics()).since(before)
    assert 0 < counters.accepted < counters.draft_tokens
    assert counters.accepted > len(BATCH) * NUM_TOKENS / 4
    return counters


# -- two ranks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(v1: EngineWorker, tiny_model: Path) -> Iterator[tuple[EngineWorker, list[Result]]]:
    """An engine on two ranks that drafts, and what one rank decodes plainly."""
    v1.open(tiny_model)
    known = v1.generate(BATCH, ASKED)
    with EngineWorker("v1", env={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}) as worker:
        worker.open(tiny_model, SPEC, timeout=START, tensor_parallel_size=2, distributed_executor_backend="mp")
        yield worker, known


@pytest.mark.parametrize("flaw", [None, "other_rank"])
def test_tensor_parallel(two_ranks: tuple[EngineWorker, list[Result]], flaw: str | None) -> None:
    """Also where the other rank's proposer gives nothing (it was late, say), and so would walk where this one judges.

    What is drawn by chance must be the same on both ranks, before drafts, with them and without.
    """
    worker, known = two_ranks
    check(worker, known, flaw=flaw)
    hot = HOT | {"max_tokens": 4 * NUM_TOKENS}
    worker.generate(BATCH[:2], hot | script("sampled", flaw=flaw))  # a batch of which one rank walks nobody
    said = {"without": script("empty"), "with": script("sampled", flaw=flaw)}
    for name, prompt in zip(said, BATCH, strict=False):
        worker.call("tests.engine.inside:add", name, prompt, hot | said[name])
    for _ in range(8):
        assert worker.call("tests.engine.inside:step_once") == []
    first, second = worker.call("tests.engine.inside:known_on_every_rank")
    worker.call("tests.engine.inside:run_to_the_end")
    assert first == second
    assert all(len(first[name]) >= 8 for name in said)


# -- vLLM 0.33 ---------------------------------------------------------------------------------------------


def test_vllm_033(newer: EngineWorker, tiny_model: Path) -> None:  # noqa: F811
    newer.open(tiny_model)
    known = newer.generate(BATCH, ASKED)
    newer.open(tiny_model, SPEC)
    newer.call("tests.engine.inside:watch_the_judge")
    check(newer, known)
    assert newer.call("tests.engine.inside:judged")
