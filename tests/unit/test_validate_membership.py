"""Which tokens are allowed whatever rounding did, which may be, and which cannot be: against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplugin.validate.distribution import distribution, scaled
from vllm_specplugin.validate.membership import growth, membership, softmax_over
from vllm_specplugin.validate.sampling import Sampling

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 12},
    "top_k of one": {"top_k": 1},
    "top_k of all": {"top_k": 60},
    "top_p": {"top_p": 0.8},
    "top_p of nearly nothing": {"top_p": 1e-6},
    "top_p of nearly all": {"top_p": 0.995},
    "min_p": {"min_p": 0.05},
    "min_p of one": {"min_p": 1.0},
    "k and p": {"top_k": 12, "top_p": 0.8},
    "min_p and p": {"min_p": 0.05, "top_p": 0.9},
    "min_p and k": {"min_p": 0.05, "top_k": 12},
    "all": {"min_p": 0.02, "top_k": 20, "top_p": 0.85},
}
VOCAB, PLACES, MOVES = 60, 12, 150


def places(seed: int = 0) -> np.ndarray:
    """`[PLACES, VOCAB]`: flat and steep ones, a third with many equal logits, the last tokens not allowed."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(PLACES, VOCAB)) * np.linspace(0.3, 3, PLACES)[:, None]
    values[::3] = np.round(4 * values[::3]) / 4
    values[:, -3:] = -np.inf
    return values


def allowed(values: np.ndarray, sampling: Sampling) -> np.ndarray:
    """`[rows, vocab]`: what the validator's own application of the parameters lets through."""
    return distribution(torch.from_numpy(values), sampling.model_copy(update={"temperature": 1.0})).probabilities.numpy() > 0


@pytest.mark.parametrize("slack", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_no_rounding_within_the_slack_moves_a_token_in_or_out(case: str, slack: float) -> None:
    sampling, rng = Sampling(**CASES[case]), np.random.default_rng(1)
    for values in places():
        found = membership(values, sampling, slack)
        assert not (found.inside & ~found.possible).any()
        # Uniform, and at the ends: what moves a token furthest.
        moves = rng.uniform(-slack / 2, slack / 2, size=(MOVES, VOCAB))
        moves[::2] = np.sign(moves[::2]) * slack / 2
        # For each token by itself: it alone falls or rises, all others the other way.
        alone = np.where(np.eye(VOCAB, dtype=bool), -slack / 2, slack / 2)
        seen = allowed(values + np.concatenate([moves, alone, -alone]), sampling)
        assert seen[:, found.inside].all()
        assert not seen[:, ~found.possible].any()


@pytest.mark.parametrize("case", CASES)
def test_little_is_uncertain_where_there_is_little_rounding(case: str) -> None:
    """The bounds are no excuse for everything: without rounding, ties aside, all is known."""
    sampling = Sampling(**CASES[case])
    for values in places()[1::3]:
        found = membership(values, sampling, 2e-6)
        expected = allowed(values[None], sampling)[0]
        if case == "min_p of one":  # the likeliest token itself lies at the cut
            assert not found.inside.any()
        else:
            assert np.array_equal(found.inside, expected)
        assert np.array_equal(found.possible, expected)


def test_the_bounds_are_reached() -> None:
    """What is uncertain may really be either: the smallest rounding that moves a token is the slack at which it is uncertain."""
    values = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    for sampling, token in ((Sampling(top_k=2), 1), (Sampling(min_p=0.2), 2), (Sampling(min_p=0.5), 1)):
        distance = values[1] - values[2] if sampling.top_k else abs(values[token] - values[0] - np.log(sampling.min_p))
        assert membership(values, sampling, 0.999 * distance).inside[token]
        assert not membership(values, sampling, 1.001 * distance).inside[token]
    # Top-p 0.9: 0.8 stands ahead of the third token. It is at 0.9 when the odds 4 : 1 are 9 : 1.
    distance = np.log(9 / 4)
    assert membership(values, Sampling(top_p=0.9), 0.98 * distance).inside[0]
    assert not membership(values, Sampling(top_p=0.9), 1.001 * distance).inside[2]
    steep = np.log(np.array([0.8, 0.15, 0.05]))  # here no order changes before the mass does
    distance = np.log(9 / 4)
    assert membership(steep, Sampling(top_p=0.9), 0.999 * distance).inside[1]
    assert not membership(steep, Sampling(top_p=0.9), 1.001 * distance).inside[1]
    distance = np.log(9.5 / 0.5) - np.log(9)  # for the third, 0.95 is ahead; at 0.9 it would stay
    assert not membership(steep, Sampling(top_p=0.9), 0.999 * distance).possible[2]
    assert membership(steep, Sampling(top_p=0.9), 1.001 * distance).possible[2]


def test_equal_tokens_at_the_cut_are_uncertain_together() -> None:
    values = np.array([3.0, 2.0, 2.0, 2.0, 1.0])
    found = membership(values, Sampling(top_k=2), 0.0)
    assert found.inside.tolist() == [True, False, False, False, False]
    assert found.possible.tolist() == [True, True, True, True, False]
    assert membership(values, Sampling(top_k=4), 0.0).inside.tolist() == [True, True, True, True, False]


def test_no_slack_is_too_large() -> None:
    values = places()[1]
    found = membership(values, Sampling(top_p=0.5, top_k=5, min_p=0.1), 1e6)
    assert not found.inside.any()
    assert found.possible.sum() == VOCAB - 3


def test_probabilities_among_members() -> None:
    values = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    members = np.array([True, False, True, False])
    np.testing.assert_allclose(softmax_over(values, members), [2 / 3, 0, 1 / 3, 0])
    assert not softmax_over(values, np.zeros(4, dtype=bool)).any()


@pytest.mark.parametrize("penalty", [1.0, 1.5, 0.5])
def test_differences_grow_by_so_much_at_most(penalty: float) -> None:
    sampling = Sampling(temperature=0.5, repetition_penalty=penalty, presence_penalty=0.3)
    random = torch.Generator().manual_seed(0)
    logits, moved = torch.randn(1, 400, generator=random), 0.01 * torch.randn(1, 400, generator=random)
    seen, said = torch.rand(1, 400, generator=random) < 0.5, torch.zeros(1, 400)
    change = (scaled(logits + moved, sampling, seen, said) - scaled(logits, sampling, seen, said)).abs()
    ratio = float((change / moved.abs())[moved.abs() > 1e-3].max())
    assert ratio == pytest.approx(growth(sampling), rel=1e-3)
