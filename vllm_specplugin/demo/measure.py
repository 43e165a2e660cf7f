"""What the demo measures, and the arithmetic from raw samples to the numbers of the table. Pure: no engine, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One request served by one engine, alone. Times are seconds from handing it over."""

    token_ids: tuple[int, ...]
    seconds: float
    first_token_seconds: float
    passes: int  # target passes that emitted tokens after the prefill; each emits at least one
    drafts: int = 0  # passes that had drafts to verify
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # [k], how many drafts were accepted up to each position

    @staticmethod
    def load(values: Mapping[str, Any]) -> Sample:
        """A sample from the JSON that an engine process answered with."""
        lists = {"token_ids", "accepted_per_position"}
        arguments: dict[str, Any] = {key: tuple(value) if key in lists else value for key, value in values.items()}
        return Sample(**arguments)


@dataclass(frozen=True)
class Difference:
    """Where the speculative output leaves the plain one, and whether rounding explains it.

    `margin` is the distance, in natural-log probability, between plain decoding's choice and the token that speculation chose
    instead, both as plain decoding saw them; None where that token was not among the ones it reports.
    """

    position: int  # index of the first output token that differs
    plain_token: str
    speculative_token: str
    margin: float | None
    noise: float  # the measured bound that `margin` is held against
    obstacle: str = ""  # why there is no margin

    @property
    def near_tie(self) -> bool:
        """Whether numerical noise of the measured size can turn the choice around."""
        # In bfloat16 margins come in steps, 1/8 and such.
        return self.margin is not None and abs(self.margin) <= self.noise + 1e-3

    @property
    def verdict(self) -> str:
        """The explanation, in one phrase."""
        if self.margin is None:
            return f"UNEXPLAINED ({self.obstacle})"
        return f"{'near-tie' if self.near_tie else 'UNEXPLAINED'} (margin {self.margin:.3f}, noise up to {self.noise:.3f})"


@dataclass
class PromptResult:
    """All that was measured of one prompt: one sample per repetition and engine."""

    kind: str
    name: str
    prompt_tokens: int
    plain: list[Sample] = field(default_factory=list)
    speculative: list[Sample] = field(default_factory=list)
    difference: Difference | None = None
    output: str = ""  # the plain output as text

    @property
    def same(self) -> bool:
        """Whether both engines gave the same tokens."""
        return first_difference(self.plain[0].token_ids, self.speculative[0].token_ids) is None

    @property
    def repeatable(self) -> bool:
        """Whether each engine gave the same tokens in every repetition."""
        return all(len({sample.token_ids for sample in samples}) == 1 for samples in (self.plain, self.speculative))


@dataclass(frozen=True)
class Noise:
    """How much the margin between the two top tokens changed between two ways to compute the same thing."""

    largest: float = 0.0
    positions: int = 0

    def including(self, values: Sequence[float]) -> Noise:
        """The noise seen so far together with new `values`."""
        return Noise(max([self.largest, *values]), self.positions + len(values))


@dataclass
class DemoResult:
    """The whole run, ready for the table and for JSON."""

    model: str
    speculative_config: dict[str, Any]
    max_tokens: int
    repeat: int
    prompts: list[PromptResult] = field(default_factory=list)
    noise: Noise = field(default_factory=Noise)
    environment: dict[str, Any] = field(default_factory=dict)  # versions, cores, what others took of them

    def rows(self) -> list[Row]:
        """One row per kind in order of appearance, and a last one over everything where there are several."""
        kinds = list(dict.fromkeys(prompt.kind for prompt in self.prompts))
        rows = [row_of(kind, [p for p in self.prompts if p.kind == kind]) for kind in kinds]
        return [*rows, row_of("all", self.prompts)] if len(kinds) > 1 else rows

    def dump(self) -> dict[str, Any]:
        """Everything as plain JSON values, raw samples included."""
        prompts = []
        for prompt in self.prompts:
            difference = prompt.difference
            explained = None if difference is None else {**asdict(difference), "verdict": difference.verdict}
            prompts.append({**asdict(prompt), "same": prompt.same, "repeatable": prompt.repeatable, "difference": explained})
        return {
            "model": self.model,
            "speculative_config": self.speculative_config,
            "max_tokens": self.max_tokens,
            "repeat": self.repeat,
            "environment": self.environment,
            "noise": asdict(self.noise),
            "rows": [asdict(row) for row in self.rows()],
            "prompts": prompts,
        }


