"""`walk` on ragged batches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplugin.scorers.base import Use
from vllm_specplugin.scorers.one_hot import OneHotVerifier, walk


def by_hand(samples: list[int], drafts: list[int]) -> list[int]:
    emitted = []
    for sample, draft in zip(samples, [*drafts, None], strict=True):
        emitted.append(sample)
        if sample != draft:
            break
    return emitted


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5).flatmap(
            lambda pairs: st.tuples(st.just(pairs), st.integers(0, 2))
        ),
        min_size=1,
        max_size=6,
    )
)
def test_equals_a_loop(rows: list[tuple[list[tuple[int, int]], int]]) -> None:
    k = max(len(pairs) for pairs, _ in rows)
    drafts = torch.full((len(rows), k), 1)  # what lies past a row's length must not matter
    samples = torch.full((len(rows), k + 1), 1)
    for row, (pairs, last) in enumerate(rows):
        for place, (sample, draft) in enumerate(pairs):
            samples[row, place], drafts[row, place] = sample, draft
        samples[row, len(pairs)] = last
    verdict = walk(samples, drafts, torch.tensor([len(pairs) for pairs, _ in rows]))
    for row, (pairs, last) in enumerate(rows):
        expected = by_hand([*(sample for sample, _ in pairs), last], [draft for _, draft in pairs])
        assert [token for token in verdict.token_ids[row].tolist() if token >= 0] == expected
        assert verdict.accepted[row] == len(expected) - 1


def test_no_drafts_at_all() -> None:
    verdict = walk(torch.tensor([[4], [5]]), torch.zeros((2, 0), dtype=torch.int64), torch.tensor([0, 0]))
    assert verdict.token_ids.tolist() == [[4], [5]]
    assert verdict.accepted.tolist() == [0, 0]


def test_verify_samples_from_the_target_with_the_noise_given() -> None:
    rows, k, vocab = 20_000, 1, 4
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(rows, k + 1, vocab)
    drafts = torch.full((rows, k), 2)
    noise = torch.rand(rows, k + 1, len(Use), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    verdict = OneHotVerifier().verify(probs, None, drafts, torch.full((rows,), k), noise)
    first = torch.bincount(verdict.token_ids[:, 0], minlength=vocab) / rows
    # Four standard deviations of a frequency near 0.3 over 20,000 draws.
    assert (first - probs[0, 0]).abs().max() < 4 * (0.25 / rows) ** 0.5
    assert abs(verdict.accepted.float().mean() - 0.3) < 4 * (0.25 / rows) ** 0.5
    # Each position's own number decides, and no other use's.
    expected = torch.searchsorted(probs[0, 0].double().cumsum(0), noise[:, 0, Use.BONUS].contiguous(), right=True)
    assert torch.equal(verdict.token_ids[:, 0], expected)
