"""The executable specification: whatever the drafter does, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specplugin.reference import draw, plain, speculative

VOCAB = 6


def target(known: Sequence[int]) -> torch.Tensor:
    """A next-token law that depends on the last two tokens."""
    seed = sum((place + 1) * token for place, token in enumerate(known[-2:])) * 31 + len(known) % 5
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).softmax(0)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    drafts=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=7), min_size=1, max_size=6),
    k=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_drafter_gives_the_tokens_of_plain_decoding(prompt: list[int], drafts: list[list[int]], k: int, seed: int) -> None:
    generation = speculative(target, lambda known, _: drafts[len(known) % len(drafts)], prompt, 12, k, seed)
    assert generation.token_ids == plain(target, prompt, 12, seed)
    assert 0 <= generation.accepted <= generation.drafted


def test_an_oracle_is_accepted_in_full() -> None:
    truth = [1, *plain(target, [1], 40, seed=3)]
    generation = speculative(target, lambda known, room: truth[len(known) : len(known) + room], [1], 40, k=4, seed=3)
    assert generation.token_ids == truth[1:]
    assert generation.passes == 8  # 40 tokens at 5 a pass
    assert generation.acceptance_length == 5.0


def test_length_edge_and_eos() -> None:
    truth = [1, *plain(target, [1], 40, seed=3)]
    edge = speculative(target, lambda known, room: truth[len(known) :], [1], 40, k=4, seed=3, max_model_len=9)
    assert edge.token_ids == truth[1:9]
    eos = truth[7]
    stopped = speculative(target, lambda known, room: truth[len(known) :], [1], 40, k=4, seed=3, eos=eos)
    assert stopped.token_ids == truth[1 : truth.index(eos, 1) + 1]


def test_draw_follows_its_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    counts = torch.bincount(torch.tensor([draw(probs, position, seed=7) for position in range(4000)]), minlength=4)
    assert counts[3] == 0
    # Standard deviation of a count is at most 32 here; five of them leave no room for chance.
    assert (counts[:3] - 4000 * probs[:3]).abs().max() < 160
