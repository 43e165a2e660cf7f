"""Noise for drafting: repeatable, apart for every name, and never the host's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from vllm_specplugin import Request
from vllm_specplugin.noise import DraftNoise


def noise(*requests: Request, positions: list[int] | None = None, seed: int = 0) -> DraftNoise:
    return DraftNoise(seed, list(requests), np.asarray(positions or [10] * len(requests), dtype=np.int64))


def test_equal_names_give_equal_streams_in_any_batch() -> None:
    seeded, other = Request("a", seed=7), Request("b", seed=8)
    alone = noise(seeded).generator(0).random(8)
    behind = noise(other, seeded).generator(1).random(8)
    renamed = noise(Request("z", seed=7)).generator(0).random(8)
    assert (alone == behind).all()
    assert (alone == renamed).all()
    earlier = noise(seeded, positions=[8]).generator(0, draft=2).random(8)
    assert (alone != earlier).any()  # another pass drafts the same place anew


def test_every_part_of_the_name_matters() -> None:
    streams = [
        noise(Request("a", seed=7)).generator(0),
        noise(Request("a", seed=8)).generator(0),
        noise(Request("a", seed=7)).generator(0, draft=1),
        noise(Request("a", seed=7)).generator(0, use="other"),
        noise(Request("a")).generator(0),
        noise(Request("b")).generator(0),
        noise(Request("a"), seed=1).generator(0),
    ]
    draws = sorted(stream.random(4).tolist() for stream in streams)
    assert all(first != second for first, second in pairwise(draws))


def test_neighbouring_streams_are_uncorrelated() -> None:
    request = Request("a", seed=1)
    rows = np.stack([noise(request, positions=[place]).generator(0).random(64) for place in range(400)])
    correlation = np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(399 * 64)  # four standard deviations


def test_the_hosts_generators_are_not_touched() -> None:
    torch.manual_seed(3)
    before, state = torch.get_rng_state(), np.random.get_state()[1].copy()
    noise(Request("a", seed=3)).generator(0).random(100)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == state).all()


def test_select_keeps_each_rows_stream() -> None:
    both = noise(Request("a"), Request("b"), positions=[3, 9])
    assert both.select([1]).generator(0).random() == both.generator(1).random()
