"""Which tokens the sampling parameters allow, where two engines round a model's logits differently.

The plain engine says what is expected, the engine under test samples. They compute the same sums in another order, so a token
near a cut (top-k, top-p, min-p) may be allowed in one and not in the other. Three kinds of tokens are told apart here: allowed
however rounding moved the logits (inside), allowed in some cases (possible), and never allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.validate.sampling import Sampling

TOP_P_ROUNDING = 2e-6
"""Engines add up 10^5 float32 probabilities in their own order; a sum this near to top_p may fall on either side."""

MIN_P_ROUNDING = 1e-5
"""Likewise for a token's logit and its min-p threshold, in nats."""

TIE_ROUNDING = 1e-6
"""Relative: logits nearer to each other than this may be in either order, or equal, once penalties have been applied."""

LARGEST_SLACK = 500.0
"""Nats; far beyond any rounding, and exp(-LARGEST_SLACK) is still a number."""


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """Of each token at one place; `inside` is a subset of `possible`."""

    inside: NDArray[np.bool_]
    """`[vocab]`: allowed in any case."""
    possible: NDArray[np.bool_]
    """`[vocab]`: allowed in some case; what is left cannot be sampled."""


def growth(sampling: Sampling) -> float:
    """How much larger a difference of raw logits may be once temperature and repetition penalty have been applied."""
    penalty = sampling.repetition_penalty
    return max(penalty, 1 / penalty) / sampling.temperature


def membership(values: NDArray[np.float32] | NDArray[np.float64], sampling: Sampling, slack: float) -> Membership:
    """Tell the tokens of one place apart.

    Args:
        values: `[vocab]`, the logits after temperature and penalties, before min-p, top-k and top-p; -inf where not allowed.
        sampling: its min_p, top_k and top_p are applied, in this order.
        slack: nats by which rounding may have moved any two values relative to each other.
    """
    values = np.asarray(values, np.float64)
    inside = np.isfinite(values)
    possible = inside.copy()
    if sampling.min_p > 0:
        margin = values - (values.max() + np.log(sampling.min_p))
        near = slack + MIN_P_ROUNDING
        inside &= margin > near
        possible &= margin >= -near
    if 0 < sampling.top_k < len(values):
        places = [sampling.top_k - 1, sampling.top_k]
        last, next_one = -np.partition(-values, places)[places]  # the k-th value and the one after it
        near = slack + TIE_ROUNDING * max(abs(last), 10)
        inside &= values > next_one + near
        possible &= values >= last - near
    if sampling.top_p < 1:
        _apply_top_p(values, sampling.top_p, min(slack, LARGEST_SLACK), inside, possible)
    return Membership(inside, possible)


def softmax_over(values: NDArray[np.float32] | NDArray[np.float64], members: NDArray[np.bool_]) -> NDArray[np.float64]:
    """`[vocab]`: the probabilities among `members`, 0 for the others; all 0 where there are no members."""
    probabilities = np.zeros(len(values))
    if members.any():
        kept = values[members].astype(np.float64)
        odds = np.exp(kept - kept.max())
        probabilities[members] = odds / odds.sum()
    return probabilities


def _apply_top_p(
    values: NDArray[np.float64], top_p: float, slack: float, inside: NDArray[np.bool_], possible: NDArray[np.bool_]
) -> None:
    """In place. A token stays where the mass of those before it is below `top_p`: here the most and the least it may be."""
    tokens = np.flatnonzero(possible)
    tokens = tokens[np.argsort(-values[tokens], kind="stable")]
    ranked = values[tokens]  # [tokens], falling
    odds = np.exp(ranked - ranked[0])
    sure = np.where(inside[tokens], odds, 0)
    odds_before, sure_before = (np.concatenate([[0.0], np.cumsum(column)]) for column in (odds, sure))
    # How many others may come before it (and itself); what comes before it in any case.
    most = np.searchsorted(-ranked, slack - ranked, side="right")
    least = np.searchsorted(-ranked, -slack - ranked, side="left")
    shrink = np.exp(-slack)
    ahead, rest = odds_before[most] - odds, odds + sure_before[-1] - sure_before[most]
    at_worst = ahead / (ahead + shrink * rest)
    inside[tokens] &= (most == 1) | (at_worst < top_p - TOP_P_ROUNDING)
    ahead, rest = shrink * sure_before[least], odds_before[-1] - odds_before[least]
    possible[tokens] &= ahead / (ahead + rest) <= top_p + TOP_P_ROUNDING
