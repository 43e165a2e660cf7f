"""Medusa heads in the real engine: parity, acceptance that plain PyTorch predicts, the target's distribution, two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.common import GREEDY, PATIENCE_MS, SEEDED, Counters, SideBySide, prompt_of
from tests.engine.test_processes import START
from tests.engine.test_statistics import ALPHA, NUM_TOKENS, PATIENCE, PROMPT, REQUESTS, TEMPERATURE, VOCABULARY, p_values
from tests.engine.test_vllm_033 import newer  # noqa: F401  (a fixture)
from tests.support.engine import EngineError, EngineWorker
from tests.support.heads import fitted_medusa, greedy_states, load_target, random_medusa
from tests.support.tiny import VOCAB_SIZE
from tests.support.tiny import tiny_model as make_tiny_model
from vllm_specplugin.heads import checkpoint, medusa_files
from vllm_specplugin.heads.medusa import MedusaConfig, MedusaHeads

K = 4
LENGTH = 40  # tokens per request
PROMPTS = [prompt_of(length, length) for length in (5, 33, 65, 20, 70, 3)]
HIDDEN = 64

FITTED: dict[str, dict[str, Any]] = {
    "own": {},
    "shared": {"output": "shared", "draft_vocab_size": 100},
    "target": {"output": "target", "gated": True, "norm": "pre"},
}
"""Heads that know the greedy texts of PROMPTS, all or most of each."""


@dataclass(frozen=True)
class Known:
    """What plain PyTorch says about the texts."""

    texts: list[list[int]]
    """Prompt and greedy continuation, LENGTH tokens and a little more."""
    states: list[torch.Tensor]
    """The target's last hidden states."""
    output: torch.Tensor
    """Its output matrix."""


@pytest.fixture(scope="module")
def known(tiny_model: Path) -> Known:
    model = load_target(tiny_model)
    found = [greedy_states(model, prompt, LENGTH + K) for prompt in PROMPTS]
    return Known([ids.tolist() for ids, _ in found], [states for _, states in found], model.lm_head.weight.detach())


def checkpoint_of(kind: str, tiny_model: Path) -> Path:
    if kind == "random":
        return random_medusa(MedusaConfig(num_heads=K, hidden_size=HIDDEN, vocab_size=VOCAB_SIZE, num_layers=2, bias=True))
    return fitted_medusa(tiny_model, PROMPTS, LENGTH, K, **FITTED[kind])


def medusa(folder: Path, **more: Any) -> dict[str, Any]:
    """Keys of the speculative configuration."""
    return {"proposer": "medusa", "model": str(folder), "control": "fixed", **more}  # else the clock has a say


def expected_acceptance(folder: Path, known: Known, k: int) -> tuple[int, int]:
    """Drafts made and accepted over the texts, by the heads in plain PyTorch: one pass after the other, as an engine does.

    Accepted ones that lie beyond a request's last token are counted as the engine does, which has verified them.
    """
    info = checkpoint.inspect(str(folder))
    made = MedusaHeads(medusa_files.config_of(info.shapes, info.config, str(folder)))
    medusa_files.load(made, checkpoint.tensors(folder), str(folder))
    drafted = accepted = 0
    for prompt, text, states in zip(PROMPTS, known.texts, known.states, strict=True):
        with torch.inference_mode():
            drafts = made.best(made(states), known.output)[:, :k].tolist()
        length, end = len(prompt) + 1, len(prompt) + LENGTH
        while length < end:
            ids = drafts[length - 2]  # from the state that chose the last known token
            right = [draft == token for draft, token in zip(ids, text[length : length + k], strict=True)]
            count = right.index(False) if False in right else k
            drafted += k
            accepted += count
            length += count + 1
    return drafted, accepted


# -- greedy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*FITTED, "random"])
def test_parity_and_the_acceptance_that_pytorch_predicts(engines: SideBySide, tiny_model: Path, known: Known, kind: str) -> None:
    """The drafts are the very ones that the heads make of Hugging Face's hidden states."""
    folder = checkpoint_of(kind, tiny_model)
    engines.open(K, plugin=medusa(folder))
    results, counters = engines.draft(PROMPTS, GREEDY | {"max_tokens": LENGTH})
    assert [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, results, strict=True)] == [
        text[: len(prompt) + LENGTH] for prompt, text in zip(PROMPTS, known.texts, strict=True)
    ]
    drafted, accepted = expected_acceptance(folder, known, K)
    assert (counters.draft_tokens, counters.accepted) == (drafted, accepted)
    assert accepted > 0.6 * drafted if kind in FITTED else accepted < 0.1 * drafted


def test_fewer_drafts_than_heads(engines: SideBySide, tiny_model: Path, known: Known) -> None:
    folder = checkpoint_of("shared", tiny_model)
    engines.open(2, plugin=medusa(folder))
    _, counters = engines.draft(PROMPTS, GREEDY | {"max_tokens": LENGTH})
    assert (counters.draft_tokens, counters.accepted) == expected_acceptance(folder, known, 2)


