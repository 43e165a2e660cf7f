"""The verifiers' rules over any kind of number, each choice asked of one abstract chance.

With fractions, and a chance that takes every branch in turn, the law of a rule's output comes out exactly; with floats, and
a chance that reads uniform numbers, each rule is the reference of the tensor code beside it. Written for reading, not speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Protocol, TypeVar

from vllm_specplugin.scorers.typical import DELTA, EPSILON
from vllm_specplugin.types import Use

Number = Any
"""`Fraction` or `float`."""
Distribution = Sequence[Number]
"""`[vocab]`"""
T = TypeVar("T")


class Chance(Protocol):
    """Where a rule's choices come from."""

    def happens(self, probability: Number, use: int, position: int) -> bool:
        """Whether something of this probability happens."""
        ...

    def one_of(self, weights: Distribution, use: int, position: int) -> int:
        """One index, drawn in proportion to the weights."""
        ...


Rule = Callable[[Sequence[Distribution], "Sequence[Distribution] | None", Sequence[int], Chance], list[int]]
"""(p `[k + 1][vocab]`, q `[k][vocab]` or None for one-hot, drafts `[k]`, chance) -> the tokens emitted."""


def walk(p: Sequence[Distribution], q: Sequence[Distribution] | None, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Sample-and-walk; see `scorers/one_hot.py`."""
    emitted = []
    for position in range(len(drafts) + 1):
        emitted.append(chance.one_of(p[position], Use.BONUS, position))
        if position == len(drafts) or emitted[-1] != drafts[position]:
            break
    return emitted


def token(p: Sequence[Distribution], q: Sequence[Distribution] | None, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Rejection sampling draft by draft; see `scorers/token.py`."""
    for position, draft in enumerate(drafts):
        drawn_from = one_hot(draft, len(p[position])) if q is None else q[position]
        if not chance.happens(_ratio(p[position][draft], drawn_from[draft]), Use.ACCEPT, position):
            return [*drafts[:position], chance.one_of(residual(p[position], drawn_from), Use.RESIDUAL, position)]
    return [*drafts, chance.one_of(p[len(drafts)], Use.BONUS, len(drafts))]


def block(p: Sequence[Distribution], q: Sequence[Distribution] | None, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Block verification; see `scorers/block.py`."""
    k = len(drafts)
    drawn_from = [one_hot(draft, len(p[0])) for draft in drafts] if q is None else q
    reached: list[Number] = [1]  # r_0, r_1, ...
    for position, draft in enumerate(drafts):
        ratio = p[position][draft] / drawn_from[position][draft]
        reached.append(min(1, reached[-1] * ratio))
    accepted = 0
    for count in range(1, k + 1):
        stands = reached[count]
        if count < k:
            mass = sum(residual(p[count], drawn_from[count], reached[count]))
            below = mass + 1 - reached[count]
            stands = mass / below if below > 0 else 1
        if chance.happens(stands, Use.ACCEPT, count - 1):
            accepted = count
    if accepted == k:
        return [*drafts, chance.one_of(p[k], Use.BONUS, k)]
    left = residual(p[accepted], drawn_from[accepted], reached[accepted])
    return [*drafts[:accepted], chance.one_of(left, Use.RESIDUAL, accepted)]


def typical(p: Sequence[Distribution], q: Sequence[Distribution] | None, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Medusa's typical acceptance; see `scorers/typical.py`. Lossy."""
    for position, draft in enumerate(drafts):
        entropy = -sum(float(weight) * math.log(weight) for weight in p[position] if weight > 0)
        if not p[position][draft] > min(EPSILON, DELTA * math.exp(-entropy)):
            return [*drafts[:position], chance.one_of(p[position], Use.RESIDUAL, position)]
    return [*drafts, chance.one_of(p[len(drafts)], Use.BONUS, len(drafts))]


def one_hot(token_id: int, vocab: int) -> Distribution:
    """All mass on one token."""
    return [1 if other == token_id else 0 for other in range(vocab)]


def residual(p: Distribution, q: Distribution, scale: Number = 1) -> Distribution:
    """[scale p - q]+, not normalised."""
    return [max(scale * target - drawn, 0) for target, drawn in zip(p, q, strict=True)]


def _ratio(p: Number, q: Number) -> Number:
    return 1 if p >= q else p / q


class _Branch:
    """A chance that follows a given path of choices, and beyond its end notes the alternatives."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path = path
        self.taken: list[int] = []
        self.probability = Fraction(1)
        self.others: list[tuple[int, ...]] = []

    def happens(self, probability: Number, use: int, position: int) -> bool:
        return self.one_of([1 - probability, probability], use, position) == 1

    def one_of(self, weights: Distribution, use: int, position: int) -> int:
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.path):
            chosen = self.path[len(self.taken)]
        else:
            chosen = possible[0]
            self.others += [(*self.taken, other) for other in possible[1:]]
        self.taken.append(chosen)
        self.probability *= Fraction(weights[chosen]) / Fraction(sum(weights))
        return chosen


def outcomes(run: Callable[[Chance], T]) -> Iterator[tuple[T, Fraction]]:
    """Every outcome of a random computation with its exact probability; `run` is repeated once per outcome."""
    paths: list[tuple[int, ...]] = [()]
    while paths:
        branch = _Branch(paths.pop())
        result = run(branch)
        paths += branch.others
        yield result, branch.probability


class FromUniforms:
    """A chance that reads one row of a verifier's uniforms, `[k + 1][3]`, as the tensor code does."""

    def __init__(self, uniforms: Sequence[Sequence[float]]) -> None:
        self.uniforms = uniforms

    def happens(self, probability: Number, use: int, position: int) -> bool:
        return self.uniforms[position][use] < probability

    def one_of(self, weights: Distribution, use: int, position: int) -> int:
        target = self.uniforms[position][use] * math.fsum(weights)
        reached = 0.0
        for index, weight in enumerate(weights):
            reached += weight
            if reached > target:
                return index
        return max(index for index, weight in enumerate(weights) if weight > 0)
