"""The executable specification of suffix drafting: brute force over lists, without a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specplugin.proposers.suffix_tree import BOTH, COUNT_BITS, GLOBAL, LOCAL, TOKEN_BITS, Odds, class_of, trust_class

Text = tuple[Sequence[int], Sequence[int]]
"""What came before, and the tokens that count."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a proposer is configured with, and what it has learnt so far."""

    min_n: int
    max_n: int
    least: float
    odds: Odds
    trust: Odds


def space_saving(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The two most frequent tokens with their counts, the more frequent first; of equals the one that came last."""
    counters: list[tuple[int, int]] = []
    for token in tokens:
        if counters and counters[0][0] == token:
            counters[0] = token, counters[0][1] + 1
            continue
        count = counters[1][1] if len(counters) == 2 else 0  # of that token, or taken over from another one
        counters[1:] = [(token, count + 1)]
        if len(counters) == 2 and counters[1][1] >= counters[0][1]:
            counters.reverse()
    return counters


def forecast(texts: Sequence[Text], context: Sequence[int], rules: Rules, source: int) -> tuple[int, float]:
    """The most likely next token after `context`, and its odds; (-1, 0) where no context of `min_n` tokens is known."""
    found: dict[int, tuple[int, list[int]]] = {}
    for n in range(rules.min_n, min(rules.max_n, len(context)) + 1):
        followers = []
        for before, tokens in texts:
            known = [*before, *tokens]
            for end in range(max(len(before), n), len(known)):
                if known[end - n : end] == list(context[len(context) - n :]):
                    followers.append(known[end])
        if followers:  # contexts that occurred at the same places count once, as the longest
            found[len(followers)] = n, followers
    token, chance = -1, 0.0
    for n, followers in sorted(found.values()):
        sketch = 0
        for follower, count in [*space_saving(followers), (0, 0)][:2]:
            sketch = ((sketch << TOKEN_BITS | follower) << COUNT_BITS) | count
        hope = float(rules.odds[0, class_of.py_func(source, n, sketch)])  # type: ignore[attr-defined, index]
        if hope >= chance:
            token, chance = sketch >> (TOKEN_BITS + 2 * COUNT_BITS), hope
    return token, chance


def suffix_draft(own: Sequence[int], answers: Sequence[Text], rules: Rules, limit: int) -> tuple[list[int], list[float]]:
    """Up to `limit` tokens to follow `own`, the request's prompt and answer, and the probability of each given those before."""
    draft: list[int] = []
    chances: list[float] = []
    path = 1.0
    while len(draft) < limit:
        context = [*own, *draft][-rules.max_n :]
        token, chance = forecast([([], own)], context, rules, LOCAL)
        other, hope = forecast(answers, context, rules, GLOBAL)
        witnesses = BOTH if token == other else LOCAL if chance >= hope else GLOBAL
        token, chance = (other, hope) if hope > chance else (token, chance)
        if token < 0:
            break
        chance = float(rules.trust[0, trust_class.py_func(chance, len(draft), witnesses)])  # type: ignore[attr-defined, index]
        path *= chance
        if path < rules.least:
            break
        draft.append(token)
        chances.append(chance)
    return draft, chances
