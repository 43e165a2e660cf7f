"""Greedy decoding with and without drafts must give the same tokens; where it does not, rounding or a bug is the cause.

A verification pass computes k + 1 rows at once, a decode pass one: the same sums in another order, so the last bits differ.
Where the two likeliest tokens lie closer than that, either may win. The log-probabilities that both runs report for the same
token after the same prefix show how large the rounding is on this model and machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import sqrt

NOISE_FLOOR = 2.0**-19
"""Nats. The step of float32 at a logit of 16 to 32: equal log-probabilities do not prove that there is less noise than that."""

NOISE_LIMITS = {"float32": 0.01, "float16": 0.25, "bfloat16": 1.0}
"""Nats, by the model's dtype: more than this is no rounding (bfloat16 steps by 1/8 at a logit of 16 to 32). Without a limit a
bug that changes the logits would count as noise and excuse itself."""


class Cause(str, Enum):
    """Why two greedy outputs part."""

    TIE = "tie"
    """The two tokens were nearer than rounding can move them."""
    BUG = "bug"
    """They were not."""


@dataclass(frozen=True, slots=True)
class Output:
    """One greedy answer."""

    token_ids: Sequence[int]
    """`[tokens]`."""
    logprobs: Sequence[Mapping[int, float]]
    """`[tokens]`: token -> log-probability (nats) of the likeliest tokens, at least two, and of the one emitted."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place where the output under test leaves the plain one; what follows has another prefix and says nothing."""

    position: int
    """Index of the first output token that differs."""
    plain_token: int | None
    """None where the plain output ended before."""
    tested_token: int | None
    plain_text: str
    tested_text: str
    margin: float | None
    """Nats by which plain decoding preferred its token; None where one output ended."""
    margin_is_bound: bool
    """The other token was not among those that plain decoding reported: `margin` is the least it can be."""
    noise: float
    """Nats: what the margin is held against, twice (each of the two log-probabilities may move by it)."""
    cause: Cause
    explanation: str


@dataclass(frozen=True, slots=True)
class PromptEquality:
    """One prompt, answered twice."""

    prompt: str
    tokens: int
    """Equal tokens, up to the first mismatch."""
    noise: float
    """Nats: the largest difference measured on this prompt, 0 where the same token was never reported by both."""
    mismatch: Mismatch | None


@dataclass(frozen=True, slots=True)
class Greedy:
    """All prompts."""

    prompts: tuple[PromptEquality, ...]
    noise: float
    """Nats: the largest difference measured on any prompt, at least `NOISE_FLOOR`."""
    noise_limit: float
    compared: int
    """Log-probabilities that the noise was measured on."""
    spread: float = 0.0
    """Nats: the root of the mean square of those differences; 0 in reports from before it was measured."""

    @property
    def equal(self) -> int:
        """Prompts with equal outputs."""
        return sum(prompt.mismatch is None for prompt in self.prompts)

    @property
    def mismatches(self) -> tuple[tuple[str, Mismatch], ...]:
        """Prompt and mismatch, where there is one."""
        return tuple((prompt.prompt, prompt.mismatch) for prompt in self.prompts if prompt.mismatch is not None)

    @property
    def bugs(self) -> int:
        """Mismatches that rounding does not explain."""
        return sum(mismatch.cause is Cause.BUG for _, mismatch in self.mismatches)


def compare(
    prompts: Sequence[tuple[str, Output, Output]],
    dtype: str = "bfloat16",
    texts: Mapping[int, str] | None = None,
) -> Greedy:
    """Compare outputs: (prompt's name, plain output, output under test) each.

    `dtype` is the model's, without `torch.`; `texts` spells tokens, where there is a tokenizer.
    """
    firsts = [first_difference(plain.token_ids, tested.token_ids) for _, plain, tested in prompts]
    differences = [
        # The place of the mismatch is left out: it must not vouch for itself.
        list(_differences(plain, tested, len(plain.token_ids) if first is None else first))
        for (_, plain, tested), first in zip(prompts, firsts, strict=True)
    ]
    measured = max((value for row in differences for value in row), default=0.0)
    limit = NOISE_LIMITS.get(dtype, max(NOISE_LIMITS.values()))
    noise = max(NOISE_FLOOR, measured)
    results = [
        PromptEquality(
            prompt=name,
            tokens=len(plain.token_ids) if first is None else first,
            noise=max(row, default=0.0),
            mismatch=None if first is None else _explain(plain, tested, first, min(noise, limit), texts or {}),
        )
        for (name, plain, tested), first, row in zip(prompts, firsts, differences, strict=True)
    ]
    compared = sum(map(len, differences))
    spread = sqrt(sum(value * value for row in differences for value in row) / compared) if compared else 0.0
    return Greedy(tuple(results), noise, limit, compared, spread)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The index at which two outputs part (one may end where the other goes on), None where they are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def _differences(plain: Output, tested: Output, positions: int) -> Iterator[float]:
    """|difference| of each log-probability that both report, over the first `positions`."""
    for ours, theirs in zip(plain.logprobs[:positions], tested.logprobs[:positions], strict=False):
        yield from (abs(value - theirs[token]) for token, value in ours.items() if token in theirs)


def _explain(plain: Output, tested: Output, position: int, noise: float, texts: Mapping[int, str]) -> Mismatch:
    """The mismatch at `position`, held against `noise`."""
    ours = plain.token_ids[position] if position < len(plain.token_ids) else None
    theirs = tested.token_ids[position] if position < len(tested.token_ids) else None
    margin, bound = None, False
    if ours is not None and theirs is not None:
        row = plain.logprobs[position]
        bound = theirs not in row
        margin = row[ours] - (min(row.values()) if bound else row[theirs])
    cause = Cause.TIE if margin is not None and margin <= 2 * noise else Cause.BUG
    if margin is None:
        explanation = f"the {'plain output' if ours is None else 'output under test'} ended here, the other went on"
    else:
        size = f"{'at least ' if bound else ''}{margin:.2g} nats apart, rounding moves them by up to {2 * noise:.2g}"
        explanation = f"{'a tie: ' if cause is Cause.TIE else 'no tie: '}{size}"
    names = [f"{'end' if token is None else texts.get(token, str(token))}" for token in (ours, theirs)]
    return Mismatch(position, ours, theirs, names[0], names[1], margin, bound, noise, cause, explanation)