SITUATIONS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 64},
    "cached": {"enable_prefix_caching": True, "block_size": 32},
    "preempted": {"num_gpu_blocks_override": 9, "block_size": 32, "max_model_len": 128},
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_situation_does_not_matter(engines: SideBySide, tiny_model: Path, known: Known, situation: str) -> None:
    """Beside chunks of other prompts, from cached prefixes, after preemption: the same tokens, and drafts that are as good."""
    engines.open(K, plugin=medusa(checkpoint_of("own", tiny_model)), **SITUATIONS[situation])
    params = GREEDY | {"max_tokens": LENGTH}
    for _ in range(2 if situation == "cached" else 1):
        results, counters = engines.draft(PROMPTS, params)
        for prompt, text, result in zip(PROMPTS, known.texts, results, strict=True):
            assert list(result.token_ids) == text[len(prompt) : len(prompt) + LENGTH]
    assert (counters.cache_hits > 0) == (situation == "cached")
    assert (counters.preemptions > 0) == (situation == "preempted")
    assert counters.accepted > 0.9 * counters.draft_tokens
    assert counters.drafts < 2 * len(PROMPTS) * LENGTH / (K + 1)


EDGE = 80


def test_the_edge_of_max_model_len(engines: SideBySide, tiny_model: Path, known: Known) -> None:
    """Case 8: texts end at the edge and not beyond; a short neighbour keeps its drafts. What requests say bounds them."""
    engines.open(K, plugin=medusa(checkpoint_of("own", tiny_model)), max_model_len=EDGE)
    texts = [known.texts[2][:length] for length in range(EDGE - 1, EDGE - K - 3, -1)]
    prompts = [*texts, PROMPTS[0], PROMPTS[0]]
    params = [GREEDY | {"max_tokens": 30}] * len(prompts)
    params[-1] = params[-1] | {"extra_args": {"specplugin": {"enabled": False}}}
    results, counters = engines.draft(prompts, params)
    for text, result in zip(texts, results, strict=False):
        assert [*text, *result.token_ids] == known.texts[2][:EDGE]
        assert result.finish_reason == "length"
    for result in results[-2:]:
        assert list(result.token_ids) == known.texts[0][5:35]
    # Each long one drafts what still fits before the edge, the neighbour k at a time to its end, the last one nothing.
    edge = sum(min(K, EDGE - 1 - (length + 1)) for length in range(EDGE - K - 2, EDGE - 1))
    assert edge <= counters.draft_tokens <= edge + 2 * 30
    assert counters.drafts >= 30 // (K + 1)


# -- sampled -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow_model(pytestconfig: pytest.Config) -> Path:
    return make_tiny_model(pytestconfig.cache.mkdir("tiny"), vocab_size=VOCABULARY, logit_std=2.0)


@pytest.mark.parametrize(("engines", "verifier"), [("v1", "token"), ("v1", "block"), ("v2", "block")], indirect=["engines"])
def test_samples_follow_the_targets_distribution(engines: SideBySide, narrow_model: Path, verifier: str) -> None:
    """Case 4: heads that know nothing draw among 12 of the 16 tokens; every eighth request is greedy, and gets its own tokens."""
    config = MedusaConfig(num_heads=2, hidden_size=HIDDEN, vocab_size=VOCABULARY, output="shared", draft_vocab_size=12)
    plugin = medusa(random_medusa(config), verifier=verifier, draft_sampling="probabilistic", options={"temperature": 1.5})
    size = {"max_num_seqs": 256, "max_num_batched_tokens": 1024, "max_model_len": 16}
    engines.open(2, plugin=plugin, model=str(narrow_model), skip_tokenizer_init=True, **size)
    asked = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    greedy = engines.baseline([PROMPT], asked | {"temperature": 0.0})[0].token_ids
    kinds = [asked | {"temperature": 0.0}] + [asked | {"temperature": TEMPERATURE}] * 7
    requests = REQUESTS[engines.runner] // 3
    results, counters = engines.draft([PROMPT] * requests, [kinds[place % 8] for place in range(requests)], timeout=PATIENCE)
    assert 0.01 < counters.accepted / counters.draft_tokens < 0.7, "drafts must be accepted as well as refused"
    assert {result.token_ids for result in results[::8]} == {greedy}
    found = p_values(engines, [result.token_ids for place, result in enumerate(results) if place % 8])
    assert min(found.values()) > ALPHA, found


