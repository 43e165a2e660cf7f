"""Which examples go together, in which order, and how they are laid out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import training
from vllm_specplugin.train.batch import Batch, Subset, in_order, plan_epoch

LENGTHS = np.random.default_rng(3).integers(5, 300, size=400)
TOKENS = 2000


@pytest.mark.parametrize("plan", [plan_epoch(LENGTHS, TOKENS, seed=1, epoch=0), in_order(LENGTHS, TOKENS)])
def test_every_example_once_and_no_batch_too_large(plan: list[list[int]]) -> None:
    assert sorted(example for batch in plan for example in batch) == list(range(len(LENGTHS)))
    assert all(len(batch) * LENGTHS[batch].max() <= TOKENS for batch in plan)


def test_the_order_is_of_the_seed_and_the_epoch() -> None:
    first = plan_epoch(LENGTHS, TOKENS, seed=1, epoch=0)
    assert first == plan_epoch(LENGTHS, TOKENS, seed=1, epoch=0)
    assert first != plan_epoch(LENGTHS, TOKENS, seed=1, epoch=1)
    assert first != plan_epoch(LENGTHS, TOKENS, seed=2, epoch=0)


def test_little_is_padding() -> None:
    plan = plan_epoch(LENGTHS, TOKENS, seed=1, epoch=0)
    places = sum(len(batch) * int(LENGTHS[batch].max()) for batch in plan)
    # A batch of unsorted examples would be about half padding.
    assert LENGTHS.sum() / places > 0.85


def test_an_example_longer_than_a_batch_is_one_by_itself() -> None:
    assert [3] in plan_epoch(np.array([10, 10, 10, 99]), 30, seed=0, epoch=0)


def test_layout() -> None:
    source = Subset(training.tokens_of(), [7, 3])
    batch = source.read([1, 0])
    for row, example in enumerate([3, 7]):
        ids = training.examples()[example].token_ids
        assert batch.token_ids[row, : len(ids)].tolist() == list(ids)
        assert batch.valid[row].tolist() == [place < len(ids) for place in range(batch.valid.shape[1])]
        assert batch.counts[row].tolist() == [4 <= place < len(ids) for place in range(batch.valid.shape[1])]
    assert batch.num_counted == sum(len(training.examples()[example].token_ids) - 4 for example in (3, 7))
    assert source.lengths.tolist() == [len(training.examples()[example].token_ids) for example in (7, 3)]


def test_states_that_are_not_there_are_named() -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64)
    batch = Batch(ids, ids.bool(), ids.bool())
    with pytest.raises(ValueError, match="'last' or 'aux'"):
        _ = batch.last
    with pytest.raises(ValueError, match="'aux'"):
        _ = batch.aux