@dataclass(frozen=True)
class Row:
    """One line of the table, over the prompts of one kind."""

    kind: str
    prompts: int
    tokens: int  # of the plain outputs, one repetition
    plain_rate: float  # output tokens per second of whole requests, prefill included
    speculative_rate: float
    ratio: float  # the speculative rate over the plain one
    ratio_range: tuple[float, float] | None  # of the repetitions taken one by one; None for a single one
    plain_decode_rate: float  # tokens per second after the first token
    speculative_decode_rate: float
    acceptance_length: float  # tokens emitted per target pass, bonus included, passes without drafts counted too
    drafted_passes: float  # share of passes that had drafts
    acceptance_rate: float  # accepted draft tokens over draft tokens
    acceptance_per_position: tuple[float, ...]  # accepted up to this position, over passes that had drafts
    same: int  # prompts whose outputs are the same


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The index at which two outputs part, None where they are equal. One may end where the other goes on."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def ratio(numerator: float, denominator: float) -> float:
    """A quotient that is 0 where there is nothing to divide by (nothing drafted, an output of one token)."""
    return numerator / denominator if denominator else 0.0


def rate(samples_by_prompt: Sequence[Sequence[Sample]]) -> float:
    """Tokens per second over several prompts, each with one sample per repetition: all tokens over all median times.

    The sum, not a mean of rates: a short answer must not weigh as much as a long one.
    """
    tokens = sum(len(samples[0].token_ids) for samples in samples_by_prompt)
    return ratio(tokens, sum(median(sample.seconds for sample in samples) for samples in samples_by_prompt))


def decode_rate(samples_by_prompt: Sequence[Sequence[Sample]]) -> float:
    """As `rate`, from the first token to the last."""
    tokens = sum(len(samples[0].token_ids) - 1 for samples in samples_by_prompt)
    return ratio(tokens, sum(median(s.seconds - s.first_token_seconds for s in samples) for samples in samples_by_prompt))


def summed(vectors: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The sum of vectors of different lengths, position by position."""
    total: list[int] = []
    for vector in vectors:
        total.extend([0] * (len(vector) - len(total)))
        for position, value in enumerate(vector):
            total[position] += value
    return tuple(total)


def row_of(kind: str, prompts: Sequence[PromptResult]) -> Row:
    """The table's line for `prompts`."""
    plain, speculative = [p.plain for p in prompts], [p.speculative for p in prompts]
    samples = [sample for p in speculative for sample in p]
    single = [
        ratio(rate([[p.speculative[r]] for p in prompts]), rate([[p.plain[r]] for p in prompts]))
        for r in range(min(len(p) for p in plain))
    ]
    drafts = sum(sample.drafts for sample in samples)
    passes = sum(sample.passes for sample in samples)
    accepted = summed(sample.accepted_per_position for sample in samples)
    return Row(
        kind=kind,
        prompts=len(prompts),
        tokens=sum(len(p[0].token_ids) for p in plain),
        plain_rate=rate(plain),
        speculative_rate=rate(speculative),
        ratio=ratio(rate(speculative), rate(plain)),
        ratio_range=(min(single), max(single)) if len(single) > 1 else None,
        plain_decode_rate=decode_rate(plain),
        speculative_decode_rate=decode_rate(speculative),
        acceptance_length=ratio(sum(len(sample.token_ids) - 1 for sample in samples), passes),
        drafted_passes=ratio(drafts, passes),
        acceptance_rate=ratio(sum(s.accepted_tokens for s in samples), sum(s.draft_tokens for s in samples)),
        acceptance_per_position=tuple(ratio(count, drafts) for count in accepted),
        same=sum(p.same for p in prompts),
    )


def margin_changes(decoded: Sequence[Mapping[str, float]], forced: Sequence[Mapping[str, float]]) -> list[float]:
    """How much the margin between the two top tokens changed, position by position, between two computations.

    Each position is a mapping of token id (as JSON spells it) to log-probability: `decoded` from passes of one token each,
    `forced` from one pass over the whole text. Both saw the same tokens, so the difference is rounding. Positions where the
    second lacks one of the first's two top tokens are left out.
    """
    changes = []
    for a, b in zip(decoded, forced, strict=False):
        top = sorted(a, key=lambda token: -a[token])[:2]
        if len(top) == 2 and all(token in b for token in top):
            changes.append(abs((a[top[0]] - a[top[1]]) - (b[top[0]] - b[top[1]])))
    return changes


def margin_between(logprobs: Mapping[str, float], chosen: int | None, other: int | None) -> float | None:
    """How far `chosen` stood above `other` at one position; None where `other` is not among the reported tokens."""
    if str(chosen) not in logprobs or str(other) not in logprobs:  # None is in none
        return None
    return logprobs[str(chosen)] - logprobs[str(other)]
