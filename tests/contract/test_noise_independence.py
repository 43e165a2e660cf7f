"""Drafting's noise and the verifier's have nothing in common, for every registered proposer that drafts by itself.

Losslessness hangs on it: a draft that knows the number which accepts it, or which draws its replacement, tilts the output
(`tests/quality/test_mutants.py` shows by how much). Proposers that draw nothing pass at once, and keep being asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.quality.chisquare import independence_p_value
from tests.support.heads import checkpoint_for
from tests.support.scripted.scripted_parts import SampledProposer
from tests.support.steps import Tokens, host, state_after
from vllm_specplugin import Drafts, Proposer, Request, Step
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.noise import DraftNoise, owner_of
from vllm_specplugin.registry import PROPOSERS
from vllm_specplugin.scorers.base import Use
from vllm_specplugin.scorers.uniforms import key_of, uniforms

VOCAB, K, REQUESTS = 8, 3, 4000
ALPHA = 1e-3
"""Of each test here, shared among its comparisons; requests and their seeds are fixed."""
TEXT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]

Make = Callable[[], Proposer]


def built_in(name: str, **options: Any) -> Make:
    """A registered proposer, drawing its drafts if it can; `options` are its checkpoint's."""
    cls = PROPOSERS.resolve(name)
    capabilities = cls.capabilities
    model = checkpoint_for(name, VOCAB, K, **options) if capabilities.checkpoint else None
    sampling: Any = "probabilistic" if capabilities.probabilities else "greedy"

    def make() -> Proposer:
        config = SpecConfig(proposer=name, model=model, draft_sampling=sampling, draft_budget_ms=30_000.0)
        proposer = cls(host(vocab_size=VOCAB, k=K, config=config), cls.Options())
        proposer.load(None)  # type: ignore[arg-type]
        return proposer

    return make


def hybrid_with_medusa() -> Proposer:
    """The heads draft for every request, as none brings a prediction; what they draw passes through the hybrid."""
    proposers = ("predicted", "medusa")
    model = checkpoint_for("medusa", VOCAB, K)
    config = SpecConfig(proposer="hybrid", model=model, draft_sampling="probabilistic", options={"proposers": proposers})
    cls = PROPOSERS.resolve("hybrid")
    proposer = cls(host(vocab_size=VOCAB, k=K, config=config), cls.Options(proposers=proposers))
    proposer.load(None)  # type: ignore[arg-type]
    return proposer


def of_class(cls: type[Proposer]) -> Make:
    return lambda: cls(host(vocab_size=VOCAB, k=K), cls.Options())


class DrawsFromTheVerifiersNoise(SampledProposer):
    """A negative control: drafts by the numbers that the verifier will read, of one use."""

    use = Use.ACCEPT

    def propose(self, step: Step) -> Drafts:
        keys = torch.tensor([key_of(owner_of(request, self.host.seed)) for request in step.requests])
        numbers = uniforms(keys, torch.from_numpy(step.lengths), step.k)[:, : step.k, self.use]
        law = torch.full((len(keys), step.k, self.host.vocab_size), 1 / self.host.vocab_size)
        return Drafts((numbers * self.host.vocab_size).long(), probabilities=law)


class SharesTheResidualsNoise(DrawsFromTheVerifiersNoise):
    use = Use.RESIDUAL


class SharesTheBonusNoise(DrawsFromTheVerifiersNoise):
    use = Use.BONUS


class AsksTheGlobalGenerator(SampledProposer):
    """A negative control: random drafts from PyTorch's global generator."""

    def propose(self, step: Step) -> Drafts:
        return Drafts(torch.randint(0, self.host.vocab_size, (len(step.requests), step.k)))


class SaysAnotherLaw(SampledProposer):
    """A negative control: returns a flatter law than it draws from."""

    def propose(self, step: Step) -> Drafts:
        drafts = super().propose(step)
        assert drafts.probabilities is not None
        flat = drafts.probabilities.sqrt()
        return Drafts(drafts.token_ids, probabilities=flat / flat.sum(-1, keepdim=True))


MAKERS: dict[str, Make] = {
    **{name: built_in(name) for name in PROPOSERS.names() if PROPOSERS.resolve(name).capabilities.native is None},
    "medusa_of_some_tokens": built_in("medusa", output="shared", draft_vocab_size=6),
    "hybrid_with_medusa": hybrid_with_medusa,
    "sampled_in_tests": of_class(SampledProposer),
}


SAMPLING = {name: make for name, make in MAKERS.items() if make().capabilities.probabilities}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


