"""The harness itself: what the other engine tests take for granted."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import inside
from tests.support.engine import EngineError, EngineWorker, Result, WorkerDiedError, WorkerTimeoutError
from tests.support.hosts import WHEEL_VARIABLE, host_tree_is_there
from tests.support.tiny import EOS
from tests.support.tiny import tiny_model as make_tiny_model
from tests.support.v2_site.v2_on_cpu import apply_top_k_top_p

PROMPTS = [[1, 2, 3], [5] * 20, list(b"hello world"), [1, 2]]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

# fp32 sums in another order
LOGPROB_TOLERANCE = 1e-4


# -- functions that run inside a worker --------------------------------------------------------------------


def scheduler_name(llm: Any) -> str:
    return type(llm.llm_engine.engine_core.engine_core.scheduler).__name__


def resident_megabytes(llm: Any) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def interpreter_is_set_up(llm: Any) -> bool:
    return "v2_on_cpu" in sys.modules and os.environ["TRITON_INTERPRET"] == "1"


def draws(llm: Any) -> list[tuple[list[int], list[int]]]:
    """The tokens that vLLM's sampling kernel draws under the interpreter, and those of what stands in for it.

    For drafting it keeps what it draws from, too, which is appended to the tokens.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    generator = torch.Generator().manual_seed(0)
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.01, 2.0, 1.3])
    seed = torch.randint(-(2**62), 2**62, (6,), generator=generator)
    both = []
    for vocabulary in (16, 258, 2500):
        logits = torch.randn(40, vocabulary, generator=generator) * 2
        logits[5, 4:] = float("-inf")
        slots = torch.randint(-1, 6, (40,), generator=generator, dtype=torch.int32)
        positions = torch.randint(0, 2**20, (40,), generator=generator)
        for apply_temperature in (True, False):
            asked = (logits, slots, temperature, seed, positions, apply_temperature, False)
            both.append((gumbel.interpreted_gumbel_sample(*asked).tolist(), gumbel.gumbel_sample(*asked).tolist()))
        kept = []
        unique = torch.where(torch.arange(40) < 6, torch.arange(40), -1)  # one row for each slot
        for draw in (gumbel.interpreted_gumbel_sample, gumbel.gumbel_sample):
            cache = torch.zeros(6, 3, vocabulary)
            column = {"logits_cache": cache, "logits_cache_col": torch.tensor(1)}
            tokens = draw(logits, unique, temperature, seed, positions, True, True, **column)
            kept.append([*tokens.tolist(), *cache.flatten().tolist()])
        both.append((kept[0], kept[1]))
    return both


def quotients(llm: Any) -> list[tuple[list[float], list[float]]]:
    """Logits over their temperatures, by vLLM's kernel under the interpreter and by what stands in for it."""
    from vllm.v1.worker.gpu.sample import gumbel

    generator = torch.Generator().manual_seed(0)
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.01, 2.0, 1.3])
    both = []
    for vocabulary in (16, 258, 9000):
        logits = torch.randn(40, vocabulary, generator=generator)
        logits[5, 4:] = float("-inf")
        slots = torch.randint(0, 6, (40,), generator=generator, dtype=torch.int32)
        pair = (logits.clone(), logits.clone())
        gumbel.interpreted_apply_temperature(pair[0], slots, temperature)
        gumbel.apply_temperature(pair[1], slots, temperature)
        both.append((pair[0].flatten().tolist(), pair[1].flatten().tolist()))
    return both


def slot_mappings(llm: Any) -> list[tuple[list[int], list[int]]]:
    """Where keys and values go, by vLLM's kernel under the interpreter and by what stands in for it, for a made-up batch."""
    tables = inside.runner(llm).block_tables
    generator = torch.Generator().manual_seed(0)
    table = tables.block_tables[0].gpu
    slots, width = table.shape
    before = table.clone()
    table.copy_(torch.randint(1, 1000, table.shape, generator=generator, dtype=torch.int32))
    lengths = torch.tensor([1, 5, 0, 40, 2, 3])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    requests = torch.randperm(slots, generator=generator)[:6].int()
    requests[4] = -1
    positions = torch.randint(0, width * int(tables.block_sizes_tensor[0]), (60,), generator=generator)
    both = []
    for compute in (tables.interpreted_slot_mappings, tables.compute_slot_mappings):
        out = torch.full_like(tables.slot_mappings, 7)
        both.append([*compute(requests, starts, positions, 56, out).flatten().tolist(), *out.flatten().tolist()])
    table.copy_(before)
    return [(both[0], both[1])]


def complain(llm: Any, subject: str) -> None:
    raise LookupError(f"no {subject} here")


def spin(llm: Any) -> None:
    while True:
        pass


def leave(llm: Any, code: int) -> None:
    os._exit(code)


# -- tokens --------------------------------------------------------------------------------------------------


