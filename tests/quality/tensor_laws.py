"""The exact law of what the *tensor code* emits.

A verifier's verdict changes only where a uniform number crosses a threshold. The exact rule says where the thresholds lie; the
tensor code is then run just above and just below each of them, and every verdict weighs as much as its interval is long.
Models whose probabilities float32 holds exactly leave no room but `RESOLUTION` for thresholds to lie elsewhere.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product

import torch

from tests.quality.laws import VOCAB, Law, Prefix, Way, extended, total_variation
from vllm_specplugin.scorers.base import Use, Verifier
from vllm_specplugin.scorers.exact import Chance, Distribution, Rule, outcomes

RESOLUTION = Fraction(1, 2**20)
"""How near to a threshold the tensor code is asked. float32 rounding is some 2^-23 of a number below 1."""

Cell = tuple[int, int]
"""(position, use): one uniform number of a pass."""


class Recording:
    """Passes choices on and notes which cells were read, and where their thresholds lie."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.read: dict[Cell, set[Fraction]] = {}

    def happens(self, probability: Fraction, use: int, position: int) -> bool:
        self.read[position, use] = {Fraction(probability)}
        return self.chance.happens(probability, use, position)

    def one_of(self, weights: Distribution, use: int, position: int) -> int:
        total, reached = sum(weights), Fraction(0)
        ends = self.read.setdefault((position, use), set())
        for weight in weights:
            reached += Fraction(weight) / total
            ends.add(reached)
        return self.chance.one_of(weights, use, position)


@dataclass
class Axis:
    """Cells that no outcome reads together, so that one number can stand for all of them."""

    cells: set[Cell]
    thresholds: set[Fraction]

    def points(self) -> Iterator[tuple[Fraction, Fraction]]:
        """(number, weight): two for each interval, just inside its ends."""
        ends = sorted({Fraction(0), Fraction(1), *self.thresholds})
        for start, end in pairwise(ends):
            assert end - start > 2 * RESOLUTION, "the thresholds of this case are too close for float32"
            yield start + RESOLUTION, (end - start) / 2
            yield end - RESOLUTION, (end - start) / 2


def axes_of(rule: Rule, p: Sequence[Distribution], q: Sequence[Distribution] | None, drafts: Prefix) -> list[Axis]:
    """The independent numbers that decide about a pass."""

    def run(chance: Chance) -> dict[Cell, set[Fraction]]:
        recording = Recording(chance)
        rule(p, q, drafts, recording)
        return recording.read

    together: list[set[Cell]] = []
    thresholds: dict[Cell, set[Fraction]] = defaultdict(set)
    for read, _ in outcomes(run):
        together.append(set(read))
        for cell, ends in read.items():
            thresholds[cell] |= ends
    axes: list[Axis] = []
    for cell in sorted(thresholds):
        for axis in axes:
            if not any(cell in read and axis.cells & read for read in together):
                axis.cells.add(cell)
                axis.thresholds |= thresholds[cell]
                break
        else:
            axes.append(Axis({cell}, set(thresholds[cell])))
    return axes


def drafts_of(way: Way) -> Iterator[tuple[Prefix, Fraction]]:
    """Every chain of drafts and its probability."""

    def run(chance: Chance) -> Prefix:
        drafts: Prefix = ()
        while len(drafts) < way.k and way.more((), drafts, way.drafter):
            drafts += (chance.one_of(way.drafter(drafts), 0, len(drafts)),)
        return drafts

    return outcomes(run)


def rows_of(way: Way, drafts: Prefix) -> tuple[list[Distribution], list[Distribution] | None]:
    """(p, q) as the verifier gets them."""
    p = way.rows(way.target, (), drafts)
    return p, None if way.one_hot else [way.drafter(drafts[:row]) for row in range(len(drafts))]


def tensor_law(verifier: Verifier, way: Way) -> Law:
    """The law of one pass of the tensor code, all chains of drafts and all of their intervals in one ragged batch."""
    k = way.k
    target_probs, draft_probs, draft_ids, lengths, uniforms, weights = [], [], [], [], [], []
    for drafts, probability in drafts_of(way):
        p, q = rows_of(way, drafts)
        axes = axes_of(way.rule, p, q, drafts)
        padded_p = padded(p, k + 1)
        padded_q = padded(q or [], k)
        for chosen in product(*(list(axis.points()) for axis in axes)):
            row = [[0.5] * len(Use) for _ in range(k + 1)]
            weight = probability
            for axis, (number, share) in zip(axes, chosen, strict=True):
                weight *= share
                for position, use in axis.cells:
                    row[position][use] = float(number)
            target_probs.append(padded_p)
            draft_probs.append(padded_q)
            draft_ids.append([*drafts, *[-7] * (k - len(drafts))])
            lengths.append(len(drafts))
            uniforms.append(row)
            weights.append(weight)
    verdict = verifier.verify(
        torch.tensor(target_probs),
        None if way.one_hot else torch.tensor(draft_probs),
        torch.tensor(draft_ids).view(len(lengths), k),
        torch.tensor(lengths),
        torch.tensor(uniforms, dtype=torch.float64),
    )
    result: Law = defaultdict(Fraction)
    for emitted, weight in zip(verdict.token_ids.tolist(), weights, strict=True):
        result[tuple(token for token in emitted if token >= 0)] += weight
    return result


def padded(rows: Sequence[Distribution], count: int) -> list[list[float]]:
    """Rows as floats, with nonsense where a row's drafts have ended."""
    return [[float(weight) for weight in row] for row in rows] + [[math.nan] * VOCAB] * (count - len(rows))


def tensor_distance(verifier: Verifier, way: Way) -> Fraction:
    """Total variation between what one pass of the tensor code emits, continued by the target, and the target's law."""
    law = tensor_law(verifier, way)
    longest = way.k + 1
    return total_variation(extended(way.target, law, longest), extended(way.target, {(): Fraction(1)}, longest))
