"""A hybrid beside a part that draws its drafts: the answers keep the target's law, whichever part is chosen, and would not if the
choice looked at what was drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.test_noise_independence import VOCAB, K, ids_of, step_of
from tests.quality.chisquare import p_value
from tests.support.steps import host
from vllm_specplugin import Capabilities, Drafts, Proposer, Step
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.guard import Guard
from vllm_specplugin.proposers.hybrid import HybridProposer
from vllm_specplugin.registry import PROPOSERS
from vllm_specplugin.scorers.block import BlockVerifier
from vllm_specplugin.scorers.token import TokenVerifier
from vllm_specplugin.scorers.uniforms import key_of, uniforms

ALPHA = 1e-3
ROWS = 20_000
TARGET = torch.tensor([0.30, 0.20, 0.15, 0.10, 0.10, 0.08, 0.05, 0.02])
DRAWN_FROM = torch.tensor([0.05, 0.10, 0.10, 0.25, 0.20, 0.10, 0.10, 0.10])


class Steady(Proposer):
    """Drafts a token that the target often says."""

    def propose(self, step: Step) -> Drafts:
        return Drafts(np.zeros((step.num_rows, K), dtype=np.int64), expected=np.full((step.num_rows, K), 0.7))


class Drawing(Proposer):
    """Draws its drafts, and thinks much of some of them and little of others."""

    capabilities = Capabilities(probabilities=True)

    def propose(self, step: Step) -> Drafts:
        ends = DRAWN_FROM.double().cumsum(0)
        ids = torch.searchsorted(ends, torch.from_numpy(step.noise.uniforms(K)), right=True).clamp(max=VOCAB - 1)
        liked = np.where(ids.numpy() < 4, 0.99, 0.01)
        return Drafts(ids, probabilities=DRAWN_FROM.expand(step.num_rows, K, VOCAB), expected=liked)


class ChoosesByWhatWasDrawn(HybridProposer):
    """A negative control: takes what `Drawing` thinks of its drafts into account, and says that they follow its law."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._parts[1].by_chance = False

    def _laws(self, *arguments: Any) -> torch.Tensor | None:
        self._parts[1].by_chance = True
        return super()._laws(*arguments)


def of_first_tokens(proposer: type[HybridProposer], verifier: Any, share: float) -> float:
    """The p-value of the first tokens emitted; a share of the requests asks for `Drawing`, so that both laws are in the batch."""
    names = ("steady", "drawing")
    options: dict[str, Any] = {"proposers": list(names)}
    config = SpecConfig(proposer="hybrid", options=options, draft_sampling="probabilistic", draft_budget_ms=60_000.0)
    guard = Guard(proposer(host(vocab_size=VOCAB, k=K, config=config), HybridProposer.Options(**options)), "hybrid", 60_000)
    step = step_of(requests=ROWS)
    asking = int(share * ROWS)
    requests = [replace(request, proposer="drawing" if row < asking else None) for row, request in enumerate(step.requests)]
    step = replace(step, requests=requests)
    drafts = guard.propose(step)
    assert not guard.faults
    assert drafts.probabilities is not None
    assert {"steady", "drawing"} == set(drafts.sources or ())
    keys = torch.tensor([key_of(f"{request.seed}") for request in step.requests])
    noise = uniforms(keys, torch.from_numpy(step.lengths), K)
    ids, lengths = torch.from_numpy(ids_of(Drafts(drafts.rows()))), torch.from_numpy(drafts.lengths)
    verdict = verifier.verify(TARGET.expand(ROWS, K + 1, VOCAB), drafts.probabilities, ids, lengths, noise)
    counts = torch.bincount(verdict.token_ids[:, 0], minlength=VOCAB)
    return p_value(counts.tolist(), (TARGET.double() * ROWS).tolist())


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"steady": Steady, "drawing": Drawing}
    monkeypatch.setattr(PROPOSERS, "resolve", parts.__getitem__)


@pytest.mark.parametrize("verifier", [TokenVerifier, BlockVerifier])
def test_the_law_is_the_targets(verifier: Any) -> None:
    assert of_first_tokens(HybridProposer, verifier(), 0.5) > ALPHA


@pytest.mark.parametrize("verifier", [TokenVerifier, BlockVerifier])
def test_a_choice_by_what_was_drawn_is_found(verifier: Any) -> None:
    assert of_first_tokens(ChoosesByWhatWasDrawn, verifier(), 0.0) < ALPHA
