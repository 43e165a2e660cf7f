"""Noise for drafting: repeatable, apart for every name, and never the host's."""

from __future__ import annotations

from hashlib import blake2b
from itertools import combinations, pairwise

import numpy as np
import torch
from scipy import stats

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


def splitmix64(state: int, count: int) -> list[float]:
    """The generator as its authors publish it, one number after the other."""
    mask, numbers = (1 << 64) - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53)
    return numbers


def test_uniforms_are_splitmix64_from_a_hash_of_the_pass() -> None:
    rows = noise(Request("a", seed=7), Request("b", arrival=3), positions=[10, 2**31], seed=5)
    numbers = rows.uniforms(6)
    assert numbers.shape == (2, 6)
    for row, name in enumerate(("seed:7|10", "5:3|2147483648")):
        seed = int.from_bytes(blake2b(name.encode(), digest_size=8, person=b"specplugin-unif").digest(), "little")
        assert numbers[row].tolist() == splitmix64(seed, 6)


def test_uniforms_are_named_as_the_generators_are() -> None:
    """By who owns the request and the pass; not by the batch, nor by how many drafts are wanted."""
    alone = noise(Request("a", seed=7)).uniforms(4)[0].tolist()
    assert noise(Request("b", seed=8), Request("z", seed=7)).uniforms(4)[1].tolist() == alone
    assert noise(Request("b", seed=8), Request("z", seed=7)).select([1]).uniforms(4)[0].tolist() == alone
    assert noise(Request("a", seed=7)).uniforms(2)[0].tolist() == alone[:2]
    others = [
        noise(Request("a", seed=7), positions=[11]),
        noise(Request("a", seed=8)),
        noise(Request("a")),
        noise(Request("a"), seed=1),
        noise(Request("a", arrival=0)),
    ]
    drawn = [*alone, *(number for other in others for number in other.uniforms(4)[0].tolist())]
    assert len(set(drawn)) == len(drawn)


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    request = Request("a", seed=1)
    numbers = np.concatenate([noise(request, positions=[place]).uniforms(5) for place in range(4000)])
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-3
    limit = 4 / np.sqrt(len(numbers))  # four standard deviations
    for first, second in [*combinations(numbers.T, 2), (numbers[:-1, 1], numbers[1:, 0]), (numbers[:-1, 0], numbers[1:, 0])]:
        assert abs(np.corrcoef(first, second)[0, 1]) < limit


def test_select_keeps_each_rows_stream() -> None:
    both = noise(Request("a"), Request("b"), positions=[3, 9])
    assert both.select([1]).generator(0).random() == both.generator(1).random()
