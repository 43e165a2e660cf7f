"""What the engines measure, and intervals from it. Pure: no engine, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

CONFIDENCE = 0.95
ROUNDS_FOR_CONFIDENCE = 6
"""From so many on an interval of medians can have it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests served by one engine, so many at once. Times are seconds by a clock that runs while this engine works."""

    requests: int
    tokens: int
    """Emitted."""
    seconds: float
    """From the first request handed over to the last token, of every batch."""
    first_token: tuple[float, ...]
    """`[requests]`: from handing a request over to its first token."""
    per_token: tuple[float, ...]
    """`[requests with two tokens or more]`: mean seconds per token after the first."""
    passes: int
    """Target passes over a request after its first token, counted for each request; each emits at least one token."""
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Sample:
        """From the JSON that an engine process answered with."""
        arguments: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls(**arguments)

    @property
    def rate(self) -> float:
        """Tokens per second of the whole batch, prefill included."""
        return self.tokens / self.seconds


def total(samples: Sequence[Sample]) -> Sample:
    """Several batches of one engine as one."""
    return Sample(
        requests=sum(sample.requests for sample in samples),
        tokens=sum(sample.tokens for sample in samples),
        seconds=sum(sample.seconds for sample in samples),
        first_token=tuple(value for sample in samples for value in sample.first_token),
        per_token=tuple(value for sample in samples for value in sample.per_token),
        passes=sum(sample.passes for sample in samples),
        draft_tokens=sum(sample.draft_tokens for sample in samples),
        accepted_tokens=sum(sample.accepted_tokens for sample in samples),
    )


class Interval(BaseModel):
    """A median with its distribution-free confidence interval."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float
    high: float
    rounds: int
    confidence: float
    """That the interval covers the true median: 0.95 from 6 rounds on, less with fewer, where it is the whole range."""

    @property
    def sure(self) -> bool:
        """Whether there were rounds enough for `CONFIDENCE`."""
        return self.confidence >= CONFIDENCE

    def __str__(self) -> str:
        return f"{self.value:.2f}x" if self.rounds < 2 else f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


def interval(values: Iterable[float]) -> Interval:
    """The median of some rounds, between two order statistics.

    The true median lies below the r-th smallest of n values, or above the r-th largest, with the binomial probability
    2 P(X < r), X ~ B(n, 1/2), whatever the noise looks like; r is the largest that keeps the confidence at 95 %.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    n = len(ordered)
    if not n:
        raise ValueError("no rounds")
    missed = np.cumsum([2 * math.comb(n, below) / 2**n for below in range(n // 2 + 1)])  # [r - 1]: chance to miss with rank r
    rank = max(int(np.searchsorted(missed, 1 - CONFIDENCE, side="right")), 1)
    confidence = max(0.0, 1 - float(missed[rank - 1]))
    return Interval(value=median(ordered), low=ordered[rank - 1], high=ordered[n - rank], rounds=n, confidence=confidence)


Round = Mapping[int, Mapping[str, Sample]]
"""Concurrency -> engine -> what it measured: everybody's answers to the same requests."""


def ratio(sample: Sample, plain: Sample) -> float:
    """How many times as fast."""
    return sample.rate / plain.rate


def overall(measured: Round, name: str, against: str) -> float:
    """One engine's speed over another's in a round: the geometric mean over its concurrencies, each counting alike."""
    return geometric_mean([ratio(samples[name], samples[against]) for samples in measured.values()])


def acceptance_length(samples: Sequence[Sample]) -> float:
    """Tokens per target pass, the bonus token included, over requests that went on after their first token."""
    passes = sum(sample.passes for sample in samples)
    return sum(sample.tokens - sample.requests for sample in samples) / passes if passes else 1.0


def percentiles(values: Iterable[float]) -> tuple[float, float]:
    """The 50th and the 95th; NaN of nothing."""
    found = np.fromiter(values, dtype=np.float64)
    return (float(np.percentile(found, 50)), float(np.percentile(found, 95))) if found.size else (math.nan, math.nan)
