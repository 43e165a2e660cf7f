"""What the martingale found, as plain values: what `betting` hands to the verdict and to the report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Family(str, Enum):
    """The kinds of places that are tested separately. The names say which mistake shows there."""

    ACCEPTED = "accepted"
    """Drafted places: too lenient (or too strict) an acceptance."""
    RESIDUAL = "residual"
    """Drafted places: what a refusal leads to, and whether the sampling parameters are applied at each verified row."""
    BONUS = "bonus"
    """Places without a draft to test: the token after the last draft, and passes that verified none."""


@dataclass(frozen=True, slots=True)
class Place:
    """One set of tokens at one place of a pass: how often it should have come up, and how often it did."""

    family: Family
    set: str
    """Its column of `Tokens`: draft, residual, top or processed."""
    place: str
    """`draft 1`, `draft 2`, ..., `bonus` or `plain`."""
    draft_position: int
    """From 1; 0 where nothing was drafted."""
    tokens: int
    observed: int
    """Hits: tokens that lay in the set."""
    expected: float
    """The sum of p(A): the hits that a lossless engine has on average."""
    deviation: float
    """Standard deviation of the hits under losslessness, sqrt(sum p(A) (1 - p(A)))."""
    z: float
    """(observed - expected) / deviation, 0 where the deviation is."""
    log10_e: float
    """Evidence of this place alone. One of many, so it says where a bias sits, not whether there is one."""


@dataclass(frozen=True, slots=True)
class FamilyEvidence:
    """The wealth of one family: 1 at the start, and on average at most 1 for ever while the engine is lossless."""

    family: Family
    tokens: int
    """Tokens on which at least one of its sets bet."""
    log10_e: float
    log10_max: float
    """The highest it ever stood: P(max >= 1/alpha) <= alpha under losslessness (Ville's inequality)."""


@dataclass(frozen=True, slots=True)
class Path:
    """log10 of the e-values after so many tokens, thinned evenly to a few thousand points."""

    tokens: tuple[int, ...]
    overall: tuple[float, ...]
    families: dict[Family, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Power:
    """What the test could have found. A bias b: at every drafted place, b of probability moves into A = {x: q(x) > p(x)}."""

    bias: float
    """The bias asked about."""
    asked: float
    """The probability asked for, 0.95 say."""
    probability: float
    """With which `bias` would have been found in the tokens seen."""
    tokens_needed: int | None
    """Tokens, those already seen included, to find `bias` with the probability asked for; None where nothing was drafted."""
    tokens_more: int | None
    """`tokens_needed` less the tokens seen, at least 0."""
    detectable: float | None
    """The smallest bias that is found with the probability asked for in the tokens seen; None where there is none."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The martingale at the end of a run."""

    alpha: float
    """The level at which `crossed_at` was decided."""
    tokens: int
    drafted: int
    """Tokens at places where a draft was tested."""
    kinds: dict[str, int]
    """Tokens by the name of their `Kind`, lower case."""
    passes: int
    """Target passes: every one ends in a residual, bonus or plain token."""
    acceptance_length: float
    """Tokens emitted per target pass, bonus included, passes without a draft counted too; 0 without a pass."""
    acceptance_per_position: tuple[float, ...]
    """Share of the passes with drafts whose drafts were accepted at least up to position 1, 2, ..."""
    log10_e: float
    log10_max: float
    max_at: int
    """Tokens seen when the e-value was highest."""
    crossed_at: int | None
    """Tokens seen when the e-value first reached 1/alpha; None while it has not."""
    impossible: int
    """Tokens in a set whose probability is exactly 0: no lossless engine emits one."""
    families: tuple[FamilyEvidence, ...]
    path: Path
    places: tuple[Place, ...]
    """All of them, by family, set and place."""
    worst: tuple[Place, ...]
    """Those with the most evidence, most first."""
    power: Power
