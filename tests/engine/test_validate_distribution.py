"""The validator's own application of sampling parameters against vLLM's V1 sampler, and against the rule of its Triton kernel.

The validator shares no code with what it checks; here the two are held against each other on random logits.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine import EngineWorker
from tests.support.v2_site.v2_on_cpu import apply_top_k_top_p
from vllm_specplugin.validate.distribution import Distribution, distribution
from vllm_specplugin.validate.sampling import Sampling

ROWS, VOCAB = 64, 300
ROUNDING = 1e-5
"""Relative, of float32 sums in another order."""

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.8},
    "top_p of nearly nothing": {"top_p": 0.001},
    "top_k and top_p": {"temperature": 1.3, "top_k": 20, "top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "bias": {"logit_bias": {3: 4.0, 7: -100.0}},
    "allowed": {"allowed_token_ids": (1, 5, 9, 200)},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "frequency and presence": {"frequency_penalty": 0.7, "presence_penalty": -0.9},
    "all": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "logit_bias": {3: 2.0, 250: 5.0},
        "allowed_token_ids": tuple(range(0, 300, 2)),
    },
}


def logits_and_texts(coarse: bool) -> tuple[torch.Tensor, list[list[int]], list[list[int]]]:
    """`[ROWS, VOCAB]`, prompts and outputs; `coarse` rounds logits as bfloat16 does, so that many are equal."""
    random = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=random)
    logits = (4 * logits).round() / 4 if coarse else logits
    numbers = np.random.default_rng(3)
    texts = [numbers.integers(0, VOCAB, size=length).tolist() for length in numbers.integers(1, 60, size=2 * ROWS)]
    return logits, texts[:ROWS], texts[ROWS:]


def ours(logits: torch.Tensor, prompts: list[list[int]], outputs: list[list[int]], sampling: Sampling, ties: Any) -> Distribution:
    seen = torch.zeros(ROWS, VOCAB, dtype=torch.bool)
    said = torch.zeros(ROWS, VOCAB, dtype=torch.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        seen[row, prompt] = True
        for token in output:
            said[row, token] += 1
    return distribution(logits, sampling, seen, said, ties)


def by_vllm(
    _llm: Any, logits: np.ndarray, prompts: list[list[int]], outputs: list[list[int]], said: dict[str, Any]
) -> np.ndarray:
    """`[ROWS, VOCAB]`: what V1's sampler draws from; runs in the process that has vLLM."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    params = SamplingParams(**said)
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    device = torch.device("cpu")
    processors = [MinPLogitsProcessor(config, device, False), LogitBiasLogitsProcessor(config, device, False)]
    added = [(row, params, prompts[row], outputs[row]) for row in range(ROWS)]
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=ROWS, removed=[], added=added, moved=[]))
    width = max(map(len, prompts))
    padded = torch.tensor([prompt + [VOCAB] * (width - len(prompt)) for prompt in prompts])
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = torch.ones(ROWS, VOCAB, dtype=torch.bool)
        allowed[:, params.allowed_token_ids] = False
    penalised = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    metadata = SamplingMetadata(
        temperature=torch.full((ROWS,), params.temperature),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((ROWS,), params.top_p) if params.top_p < 1 else None,
        top_k=torch.full((ROWS,), params.top_k, dtype=torch.int32) if params.top_k > 0 else None,
        generators={},
        max_num_logprobs=-1,
        no_penalties=not penalised,
        prompt_token_ids=padded,
        frequency_penalties=torch.full((ROWS,), params.frequency_penalty),
        presence_penalties=torch.full((ROWS,), params.presence_penalty),
        repetition_penalties=torch.full((ROWS,), params.repetition_penalty),
        output_token_ids=outputs,
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )
    found = Sampler(logprobs_mode="processed_logprobs")(torch.from_numpy(logits.copy()), metadata).logprobs_tensors
    return found.logprobs.exp().numpy()


def same(actual: Distribution, expected: torch.Tensor) -> None:
    """Equal supports and probabilities wherever the validator claims to know them."""
    assert actual.clear.float().mean() > 0.9
    p = actual.probabilities
    differ = (p > 0) != (expected > 0)
    if actual.tied is not None:
        differ &= ~actual.tied  # of these some stay, and engines differ in which
        kept = [(rows * actual.tied).sum(dim=-1) for rows in ((p > 0).int(), (expected > 0).int())]
        assert torch.equal(kept[0][actual.clear], kept[1][actual.clear])
        p, expected = p.masked_fill(actual.tied, 0), expected.masked_fill(actual.tied, 0)
    assert not differ[actual.clear].any()
    torch.testing.assert_close(p[actual.clear], expected[actual.clear], rtol=ROUNDING, atol=1e-9)


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct logits", "many equal logits"])
@pytest.mark.parametrize("case", CASES)
def test_equals_v1(v1: EngineWorker, case: str, coarse: bool) -> None:
    sampling = Sampling(**CASES[case])
    logits, prompts, outputs = logits_and_texts(coarse)
    told = (logits.numpy(), prompts, outputs, sampling.for_vllm())
    expected = v1.call("tests.engine.test_validate_distribution:by_vllm", *told)
    same(ours(logits, prompts, outputs, sampling, "keep"), torch.from_numpy(expected))


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct logits", "many equal logits"])
@pytest.mark.parametrize("said", [{"top_k": 7}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.7}], ids=["k", "p", "k and p"])
def test_equals_the_rule_of_the_triton_kernel(said: dict[str, Any], coarse: bool) -> None:
    sampling = Sampling(**said)
    logits, prompts, outputs = logits_and_texts(coarse)
    k = torch.full((ROWS,), sampling.top_k) if sampling.top_k else None
    p = torch.full((ROWS,), sampling.top_p) if sampling.top_p < 1 else None
    expected = apply_top_k_top_p(logits.clone(), k, p).softmax(dim=-1)
    found = ours(logits, prompts, outputs, sampling, "cut")
    same(found, expected)
    if coarse:
        assert found.tied is not None, "the case must have ties at the boundary"
    careful = ours(logits, prompts, outputs, sampling, "skip")
    split = torch.zeros(ROWS, dtype=torch.bool) if found.tied is None else found.tied.any(dim=-1)
    assert torch.equal(careful.clear, found.clear & ~split)


def test_sums_at_the_boundary_are_not_trusted() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.5, 0.31, 0.1, 0.09]]).log()
    assert distribution(logits, Sampling(top_p=0.8)).clear.tolist() == [False, True]
    assert distribution(logits, Sampling(min_p=0.2)).clear.tolist() == [False, False]
    assert distribution(logits, Sampling(min_p=0.21)).clear.tolist() == [True, True]


def test_a_tie_that_penalties_made_is_not_trusted() -> None:
    """3 / 1.5 is 2, and 3 * (1 / 1.5) is not in float32: engines may keep one token or two."""
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 1.5, 1.0]])
    seen, said = torch.tensor([[True, False, False]] * 2), torch.zeros(2, 3)
    found = distribution(logits, Sampling(top_k=1, repetition_penalty=1.5), seen, said)
    assert found.clear.tolist() == [False, True]
    assert distribution(logits[:1], Sampling(top_k=1)).clear.tolist() == [True]