def step_of(length: int = len(TEXT), requests: int = REQUESTS, sharpness: float = 1.0) -> Step:
    """Many requests with seeds of their own at the same place of the same text, so that nothing but noise tells them apart.

    With a sharpness of 0 their drafts' laws are flat, for scripted drafts by the script, for learned ones by the temperature.
    """
    temperature = 1.0 if sharpness else 20.0
    extra = {"script": {"mode": "sampled", "sharpness": sharpness}}
    rows = [Request(f"request-{seed}", temperature=temperature, seed=seed, extra=extra) for seed in range(requests)]
    text = (TEXT * 2)[:length]
    lengths = np.full(requests, length, dtype=np.int64)
    return Step(
        requests=rows,
        k=K,
        committed_ids=np.full(requests, text[-1], dtype=np.int32),
        committed_offsets=np.arange(requests + 1, dtype=np.int64),
        lengths=lengths,
        limits=np.full(requests, K, dtype=np.int64),
        history=Tokens([text] * requests),
        noise=DraftNoise(0, rows, lengths),
        hidden_states=state_after(text).expand(requests, -1),
    )


def ids_of(drafts: Drafts) -> np.ndarray:
    """`[requests, K]`, VOCAB where a row has fewer."""
    rows = drafts.token_ids.tolist() if hasattr(drafts.token_ids, "tolist") else drafts.token_ids
    return np.array([[*row, *[VOCAB] * (K - len(row))] for row in rows])


# -- global generators ---------------------------------------------------------------------------------------


def states() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def leaves_global_generators_alone(make: Make) -> bool:
    """They are neither used up nor asked."""
    drafts = []
    for seed in (1, 2):
        seeded(seed)
        before = states()
        drafts.append(ids_of(make().propose(step_of(requests=50))))
        if states() != before:
            return False
    return bool((drafts[0] == drafts[1]).all())


def test_global_generators_are_left_alone(make: Make) -> None:
    assert leaves_global_generators_alone(make)


def test_asking_them_is_found() -> None:
    assert not leaves_global_generators_alone(of_class(AsksTheGlobalGenerator))


# -- the verifier's noise ------------------------------------------------------------------------------------


def least_p_value(make: Make) -> float:
    """Of all comparisons of a draft with a number that the verifier reads in this pass, the last or the next one."""
    step = step_of()
    ids = ids_of(make().propose(step))
    keys = torch.tensor([key_of(owner_of(request, 0)) for request in step.requests])
    found = []
    for passed in (-1, 0, 1):
        numbers = (uniforms(keys, torch.from_numpy(step.lengths) + passed, K) * 8).long().numpy()
        for place, position, use in product(range(K), range(K + 1), Use):
            found.append(independence_p_value(ids[:, place], numbers[:, position, use]))
    return min(found) * len(found)  # Bonferroni's correction


def test_drafts_are_independent_of_the_verifiers_noise(make: Make) -> None:
    assert least_p_value(make) > ALPHA


@pytest.mark.parametrize("proposer", [DrawsFromTheVerifiersNoise, SharesTheResidualsNoise, SharesTheBonusNoise])
def test_sharing_the_verifiers_noise_is_found(proposer: type[Proposer]) -> None:
    assert least_p_value(of_class(proposer)) < ALPHA


# -- the next pass -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SAMPLING.values(), ids=SAMPLING)
def test_the_next_pass_draws_anew(make: Make) -> None:
    # The second draft of a pass and the first one of the next, for the same place: flat laws, so that only noise decides.
    proposer = make()
    earlier = ids_of(proposer.propose(step_of(len(TEXT), sharpness=0.0)))
    later = ids_of(proposer.propose(step_of(len(TEXT) + 1, sharpness=0.0)))
    assert independence_p_value(earlier[:, 1], later[:, 0]) > ALPHA


# -- the law that drafts are said to be drawn from -----------------------------------------------------------


def follows_its_law(make: Make) -> float:
    """The p-value of drafts under the returned probabilities, each draft given the ones before it."""
    drafts = make().propose(step_of())
    assert drafts.probabilities is not None
    ids, law = ids_of(drafts), drafts.probabilities.double().numpy()
    assert np.allclose(law.sum(-1), 1.0, atol=1e-5)
    found = []
    for place in range(K):
        q = law[:, place]
        # A sum of independent terms of mean 0, whatever the laws of the rows are; its variance is known exactly.
        surplus = (ids[:, place, None] == np.arange(VOCAB)).sum(0) - q.sum(0)
        variance = (q * (1 - q)).sum(0)
        assert (surplus[variance == 0] == 0).all(), "a token that the law rules out"
        deviations = surplus[variance > 0] / np.sqrt(variance[variance > 0])
        found += (2 * stats.norm.sf(np.abs(deviations))).tolist()
    return min(found) * len(found)


@pytest.mark.parametrize("make", SAMPLING.values(), ids=SAMPLING)
def test_drafts_follow_the_probabilities_returned(make: Make) -> None:
    assert follows_its_law(make) > ALPHA


def test_a_law_that_was_not_drawn_from_is_found() -> None:
    assert follows_its_law(of_class(SaysAnotherLaw)) < ALPHA


def test_probabilities_come_only_from_those_who_announce_them(make: Make) -> None:
    proposer = make()
    drafts = proposer.propose(step_of(requests=5))
    assert (drafts.probabilities is not None or drafts.logits is not None) == proposer.capabilities.probabilities
