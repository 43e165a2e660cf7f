"""How the vocabulary is cut up for speed changes no verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from vllm_specplugin.registry import VERIFIERS
from vllm_specplugin.scorers import drawing
from vllm_specplugin.scorers.drawing import BLOCK, Residual
from vllm_specplugin.scorers.uniforms import uniforms
from vllm_specplugin.types import Verdict

ROWS, K = 24, 4
VOCABULARIES = [BLOCK - 1, 3 * BLOCK, 5 * BLOCK + 7]
CASES = [(name, draft) for name in ("token", "block") for draft in (True, False)] + [("one_hot", False), ("typical", False)]


@dataclass(frozen=True)
class Batch:
    """The arguments of `Verifier.verify`."""

    target: torch.Tensor
    draft: torch.Tensor | None
    ids: torch.Tensor
    lengths: torch.Tensor
    noise: torch.Tensor

    def verify(self, name: str) -> Verdict:
        return VERIFIERS.resolve(name)().verify(self.target, self.draft, self.ids, self.lengths, self.noise)

    def rows(self, row: int) -> Batch:
        """One row alone."""
        one = slice(row, row + 1)
        draft = None if self.draft is None else self.draft[one]
        return Batch(self.target[one], draft, self.ids[one], self.lengths[one], self.noise[one])


def batch(vocab: int, with_draft: bool) -> Batch:
    """Ragged; the drafts are likely, unlikely and all between, so that every rule accepts some and refuses some."""
    generator = torch.Generator().manual_seed(vocab)
    ids = torch.randint(0, vocab, (ROWS, K), generator=generator)
    draft = torch.rand(ROWS, K, vocab, generator=generator)
    draft.scatter_(2, ids[..., None], 0.7 * vocab)
    target = torch.rand(ROWS, K + 1, vocab, generator=generator)
    target[:, :K].scatter_(2, ids[..., None], vocab * 10 ** (-6 * torch.rand(ROWS, K, 1, generator=generator) ** 3))
    target, draft = (probs / probs.sum(-1, keepdim=True) for probs in (target, draft))
    noise = uniforms(torch.arange(ROWS), torch.arange(ROWS), K)
    return Batch(target, draft if with_draft else None, ids, torch.arange(ROWS) % (K + 1), noise)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize(("name", "with_draft"), CASES)
def test_the_size_of_the_pieces(monkeypatch: pytest.MonkeyPatch, name: str, with_draft: bool, vocab: int) -> None:
    given = batch(vocab, with_draft)
    verdicts = []
    for size in (1, 2 * BLOCK * ROWS, 1 << 30):
        monkeypatch.setattr(drawing, "PIECE_ON_CPU", size)
        verdicts.append(given.verify(name))
    assert 0 < verdicts[0].accepted.sum() < given.lengths.sum(), "nothing accepted or nothing refused shows nothing"
    for other in verdicts[1:]:
        assert torch.equal(verdicts[0].token_ids, other.token_ids)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize(("name", "with_draft"), CASES)
def test_the_batch_around_a_row(name: str, with_draft: bool, vocab: int) -> None:
    given = batch(vocab, with_draft)
    together = given.verify(name)
    for row in range(ROWS):
        assert torch.equal(given.rows(row).verify(name).token_ids[0], together.token_ids[row])


@pytest.mark.parametrize(("name", "with_draft"), CASES)
def test_parts_of_larger_tensors(name: str, with_draft: bool) -> None:
    given = batch(2 * BLOCK + 1, with_draft)
    larger = torch.nn.functional.pad(given.target, (0, 3, 0, 2))[:, : K + 1, : 2 * BLOCK + 1]
    assert not larger.is_contiguous()
    draft = None if given.draft is None else torch.nn.functional.pad(given.draft, (0, 3, 0, 2))[:, :K, : 2 * BLOCK + 1]
    assert torch.equal(given.verify(name).token_ids, replace(given, target=larger, draft=draft).verify(name).token_ids)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize(("name", "with_draft"), CASES)
def test_what_lies_past_a_rows_length(name: str, with_draft: bool, garbage: float) -> None:
    given = batch(2 * BLOCK, with_draft)
    place = torch.arange(K + 1)
    past = place > given.lengths[:, None]  # of the target's positions, of which there is one more
    target = given.target.masked_fill(past[..., None], garbage)
    draft = None if given.draft is None else given.draft.masked_fill(past[:, 1:, None], garbage)
    assert torch.equal(given.verify(name).token_ids, replace(given, target=target, draft=draft).verify(name).token_ids)


def test_past_the_end_of_a_short_last_block_there_is_no_weight() -> None:
    vocab, left_out = BLOCK + 3, BLOCK + 1
    probs = torch.rand(1, 1, vocab, generator=torch.Generator().manual_seed(0))
    row = torch.tensor([0])
    weights = Residual(probs, row, row, left_out=torch.tensor([left_out]))
    last = probs[0, 0, BLOCK:].tolist()
    assert weights.block(torch.tensor([[1]]))[0].tolist() == [last[0], 0.0, last[2], *[0.0] * (BLOCK - 3)]
    # The block is summed up anew without the token; what fills it up must not count.
    assert torch.allclose(weights.sums()[0, 1], torch.tensor(last[0] + last[2]))
