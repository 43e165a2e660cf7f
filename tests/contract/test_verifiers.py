"""One suite over every registered verifier."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.quality.chisquare import p_value
from vllm_specplugin import Verifier
from vllm_specplugin.registry import VERIFIERS
from vllm_specplugin.scorers.base import Use

WRONG_ON_PURPOSE = {"biased_one_hot"}
"""An example for `vllm-specplugin validate` to find, with tests of its own; it may be installed beside the others."""
NAMES = [name for name in VERIFIERS.names() if name not in WRONG_ON_PURPOSE]
ALPHA = 1e-4
"""Of each statistical test here; the noise is fixed."""

Arguments = dict[str, Any]


@pytest.fixture(params=NAMES)
def verifier(request: pytest.FixtureRequest) -> Verifier:
    return VERIFIERS.resolve(request.param)()


@pytest.fixture(params=["probabilities", "one_hot"])
def one_hot(request: pytest.FixtureRequest) -> bool:
    """Whether drafts come without probabilities, which every verifier must take."""
    return bool(request.param == "one_hot")


def batch(rows: int, k: int, vocab: int, seed: int = 0, one_hot: bool = False) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    draft_probs = torch.randn(rows, k, vocab, generator=generator).softmax(-1)
    draft_ids = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).view(rows, k)
    return {
        "target_probs": torch.randn(rows, k + 1, vocab, generator=generator).softmax(-1),
        "draft_probs": None if one_hot else draft_probs,
        "draft_ids": draft_ids,
        "lengths": torch.randint(0, k + 1, (rows,), generator=generator),
        "uniforms": torch.rand(rows, k + 1, len(Use), generator=generator, dtype=torch.float64),
    }


def rows_of(arguments: Arguments, rows: Any) -> Arguments:
    return {name: None if value is None else value[rows] for name, value in arguments.items()}


def test_declares_itself(verifier: Verifier) -> None:
    assert isinstance(verifier.lossless, bool)
    assert isinstance(verifier.needs_probabilities, bool)
    assert inspect.getdoc(type(verifier))


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("vocab", [2, 3, 2500])
def test_verdict_is_well_formed(verifier: Verifier, one_hot: bool, k: int, vocab: int) -> None:
    rows = 64
    arguments = batch(rows, k, vocab, one_hot=one_hot) if k else batch(rows, 1, vocab, one_hot=one_hot)
    if k == 0:  # a step in which nothing was drafted
        arguments |= {name: arguments[name][:, :0] for name in ("draft_probs", "draft_ids") if arguments[name] is not None}
        arguments |= {name: arguments[name][:, :1] for name in ("target_probs", "uniforms")}
        arguments["lengths"] = torch.zeros(rows, dtype=torch.int64)
    before = {name: value.clone() for name, value in arguments.items() if value is not None}
    verdict = verifier.verify(**arguments)
    assert verdict.token_ids.shape == (rows, k + 1)
    assert verdict.accepted.shape == (rows,)
    assert (verdict.accepted <= arguments["lengths"]).all()
    assert (verdict.accepted >= 0).all()
    for row in range(rows):
        accepted = int(verdict.accepted[row])
        emitted = verdict.token_ids[row]
        assert torch.equal(emitted[:accepted], arguments["draft_ids"][row, :accepted])
        assert 0 <= emitted[accepted] < vocab
        assert (emitted[accepted + 1 :] == -1).all()
    for name, value in before.items():
        assert torch.equal(value, arguments[name]), f"{name} was changed in place"


def test_is_a_pure_function_of_its_arguments(verifier: Verifier, one_hot: bool) -> None:
    arguments = batch(rows=16, k=3, vocab=7, one_hot=one_hot)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = verifier.verify(**arguments)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = verifier.verify(**arguments)
    assert torch.equal(first.token_ids, second.token_ids)


@pytest.mark.parametrize("vocab", [7, 2500])
def test_rows_do_not_depend_on_each_other(verifier: Verifier, one_hot: bool, vocab: int) -> None:
    arguments = batch(rows=24, k=3, vocab=vocab, one_hot=one_hot)
    together = verifier.verify(**arguments).token_ids
    for row in range(24):
        alone = verifier.verify(**rows_of(arguments, slice(row, row + 1))).token_ids
        assert torch.equal(alone[0], together[row])
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:17]
    assert torch.equal(verifier.verify(**rows_of(arguments, order)).token_ids, together[order])


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, 0.0])
def test_nothing_past_a_rows_length_is_looked_at(verifier: Verifier, one_hot: bool, nonsense: float) -> None:
    arguments = batch(rows=64, k=4, vocab=5, one_hot=one_hot)
    past = torch.arange(5) > arguments["lengths"][:, None]
    other = arguments | {
        "draft_ids": arguments["draft_ids"].masked_fill(past[:, 1:], -1),
        "target_probs": arguments["target_probs"].masked_fill(past[..., None], nonsense),
    }
    if not one_hot:
        other["draft_probs"] = arguments["draft_probs"].masked_fill(past[:, 1:, None], nonsense)
    assert torch.equal(verifier.verify(**arguments).token_ids, verifier.verify(**other).token_ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_width(verifier: Verifier, dtype: torch.dtype) -> None:
    arguments = batch(rows=32, k=3, vocab=5)
    narrow = arguments | {name: arguments[name].to(dtype) for name in ("draft_ids", "lengths")}
    assert torch.equal(verifier.verify(**arguments).token_ids, verifier.verify(**narrow).token_ids.long())


def emitted_at_each_place(verifier: Verifier, one_hot: bool, rows: int = 60_000) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For the first tokens and for the second ones behind each first: (counts, expected)."""
    k, vocab = 2, 4
    generator = torch.Generator().manual_seed(5)
    p = torch.tensor([[0.05, 0.15, 0.3, 0.5], [0.4, 0.3, 0.2, 0.1], [0.25, 0.0, 0.5, 0.25]]).expand(rows, k + 1, vocab)
    q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.4, 0.4, 0.1]]).expand(rows, k, vocab)
    ids = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, k)
    if one_hot:
        ids = torch.tensor([[2, 0]]).expand(rows, k)
    verdict = verifier.verify(
        p,
        None if one_hot else q,
        ids,
        torch.full((rows,), k),
        torch.rand(rows, k + 1, len(Use), generator=generator, dtype=torch.float64),
    )
    first = verdict.token_ids[:, 0]
    # Where a pass ended with its first token, the second one is left to the target.
    last = torch.multinomial(p[:, 1], 1, generator=generator).squeeze(1)
    second = torch.where(verdict.token_ids[:, 1] < 0, last, verdict.token_ids[:, 1])
    counts = torch.bincount(first * vocab + second, minlength=vocab * vocab)
    return [
        (torch.bincount(first, minlength=vocab), rows * p[0, 0].double()),
        (counts, rows * (p[0, 0].double()[:, None] * p[0, 1].double()).flatten()),
    ]


def test_emits_the_targets_law_if_and_only_if_it_says_so(verifier: Verifier, one_hot: bool) -> None:
    tilted = any(p_value(counts, expected) < ALPHA for counts, expected in emitted_at_each_place(verifier, one_hot))
    assert tilted == (not verifier.lossless)
