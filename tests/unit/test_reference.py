"""The executable specification: whatever the drafter does, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quality.chisquare import p_value
from vllm_specplugin.reference import Drafter, Drawn, draw, plain, sampled, speculative
from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.scorers.block import BlockVerifier
from vllm_specplugin.scorers.token import TokenVerifier

VOCAB = 6
ALPHA = 1e-4
"""Of each statistical test here; the seeds are fixed."""


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


# -- drafts drawn by chance ----------------------------------------------------------------------------------

NARROW = 16
LOGITS = torch.randn(NARROW + 1, NARROW, generator=torch.Generator().manual_seed(8)).mul(0.8)
"""By the last token; the drafter's are the negative ones, so that most drafts are refused."""
TARGET = list(LOGITS.softmax(-1))
DRAFTER = list(LOGITS.neg().softmax(-1))
PROMPT = [NARROW]
TRIALS = 20_000


def narrow(known: Sequence[int]) -> torch.Tensor:
    return TARGET[known[-1]]


def opposite(known: Sequence[int]) -> torch.Tensor:
    return DRAFTER[known[-1]]


def first_two(verifier: Verifier, drafter_of: Callable[[int], Drafter], trials: int = TRIALS) -> tuple[np.ndarray, float]:
    """`[NARROW, NARROW]`: how often each pair of first tokens came, and the share of drafts that were accepted."""
    counts, drafted, accepted = np.zeros((NARROW, NARROW)), 0, 0
    for seed in range(trials):
        # Room for two drafts: the second token comes from the first pass or, after a refusal, from the next one.
        generation = speculative(narrow, drafter_of(seed), PROMPT, 2, k=2, seed=seed, verifier=verifier)
        counts[tuple(generation.token_ids)] += 1
        drafted += generation.drafted
        accepted += generation.accepted
    return counts, accepted / drafted


def honest(seed: int) -> Drafter:
    return sampled(opposite, seed)


def lying(seed: int) -> Drafter:
    """The same drafts, said to be drawn from a flatter law."""

    def changed(known: Sequence[int], room: int) -> Drawn:
        drawn = honest(seed)(known, room)
        assert isinstance(drawn, Drawn)
        return Drawn(drawn.ids, drawn.probabilities.sqrt() / drawn.probabilities.sqrt().sum(-1, keepdim=True))

    return changed


def expected_pairs() -> np.ndarray:
    first = TARGET[NARROW].double().numpy()
    return first[:, None] * torch.stack(TARGET[:NARROW]).double().numpy()


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()], ids=["token", "block"])
def test_sampled_drafts_leave_the_law_alone(verifier: Verifier) -> None:
    counts, accepted = first_two(verifier, honest)
    expected = expected_pairs()
    assert 0.1 < accepted < 0.5, "most drafts are to be refused, and not all"
    assert p_value(counts.sum(1), expected.sum(1)) > ALPHA
    assert p_value(counts.sum(0), expected.sum(0)) > ALPHA
    assert p_value(counts, expected) > ALPHA


def test_a_wrong_q_is_found() -> None:
    counts, _ = first_two(TokenVerifier(), lying, TRIALS // 3)
    assert p_value(counts.sum(1), expected_pairs().sum(1)) < ALPHA


def test_plain_decoding_follows_the_same_law() -> None:
    counts = np.zeros((NARROW, NARROW))
    for seed in range(TRIALS):
        counts[tuple(plain(narrow, PROMPT, 2, seed))] += 1
    assert p_value(counts, expected_pairs()) > ALPHA


def test_one_hot_gives_plain_decodings_tokens_for_sampled_drafts_too() -> None:
    for seed in range(200):
        generation = speculative(narrow, sampled(opposite, seed), PROMPT, 9, k=3, seed=seed)
        assert generation.token_ids == plain(narrow, PROMPT, 9, seed)


def test_sampled_repeats_itself_and_draws_anew_in_each_pass() -> None:
    drafter = sampled(opposite, seed=4)
    first = drafter([NARROW], 3)
    assert isinstance(first, Drawn)
    again = drafter([NARROW], 3)
    assert isinstance(again, Drawn)
    assert list(first.ids) == list(again.ids)
    assert torch.equal(first.probabilities, again.probabilities)
    for place, law in enumerate(first.probabilities):
        assert torch.equal(law, opposite([NARROW, *first.ids[:place]]))
    # After a refusal in the first pass, its second draft must not come again only because its place is drafted again.
    same = 0
    for seed in range(300):
        flat = sampled(lambda known: torch.full((NARROW,), 1 / NARROW), seed)
        earlier, later = flat([0], 2), flat([0, 0], 1)
        assert isinstance(earlier, Drawn)
        assert isinstance(later, Drawn)
        same += earlier.ids[1] == later.ids[0]
    assert same < 45  # 300 / 16 are expected by chance, and six standard deviations are 25


def test_edges_with_sampled_drafts() -> None:
    for verifier in (TokenVerifier(), BlockVerifier()):
        edge = speculative(narrow, sampled(opposite, 1), PROMPT, 40, k=4, seed=1, max_model_len=9, verifier=verifier)
        assert len(edge.token_ids) == 8
        none = speculative(narrow, sampled(opposite, 1), PROMPT, 5, k=0, seed=1, verifier=verifier)
        assert (len(none.token_ids), none.drafted, none.passes) == (5, 0, 5)
