"""Case 4 in the engine: without a seed, what is sampled with drafts follows the target's own distribution.

A model of 16 tokens, drafts that the target mostly refuses, the first three tokens of many requests. The exact distributions
come from plain decoding's log-probabilities, so a sampler that is wrong in the same way on both sides is not seen here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.common import PATIENCE_MS, SideBySide, script
from tests.support.tiny import tiny_model as make_tiny_model

VOCABULARY = 16
PROMPT = [3, 1, 4]
K = 2
NUM_TOKENS = 3
REQUESTS = {"v1": 12_000, "v2": 2_000}  # V2's interpreter is slow
TEMPERATURE = 0.7

PATIENCE = 280.0  # seconds for one batch of them, on a machine that is busy

# The chance that a test of a right engine fails would it draw anew; it does not, as the engine's own seed is fixed.
ALPHA = 1e-3
# Bins that expect fewer are merged, as chi-square needs.
FEWEST = 5.0


@pytest.fixture(scope="module")
def narrow_model(pytestconfig: pytest.Config) -> Path:
    return make_tiny_model(pytestconfig.cache.mkdir("tiny"), vocab_size=VOCABULARY, logit_std=2.0)


def opened(engines: SideBySide, model: Path, verifier: str = "one_hot", **plugin: Any) -> None:
    engines.open(
        K,
        plugin={"verifier": verifier, **plugin},
        model=str(model),
        skip_tokenizer_init=True,
        max_num_seqs=256,
        max_num_batched_tokens=1024,
        max_model_len=16,
    )


def next_token_distributions(engines: SideBySide, contexts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], np.ndarray]:
    """What follows PROMPT and each context: `[16]` probabilities at TEMPERATURE, float64."""
    asked = {"temperature": 0.0, "max_tokens": 1, "logprobs": VOCABULARY, "detokenize": False}
    results = engines.baseline([[*PROMPT, *context] for context in contexts], asked)
    found = {}
    for context, result in zip(contexts, results, strict=True):
        assert result.logprobs is not None
        logits = torch.tensor([result.logprobs[0][token].logprob for token in range(VOCABULARY)], dtype=torch.float64)
        found[context] = (logits / TEMPERATURE).softmax(0).numpy()
    return found


def p_value(observed: Sequence[int], expected: Sequence[float]) -> float:
    """Pearson's chi-square, the cells with the smallest expectations merged until each expects FEWEST."""
    cells = sorted(zip(expected, observed, strict=True), reverse=True)
    merged: list[list[float]] = []
    for wanted, seen in cells:
        if merged and (wanted < FEWEST or merged[-1][0] < FEWEST):
            merged[-1][0] += wanted
            merged[-1][1] += seen
        else:
            merged.append([wanted, seen])
    if len(merged) < 2:
        return 1.0
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in merged)
    freedom = torch.tensor((len(merged) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def p_values(engines: SideBySide, outputs: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """One for each of the first three tokens (given the ones before it), and one for all of them together."""
    singles = [(token,) for token in range(VOCABULARY)]
    pairs = list(itertools.product(range(VOCABULARY), repeat=2))
    p = next_token_distributions(engines, [(), *singles, *pairs])
    total = len(outputs)

    def conditional(place: int, contexts: Sequence[tuple[int, ...]]) -> float:
        """Contexts that came up often enough are tested one by one; Fisher's method puts them together."""
        tests = []
        for context in contexts:
            counts = Counter(output[place] for output in outputs if output[:place] == context)
            if counts.total() >= 10 * FEWEST:
                expected = p[context] * counts.total()
                tests.append(p_value([counts[token] for token in range(VOCABULARY)], expected.tolist()))
        statistic = torch.tensor(-sum(map(math.log, (max(test, 1e-300) for test in tests))), dtype=torch.float64)
        return float(torch.special.gammaincc(torch.tensor(float(len(tests)), dtype=torch.float64), statistic))

    triples = list(itertools.product(range(VOCABULARY), repeat=3))
    joint = [p[()][a] * p[a,][b] * p[a, b][c] * total for a, b, c in triples]
    seen = Counter(outputs)
    return {
        "first": conditional(0, [()]),
        "second": conditional(1, singles),
        "third": conditional(2, pairs),
        "joint": p_value([seen[triple] for triple in triples], joint),
    }


def sample(engines: SideBySide, requests: int) -> tuple[list[tuple[int, ...]], float]:
    """The tokens of many requests, and the share of drafts that was accepted.

    Half of them draft what greedy decoding says, the others what the target hardly ever says.
    """
    greedy = engines.baseline([PROMPT], {"temperature": 0.0, "max_tokens": NUM_TOKENS, "detokenize": False})[0].token_ids
    p = next_token_distributions(engines, [(), *((token,) for token in range(VOCABULARY))])
    second = sum(p[()][token] * p[token,] for token in range(VOCABULARY))  # its distribution, whatever the first one is
    kinds = [script("oracle", PROMPT, greedy), script("constant", token=int(second.argmin()))]
    params = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    asked: list[dict[str, Any]] = [params | kinds[place % 2] for place in range(requests)]
    results, counters = engines.draft([PROMPT] * requests, asked, timeout=PATIENCE)
    return [result.token_ids for result in results], counters.accepted / counters.draft_tokens


def test_samples_follow_the_targets_distribution(engines: SideBySide, narrow_model: Path) -> None:
    opened(engines, narrow_model)
    outputs, acceptance = sample(engines, REQUESTS[engines.runner])
    assert 0.03 < acceptance < 0.5, "drafts must be accepted as well as refused"
    found = p_values(engines, outputs)
    assert min(found.values()) > ALPHA, found


def sample_by_chance(engines: SideBySide, requests: int, sharpness: float) -> tuple[list[tuple[int, ...]], float]:
    """The tokens of many requests, all but every eighth of which draw their drafts by chance; and the share accepted."""
    kinds = [script("constant", token=5), *[script("sampled", sharpness=sharpness)] * 7]
    params = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    asked: list[dict[str, Any]] = [params | kinds[place % 8] for place in range(requests)]
    results, counters = engines.draft([PROMPT] * requests, asked, timeout=PATIENCE)
    return [result.token_ids for result in results], counters.accepted / counters.draft_tokens


SAMPLED = {"proposer": "sampled", "draft_sampling": "probabilistic"}


@pytest.mark.parametrize("verifier", ["token", "block", "one_hot"])
def test_drafts_drawn_by_chance_leave_the_distribution_alone(engines: SideBySide, narrow_model: Path, verifier: str) -> None:
    opened(engines, narrow_model, verifier, **SAMPLED)
    outputs, acceptance = sample_by_chance(engines, REQUESTS[engines.runner] // 2, sharpness=1.5)
    assert 0.01 < acceptance < 0.7, "drafts must be accepted as well as refused"
    found = p_values(engines, outputs)
    assert min(found.values()) > ALPHA, found


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_the_hosts_own_kernels_leave_the_distribution_alone(engines: SideBySide, narrow_model: Path) -> None:
    """They are for CUDA; here Triton's interpreter runs them."""
    opened(engines, narrow_model, "token", **SAMPLED, draft_budget_ms=PATIENCE_MS - 1)  # an engine of its own
    engines.inside("use_the_hosts_kernels")
    outputs, acceptance = sample_by_chance(engines, REQUESTS["v2"] // 2, sharpness=1.5)
    assert 0.01 < acceptance < 0.7
    assert sum(engines.inside("host_kernel_steps")) >= REQUESTS["v2"] // 2, "each request was verified there at least once"
    found = p_values(engines, outputs)
    assert min(found.values()) > ALPHA, found


def test_a_lossy_verifier_is_found(engines: SideBySide, narrow_model: Path) -> None:
    opened(engines, narrow_model, "typical", **SAMPLED)
    outputs, _ = sample_by_chance(engines, REQUESTS[engines.runner] // 2, sharpness=1.5)
    found = p_values(engines, outputs)
    assert found["first"] > ALPHA  # which no draft precedes
    assert found["joint"] < ALPHA / 10, found


@pytest.mark.parametrize("verifier", ["accept_all", "next_row_after_refusal"])
def test_a_biased_verifier_is_found(engines: SideBySide, narrow_model: Path, verifier: str) -> None:
    """Negative controls: one crude, one whose every token was drawn from the target, though not from the right row."""
    opened(engines, narrow_model, verifier)
    outputs, _ = sample(engines, REQUESTS[engines.runner] // 4)
    found = p_values(engines, outputs)
    assert found["first"] > ALPHA  # which no draft precedes
    assert found["second"] < ALPHA / 1000, found
