"""Exact laws: what a way of decoding emits, each outcome with its probability as a fraction.

A `Way` is everything that decides about the output: the two models, how many tokens are drafted, what the verifier is told,
its rule, and which draws share a uniform number. The right ways and the mutants all go through `distance`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from vllm_specplugin.scorers.exact import Chance, Distribution, Rule, outcomes

VOCAB = 3
DRAFT = 3
"""The use of drafting's own draws, beside the verifier's (`base.Use`)."""

Prefix = tuple[int, ...]
Model = Callable[[Prefix], Distribution]
Law = dict[Prefix, Fraction]
Key = Callable[[int, int], str | None]
"""(use, position in the pass) -> the name of a number that belongs to the absolute position; None: a fresh number."""
Known = dict[tuple[str, int], tuple[Fraction, Fraction]]
"""(name, absolute position) -> the interval in which the number is known to lie."""


def table(weights: Sequence[Sequence[int]], shift: int = 0) -> Model:
    """A model whose next-token law is one of the given ones, by the prefix."""
    laws = [tuple(Fraction(weight, sum(row)) for weight in row) for row in weights]

    def model(prefix: Prefix) -> Distribution:
        return laws[(shift + 7 * len(prefix) + sum((place + 1) * token for place, token in enumerate(prefix))) % len(laws)]

    return model


def greedy(model: Model) -> Model:
    """All mass on the likeliest token, the first of several."""

    def one_hot(prefix: Prefix) -> Distribution:
        law = model(prefix)
        best = max(range(len(law)), key=lambda token: (law[token], -token))
        return tuple(Fraction(token == best) for token in range(len(law)))

    return one_hot


def fresh(use: int, position: int) -> None:
    """Every draw has a number of its own."""
    return None


def always(known: Prefix, drafts: Prefix, q: Model) -> bool:
    """Draft as many tokens as allowed."""
    return True


def honest_rows(target: Model, known: Prefix, drafts: Prefix) -> list[Distribution]:
    """The target's law before each draft and after the last one."""
    return [target(known + drafts[:row]) for row in range(len(drafts) + 1)]


def untrimmed(drafts: Prefix, q: Model, known: Prefix) -> Prefix:
    return drafts


@dataclass(frozen=True)
class Way:
    """A way of decoding."""

    target: Model
    """What the output must follow."""
    drafter: Model
    """What drafts are really drawn from."""
    rule: Rule
    k: int = 2
    more: Callable[[Prefix, Prefix, Model], bool] = always
    """Whether to draft one more token after (known, drafts so far)."""
    trim: Callable[[Prefix, Model, Prefix], Prefix] = untrimmed
    """What is left of the drafts before they are verified."""
    rows: Callable[[Model, Prefix, Prefix], list[Distribution]] = honest_rows
    """What the verifier gets as the target's rows."""
    claimed: Model | None = None
    """What the verifier is told that drafts are drawn from, where that is not the drafter."""
    one_hot: bool = False
    """The verifier is told nothing: the drafts pass for chosen deterministically."""
    key: Key = fresh

    def one_pass(self, known: Prefix, chance: Chance) -> Prefix:
        """The tokens that one pass emits."""
        drafts: Prefix = ()
        while len(drafts) < self.k and self.more(known, drafts, self.drafter):
            drafts += (chance.one_of(self.drafter(known + drafts), DRAFT, len(drafts)),)
        drafts = self.trim(drafts, self.drafter, known)
        p = self.rows(self.target, known, drafts)
        told = self.claimed or self.drafter
        q = None if self.one_hot else [told(known + drafts[:row]) for row in range(len(drafts))]
        return tuple(self.rule(p, q, drafts, chance))


