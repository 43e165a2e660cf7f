"""Rules and ways of driving them that look right and are not: each was, or could be, a real bug of some engine.

`PAIRS` holds for each mutant the right way that it was made from; `test_mutants.py` puts both through the same harness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from tests.quality.cases import CASES, ONE_HOT, SOFT, stop_after_low_confidence
from tests.quality.laws import DRAFT, Model, Prefix, Way, honest_rows
from vllm_specplugin.scorers import exact
from vllm_specplugin.scorers.base import Use
from vllm_specplugin.scorers.exact import Chance, Distribution, Rule, one_hot, residual

Drawn = Sequence[Distribution] | None

# -- rules ---------------------------------------------------------------------------------------------------


def token_with(
    left: Callable[[Distribution, Distribution], Distribution] = residual,
    ratio: Callable[[Any, Any], Any] = lambda p, q: min(1, p / q),
    bonus: Callable[[Distribution], Distribution] = lambda p: p,
) -> Rule:
    """The token rule with some part exchanged."""

    def rule(p: Sequence[Distribution], q: Drawn, drafts: Sequence[int], chance: Chance) -> list[int]:
        drawn_from = [one_hot(draft, len(p[0])) for draft in drafts] if q is None else q
        for place, draft in enumerate(drafts):
            if not chance.happens(ratio(p[place][draft], drawn_from[place][draft]), Use.ACCEPT, place):
                weights = left(p[place], drawn_from[place])
                weights = weights if sum(weights) > 0 else p[place]
                return [*drafts[:place], chance.one_of(weights, Use.RESIDUAL, place)]
        return [*drafts, chance.one_of(bonus(p[len(drafts)]), Use.BONUS, len(drafts))]

    return rule


def block_with(
    cut: bool = True, chain: bool = True, scale: bool = True, first_failure_ends_it: bool = False, mass: bool = True
) -> Rule:
    """Block verification with some part left out; with all of them it is `exact.block`."""

    def rule(p: Sequence[Distribution], q: Drawn, drafts: Sequence[int], chance: Chance) -> list[int]:
        k = len(drafts)
        drawn_from = [one_hot(draft, len(p[0])) for draft in drafts] if q is None else q
        reached: list[Any] = [Fraction(1)]
        for place, draft in enumerate(drafts):
            r = (reached[-1] if chain else 1) * Fraction(p[place][draft]) / drawn_from[place][draft]
            reached.append(min(Fraction(1), r) if cut else r)
        accepted = 0
        for count in range(1, k + 1):
            h = min(Fraction(1), reached[count])
            if count < k and mass:
                left = sum(residual(p[count], drawn_from[count], reached[count]))
                below = left + 1 - reached[count]
                h = min(Fraction(1), left / below) if below > 0 else Fraction(1)
            if chance.happens(h, Use.ACCEPT, count - 1):
                accepted = count
            elif first_failure_ends_it:
                break
        if accepted == k:
            return [*drafts, chance.one_of(p[k], Use.BONUS, k)]
        weights = residual(p[accepted], drawn_from[accepted], reached[accepted] if scale else 1)
        weights = weights if sum(weights) > 0 else p[accepted]
        return [*drafts[:accepted], chance.one_of(weights, Use.RESIDUAL, accepted)]

    return rule


def accepts_everything(p: Sequence[Distribution], q: Drawn, drafts: Sequence[int], chance: Chance) -> list[int]:
    return [*drafts, chance.one_of(p[len(drafts)], Use.BONUS, len(drafts))]


def walk_keeps_going(p: Sequence[Distribution], q: Drawn, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Emits the samples of all rows, although those after a refusal saw the wrong prefix."""
    return [chance.one_of(row, Use.BONUS, place) for place, row in enumerate(p)]


