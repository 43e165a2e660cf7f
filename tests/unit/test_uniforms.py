"""The verifiers' noise: known answers, uniform, and apart for every part of the key."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from scipy import stats

from tests.quality.chisquare import independence_p_value, p_value
from vllm_specplugin.scorers.base import Use
from vllm_specplugin.scorers.uniforms import _mix, key_of, uniforms

ALPHA = 1e-4
"""Of each test here; the numbers are fixed, so that a test that passed once always does."""
SIGMAS = 4.5
"""How many standard deviations an estimate may lie off."""


def draws(keys: int = 2000, passes: int = 20, k: int = 3) -> torch.Tensor:
    """`[keys, passes, k + 1, uses]`, of neighbouring keys and passes as an engine has them."""
    of_keys = torch.tensor([key_of(f"seed:{seed}") for seed in range(keys)])
    return uniforms(of_keys.repeat_interleave(passes), torch.arange(passes).repeat(keys), k).view(keys, passes, k + 1, len(Use))


def test_splitmix64_known_answers() -> None:
    # Seed 0, as in the reference implementation (https://prng.di.unimi.it/splitmix64.c); also the test vectors of Java and numpy.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert [number % 2**64 for number in _mix(torch.arange(1, 6)).tolist()] == known


def splitmix64(number: int) -> int:
    """The same in Python's whole numbers."""
    z = number * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, -0x0123456789ABCDEF])
def test_keys_of_either_sign(key: int) -> None:
    passes = [0, 1, 17, 2**31, 131_071]
    ours = uniforms(torch.full((len(passes),), key), torch.tensor(passes), 2)
    assert ours.shape == (len(passes), 3, len(Use))
    assert ours.dtype == torch.float64
    for row, of_pass in enumerate(passes):
        known = splitmix64((splitmix64(key) + of_pass) % 2**64)
        for position in range(3):
            for use in Use:
                bits = splitmix64((known + (position << 8) + use + 1) % 2**64)
                assert ours[row, position, use] == (bits >> 11) / 2**53


def test_key_of_is_signed_and_stable() -> None:
    keys = [key_of(f"seed:{seed}") for seed in range(1000)]
    assert len(set(keys)) == 1000
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert any(key < 0 for key in keys)
    assert any(key > 0 for key in keys)
    # blake2b of the name with the label "specplug-verify"; another number would change what every seeded run gives.
    assert key_of("seed:0") == 7806956929811090041


def test_uniform_on_the_unit_interval() -> None:
    numbers = draws().flatten()
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert (numbers * 2**53 == (numbers * 2**53).floor()).all()
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > ALPHA
    bins = torch.bincount((numbers * 1024).long(), minlength=1024)
    assert p_value(bins, np.full(1024, len(numbers) / 1024)) > ALPHA
    # The lowest bits, too: a draw from a wide vocabulary needs them.
    low = ((numbers * 2**53).long() & 255).bincount(minlength=256)
    assert p_value(low, np.full(256, len(numbers) / 256)) > ALPHA


def test_no_number_comes_twice() -> None:
    numbers = draws().flatten()
    assert len(numbers.unique()) == len(numbers)


Pair = tuple[torch.Tensor, torch.Tensor]


def of_uses(first: Use, second: Use, later: int) -> Callable[[torch.Tensor], Pair]:
    """One use at each position, and another one so many positions later."""
    return lambda numbers: (numbers[:, :, : numbers.shape[2] - later, first], numbers[:, :, later:, second])


PAIRS: dict[str, Callable[[torch.Tensor], Pair]] = {
    "keys": lambda numbers: (numbers[:-1], numbers[1:]),
    "passes": lambda numbers: (numbers[:, :-1], numbers[:, 1:]),
    "positions": lambda numbers: (numbers[:, :, :-1], numbers[:, :, 1:]),
    # What would be equal if numbers followed the absolute position: pass n at its second place, pass n + 1 at its first.
    "passes_at_one_absolute_position": lambda numbers: (numbers[:, :-1, 1:], numbers[:, 1:, :-1]),
    **{f"{first.name}_{second.name}": of_uses(first, second, 0) for first, second in combinations(Use, 2)},
    **{f"{first.name}_then_{second.name}": of_uses(first, second, 1) for first, second in permutations(Use, 2)},
}
"""Pairs of numbers whose keys differ in one part, of `[keys, passes, k + 1, uses]`."""


@pytest.fixture(scope="module")
def all_draws() -> torch.Tensor:
    return draws()


@pytest.mark.parametrize("pair", PAIRS)
def test_independent_across(pair: str, all_draws: torch.Tensor) -> None:
    first, second = (numbers.flatten().numpy() for numbers in PAIRS[pair](all_draws))
    assert abs(np.corrcoef(first, second)[0, 1]) < SIGMAS / np.sqrt(len(first))
    assert independence_p_value((first * 16).astype(int), (second * 16).astype(int)) > ALPHA


def test_the_test_of_independence_sees_what_is_shared(all_draws: torch.Tensor) -> None:
    first, second = (numbers.flatten().numpy() for numbers in PAIRS["passes"](all_draws))
    one_in_fifty_shared = np.where(np.arange(len(first)) % 50 == 0, first, second)
    assert independence_p_value((first * 16).astype(int), (one_in_fifty_shared * 16).astype(int)) < ALPHA


def test_any_batch_gives_the_same_numbers() -> None:
    keys = torch.tensor([key_of(name) for name in "abcdef"])
    passes = torch.tensor([5, 5, 6, 0, 100, 5])
    together = uniforms(keys, passes, 4)
    order = torch.tensor([3, 1, 5, 0])
    assert torch.equal(uniforms(keys[order], passes[order], 4), together[order])
    assert torch.equal(uniforms(keys[2:3], passes[2:3], 4), together[2:3])
    # A batch whose longest row is shorter looks at fewer of the same numbers.
    assert torch.equal(uniforms(keys, passes, 1), together[:, :2])


def test_arguments_and_global_generators_are_left_alone() -> None:
    keys, passes = torch.tensor([1, -2]), torch.tensor([3, 4])
    state = torch.get_rng_state()
    uniforms(keys, passes, 2)
    assert keys.tolist() == [1, -2]
    assert passes.tolist() == [3, 4]
    assert torch.equal(torch.get_rng_state(), state)