def tokens(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def test_greedy_tokens_are_the_same_on_both_runners(v1: EngineWorker, v2: EngineWorker, tiny_model: Path) -> None:
    outputs = []
    for worker in (v1, v2):
        worker.open(tiny_model)
        outputs.append(tokens(worker.generate(PROMPTS, GREEDY)))
    assert outputs[0] == outputs[1]
    assert all(len(output) == GREEDY["max_tokens"] for output in outputs[0])
    assert all(len(set(output)) > 6 for output in outputs[0]), "the tiny model repeats itself"


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -1.5}, id="penalties"),
        pytest.param({"bad_words": ["d", "A", "*U"]}, id="bad_words"),
        pytest.param({"logit_bias": {210: -100.0, 65: 3.0}}, id="logit_bias"),
        pytest.param({"allowed_token_ids": [65, 66, 67, 210]}, id="allowed_token_ids"),
        pytest.param({"min_tokens": 10, "ignore_eos": False, "logit_bias": {EOS: 50.0}}, id="min_tokens"),
        pytest.param({"stop_token_ids": [230, 26]}, id="stop_token_ids"),
        pytest.param({"temperature": 1.0, "min_p": 0.9999}, id="min_p"),
        pytest.param({"temperature": 1.0, "top_k": 1}, id="top_k"),
        pytest.param({"temperature": 1.0, "top_p": 1e-6}, id="top_p"),
        pytest.param({"logprobs": 5, "prompt_logprobs": 3}, id="logprobs"),
        pytest.param({"structured_outputs": {"regex": "[a-c]{3}(foo|bar)*"}}, id="regex"),
        pytest.param({"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}}, id="json"),
    ],
)
def test_what_a_request_may_ask_for_works_alike_on_both_runners(
    v1: EngineWorker, v2: EngineWorker, tiny_model: Path, asked: dict[str, Any]
) -> None:
    """V2's sampling kernels run under the interpreter: V1's torch code says what they should give."""
    outputs = []
    for worker in (v1, v2):
        if not worker.call("tests.engine.test_harness:is_open"):
            worker.open(tiny_model)
        outputs.append(worker.generate(PROMPTS, GREEDY | asked))
    first, second = outputs
    assert tokens(first) == tokens(second)
    assert [r.finish_reason for r in first] == [r.finish_reason for r in second]
    assert [r.stop_reason for r in first] == [r.stop_reason for r in second]
    for one, other in zip(first, second, strict=True):
        for here, there in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert ("logprobs" in asked) == (here is not None)
            for left, right in zip(here or (), there or (), strict=True):
                assert (left is None) == (right is None)
                if left is not None and right is not None:
                    assert {t: e.rank for t, e in left.items()} == {t: e.rank for t, e in right.items()}
                    for token, entry in left.items():
                        assert entry.logprob == pytest.approx(right[token].logprob, abs=LOGPROB_TOLERANCE)


def is_open(llm: Any) -> bool:
    return llm is not None and llm.llm_engine.vllm_config.speculative_config is None


def test_seeds_repeat_and_differ(worker: EngineWorker, tiny_model: Path) -> None:
    """Within a runner; the runners draw their noise differently, so their tokens differ by design."""
    worker.open(tiny_model)
    sampled = GREEDY | {"temperature": 1.0}
    seven, again, eight = (tokens(worker.generate(PROMPTS, sampled | {"seed": seed})) for seed in (7, 7, 8))
    assert seven == again
    assert all(one != other for one, other in zip(seven, eight, strict=True))


