"""How many tokens a bias needs: the numbers said are the numbers that simulations show."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest

from tests.support.validate_tokens import plain, sampled, walked
from vllm_specplugin.validate.betting import Martingale
from vllm_specplugin.validate.power import PowerModel, Spread
from vllm_specplugin.validate.records import Tokens
from vllm_specplugin.validate.stakes import Floats, log_factors

ALPHA = 1e-3
SPREADS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "middling": lambda rng, n: rng.uniform(0.3, 0.5, n),
    "one of sixteen": lambda rng, n: rng.dirichlet(np.ones(16), n)[:, 0],
    "all or nothing": lambda rng, n: rng.beta(0.2, 0.2, n),
    "seldom": lambda rng, n: rng.beta(0.5, 8, n),
}


def seen(p: Floats) -> Martingale:
    martingale = Martingale(ALPHA)
    martingale.add(sampled(np.random.default_rng(1), p))
    return martingale


def share_found(draw: Callable[[np.random.Generator, int], Floats], tokens: int, bias: float, runs: int) -> float:
    found = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        martingale = Martingale(ALPHA)
        martingale.add(sampled(rng, draw(rng, tokens), bias))
        found += martingale.crossed
    return found / runs


@pytest.mark.parametrize("name", SPREADS)
def test_the_tokens_needed_give_the_power_asked_for(name: str) -> None:
    draw, bias = SPREADS[name], 0.03
    martingale = seen(draw(np.random.default_rng(0), 20_000))
    for power in (0.95, 0.5):
        needed = martingale.tokens_needed(bias, power)
        assert needed is not None
        found = share_found(draw, needed, bias, runs=150)
        # Four standard errors below, for chance; above, what an earlier crossing and the normal approximation add.
        assert power - 4 * (power * (1 - power) / 150) ** 0.5 < found <= min(1.0, power + 0.2)


@pytest.mark.parametrize("bias", [0.02, 0.4])
@pytest.mark.parametrize("power", [0.5, 0.95])
def test_the_tokens_needed_follow_from_mean_and_deviation(bias: float, power: float) -> None:
    needed = seen(np.full(500, 0.4)).tokens_needed(bias, power)
    assert needed is not None
    outcomes = log_factors(np.array([0.4, 0.4]), np.array([True, False]))  # [2, bets]
    weights = np.array([0.4 + bias, 0.6 - bias])
    mean = weights @ outcomes
    deviation = (weights @ (outcomes - mean) ** 2) ** 0.5

    def e_value(tokens: int) -> float:
        low = tokens * mean - NormalDist().inv_cdf(power) * tokens**0.5 * deviation
        return float(np.exp(low).mean() / 3)  # one of three families

    assert e_value(needed - 1) < 1 / ALPHA <= e_value(needed)


def test_a_bias_downwards_needs_about_as_many() -> None:
    draw = SPREADS["middling"]
    needed = seen(draw(np.random.default_rng(0), 20_000)).tokens_needed(0.03)
    assert needed is not None
    assert share_found(draw, needed, -0.03, runs=50) > 0.8


def test_probability_detectable_and_needed_are_one_thing() -> None:
    martingale = seen(SPREADS["middling"](np.random.default_rng(0), 50_000))
    detectable = martingale.detectable_bias(0.9)
    assert detectable is not None
    needed = martingale.tokens_needed(detectable, 0.9)
    assert needed == pytest.approx(50_000, rel=0.05)
    assert martingale.evidence(detectable, 0.9).power.probability == pytest.approx(0.9, abs=0.01)


def test_more_is_needed_for_less_bias_more_power_and_smaller_alpha() -> None:
    martingale = seen(SPREADS["middling"](np.random.default_rng(0), 20_000))
    needed = [martingale.tokens_needed(bias) or 0 for bias in (0.1, 0.03, 0.01, 0.003)]
    assert needed == sorted(needed)
    assert needed[2] == pytest.approx(100_000, rel=0.15)  # close to 1 / bias^2, and what the documentation says
    assert needed[2] < (martingale.tokens_needed(0.01, 0.99) or 0)
    spread = Spread()
    spread.add(np.full(1000, 0.4))
    by_alpha = [PowerModel(spread, alpha, 1.0).tokens_needed(0.01, 0.95) or 0 for alpha in (0.1, 1e-3, 1e-9)]
    assert by_alpha == sorted(by_alpha)


def test_tokens_without_drafts_count_as_tokens_to_generate() -> None:
    p = SPREADS["middling"](np.random.default_rng(0), 1000)
    alone = seen(p).tokens_needed(0.05)
    diluted = seen(p)
    diluted.add(plain(np.random.default_rng(0), 3000))
    assert alone is not None
    assert diluted.tokens_needed(0.05) == 4 * alone
    power = diluted.evidence(0.05).power
    assert power.tokens_more == 4 * alone - 4000
    assert power.probability < 0.95


def test_with_enough_tokens_no_more_are_needed() -> None:
    martingale = Martingale(ALPHA)
    martingale.add(walked(np.random.default_rng(0), 4000))
    power = martingale.evidence(0.05).power
    assert power.tokens_more == 0
    assert power.probability > 0.95
    assert power.detectable is not None
    assert power.detectable < 0.05
    assert power.tokens_needed is not None
    assert power.tokens_needed < martingale.tokens


def test_nothing_drafted_finds_nothing() -> None:
    martingale = Martingale(ALPHA)
    martingale.add(plain(np.random.default_rng(0), 100))
    power = martingale.evidence(0.01).power
    assert (power.probability, power.tokens_needed, power.tokens_more, power.detectable) == (0.0, None, None, None)


def test_where_acceptance_is_certain_no_number_of_tokens_shows_a_bias() -> None:
    martingale = seen(np.ones(1000))
    assert martingale.tokens_needed(0.01) is None
    assert martingale.detectable_bias() is None
    assert martingale.evidence(0.01).power.tokens_more is None


def test_few_tokens_detect_nothing() -> None:
    assert seen(np.full(5, 0.5)).detectable_bias() is None


def test_the_spread_keeps_what_matters_of_the_probabilities() -> None:
    p = np.concatenate([np.random.default_rng(0).beta(0.3, 0.6, 3000), [0.0, 1.0]])
    spread = Spread()
    for part in np.array_split(p, 7):
        spread.add(part)
    assert spread.total == 3002
    assert spread.sums.sum() == pytest.approx(p.sum())
    met = spread.counts > 0
    means = spread.sums[met] / spread.counts[met]
    assert (spread.counts[met] * means * (1 - means)).sum() == pytest.approx((p * (1 - p)).sum(), rel=0.01)
    assert Spread.from_state(spread.state()).state() == spread.state()


def test_tokens_of_all_kinds_are_needed_in_proportion() -> None:
    tokens = walked(np.random.default_rng(0), 2000)
    martingale = Martingale(ALPHA)
    martingale.add(tokens)
    drafted_only = Martingale(ALPHA)
    drafted = tokens.draft_position > 0
    drafted_only.add(Tokens(**{name: getattr(tokens, name)[drafted] for name in Tokens.__slots__}))
    assert (martingale.tokens_needed(0.02) or 0) / (drafted_only.tokens_needed(0.02) or 1) == pytest.approx(
        len(tokens) / drafted.sum(), rel=1e-3
    )
