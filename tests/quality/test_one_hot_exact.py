"""`one_hot` proven exactly: every outcome enumerated with fractions, the law of the output equal to the target's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product

import pytest
import torch

from vllm_specplugin.scorers.one_hot import walk

VOCAB = 3
Law = dict[tuple[int, ...], Fraction]
Target = Callable[[tuple[int, ...]], tuple[Fraction, ...]]
Verify = Callable[[Sequence[int], Sequence[int]], list[int]]


def target_of(case: int) -> Target:
    """A next-token law that depends on the prefix; with zeros and ties in some."""
    weights = [(1, 2, 3), (0, 1, 1), (5, 0, 0), (1, 1, 1), (0, 0, 7), (2, 0, 5)]

    def target(prefix: tuple[int, ...]) -> tuple[Fraction, ...]:
        chosen = weights[(case + 7 * len(prefix) + sum((place + 1) * token for place, token in enumerate(prefix))) % len(weights)]
        return tuple(Fraction(weight, sum(chosen)) for weight in chosen)

    return target


def outcomes(target: Target, prefixes: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every combination of independent samples, one at each verified row, with its probability."""
    for samples in product(range(VOCAB), repeat=len(prefixes)):
        probability = Fraction(1)
        for prefix, token in zip(prefixes, samples, strict=True):
            probability *= target(prefix)[token]
        if probability:
            yield samples, probability


def extended(target: Target, law: Law, length: int) -> Law:
    """Every output continued by the target to a common length."""
    result: Law = defaultdict(Fraction)
    for output, probability in law.items():
        if len(output) >= length:
            result[output[:length]] += probability
            continue
        for token, chance in enumerate(target(output)):
            if chance:
                for longer, more in extended(target, {(*output, token): probability * chance}, length).items():
                    result[longer] += more
    return result


def total_variation(target: Target, drafts: tuple[int, ...], verify: Verify) -> Fraction:
    prefixes = [drafts[:row] for row in range(len(drafts) + 1)]
    law: Law = defaultdict(Fraction)
    for samples, probability in outcomes(target, prefixes):
        law[tuple(verify(samples, drafts))] += probability
    length = len(drafts) + 1
    ours, true = extended(target, law, length), extended(target, {(): Fraction(1)}, length)
    assert sum(ours.values()) == sum(true.values()) == 1
    return sum((abs(ours.get(word, Fraction(0)) - true.get(word, Fraction(0))) for word in {*ours, *true}), Fraction(0)) / 2


def verified(samples: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The tensor code that runs in the engine."""
    verdict = walk(torch.tensor([list(samples)]), torch.tensor([list(drafts)]), torch.tensor([len(drafts)]))
    return [token for token in verdict.token_ids[0].tolist() if token >= 0]


def accepts_everything(samples: Sequence[int], drafts: Sequence[int]) -> list[int]:
    return [*drafts, samples[-1]]


def off_by_one_row(samples: Sequence[int], drafts: Sequence[int]) -> list[int]:
    return verified([samples[-1], *samples[:-1]], drafts)


def keeps_going(samples: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Emits the samples of all rows, although those after a refusal saw the wrong prefix."""
    return list(samples)


def drops_the_sample(samples: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Emits only the accepted drafts; the refused position is drawn anew, which tilts it towards the draft."""
    output = verified(samples, drafts)
    return output if len(output) == len(drafts) + 1 else output[:-1]


CASES = [(case, drafts) for case in range(6) for length in (1, 2, 3) for drafts in product(range(VOCAB), repeat=length)]


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("length", [1, 2, 3])
def test_output_follows_the_target_exactly(case: int, length: int) -> None:
    for drafts in product(range(VOCAB), repeat=length):
        assert total_variation(target_of(case), drafts, verified) == 0, drafts


@pytest.mark.parametrize("mutant", [accepts_everything, off_by_one_row, keeps_going, drops_the_sample])
def test_lossy_variants_are_told_apart(mutant: Verify) -> None:
    worst = max(total_variation(target_of(case), drafts, mutant) for case, drafts in CASES)
    assert worst > Fraction(1, 20)