def test_interpreted_top_k_top_p_keeps_the_tokens_it_should() -> None:
    """The one kernel that had to be replaced, against the definition."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(200, 16, generator=generator) * 4).round() / 2  # ties
    k = torch.randint(1, 17, (200,), generator=generator)
    p = torch.rand(200, generator=generator)
    p[::7] = 1.0
    kept = apply_top_k_top_p(logits.clone(), k, p) > float("-inf")
    for row in range(200):
        order = sorted(range(16), key=lambda token: (-logits[row, token].item(), token))[: int(k[row])]
        weights = logits[row, order].double().exp()
        mass = (weights / weights.sum()).cumsum(0)
        enough = len(order) if p[row] == 1.0 else int((mass < p[row]).sum()) + 1
        assert kept[row].nonzero().flatten().tolist() == sorted(order[:enough])


@pytest.mark.parametrize("what", ["draws", "quotients", "slot_mappings"])
def test_what_is_hurried_gives_what_the_kernel_gives(v2: EngineWorker, tiny_model: Path, what: str) -> None:
    v2.open(tiny_model)
    for kernel, hurried in v2.call(f"tests.engine.test_harness:{what}"):
        assert hurried == kernel
        assert len(set(kernel)) > 10


# -- engines -------------------------------------------------------------------------------------------------


def test_one_process_serves_one_engine_after_another(worker: EngineWorker, tiny_model: Path) -> None:
    def resident() -> int:
        megabytes: int = worker.call("tests.engine.test_harness:resident_megabytes")
        return megabytes

    worker.open(tiny_model)
    process = worker.info["pid"]
    plain = tokens(worker.generate(PROMPTS, GREEDY))

    worker.open(tiny_model, NGRAM)
    assert tokens(worker.generate(PROMPTS, GREEDY)) == plain
    metrics = worker.metrics()
    assert metrics["vllm:generation_tokens"] == len(PROMPTS) * GREEDY["max_tokens"]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert len(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]) == NGRAM["num_speculative_tokens"]

    before = resident()
    for _ in range(3):
        worker.open(tiny_model, kv_cache_memory_bytes=512 << 20)
        worker.generate(PROMPTS, GREEDY)
    worker.open(tiny_model)
    assert resident() < before + 256, "the caches of closed engines are still there"
    assert "vllm:spec_decode_num_drafts" not in worker.metrics(), "metrics of a closed engine"
    assert worker.info["pid"] == process


def test_sixteen_tokens_without_a_tokenizer(worker: EngineWorker) -> None:
    worker.open(make_tiny_model(vocab_size=16), skip_tokenizer_init=True)
    (result,) = worker.generate([[1, 2, 3]], {"temperature": 1.0, "max_tokens": 64, "detokenize": False})
    assert len(result.token_ids) == 64
    assert max(result.token_ids) < 16


def test_asynchronous_scheduling_can_be_had_on_a_cpu(worker: EngineWorker, tiny_model: Path) -> None:
    worker.open(tiny_model)
    plain = tokens(worker.generate(PROMPTS, GREEDY))
    assert worker.call("tests.engine.test_harness:scheduler_name") == "Scheduler"
    worker.open(tiny_model, force_async=True)
    assert worker.call("tests.engine.test_harness:scheduler_name") == "AsyncScheduler"
    assert tokens(worker.generate(PROMPTS, GREEDY)) == plain


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_vllm_033_runs_over_the_compiled_files_of_032(runner: Any, v1: EngineWorker, tiny_model: Path) -> None:
    if not (os.environ.get(WHEEL_VARIABLE) or host_tree_is_there()):
        pytest.skip(f"needs the 340 MB wheel of vllm 0.33.0: set {WHEEL_VARIABLE}, or call host_tree() once")
    v1.open(tiny_model)
    with EngineWorker(runner, "0.33") as newer:
        newer.open(tiny_model)
        assert newer.info["vllm"] == "0.33.0"
        assert tokens(newer.generate(PROMPTS, GREEDY)) == tokens(v1.generate(PROMPTS, GREEDY))


# -- failures ------------------------------------------------------------------------------------------------


def test_an_exception_travels_back_and_the_worker_lives_on(v1: EngineWorker, tiny_model: Path) -> None:
    v1.open(tiny_model)
    with pytest.raises(EngineError, match="no bread here") as caught:
        v1.call("tests.engine.test_harness:complain", "bread")
    assert caught.value.kind == "LookupError"
    assert "in complain" in caught.value.remote_traceback
    assert str(v1.log_path) in str(caught.value)

    with pytest.raises(EngineError, match="temperature"):
        v1.generate([[1], [2]], [GREEDY, GREEDY | {"temperature": -1.0}])
    assert len(v1.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_an_engine_that_cannot_be_made_does_not_spoil_the_next(worker: EngineWorker, tiny_model: Path) -> None:
    with pytest.raises(EngineError):
        worker.open(tiny_model, NGRAM | {"method": "no such method"})
    with pytest.raises(EngineError, match="no engine is open"):
        worker.generate(PROMPTS, GREEDY)
    worker.open(tiny_model)
    assert len(worker.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_silence_and_death_end_the_process_and_the_next_call_starts_another() -> None:
    here = "tests.engine.test_harness:"
    with EngineWorker("v1") as worker:
        assert worker.call(here + "is_open") is False  # the process is up, and has imported this file
        began = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match=r"more than 0\.5 s"):
            worker.call(here + "spin", timeout=0.5)
        assert time.monotonic() - began < 20.0
        assert not worker.alive
        with pytest.raises(WorkerDiedError, match="open"):
            worker.generate(PROMPTS, GREEDY)

        with pytest.raises(WorkerDiedError, match="exit code 7"):
            worker.call(here + "leave", 7)
        assert worker.call(here + "is_open") is False  # another one


def test_a_search_path_from_the_caller_does_not_displace_the_harness(tmp_path: Path) -> None:
    (tmp_path / "brought_along.py").write_text("def where(llm): return __file__")
    with EngineWorker("v2", env={"PYTHONPATH": str(tmp_path)}) as worker:
        assert worker.call("brought_along:where") == str(tmp_path / "brought_along.py")
        assert worker.call("tests.engine.test_harness:interpreter_is_set_up")