def walk_drops_the_sample(p: Sequence[Distribution], q: Drawn, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Emits only accepted drafts where there are any; the refused position is drawn anew, tilted towards the draft."""
    emitted = exact.walk(p, q, drafts, chance)
    return emitted if len(emitted) in (1, len(p)) else emitted[:-1]


def residual_not_cut_at_zero(p: Distribution, q: Distribution) -> Distribution:
    return [abs(target - drawn) for target, drawn in zip(p, q, strict=True)]


def the_target_itself(p: Distribution, q: Distribution) -> Distribution:
    return p


def the_whole_excess_of_q(p: Distribution, q: Distribution) -> Distribution:
    return residual(q, p)


def argmax(p: Distribution) -> Distribution:
    return one_hot(max(range(len(p)), key=lambda token: p[token]), len(p))


# -- what the request asked for ------------------------------------------------------------------------------


def sharpened(p: Distribution) -> Distribution:
    """Temperature 1/2, exactly: squares."""
    total = sum(weight * weight for weight in p)
    return tuple(Fraction(weight) * weight / total for weight in p)


def top_2(p: Distribution) -> Distribution:
    kept = sorted(range(len(p)), key=lambda token: (-p[token], token))[:2]
    total = sum(p[token] for token in kept)
    return tuple(Fraction(p[token]) / total if token in kept else Fraction(0) for token in range(len(p)))


@dataclass(frozen=True)
class Through:
    """A model after what the request asked for, or a drafter after its own truncation."""

    model: Model
    change: Callable[[Distribution], Distribution]

    def __call__(self, prefix: Prefix) -> Distribution:
        return self.change(self.model(prefix))


def raw_rows(which: Callable[[int, int], bool], raw: Model) -> Callable[[Model, Prefix, Prefix], list[Distribution]]:
    """The rows of which the request's parameters were forgotten: `which(row, last row)`."""

    def rows(target: Model, known: Prefix, drafts: Prefix) -> list[Distribution]:
        honest = honest_rows(target, known, drafts)
        return [raw(known + drafts[:row]) if which(row, len(drafts)) else law for row, law in enumerate(honest)]

    return rows


def temperature_after_acceptance(p: Sequence[Distribution], q: Drawn, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Gets rows without temperature, accepts by them, and applies it to what it draws."""
    assert q is not None
    for place, draft in enumerate(drafts):
        if not chance.happens(min(1, p[place][draft] / q[place][draft]), Use.ACCEPT, place):
            weights = residual(sharpened(p[place]), q[place])
            weights = weights if sum(weights) > 0 else sharpened(p[place])
            return [*drafts[:place], chance.one_of(weights, Use.RESIDUAL, place)]
    return [*drafts, chance.one_of(sharpened(p[-1]), Use.BONUS, len(drafts))]


# -- rows, lengths, noise ------------------------------------------------------------------------------------


def rows_from(offset: int) -> Callable[[Model, Prefix, Prefix], list[Distribution]]:
    """Rows off by one: each draft is judged by another position's row."""

    def rows(target: Model, known: Prefix, drafts: Prefix) -> list[Distribution]:
        honest = honest_rows(target, known, drafts)
        return [honest[min(max(row + offset, 0), len(drafts))] for row in range(len(drafts) + 1)]

    return rows


def drop_low_confidence(drafts: Prefix, q: Model, known: Prefix) -> Prefix:
    """Peeks: a doubted draft is dropped itself, with all that follow."""
    for place, draft in enumerate(drafts):
        if q(known + drafts[:place])[draft] < Fraction(1, 2):
            return drafts[:place]
    return drafts


def drop_what_was_just_said(drafts: Prefix, q: Model, known: Prefix) -> Prefix:
    """Peeks: no repetitions are verified."""
    for place, draft in enumerate(drafts):
        if (known + drafts[:place])[-1:] == (draft,):
            return drafts[:place]
    return drafts


def sharing(*uses: int) -> Callable[[int, int], str | None]:
    """One number per position for all of these uses, in this pass and in every later one."""
    return lambda use, position: "shared" if use in uses else None


def all_by_position(use: int, position: int) -> str:
    """Numbers by (use, position): apart within a pass, and met again by the next one."""
    return str(use)


# -- the family ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A mutant, the right way beside it, and the cases that are to tell them apart."""

    mutate: Callable[[Way], Way]
    rule: Rule
    cases: Sequence[str] = tuple(SOFT)
    right: Callable[[Way], Way] = lambda way: way
    k: int = 2

    def ways(self) -> dict[str, tuple[Way, Way]]:
        """case -> (right, mutant)"""
        made = {}
        for case in self.cases:
            target, drafter = CASES[case]
            right = self.right(Way(target, drafter, self.rule, self.k))
            made[case] = right, self.mutate(right)
        return made


def a_rule(rule: Rule) -> Callable[[Way], Way]:
    return lambda way: replace(way, rule=rule)


def with_temperature(way: Way) -> Way:
    return replace(way, target=Through(way.target, sharpened))


def without_temperature(which: Callable[[int, int], bool]) -> Callable[[Way], Way]:
    """Some rows reach the verifier as the model made them."""

    def mutate(way: Way) -> Way:
        assert isinstance(way.target, Through)
        return replace(way, rows=raw_rows(which, way.target.model))

    return mutate


def with_top_k(way: Way) -> Way:
    return replace(way, drafter=Through(way.drafter, top_2))


def told_the_full_q(way: Way) -> Way:
    assert isinstance(way.drafter, Through)
    return replace(way, claimed=way.drafter.model)


def told_the_softmax(way: Way) -> Way:
    """A greedy draft, judged with q = 1 and replaced by the residual of the softmax that it is the maximum of."""
    rule = token_with(ratio=lambda p, q: p, left=residual)
    return replace(way, rule=rule, claimed=CASES["soft"][1])


def told_the_last_q(way: Way) -> Way:
    return replace(way, claimed=lambda prefix: way.drafter(prefix[:-1]))


def a_key(key: Callable[[int, int], str | None]) -> Callable[[Way], Way]:
    return lambda way: replace(way, key=key)


token, block, walk = exact.token, exact.block, exact.walk

PAIRS: dict[str, Pair] = {
    # the rule
    "no_residual": Pair(a_rule(token_with(left=the_target_itself)), token),
    "residual_without_zeroing": Pair(a_rule(token_with(left=the_target_itself)), token, ONE_HOT),
    "residual_not_cut_at_zero": Pair(a_rule(token_with(left=residual_not_cut_at_zero)), token),
    "residual_the_wrong_way_round": Pair(a_rule(token_with(left=the_whole_excess_of_q)), token),
    "q_is_one_for_one_hot": Pair(told_the_softmax, token, ["one_hot_drafter"]),
    "accepts_by_p_alone": Pair(a_rule(token_with(ratio=lambda p, q: p)), token),
    "accepts_everything": Pair(a_rule(accepts_everything), walk, tuple(CASES)),
    "greedy_bonus": Pair(a_rule(token_with(bonus=argmax)), token),
    "walk_keeps_going": Pair(a_rule(walk_keeps_going), walk, tuple(CASES)),
    "walk_drops_the_sample": Pair(a_rule(walk_drops_the_sample), walk, tuple(CASES)),
    "typical": Pair(a_rule(exact.typical), walk, tuple(CASES)),
    # block verification
    "block_stops_at_first_failure_with_block_residual": Pair(a_rule(block_with(first_failure_ends_it=True)), block),
    "block_ratio_not_cut_at_one": Pair(a_rule(block_with(cut=False)), block),
    "block_ratio_not_chained": Pair(a_rule(block_with(chain=False)), block),
    "block_residual_without_scale": Pair(a_rule(block_with(scale=False)), block),
    "block_accepts_by_the_ratio": Pair(a_rule(block_with(mass=False)), block),
    # what the request asked for
    "bonus_from_unprocessed_logits": Pair(without_temperature(lambda row, last: row == last), token, right=with_temperature),
    "parameters_at_the_bonus_only": Pair(without_temperature(lambda row, last: row < last), token, right=with_temperature),
    "accept_before_temperature": Pair(
        lambda way: replace(without_temperature(lambda row, last: True)(way), rule=temperature_after_acceptance),
        token,
        right=with_temperature,
    ),
    # what drafts were drawn from
    "wrong_q_after_top_k": Pair(told_the_full_q, token, right=with_top_k),
    "wrong_q_after_top_k_block": Pair(told_the_full_q, block, right=with_top_k),
    "q_of_the_previous_step": Pair(told_the_last_q, token, ["soft", "decided_drafter"]),
    # which row, how many
    "off_by_one_row": Pair(lambda way: replace(way, rows=rows_from(1)), token, tuple(CASES)),
    "off_by_one_row_back": Pair(lambda way: replace(way, rows=rows_from(-1)), token, tuple(CASES)),
    "off_by_one_row_walk": Pair(lambda way: replace(way, rows=rows_from(1)), walk, tuple(CASES)),
    "peeking_length_control": Pair(
        lambda way: replace(way, trim=drop_low_confidence),
        token,
        right=lambda way: replace(way, more=stop_after_low_confidence),
    ),
    "peeking_for_repetitions": Pair(lambda way: replace(way, trim=drop_what_was_just_said), block),
    # noise
    "shared_noise": Pair(a_key(sharing(DRAFT, Use.ACCEPT)), token),
    "shared_noise_accept_and_residual": Pair(a_key(sharing(Use.ACCEPT, Use.RESIDUAL)), token),
    "shared_noise_draft_and_residual": Pair(a_key(sharing(DRAFT, Use.RESIDUAL)), token),
    "block_noise_keyed_by_position": Pair(a_key(sharing(Use.ACCEPT)), block, tuple(CASES)),
    "draft_noise_keyed_by_position_under_block": Pair(a_key(sharing(DRAFT)), block),
}

HARMLESS: dict[str, Pair] = {
    "token_noise_keyed_by_position": Pair(a_key(all_by_position), token),
    "walk_noise_keyed_by_position": Pair(a_key(all_by_position), walk),
    # A walk emits what the target drew, whatever the draft was: drafters may even share that number (arXiv 2408.07978).
    "walk_shares_noise_with_the_drafter": Pair(a_key(sharing(DRAFT, Use.BONUS)), walk, ["soft", "zeros", "ties"]),
    "token_in_the_place_of_block": Pair(a_rule(token_with()), block, tuple(CASES)),
    "block_rebuilt_from_its_parts": Pair(a_rule(block_with()), block, tuple(CASES)),
}
"""Changes that do not tilt the law, and must pass: the harness does not kill whatever is different."""
