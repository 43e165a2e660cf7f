"""Models and length controllers over three symbols; the weights of a row sum to 8, so that float32 holds every one exactly."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from tests.quality.laws import Model, Prefix, always, greedy, table

_DECIDED = table([(1, 2, 5), (5, 1, 2), (2, 5, 1), (1, 6, 1)])
_UNDECIDED = table([(3, 3, 2), (2, 4, 2), (4, 1, 3), (3, 2, 3), (1, 3, 4)], shift=2)
_GAPS = table([(0, 4, 4), (8, 0, 0), (2, 0, 6), (0, 3, 5), (0, 0, 8)])
_OTHER_GAPS = table([(4, 4, 0), (1, 0, 7), (0, 8, 0), (3, 3, 2), (5, 3, 0)], shift=1)
_TIES = table([(2, 2, 4), (4, 4, 0), (4, 2, 2)])
_OTHER_TIES = table([(2, 4, 2), (2, 2, 4), (0, 4, 4)])

CASES: dict[str, tuple[Model, Model]] = {
    "soft": (_DECIDED, _UNDECIDED),
    "decided_drafter": (_UNDECIDED, _DECIDED),
    "zeros": (_GAPS, _OTHER_GAPS),
    "zeros_in_q": (_UNDECIDED, _OTHER_GAPS),
    "ties": (_TIES, _OTHER_TIES),
    "refused_after_an_unlikely_one": (table([(2, 2, 4), (5, 1, 2)]), table([(0, 0, 8), (3, 5, 0)])),
    "equal": (_DECIDED, _DECIDED),
    "disjoint": (table([(8, 0, 0), (0, 4, 4)]), table([(0, 4, 4), (8, 0, 0)])),
    "one_hot_drafter": (_DECIDED, greedy(_UNDECIDED)),
    "one_hot_drafter_never_right": (_GAPS, greedy(table([(8, 0, 0), (0, 8, 0), (1, 7, 0), (8, 0, 0), (8, 0, 0)]))),
    "one_hot_both": (greedy(_DECIDED), greedy(_UNDECIDED)),
}
"""name -> (target, drafter)"""
SOFT = [name for name in CASES if "one_hot" not in name]
ONE_HOT = [name for name in CASES if "one_hot" in name]


def stop_after_low_confidence(known: Prefix, drafts: Prefix, q: Model) -> bool:
    """No more after a draft that its own drafter doubts; the doubted one is kept."""
    return not drafts or q(known + drafts[:-1])[drafts[-1]] >= Fraction(1, 2)


def by_prefix(known: Prefix, drafts: Prefix, q: Model) -> bool:
    """Something arbitrary, as a table learnt from earlier text might say."""
    return (sum(known + drafts) + len(drafts)) % 3 != 2


def while_decided(known: Prefix, drafts: Prefix, q: Model) -> bool:
    """Looks at the law that the next draft would be drawn from, and not at the draft."""
    return max(q(known + drafts)) >= Fraction(1, 2)


def at_most_one(known: Prefix, drafts: Prefix, q: Model) -> bool:
    """A row's own maximum below the engine's k."""
    return len(drafts) < 1


def never(known: Prefix, drafts: Prefix, q: Model) -> bool:
    return False


CONTROLS: dict[str, Callable[[Prefix, Prefix, Model], bool]] = {
    "always": always,
    "stop_after_low_confidence": stop_after_low_confidence,
    "by_prefix": by_prefix,
    "while_decided": while_decided,
    "at_most_one": at_most_one,
    "never": never,
}
