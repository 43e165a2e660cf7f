"""Drawing from unnormalised weights: the right law to the last token, and never a token without weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.quality.chisquare import p_value
from vllm_specplugin.scorers import drawing
from vllm_specplugin.scorers.drawing import BELOW_ONE, BLOCK, Residual, draw

VOCABULARIES = [1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3000]
NEAR = 2.0**-20
"""Of the total: between two tokens a number as near as this to their border may fall to either (float32 sums of blocks)."""


def weights_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Some with many zeros, some with whole blocks of them, tiny beside large ones."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, vocab, generator=generator).mul(4).exp()
    gone = torch.rand(rows, vocab, generator=generator) < torch.tensor([0.0, 0.5, 0.999])[torch.arange(rows) % 3, None]
    gone |= (torch.arange(vocab) // BLOCK == 1) & (torch.arange(rows) % 2 == 0)[:, None]
    gone.scatter_(1, torch.randint(0, vocab, (rows, 1), generator=generator), False)
    return weights.masked_fill(gone, 0.0)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_equals_a_cumulative_sum_in_float64(vocab: int) -> None:
    rows = 600
    weights = weights_of(rows, vocab)
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, total = draw(weights, uniforms)
    ends = weights.double().cumsum(1)
    assert torch.allclose(total, ends[:, -1], rtol=1e-6)
    target = uniforms[:, None] * ends[:, -1:]
    expected = (ends <= target).sum(1)
    differ = tokens != expected
    nearest = ((ends - target).abs().min(1).values / ends[:, -1])[differ]
    assert (nearest < NEAR).all()
    assert differ.sum() <= rows / 50


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, BELOW_ONE])
def test_no_token_without_weight(vocab: int, uniform: float) -> None:
    weights = weights_of(300, vocab, seed=2)
    tokens, _ = draw(weights, torch.full((300,), uniform, dtype=torch.float64))
    assert (weights.gather(1, tokens[:, None]) > 0).all()
    possible = weights > 0
    if uniform == 0.0:
        assert torch.equal(tokens, possible.long().argmax(1))
    if uniform == BELOW_ONE:
        # float32's sum of a block may miss the last few tokens of the smallest weight, and so may the draw.
        last = vocab - 1 - possible.flip(1).long().argmax(1)
        behind = weights.double().cumsum(1).gather(1, tokens[:, None]).squeeze(1) / weights.double().sum(1)
        assert ((tokens == last) | (behind > 1 - NEAR)).all()


def test_no_token_without_weight_at_the_borders_of_blocks() -> None:
    # Where a number falls on the end of a block, rounding may put it a little before the next one, which starts with no weight.
    blocks, rows = 6, 2000
    generator = torch.Generator().manual_seed(6)
    weights = torch.rand(rows, blocks, BLOCK, generator=generator)
    weights *= 10.0 ** torch.randint(-9, 1, (rows, blocks, 1), generator=generator)  # so far apart that float64 has to round
    weights[:, :, :3] = 0.0
    weights = weights.flatten(1)
    ends = drawing.Whole(weights).sums().cumsum(1, dtype=torch.float64)
    for border in range(blocks - 1):
        exact = ends[:, border] / ends[:, -1]
        for uniforms in (exact, torch.nextafter(exact, torch.ones_like(exact)), torch.nextafter(exact, torch.zeros_like(exact))):
            tokens, _ = draw(weights, uniforms)
            assert (weights.gather(1, tokens[:, None]) > 0).all()
            assert ((tokens // BLOCK == border) | (tokens // BLOCK == border + 1)).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 7.0, 1e30])
def test_weights_need_no_normalising(scale: float) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0]]).expand(4, 4) * scale
    tokens, total = draw(weights, torch.tensor([0.0, 0.24, 0.26, BELOW_ONE], dtype=torch.float64))
    assert tokens.tolist() == [1, 1, 3, 3]
    assert torch.allclose(total, torch.full((4,), 4.0 * scale, dtype=torch.float64))


def test_no_weight_at_all_is_told_by_the_total() -> None:
    tokens, total = draw(torch.zeros(2, 3000), torch.tensor([0.0, 0.9], dtype=torch.float64))
    assert total.tolist() == [0.0, 0.0]
    assert ((tokens >= 0) & (tokens < 3000)).all()


def test_the_law_over_a_wide_vocabulary_of_tiny_weights() -> None:
    # Half of the mass on five tokens, the rest on thousands, each of them below float32's resolution of the running sum's end.
    vocab, rounds, rows = 3000, 12, 10_000
    weights = torch.rand(vocab, generator=torch.Generator().manual_seed(3)) * 3e-4
    weights[[0, 700, 1023, 1024, 2999]] = 0.1
    weights[2000:2048] = 0.0
    generator = torch.Generator().manual_seed(4)
    counts = torch.zeros(vocab, dtype=torch.int64)
    for _ in range(rounds):
        uniforms = torch.rand(rows, generator=generator, dtype=torch.float64)
        counts += torch.bincount(draw(weights.expand(rows, vocab), uniforms)[0], minlength=vocab)
    expected = weights.double().numpy() * (rounds * rows / float(weights.double().sum()))
    assert p_value(counts.numpy(), expected) > 1e-4
    tilted = np.where(np.arange(vocab) >= BLOCK, expected * 1.2, expected)
    assert p_value(counts.numpy(), tilted) < 1e-4, "the test would not see a tilt"


def test_evenly_spread_uniforms_give_every_token_its_share() -> None:
    # Sharper than a statistical test: over n equal steps a token of weight w is drawn n w times, but for its two ends.
    vocab, n = 2100, 50_000
    weights = weights_of(1, vocab, seed=7) + 1e-3
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    counts = torch.bincount(draw(weights.expand(n, vocab), uniforms)[0], minlength=vocab).double()
    expected = n * weights[0].double() / weights.double().sum()
    assert (counts - expected).abs().max() <= 1 + n * NEAR


# -- residuals -----------------------------------------------------------------------------------------------


def parts(vocab: int, contiguous: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    p = torch.randn(7, 4, vocab, generator=generator).mul(3).softmax(-1)
    q = torch.randn(7, 3, vocab, generator=generator).mul(3).softmax(-1)
    if not contiguous:
        p, q = p.transpose(1, 2).contiguous().transpose(1, 2), q.transpose(1, 2).contiguous().transpose(1, 2)
    row = torch.tensor([6, 0, 3, 3])
    position = torch.tensor([2, 0, 1, 2])
    return p, q, row, position, torch.tensor([1.0, 0.25, 0.9, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("piece", [1, drawing.PIECE_ON_CPU])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_residuals_in_pieces(monkeypatch: pytest.MonkeyPatch, vocab: int, piece: int, contiguous: bool) -> None:
    monkeypatch.setattr(drawing, "PIECE_ON_CPU", piece)  # 1: a block at a time
    p, q, row, position, scale = parts(vocab, contiguous)
    before = p.clone(), q.clone()
    left_out = torch.tensor([0, vocab - 1, vocab // 2, min(BLOCK, vocab - 1)])
    chosen, drawn_from = p[row, position], q[row, position]
    expected = {
        "p": (Residual(p, row, position), chosen),
        "p - q": (Residual(p, row, position, q), (chosen - drawn_from).clamp(min=0.0)),
        "scale p - q": (Residual(p, row, position, q, scale), (chosen * scale.float()[:, None] - drawn_from).clamp(min=0.0)),
        "left out": (Residual(p, row, position, left_out=left_out), chosen.scatter(1, left_out[:, None], 0.0)),
    }
    every = torch.arange(vocab).expand(4, -1)
    uniforms = torch.tensor([0.1, 0.999, 0.5, 0.73], dtype=torch.float64)
    for name, (residual, weights) in expected.items():
        assert torch.equal(residual.at(every), weights), name
        blocks = torch.nn.functional.pad(weights.double(), (0, -vocab % BLOCK)).unflatten(1, (-1, BLOCK)).sum(2)
        assert torch.allclose(residual.sums().double(), blocks, rtol=1e-5, atol=1e-12), name
        ours, total = draw(residual, uniforms)
        assert torch.allclose(total, blocks.sum(1), rtol=1e-5, atol=1e-12), name
        positive = weights.sum(1) > 0
        assert torch.equal(ours[positive], draw(weights, uniforms)[0][positive]), name
    assert torch.equal(p, before[0]), "p was changed in place"
    assert torch.equal(q, before[1]), "q was changed in place"


def test_a_left_out_token_with_nearly_all_of_the_weight() -> None:
    vocab = 1500
    p = torch.full((1, 1, vocab), 1e-9)
    p[0, 0, 70] = 1.0
    zero = torch.tensor([0])
    residual = Residual(p, zero, zero, left_out=torch.tensor([70]))
    counts = torch.zeros(vocab)
    n = 3000
    for step in range(n):
        token, total = draw(residual, torch.tensor([(step + 0.5) / n], dtype=torch.float64))
        counts[token] += 1
    assert total.item() == pytest.approx((vocab - 1) * 1e-9, rel=1e-5)
    assert counts[70] == 0
    assert (counts - n / (vocab - 1)).abs()[torch.arange(vocab) != 70].max() <= 1


# -- the end of a pass ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 3000])
def test_a_draft_that_rounding_alone_refused_is_kept(vocab: int) -> None:
    # p = q but for the last bit of the draft's own probability: refused with a chance of 2^-24, and nothing else has an excess.
    q = torch.full((1, 1, vocab), 1 / vocab)
    p = q.repeat(1, 2, 1)
    p[0, 0, 1] = torch.nextafter(p[0, 0, 1], torch.tensor(0.0))
    drafts, one, none = torch.tensor([[1]]), torch.tensor([1]), torch.tensor([0])
    verdict = drawing.conclude(none, p, q, drafts, one, torch.full((1, 2, 3), 0.5, dtype=torch.float64))
    assert verdict.token_ids.tolist() == [[1, -1]]


def test_a_certain_one_hot_draft_that_is_refused_nevertheless_is_kept() -> None:
    # What a host rounds to exactly 1 leaves nothing for the residual.
    p = torch.zeros(1, 2, 2000)
    p[..., 1500] = 1.0
    uniforms = torch.full((1, 2, 3), 0.5, dtype=torch.float64)
    verdict = drawing.conclude(torch.tensor([0]), p, None, torch.tensor([[1500]]), torch.tensor([1]), uniforms)
    assert verdict.token_ids.tolist() == [[1500, -1]]
