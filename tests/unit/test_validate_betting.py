"""The martingale: fair bets, few false alarms however long one looks, and biases found where they sit."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import log10

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tests.support.validate_tokens import bets, plain, sampled, walked
from vllm_specplugin.validate.betting import BETS, MOST_POINTS, Martingale
from vllm_specplugin.validate.evidence import Evidence, Family
from vllm_specplugin.validate.records import Kind, Tokens
from vllm_specplugin.validate.stakes import COUNT, FORCED, LEAST_INSIDE, LEAST_OUTSIDE, TILTS, log_factors, running_sums

PROBABILITIES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e-12, 1e-30, 1 - 1e-7, 1 - 1e-12]))


def after(*parts: Tokens, alpha: float = 1e-3) -> Evidence:
    martingale = Martingale(alpha)
    for part in parts:
        martingale.add(part)
    return martingale.evidence(0.01)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# -- the bets ------------------------------------------------------------------------------------------------


@given(PROBABILITIES)
def test_no_bet_wins_on_average_and_none_can_ruin(p: float) -> None:
    hit, miss = log_factors(np.array([p, p]), np.array([True, False]))
    assert np.isfinite([hit, miss]).all()
    mean = p * np.exp(hit) + (1 - p) * np.exp(miss)
    assert (mean <= 1 + 1e-9).all()
    fair = np.ones(COUNT, np.bool_)
    fair[2 * len(TILTS) : -len(FORCED)] = p >= LEAST_INSIDE
    fair[-len(FORCED) :] = 1 - p >= LEAST_OUTSIDE
    assert mean[fair] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.4, 0.8])
def test_for_every_small_shift_some_bet_grows_at_nearly_the_best_rate(p: float) -> None:
    hit, miss = log_factors(np.array([p, p]), np.array([True, False]))
    for tilt in np.geomspace(0.01, 0.6, 50):
        for shifted in (p + tilt * p * (1 - p), p - tilt * p * (1 - p)):
            best = shifted * np.log(shifted / p) + (1 - shifted) * np.log((1 - shifted) / (1 - p))  # Kelly's rate
            assert (shifted * hit + (1 - shifted) * miss).max() > 0.85 * best


def test_rare_tokens_weigh_by_how_rare_they_are() -> None:
    hit = log_factors(np.array([1e-9]), np.array([True]))
    assert hit.max() > np.log(1e8)
    miss = log_factors(np.array([1 - 1e-5]), np.array([False]))
    assert miss.max() > np.log(1e4)


def test_a_sum_that_rounds_to_1_is_no_certainty() -> None:
    miss = np.exp(log_factors(np.array([1.0]), np.array([False])))
    assert 1000 < miss.max() < 0.51 / LEAST_OUTSIDE


# -- the mixture -----------------------------------------------------------------------------------------------


def by_hand(tokens: Tokens) -> list[dict[str, float]]:
    """After each token: the e-values as the docstring defines them, one token and one bet at a time."""
    wealth = {bet: np.ones(COUNT) for bet in BETS}
    steps = []
    for at in range(len(tokens)):
        drafted = tokens.kind[at] in (Kind.ACCEPTED, Kind.RESIDUAL)
        for bet in BETS:
            p, hit = getattr(tokens, f"p_{bet.set}")[at], getattr(tokens, f"in_{bet.set}")[at]
            if bet.drafted == drafted and not np.isnan(p):
                wealth[bet] = wealth[bet] * np.exp(log_factors(np.array([p]), np.array([hit]))[0])
        families = {f.value: float(np.mean([wealth[bet].mean() for bet in BETS if bet.family is f])) for f in Family}
        steps.append({**families, "overall": float(np.mean(list(families.values())))})
    return steps


def test_equals_the_definition() -> None:
    tokens = Tokens.concatenate([walked(rng(1), 60, lenient=0.3), plain(rng(2), 20), walked(rng(3), 60)])
    steps = by_hand(tokens)
    evidence = after(tokens, alpha=0.05)
    assert evidence.path.tokens == tuple(range(len(tokens) + 1))
    assert evidence.path.overall[0] == 0
    assert evidence.path.overall[1:] == pytest.approx([log10(step["overall"]) for step in steps])
    for family in evidence.families:
        values = [log10(step[family.family.value]) for step in steps]
        assert evidence.path.families[family.family][1:] == pytest.approx(values)
        assert family.log10_e == pytest.approx(values[-1])
        assert family.log10_max == pytest.approx(max(0, *values))
    overall = [step["overall"] for step in steps]
    assert evidence.log10_e == pytest.approx(log10(overall[-1]))
    assert evidence.log10_max == pytest.approx(log10(max(overall)))
    assert evidence.max_at == 1 + int(np.argmax(overall))
    assert evidence.crossed_at == 1 + next(at for at, value in enumerate(overall) if value >= 20)


def test_what_became_of_a_draft_does_not_choose_the_bet() -> None:
    tokens = walked(rng(), 200)
    swapped = tokens.kind.copy()
    swapped[tokens.kind == Kind.ACCEPTED], swapped[tokens.kind == Kind.RESIDUAL] = Kind.RESIDUAL, Kind.ACCEPTED
    first, second = after(tokens), after(replace(tokens, kind=swapped))
    assert (first.families, first.places) == (second.families, second.places)


def test_a_crossing_is_kept_when_the_wealth_falls_again() -> None:
    martingale, generator = Martingale(1e-3), rng(2)
    martingale.add(sampled(generator, np.full(700, 0.4), bias=0.1))
    assert martingale.crossed
    crossed = martingale.evidence(0.01)
    martingale.add(sampled(generator, np.full(3000, 0.4), bias=-0.03))
    fallen = martingale.evidence(0.01)
    assert fallen.log10_e < 0 < 3 < crossed.log10_max <= fallen.log10_max
    assert fallen.crossed_at == crossed.crossed_at
    assert (fallen.crossed_at or 0) < fallen.max_at < 1000


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0])
def test_alpha_is_a_probability(alpha: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Martingale(alpha)


# -- false alarms, and biases found ----------------------------------------------------------------------------


def test_a_lossless_engine_is_seldom_accused_however_often_one_looks() -> None:
    runs = 400
    highest = []
    for seed in range(runs):
        highest.append(after(walked(rng(seed), 400)).log10_max)
    for alpha in (0.5, 0.2, 0.05, 0.01):
        # Ville's bound holds for the probability; of 400 runs, chance alone exceeds this number once in 10,000.
        assert sum(value >= log10(1 / alpha) for value in highest) <= binom.ppf(0.9999, runs, alpha)
    assert sum(value >= 0.1 for value in highest) > runs / 20  # bets are placed: wealth does rise now and then


@pytest.mark.parametrize("low", [0.3, 0.5])
def test_a_bias_of_one_percent_is_found_within_100_000_drafted_tokens(low: float) -> None:
    crossed = []
    for seed in range(20):
        generator = rng(seed)
        crossed.append(after(sampled(generator, generator.uniform(low, 0.5, 100_000), bias=0.01)).crossed_at)
    assert sum(at is None for at in crossed) <= 2  # about 0.97 is the truth at p = 0.5
    assert np.median([at or 100_001 for at in crossed]) < 70_000


@pytest.mark.parametrize(
    ("lossy", "family", "set_", "place"),
    [
        ({"lenient": 0.03}, Family.ACCEPTED, "draft", "draft 1"),
        ({"greedy_bonus": True}, Family.BONUS, "top", "bonus"),
        ({"raw_after": 2}, Family.RESIDUAL, "processed", "draft 2"),
    ],
)
def test_each_mistake_shows_where_it_is_made(lossy: dict[str, float], family: Family, set_: str, place: str) -> None:
    evidence = after(walked(rng(), 4000, **lossy))  # type: ignore[arg-type]
    assert evidence.crossed_at is not None
    assert (evidence.worst[0].family, evidence.worst[0].set, evidence.worst[0].place) == (family, set_, place)
    assert evidence.worst[0].log10_e > 3
    assert [p.log10_e for p in evidence.worst] == sorted((p.log10_e for p in evidence.worst), reverse=True)
    assert max(evidence.families, key=lambda f: f.log10_max).family is family


def test_too_strict_an_acceptance_is_found_as_well() -> None:
    evidence = after(sampled(rng(), np.full(30_000, 0.4), bias=-0.02))
    assert evidence.crossed_at is not None
    assert evidence.worst[0].z < -4


# -- extremes --------------------------------------------------------------------------------------------------


def test_an_impossible_token_is_evidence_without_end() -> None:
    p, hits = np.full(2000, 0.5), rng().random(2000) < 0.5
    p[1234], hits[1234] = 0.0, True
    evidence = after(bets(p, hits), sampled(rng(), np.full(2000, 0.5)), alpha=1e-6)
    assert evidence.crossed_at == 1235
    assert evidence.impossible == 1
    assert 300 < evidence.log10_e < 310
    assert evidence.worst[0].log10_e > 300
    assert evidence.families[0].log10_max > 300
    assert json.loads(json.dumps(Martingale(0.1).state()))  # nothing that JSON cannot say


def test_certain_tokens_say_nothing() -> None:
    zeros, ones = np.zeros(500), np.ones(500)
    evidence = after(bets(zeros, zeros > 0), bets(ones, ones > 0))
    assert evidence.crossed_at is None
    assert evidence.log10_max == 0
    assert evidence.impossible == 0
    assert evidence.places[0].z == 0
    assert np.isfinite(evidence.path.overall).all()


def test_a_probability_that_rounding_took_past_1_is_1() -> None:
    evidence = after(bets(np.full(500, 1 + 1e-7), np.ones(500, np.bool_)))
    assert evidence.log10_max == 0


def test_nothing_at_all() -> None:
    evidence = after()
    assert (evidence.tokens, evidence.drafted, evidence.log10_e, evidence.crossed_at) == (0, 0, 0.0, None)
    assert evidence.path.tokens == (0,)
    assert (evidence.places, evidence.acceptance_length, evidence.acceptance_per_position) == ((), 0.0, ())
    assert after(walked(rng(), 0)).tokens == 0


# -- counts ----------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_tokens() -> None:
    tokens = Tokens.concatenate([walked(rng(), 500, k=3), plain(rng(), 100)])
    evidence = after(tokens)
    assert evidence.tokens == len(tokens)
    assert evidence.kinds == {kind.name.lower(): int((tokens.kind == kind).sum()) for kind in Kind}
    assert evidence.passes == 600
    assert evidence.acceptance_length == pytest.approx(len(tokens) / 600)
    accepted = [((tokens.kind == Kind.ACCEPTED) & (tokens.draft_position == i)).sum() / 500 for i in (1, 2, 3)]
    assert evidence.acceptance_per_position == pytest.approx(accepted)
    drafted = tokens.draft_position > 0
    assert evidence.drafted == drafted.sum()
    assert [family.tokens for family in evidence.families] == [drafted.sum(), drafted.sum(), (~drafted).sum()]


def test_places_sum_up_their_tokens() -> None:
    tokens = Tokens.concatenate([walked(rng(), 500, k=3), plain(rng(), 100)])
    places = {(p.family, p.set, p.place): p for p in after(tokens).places}
    assert [place for family, set_, place in places if set_ == "draft"] == ["draft 1", "draft 2", "draft 3"]
    assert [place for family, set_, place in places if set_ == "top"] == ["bonus", "plain"]
    at = tokens.draft_position == 2
    p, hits = tokens.p_draft[at], tokens.in_draft[at]
    place = places[Family.ACCEPTED, "draft", "draft 2"]
    assert (place.tokens, place.observed, place.draft_position) == (at.sum(), hits.sum(), 2)
    assert place.expected == pytest.approx(p.sum())
    assert place.deviation == pytest.approx((p * (1 - p)).sum() ** 0.5)
    assert place.z == pytest.approx((hits.sum() - p.sum()) / (p * (1 - p)).sum() ** 0.5)
    assert place.log10_e == pytest.approx(log10(np.exp(log_factors(p, hits).sum(axis=0)).mean()))


# -- long runs, and resumed ones -------------------------------------------------------------------------------


def test_the_path_stays_small_and_even() -> None:
    evidence = after(sampled(rng(), np.full(50_000, 0.5)), sampled(rng(), np.full(1, 0.5)))
    gaps = np.diff(evidence.path.tokens)
    assert MOST_POINTS / 2 < len(gaps) <= MOST_POINTS
    assert set(gaps[:-1]) == {32}
    assert evidence.path.tokens[-1] == evidence.tokens == 50_001
    assert evidence.path.overall[-1] == evidence.log10_e
    assert all(len(values) == len(gaps) + 1 for values in evidence.path.families.values())


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=4), st.integers(0, 2**31))
def test_resumed_from_a_saved_state_it_goes_on_to_the_last_bit(cuts: list[int], seed: int) -> None:
    parts = [walked(rng(seed), 150, lenient=0.02), plain(rng(seed), 20), walked(rng(seed + 1), 150)]
    tokens = Tokens.concatenate(parts)
    whole = Martingale(0.01)
    whole.add(tokens)
    resumed = Martingale(0.01)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in pairwise(bounds):
        resumed = Martingale.from_state(json.loads(json.dumps(resumed.state(), allow_nan=False)))
        resumed.add(Tokens(**{name: getattr(tokens, name)[start:end] for name in Tokens.__slots__}))
    assert resumed.state() == whole.state()
    assert resumed.evidence(0.01) == whole.evidence(0.01)


def test_long_parts_and_impossible_tokens_resume_as_well() -> None:
    p, hits = np.full(40_000, 0.3), rng().random(40_000) < 0.3
    p[20_000], hits[20_000] = 0.0, True
    whole, resumed = Martingale(0.01), Martingale(0.01)
    whole.add(bets(p, hits))
    for part in np.array_split(np.arange(len(p)), [9, 17_000, 30_001]):
        resumed.add(bets(p[part], hits[part]))
        resumed = Martingale.from_state(json.loads(json.dumps(resumed.state(), allow_nan=False)))
    assert resumed.state() == whole.state()


def test_running_sums_do_not_depend_on_where_they_are_cut() -> None:
    values = rng().normal(size=(1000, 3))
    start = rng().normal(size=3)
    whole = running_sums(start, values)
    first = running_sums(start, values[:333])
    assert (np.concatenate([first, running_sums(first[-1], values[333:])]) == whole).all()
    assert whole[-1] == pytest.approx(start + values.sum(axis=0))