class Streams:
    """A chance that reads uniform numbers by name, some of which other draws or passes have read before.

    Something of probability p happens when its number lies below p; one of several is found by inverting the cumulative
    sum. Of a number that was read only the interval is known in which it must lie.
    """

    def __init__(self, chance: Chance, key: Key, offset: int, known: Known) -> None:
        self.chance = chance
        self.key = key
        self.offset = offset
        self.known = dict(known)

    def happens(self, probability: Fraction, use: int, position: int) -> bool:
        return self._read([probability, 1 - probability], use, position) == 0

    def one_of(self, weights: Distribution, use: int, position: int) -> int:
        total = sum(weights)
        return self._read([Fraction(weight) / total for weight in weights], use, position)

    def _read(self, pieces: Sequence[Fraction], use: int, position: int) -> int:
        name = self.key(use, position)
        if name is None:
            return self.chance.one_of(pieces, use, position)
        place = (name, self.offset + position)
        low, high = self.known.get(place, (Fraction(0), Fraction(1)))
        ends = [Fraction(0)]
        for piece in pieces:
            ends.append(ends[-1] + piece)
        parts = [(max(low, start), min(high, end)) for start, end in pairwise(ends)]
        chosen = self.chance.one_of([max(end - start, Fraction(0)) for start, end in parts], use, position)
        self.known[place] = parts[chosen]
        return chosen


def law(way: Way, tokens: int, passes: int | None = None, prompt: Prefix = ()) -> Law:
    """The law of the first `tokens` tokens after the prompt; after so many passes the target itself goes on."""
    total: Law = defaultdict(Fraction)
    # By tokens emitted: every pass emits at least one, so that whoever arrives at a length has arrived before it is left.
    waiting: list[dict[tuple[Prefix, int, frozenset], Fraction]] = [defaultdict(Fraction) for _ in range(tokens)]
    waiting[0][(), 0, frozenset()] = Fraction(1)
    for length in range(tokens):
        for (emitted, done, memory), weight in waiting[length].items():
            if done == passes:
                for word, probability in extended(way.target, {emitted: weight}, tokens, prompt).items():
                    total[word] += probability
                continue
            # How many passes were done matters only where they are counted.
            count = done if passes is None else done + 1
            for (more, left), probability in after_one_pass(way, prompt + emitted, dict(memory)).items():
                word = emitted + more
                if len(word) < tokens:
                    waiting[len(word)][word, count, left] += weight * probability
                else:
                    total[word[:tokens]] += weight * probability
    return total


def after_one_pass(way: Way, known: Prefix, memory: Known) -> dict[tuple[Prefix, frozenset], Fraction]:
    """What a pass emits and what is known of later passes' numbers after it."""
    result: dict[tuple[Prefix, frozenset], Fraction] = defaultdict(Fraction)

    def run(chance: Chance) -> tuple[Prefix, frozenset]:
        if way.key is fresh:
            return way.one_pass(known, chance), frozenset()
        streams = Streams(chance, way.key, len(known), memory)
        emitted = way.one_pass(known, streams)
        later = {place: interval for place, interval in streams.known.items() if place[1] >= len(known) + len(emitted)}
        return emitted, frozenset(later.items())

    for outcome, probability in outcomes(run):
        result[outcome] += probability
    return result


def extended(target: Model, law_: Law, length: int, prompt: Prefix = ()) -> Law:
    """Every output continued by the target to a common length."""
    result: Law = defaultdict(Fraction)
    for output, probability in law_.items():
        if len(output) >= length:
            result[output[:length]] += probability
            continue
        longer = {(*output, token): probability * chance for token, chance in enumerate(target(prompt + output)) if chance}
        for word, more in extended(target, longer, length, prompt).items():
            result[word] += more
    return result


def total_variation(ours: Law, true: Law) -> Fraction:
    assert sum(ours.values()) == sum(true.values()) == 1
    return sum((abs(ours.get(word, Fraction(0)) - true.get(word, Fraction(0))) for word in {*ours, *true}), Fraction(0)) / 2


def distance(way: Way, tokens: int, passes: int | None = None, prompt: Prefix = ()) -> Fraction:
    """Total variation between what the way emits and what the target alone would; 0 means lossless."""
    true = extended(way.target, {(): Fraction(1)}, tokens, prompt)
    return total_variation(law(way, tokens, passes, prompt), true)