def test_a_seed_gives_plain_decodings_tokens(engines: SideBySide, tiny_model: Path) -> None:
    """Also with drafts that were drawn by chance, which are good where the target is sure."""
    plugin = medusa(checkpoint_of("own", tiny_model), draft_sampling="probabilistic", verifier="block", options={"top_p": 0.9})
    engines.open(K, plugin=plugin)
    params = [SEEDED | {"max_tokens": 24, "temperature": (0.02, 1.0)[place % 2], "seed": place} for place in range(len(PROMPTS))]
    known = engines.baseline(PROMPTS, params)
    results, counters = engines.draft(PROMPTS, params)
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    assert counters.accepted >= (24 // (K + 1)) * K * len(PROMPTS) / 2  # nearly all of the cool half's alone


# -- elsewhere ---------------------------------------------------------------------------------------------


def check(worker: EngineWorker, known: Known) -> Counters:
    results = worker.generate(PROMPTS, GREEDY | {"max_tokens": LENGTH})
    for prompt, text, result in zip(PROMPTS, known.texts, results, strict=True):
        assert list(result.token_ids) == text[len(prompt) : len(prompt) + LENGTH]
    return Counters.read(worker.metrics())


def test_vllm_033(newer: EngineWorker, tiny_model: Path, known: Known) -> None:  # noqa: F811
    """Which has no Medusa of its own any more."""
    folder = checkpoint_of("shared", tiny_model)
    newer.open(tiny_model, medusa(folder, draft_budget_ms=PATIENCE_MS))
    counters = check(newer, known)
    assert (counters.draft_tokens, counters.accepted) == expected_acceptance(folder, known, K)


@pytest.fixture(scope="module")
def two_ranks(tiny_model: Path) -> Iterator[EngineWorker]:
    """Heads with one output layer: their blocks are spread over the ranks as a batch, the output as vLLM's own layer."""
    with EngineWorker("v1", env={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, timeout=START) as worker:
        spec = medusa(checkpoint_of("shared", tiny_model), draft_budget_ms=PATIENCE_MS)
        worker.open(tiny_model, spec, timeout=START, tensor_parallel_size=2, distributed_executor_backend="mp")
        yield worker


def test_tensor_parallel(two_ranks: EngineWorker, tiny_model: Path, known: Known) -> None:
    counters = check(two_ranks, known)
    drafted, accepted = expected_acceptance(checkpoint_of("shared", tiny_model), known, K)
    assert (counters.draft_tokens, counters.accepted) == (drafted, accepted)


def test_each_rank_has_a_part_of_every_layer(two_ranks: EngineWorker) -> None:
    """Their results are those of the whole layers, the same on both ranks; outputs that do not divide by two are padded."""
    first, second = two_ranks.call("tests.engine.test_medusa:layers_on_every_rank")
    assert first == second
    assert first["equal"] == [True] * len(first["equal"])
    assert first["rows"] == [129, 9]


def layers_on_every_rank(llm: Any) -> list[dict[str, Any]]:
    return llm.collective_rpc(layers_of_worker)


def layers_of_worker(worker: Any) -> dict[str, Any]:
    """Runs on each rank: layers of several shapes beside whole ones with the same weights."""
    from vllm_specplugin.heads.layers import Projection
    from vllm_specplugin.runtime.layers import ShardedProjection, VllmLayers

    layers = VllmLayers(torch.device("cpu"), eager=True)
    generator = torch.Generator().manual_seed(0)
    equal, rows = [], []
    for count, outputs, bias in ((3, 258, True), (2, 17, False), (1, 258, False), (1, 17, False)):
        whole, part = Projection(count, HIDDEN, outputs, bias), layers.projection(count, HIDDEN, outputs, bias)
        for head in range(count):
            weight = torch.randn(outputs, HIDDEN, generator=generator)
            offset = torch.randn(outputs, generator=generator) if bias else None
            for each in (whole, part):
                each.load(head, weight, offset)
        part.finish()
        if isinstance(part, ShardedProjection):
            rows.append(part.weight.shape[1])
        states = torch.randn(5, 3 if count == 1 else count, HIDDEN, generator=generator)
        for given in (states, states[:, :1]):
            equal.append(
                torch.allclose(whole(given), part(given), atol=1e-4) and torch.equal(whole.best(given), part.best(given))
            )
    return {"equal": equal, "rows": rows}


# -- refusals ----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_said_before_anything_is_loaded(v1: EngineWorker, tiny_model: Path, tmp_path: Path) -> None:
    """Case 12: heads of another size or vocabulary, no heads at all, more drafts than heads."""
    other_size = random_medusa(MedusaConfig(num_heads=2, hidden_size=32, vocab_size=VOCAB_SIZE))
    other_vocabulary = random_medusa(MedusaConfig(num_heads=2, hidden_size=HIDDEN, vocab_size=300))
    good = checkpoint_of("own", tiny_model)
    for spec, message in (
        (medusa(other_size), f"Medusa heads for a hidden size of 32 .*, but the target '{tiny_model}' has 64"),
        (medusa(other_vocabulary), f"Medusa heads for a vocabulary of 300 tokens .*, but the target '{tiny_model}' has 258"),
        (medusa(tiny_model), f"'model' is '{tiny_model}', which holds a language model, but the proposer 'medusa' needs Medusa"),
        (medusa(tmp_path), f"'model' is '{tmp_path}': the folder is empty"),
        (
            medusa(good, num_speculative_tokens=5),
            f"'num_speculative_tokens' is 5, but it can be at most 4: {good} has 4 Medusa heads",
        ),
        ({"proposer": "medusa"}, "'model' is missing: the proposer 'medusa' needs the path of its checkpoint"),
    ):
        with pytest.raises(EngineError, match=message):
            v1.open(tiny_model, spec)
