"""From the three tests to one word and one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_specplugin.validate.chisquare import ChiSquare
from vllm_specplugin.validate.evidence import Evidence
from vllm_specplugin.validate.greedy import Greedy

MARTINGALE_SHARE = 0.9
CHI_SQUARE_SHARE = 0.1
"""How the two statistical tests share alpha (Bonferroni): a lossless engine is called biased by either with probability <=
alpha in all. The martingale is the more sensitive one, so most of it goes there."""

PLAIN_TO_SEE = 3.0
"""Standard deviations. Where the hits are hardly more than expected, the evidence lies in which tokens were hit."""


class Verdict(str, Enum):
    """What a run says about the engine."""

    LOSSLESS = "LOSSLESS"
    """No evidence of a bias, and a bias of the size asked about would have been found."""
    BIASED = "BIASED"
    INCONCLUSIVE = "INCONCLUSIVE"
    """No evidence of a bias, but too little was seen to say more."""

    @property
    def exit_code(self) -> int:
        """0, 1, 2."""
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True)
class Levels:
    """The part of alpha that each statistical test may spend."""

    martingale: float
    chi_square: float

    @classmethod
    def of(cls, alpha: float) -> Levels:
        """Split `alpha`; make the tests with these: `Martingale(Levels.of(alpha).martingale)`."""
        return cls(MARTINGALE_SHARE * alpha, CHI_SQUARE_SHARE * alpha)


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict and its reason, one sentence with the numbers."""

    verdict: Verdict
    reason: str


def decide(
    evidence: Evidence,
    chi_square: ChiSquare | None,
    greedy: Greedy | None,
    *,
    lossy: str | None = None,
    interrupted: bool = False,
) -> Decision:
    """Judge a run. A test that was not made is None.

    `lossy` names the verifier where its class says that it is lossy; `interrupted` if the run ended before its tokens were
    generated. The tests carry the level that they were made with (see `Levels`).
    """
    biased = _biased(evidence, chi_square, greedy, lossy)
    if biased:
        return Decision(Verdict.BIASED, _sentence(biased))
    missing = _missing(evidence, interrupted)
    if missing:
        return Decision(Verdict.INCONCLUSIVE, "no evidence of a bias so far, but " + _sentence(missing))
    power = evidence.power
    found = f"a bias of {percent(power.bias)} would have been found with probability {probability(power.probability)}"
    return Decision(
        Verdict.LOSSLESS,
        f"no evidence of a bias in {evidence.tokens:,} tokens ({evidence.drafted:,} with a draft tested), where {found}.",
    )


def count(number: int, thing: str) -> str:
    """`1 token`, `2,000 tokens`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """`1%`, `0.16%`."""
    return f"{100 * share:.3g}%"


def probability(value: float) -> str:
    """Two digits; never 0 or 1 for what is neither impossible nor certain."""
    return "over 0.99" if value > 0.99 else "under 0.01" if value < 0.01 else f"{value:.2f}"


def e_value(log10: float) -> str:
    """`12`, `3.4e+08`, `1e+1204`: also those that no float holds."""
    if abs(log10) < 4:
        return f"{10**log10:.3g}"
    exponent = int(log10 // 1)
    mantissa = f"{10 ** (log10 - exponent):.1f}"
    return f"{mantissa}e{exponent:+03d}" if mantissa != "10.0" else f"1.0e{exponent + 1:+03d}"


def _biased(evidence: Evidence, chi_square: ChiSquare | None, greedy: Greedy | None, lossy: str | None) -> list[str]:
    """Why the engine is biased, a phrase each."""
    reasons = []
    if lossy is not None:
        reasons.append(f"the verifier {lossy!r} is lossy by its own account")
    if evidence.impossible:
        reasons.append(f"{count(evidence.impossible, 'token')} of probability 0 came out of the engine")
    elif evidence.crossed_at is not None:
        reasons.append(
            f"the e-value reached {1 / evidence.alpha:,.0f} after {evidence.crossed_at:,} tokens "
            f"(highest {e_value(evidence.log10_max)}{_worst_place(evidence)})"
        )
    if greedy is not None and greedy.bugs:
        reasons.append(f"{greedy.bugs} of {len(greedy.prompts):,} greedy outputs part from plain decoding by more than rounding")
    if chi_square is not None and chi_square.impossible:
        impossible = sum(item.observed for item in chi_square.impossible)
        reasons.append(f"{count(impossible, 'first token')} had probability 0")
    if chi_square is not None and chi_square.p_value < chi_square.alpha:
        reasons.append(f"the chi-square of the first tokens has p = {chi_square.p_value:.2g}, below {chi_square.alpha:.2g}")
    return reasons


def _worst_place(evidence: Evidence) -> str:
    """Where most of the evidence sits."""
    if not evidence.worst:
        return ""
    place = evidence.worst[0]
    where = f"{place.place}, set {place.set!r}"
    found = f"; most of it at {where}: {place.observed:,} hits, {place.expected:,.0f} expected, {place.z:+.1f} sd"
    return found if abs(place.z) > PLAIN_TO_SEE else f"{found}, but they came where they were least likely"


def _missing(evidence: Evidence, interrupted: bool) -> list[str]:
    """What a verdict lacks, a phrase each."""
    power = evidence.power
    if not evidence.drafted:
        return ["nothing was drafted, so nothing was tested"]
    reasons = ["the run was interrupted"] if interrupted else []
    if power.tokens_more is None or power.tokens_more > 0:
        more = "more tokens than can be told" if power.tokens_more is None else count(power.tokens_more, "more token")
        reasons.append(
            f"{more} are needed to find a bias of {percent(power.bias)} with probability {probability(power.asked)} "
            f"({evidence.tokens:,} seen, which find it with probability {probability(power.probability)})"
        )
    return reasons


def _sentence(phrases: list[str]) -> str:
    """Phrases as one sentence."""
    return "; ".join(phrases) + "."
