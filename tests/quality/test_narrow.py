"""The tensor code statistically, where faults show most: few tokens, and drafts that mostly disagree with the target.

A fault of shared noise that a test over a wide vocabulary had missed was found here at once: 16 tokens, the drafter's logits the
negative of the target's, 200,000 requests decoded in one batch over several passes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.quality.chisquare import p_value
from vllm_specplugin.scorers.base import Use, Verifier
from vllm_specplugin.scorers.block import BlockVerifier
from vllm_specplugin.scorers.drawing import draw
from vllm_specplugin.scorers.one_hot import OneHotVerifier
from vllm_specplugin.scorers.token import TokenVerifier
from vllm_specplugin.scorers.uniforms import uniforms

VOCAB, K, TOKENS = 16, 3, 3
REQUESTS, FEWER = 200_000, 60_000
"""Trials of what must pass, and of what is found with less."""
ALPHA = 1e-4
"""Of each test here; the noise is fixed."""
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)).mul(0.8)
"""By the last token; the drafter's are the negative ones."""
TARGET, DRAFTER = LOGITS.softmax(-1), LOGITS.neg().softmax(-1)

Noise = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(requests, tokens known) -> (drafting's numbers `[rows, K]`, the verifier's `[rows, K + 1, 3]`)"""


def apart(requests: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As it should be: drafting's numbers have keys of their own, and everything belongs to one pass."""
    return uniforms(-1 - requests, known, K)[:, :K, 0], uniforms(requests, known, K)


def decode(
    verifier: Verifier, noise: Noise = apart, told: torch.Tensor = DRAFTER, requests: int = REQUESTS
) -> tuple[torch.Tensor, float]:
    """`[requests, TOKENS]`: the first tokens of many requests, and the share of drafts that were accepted."""
    text = torch.zeros(requests, 1 + TOKENS + K + 1, dtype=torch.int64)  # every request starts after token 0
    known = torch.ones(requests, dtype=torch.int64)
    drafted = accepted = 0
    while len(request := (known < 1 + TOKENS).nonzero().squeeze(1)) > 0:
        of_drafting, of_verifier = noise(request, known[request])
        path = [text[request, known[request] - 1]]
        for place in range(K):
            path.append(draw(DRAFTER[path[-1]], of_drafting[:, place])[0])
        tokens = torch.stack(path, dim=1)  # [rows, K + 1]
        lengths = torch.full((len(request),), K)
        verdict = verifier.verify(TARGET[tokens], told[tokens[:, :K]], tokens[:, 1:], lengths, of_verifier)
        for place in range(K + 1):
            text[request, known[request] + place] = verdict.token_ids[:, place]  # what is past the end is written over
        known[request] += verdict.accepted + 1
        drafted += K * len(request)
        accepted += int(verdict.accepted.sum())
    return text[:, 1 : 1 + TOKENS], accepted / drafted


def p_values(tokens: torch.Tensor) -> dict[str, float]:
    """Each position for itself, the first two jointly, and all three."""
    words = np.zeros((VOCAB,) * TOKENS)
    np.add.at(words, tuple(tokens.T.numpy()), 1)
    p = TARGET.double().numpy()
    expected = p[0][:, None, None] * p[:, :, None] * p[None]
    return {
        "first": p_value(words.sum((1, 2)), expected.sum((1, 2))),
        "second": p_value(words.sum((0, 2)), expected.sum((0, 2))),
        "third": p_value(words.sum((0, 1)), expected.sum((0, 1))),
        "first two": p_value(words.sum(2), expected.sum(2)),
        "all": p_value(words, expected),
    }


@pytest.mark.parametrize("verifier", [OneHotVerifier(), TokenVerifier(), BlockVerifier()], ids=["one_hot", "token", "block"])
def test_the_law_is_the_targets(verifier: Verifier) -> None:
    tokens, accepted = decode(verifier)
    assert 0.01 < accepted < 0.5, "most drafts are to be refused, and not all"
    found = p_values(tokens)
    assert min(found.values()) > ALPHA, found


# -- the same decoding with a fault --------------------------------------------------------------------------


def shared(use: Use) -> Noise:
    """Drafting reads the verifier's numbers."""

    def noise(requests: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_verifier = uniforms(requests, known, K)
        return of_verifier[:, :K, use].contiguous(), of_verifier

    return noise


def by_position(drafting: bool) -> Noise:
    """Numbers follow the absolute position, and so are met again by the next pass: drafting's, or the verifier's.

    What the latter does under block verification is too little to be seen here; `test_mutants.py` has its exact size.
    """

    def noise(requests: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_drafting, of_verifier = apart(requests, known)
        for place in range(K + 1):
            number = uniforms(-1 - requests if drafting else requests, known + place, 0)[:, 0]
            if drafting and place < K:
                of_drafting[:, place] = number[:, 0]
            if not drafting:
                of_verifier[:, place] = number
        return of_drafting, of_verifier

    return noise


FAULTS: dict[str, tuple[Verifier, Noise, torch.Tensor]] = {
    "drafting_shares_with_acceptance": (TokenVerifier(), shared(Use.ACCEPT), DRAFTER),
    "drafting_shares_with_acceptance_block": (BlockVerifier(), shared(Use.ACCEPT), DRAFTER),
    "drafting_shares_with_the_residual": (TokenVerifier(), shared(Use.RESIDUAL), DRAFTER),
    "drafts_were_drawn_at_another_temperature": (TokenVerifier(), apart, LOGITS.mul(-0.9).softmax(-1)),
    "draft_noise_keyed_by_position_under_block": (BlockVerifier(), by_position(drafting=True), DRAFTER),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    verifier, noise, told = FAULTS[fault]
    found = p_values(decode(verifier, noise, told, FEWER)[0])
    assert min(found.values()) < ALPHA, found


@pytest.mark.parametrize("drafting", [True, False])
def test_the_token_rule_may_meet_its_numbers_again(drafting: bool) -> None:
    found = p_values(decode(TokenVerifier(), by_position(drafting), requests=FEWER)[0])
    assert min(found.values()) > ALPHA, found
