"""One suite over every registered verifier."""

from __future__ import annotations

import inspect

import pytest
import torch

from vllm_specplugin import Verifier
from vllm_specplugin.registry import VERIFIERS

NAMES = VERIFIERS.names()


@pytest.fixture(params=NAMES)
def verifier(request: pytest.FixtureRequest) -> Verifier:
    return VERIFIERS.resolve(request.param)()


def batch(rows: int, k: int, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, k + 1, (rows,), generator=generator)
    return {
        "target_probs": torch.randn(rows, k + 1, vocab, generator=generator).softmax(-1),
        "draft_probs": torch.randn(rows, k, vocab, generator=generator).softmax(-1),
        "draft_ids": torch.randint(0, vocab, (rows, k), generator=generator),
        "lengths": lengths,
        "uniforms": torch.rand(rows, k + 1, vocab, generator=generator).clamp_min(1e-12),
    }


def test_declares_itself(verifier: Verifier) -> None:
    assert isinstance(verifier.lossless, bool)
    assert isinstance(verifier.needs_probabilities, bool)
    assert inspect.getdoc(type(verifier))


def test_verdict_is_well_formed(verifier: Verifier) -> None:
    arguments = batch(rows=64, k=5, vocab=3)
    before = {name: value.clone() for name, value in arguments.items()}
    verdict = verifier.verify(**arguments)
    assert verdict.token_ids.shape == (64, 6)
    assert verdict.accepted.shape == (64,)
    assert (verdict.accepted <= arguments["lengths"]).all()
    assert (verdict.accepted >= 0).all()
    for row in range(64):
        accepted = int(verdict.accepted[row])
        emitted = verdict.token_ids[row]
        assert torch.equal(emitted[:accepted], arguments["draft_ids"][row, :accepted])
        assert 0 <= emitted[accepted] < 3
        assert (emitted[accepted + 1 :] == -1).all()
    for name, value in before.items():
        assert torch.equal(value, arguments[name]), f"{name} was changed in place"


def test_is_a_pure_function_of_its_arguments(verifier: Verifier) -> None:
    arguments = batch(rows=16, k=3, vocab=7)
    torch.manual_seed(1)
    first = verifier.verify(**arguments)
    torch.manual_seed(2)
    second = verifier.verify(**arguments)
    assert torch.equal(first.token_ids, second.token_ids)


def test_rows_do_not_depend_on_each_other(verifier: Verifier) -> None:
    arguments = batch(rows=16, k=3, vocab=7)
    together = verifier.verify(**arguments).token_ids
    for row in range(16):
        alone = verifier.verify(**{name: value[row : row + 1] for name, value in arguments.items()}).token_ids
        assert torch.equal(alone[0], together[row])


def test_ids_past_a_rows_length_are_not_looked_at(verifier: Verifier) -> None:
    arguments = batch(rows=32, k=4, vocab=5)
    past = torch.arange(4) >= arguments["lengths"][:, None]
    other = arguments | {"draft_ids": arguments["draft_ids"].masked_fill(past, 0)}
    assert torch.equal(verifier.verify(**arguments).token_ids, verifier.verify(**other).token_ids)


def test_lossless_verifiers_emit_the_targets_law(verifier: Verifier) -> None:
    if not verifier.lossless or verifier.needs_probabilities:
        pytest.skip("this test drafts without chance")
    rows, vocab = 60_000, 4
    generator = torch.Generator().manual_seed(5)
    target = torch.tensor([[0.05, 0.15, 0.3, 0.5], [0.4, 0.3, 0.2, 0.1]]).expand(rows, 2, vocab)
    verdict = verifier.verify(
        target,
        None,
        torch.full((rows, 1), 2),
        torch.ones(rows, dtype=torch.int64),
        torch.rand(rows, 2, vocab, generator=generator).clamp_min(1e-12),
    )
    counts = torch.bincount(verdict.token_ids[:, 0], minlength=vocab).double()
    expected = rows * target[0, 0].double()
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, alpha 1e-3
