"""A row for each test, for the terminal and for the page."""

from __future__ import annotations

from dataclasses import dataclass
from math import log10

from vllm_specplugin.validate.chisquare import ChiSquare
from vllm_specplugin.validate.evidence import Evidence, Family, FamilyEvidence
from vllm_specplugin.validate.greedy import Greedy
from vllm_specplugin.validate.report import Report
from vllm_specplugin.validate.verdict import count, e_value, percent, probability

FAMILY_NAMES = {
    Family.ACCEPTED: "accepted drafts",
    Family.RESIDUAL: "after a refusal",
    Family.BONUS: "bonus, undrafted",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What was tested, what came out in figures, what that means; `bad` where it speaks against losslessness."""

    test: str
    figure: str
    verdict: str
    bad: bool = False
    part: bool = False
    """Of the row before."""


def rows(report: Report) -> list[Row]:
    """All of them, in the order in which a reader wants them."""
    evidence = report.martingale
    return [
        *(
            [Row("Verifier", f"{report.settings.verifier} is lossy by its own account", "lossy", bad=True)]
            if report.settings.lossy
            else []
        ),
        _greedy(report.greedy),
        _martingale(evidence),
        *(_family(family, evidence.alpha) for family in evidence.families),
        _power(evidence),
        _chi_square(report.chi_square),
        _drafting(evidence),
    ]


def _greedy(greedy: Greedy | None) -> Row:
    name = "Greedy equality"
    if greedy is None:
        return Row(name, "", "not tested")
    tokens = sum(prompt.tokens for prompt in greedy.prompts)
    figure = f"{greedy.equal} of {len(greedy.prompts)} prompts equal, {tokens:,} tokens; numeric noise {greedy.noise:.2g} nats"
    if not greedy.mismatches:
        return Row(name, figure, "equal")
    ties = len(greedy.mismatches) - greedy.bugs
    found = [count(ties, "tie")] if ties else []
    found += [count(greedy.bugs, "bug")] if greedy.bugs else []
    return Row(name, figure, ", ".join(found), bad=greedy.bugs > 0)


def _martingale(evidence: Evidence) -> Row:
    figure = f"e-value {e_value(evidence.log10_e)}, highest {e_value(evidence.log10_max)} of {1 / evidence.alpha:,.0f} allowed"
    figure += f"; {evidence.tokens:,} tokens"
    if evidence.impossible:
        return Row("Sampling (martingale)", f"{figure}; {evidence.impossible:,} of probability 0", "biased", bad=True)
    if evidence.crossed_at is not None:
        return Row("Sampling (martingale)", figure, f"biased, seen after {evidence.crossed_at:,} tokens", bad=True)
    return Row("Sampling (martingale)", figure, "no evidence" if evidence.drafted else "nothing drafted")


def _family(family: FamilyEvidence, alpha: float) -> Row:
    if not family.tokens:
        return Row(FAMILY_NAMES[family.family], "no such token", "not tested", part=True)
    figure = f"e-value {e_value(family.log10_e)}, highest {e_value(family.log10_max)}; {family.tokens:,} tokens"
    # A third of the whole each: this one alone takes the mean to 1/alpha.
    biased = family.log10_max >= log10(len(Family) / alpha)
    return Row(FAMILY_NAMES[family.family], figure, "biased" if biased else "no evidence", bad=biased, part=True)


def _power(evidence: Evidence) -> Row:
    power = evidence.power
    figure = f"a bias of {percent(power.bias)} is found with probability {probability(power.probability)}"
    if power.detectable is not None:
        figure += f", one of {percent(power.detectable)} with {power.asked:.2f}"
    if power.tokens_more is None:
        return Row("its power", figure, "no number of tokens is enough" if evidence.drafted else "nothing drafted", part=True)
    return Row("its power", figure, f"{power.tokens_more:,} more tokens needed" if power.tokens_more else "enough", part=True)


def _chi_square(test: ChiSquare | None) -> Row:
    name = "First tokens (chi-square)"
    if test is None:
        return Row(name, "", "not tested")
    figure = f"{test.statistic:.1f} on {test.degrees:,} degrees of freedom, p = {test.p_value:.2g}; {test.samples:,} samples; "
    figure += f"a total variation of {percent(test.tv)} is found with probability {probability(test.power)}"
    if test.detectable is not None:
        figure += f", one of {percent(test.detectable)} with {test.power_asked:.2f}"
    if test.noncentrality:
        figure += f"; rounding between the engines is granted a noncentrality of {test.noncentrality:.2g}"
    if test.impossible:
        return Row(name, figure, f"{len(test.impossible):,} tokens of probability 0", bad=True)
    biased = test.p_value < test.alpha
    return Row(name, figure, f"biased (below {test.alpha:.2g})" if biased else "no evidence", bad=biased)


def _drafting(evidence: Evidence) -> Row:
    shares = " ".join(f"{share:.0%}" for share in evidence.acceptance_per_position)
    figure = f"{evidence.acceptance_length:.2f} tokens per target pass"
    figure += f"; accepted up to position 1, 2, ...: {shares}" if shares else "; no draft accepted"
    return Row("Acceptance length", figure, "")
