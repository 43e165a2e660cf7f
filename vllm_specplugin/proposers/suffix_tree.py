"""The suffix tree of suffix decoding, as parts of compiled loops: what has followed each context, and how often.

The tree is that of the n-gram index (`ngram_kernels`): a trie over reversed contexts without its unbranched paths, in one
open-addressing table. A node stands for all contexts, some `n` to `agreed` tokens long, that have occurred at exactly the same
places; here it also carries a *sketch* of the tokens that followed there. So one walk down from the shortest context of a
place, over as many nodes as the text branched at, nearly always one to three, meets every context that is known of it.

A node is two int64: the entry of the n-gram index, 0 where empty, and the sketch:

    bits 42..61  the token that has followed most often
    bits 31..41  how often
    bits 11..30  the next one
    bits  0..10  how often

The sketch is Space-Saving (Metwally et al. 2005) with two counters: a third token takes the smaller counter over, and the two
always add up to the number of occurrences. Where a counter is full both are halved, so that what is long ago fades.

How far to trust a sketch is measured, not assumed: `odds[class_of(...)]` is how often the leading token did come, as a moving
average over all places seen so far where the context had such a length and the sketch such counts. Fresh tokens update it
before they enter the tree, so that it is a forecast's hit rate and no fit.

The tokens may lie in a ring (`mask`), whose old part is overwritten as `head` moves on: nodes that point there are dead,
and are passed over until `sweep` removes them. Positions count modulo 2^28, the width of `end`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.compiled import part
from vllm_specplugin.proposers.ngram_kernels import (
    KEY_SHIFT,
    MAX_N,
    MAX_TOKENS,
    Tokens,
    Words,
    agreed_of,
    home,
    make_entry,
    make_key,
    mix,
)

TOKEN_BITS, COUNT_BITS = 20, 11
MAX_VOCAB = 1 << TOKEN_BITS
MAX_COUNT = (1 << COUNT_BITS) - 1
TOKEN_MASK = MAX_VOCAB - 1
NODE_WORDS = 2

Odds = NDArray[np.float64]

# -- odds ------------------------------------------------------------------------

LENGTH_CLASSES, COUNT_CLASSES, SOURCES = 10, 8, 2
LOCAL, GLOBAL = range(SOURCES)
CLASSES = SOURCES * LENGTH_CLASSES * COUNT_CLASSES * COUNT_CLASSES
LEVELS, DEPTH_CLASSES, WITNESSES = 20, 3, 3
BOTH = SOURCES
"""Beside LOCAL and GLOBAL: both trees forecast the same token."""
TRUST_CLASSES = LEVELS * DEPTH_CLASSES * WITNESSES
MEMORY = 255.0
"""Over how many forecasts the moving averages reach."""

_LENGTH_CLASS = np.digitize(np.arange(MAX_N + 1), [2, 3, 4, 5, 6, 8, 11, 16, 24])
_COUNT_CLASS = np.digitize(np.arange(MAX_COUNT + 1), [1, 2, 3, 4, 8, 16, 64])


def first_odds() -> Odds:
    """`[2, CLASSES]`: forecasts of the beginner, who trusts long contexts and clear majorities; and how many each has seen."""
    odds = np.zeros((2, CLASSES))
    shape = SOURCES, LENGTH_CLASSES, COUNT_CLASSES, COUNT_CLASSES
    _, length, leading, next_one = np.indices(shape)
    trust = (leading + length / 2) / (leading + next_one + length / 2 + 1)
    odds[0] = trust.reshape(-1)
    return odds


def first_trust() -> Odds:
    """`[2, TRUST_CLASSES]`: forecasts are believed at first, with the weight of a few that came true as often as they said."""
    trust = np.full((2, TRUST_CLASSES), 8.0)
    trust[0] = np.tile((np.arange(LEVELS) + 0.5) / LEVELS, TRUST_CLASSES // LEVELS)
    return trust


@part
def trust_class(chance: float, place: int, witnesses: int) -> int:
    """Which drafts one of odds `chance` at `place` is to be judged by; LOCAL, GLOBAL or BOTH trees said so."""
    level = min(int(chance * LEVELS), LEVELS - 1)
    depth = 0 if place == 0 else 1 if place < 3 else 2
    return (witnesses * DEPTH_CLASSES + depth) * LEVELS + level


@part
def class_of(source: int, length: int, sketch: int) -> int:
    """Which forecasts a sketch's leading token is to be judged by."""
    place = source * LENGTH_CLASSES + _LENGTH_CLASS[length]
    place = place * COUNT_CLASSES + _COUNT_CLASS[(sketch >> (TOKEN_BITS + COUNT_BITS)) & MAX_COUNT]
    return int(place * COUNT_CLASSES + _COUNT_CLASS[sketch & MAX_COUNT])


@part
def judge(odds: Odds, place: int, hit: bool) -> None:
    seen = odds[1, place]
    odds[0, place] += ((1.0 if hit else 0.0) - odds[0, place]) / (seen + 1.5)
    odds[1, place] = min(seen + 1, MEMORY)


# -- sketches --------------------------------------------------------------------


@part
def leading(sketch: int) -> int:
    return sketch >> (TOKEN_BITS + 2 * COUNT_BITS)


@part
def counted(sketch: int, token: int) -> int:
    """The sketch with one more token seen; 0 is the sketch of nothing."""
    first, often = leading(sketch), (sketch >> (TOKEN_BITS + COUNT_BITS)) & MAX_COUNT
    second, seldom = (sketch >> COUNT_BITS) & TOKEN_MASK, sketch & MAX_COUNT
    if often == 0 or token == first:
        first, often = token, often + 1
    else:
        second, seldom = token, seldom + 1
        if seldom >= often:  # of two that are as frequent the latest leads
            first, often, second, seldom = second, seldom, first, often
    if often > MAX_COUNT:
        often, seldom = often >> 1, seldom >> 1
    return (((first << COUNT_BITS | often) << TOKEN_BITS | second) << COUNT_BITS) | seldom


# -- the tree --------------------------------------------------------------------


@part
def dead(entry: int, mask: int, head: int) -> bool:
    """The tokens that an entry points to have been overwritten."""
    return ((head - (entry & MAX_TOKENS)) & MAX_TOKENS) > mask + 1


@part
def find(
    words: Words,
    tokens: Tokens,
    table: int,
    size: int,
    start: int,
    mask: int,
    head: int,
    text: Tokens,
    at: int,
    known: int,
    n: int,
    key: int,
) -> tuple[int, int]:
    """The word that holds the node of the `n` tokens of `text` before `at`, or the empty one where it belongs.

    And on how many tokens, of the `known` before `at`, the text agrees with the node's, no more than those do among themselves.
    """
    place = home(key, size)
    while True:
        word = table + NODE_WORDS * place
        entry = words[word]
        if entry == 0:
            return word, 0
        if entry >> KEY_SHIFT == key and not dead(entry, mask, head):
            other = entry & MAX_TOKENS
            last = start + ((other - 1) & mask)
            most = min(agreed_of(entry), other, known)
            same = 0
            while same < most and tokens[last - same] == text[at - 1 - same]:
                same += 1
            if same >= n:
                return word, same
        place += 1
        if place == size:
            place = 0


@part
def put(words: Words, table: int, size: int, entry: int, sketch: int) -> None:
    """Enter a node that is known to be absent."""
    place = home(entry >> KEY_SHIFT, size)
    while words[table + NODE_WORDS * place] != 0:
        place += 1
        if place == size:
            place = 0
    words[table + NODE_WORDS * place] = entry
    words[table + NODE_WORDS * place + 1] = sketch


@part
def learn(
    words: Words,
    tokens: Tokens,
    table: int,
    size: int,
    start: int,
    mask: int,
    head: int,
    end: int,
    known: int,
    min_n: int,
    max_n: int,
    salt: np.uint64,
    room: bool,
    odds: Odds,
    source: int,
) -> int:
    """Take in that the token at `end` followed the `known` tokens before it; returns how many nodes that added, two at most.

    With `room` False known contexts are updated but none added. A source below 0 leaves the odds alone.
    """
    if known < min_n:
        return 0
    at = start + ((end - 1) & mask) + 1
    token = tokens[at]
    state, n = salt, 0
    while n < min_n:
        n += 1
        state = mix(state, tokens[at - n])
    while True:
        key = make_key(state, n)
        word, same = find(words, tokens, table, size, start, mask, head, tokens, at, known, n, key)
        entry = words[word]
        if entry == 0:
            if not room:
                return 0
            words[word], words[word + 1] = make_entry(key, max_n, end), counted(0, token)
            return 1
        agreed, sketch = agreed_of(entry), words[word + 1]
        if source >= 0:
            judge(odds, class_of(source, same, sketch), leading(sketch) == token)
        words[word], words[word + 1] = make_entry(key, same, end), counted(sketch, token)
        if same in (max_n, known):
            return 0
        while n <= same:
            n += 1
            state = mix(state, tokens[at - n])
        if same < agreed:
            break
    # The node splits: from here on the new occurrence differs from the old ones, which agree among themselves further on.
    if not room:
        return 0
    put(words, table, size, make_entry(make_key(state, n), max_n, end), counted(0, token))
    other = entry & MAX_TOKENS
    if other < n:  # the old one is at the start of the text
        return 1
    last = start + ((other - 1) & mask)
    # All but the last token of the old one's longer context are the new one's.
    state, length = salt, 0
    while length < n:
        state = mix(state, tokens[last - length])
        length += 1
    put(words, table, size, make_entry(make_key(state, n), agreed, other), sketch)
    return 2


@part
def consult(
    words: Words,
    tokens: Tokens,
    table: int,
    size: int,
    start: int,
    mask: int,
    head: int,
    text: Tokens,
    at: int,
    known: int,
    min_n: int,
    max_n: int,
    salt: np.uint64,
    odds: Odds,
    source: int,
) -> tuple[int, float]:
    """The token that is most likely to follow the `known` tokens of `text` before `at`, and its odds; (-1, 0) for none.

    Of all contexts that are known, the one whose forecast has the best odds counts; of equals, the longest.
    """
    token, chance = -1, 0.0
    if size == 0 or known < min_n:
        return token, chance
    state, n = salt, 0
    while n < min_n:
        n += 1
        state = mix(state, text[at - n])
    while True:
        word, same = find(words, tokens, table, size, start, mask, head, text, at, known, n, make_key(state, n))
        entry = words[word]
        if entry == 0:
            return token, chance
        sketch = words[word + 1]
        hope = odds[0, class_of(source, same, sketch)]
        if hope >= chance:
            token, chance = leading(sketch), hope
        if same in (max_n, known) or same < agreed_of(entry):
            return token, chance
        while n <= same:
            n += 1
            state = mix(state, text[at - n])


# -- removal -----------------------------------------------------------------------


@part
def remove(words: Words, size: int, place: int) -> None:
    """Empty a place of the table at word 0, moving up what would no longer be found behind the gap."""
    gap = place
    while True:
        place += 1
        if place == size:
            place = 0
        entry = words[NODE_WORDS * place]
        if entry == 0:
            break
        # How far the entry lies behind its home, and behind the gap; it may move there if that is not before its home.
        from_home = place - home(entry >> KEY_SHIFT, size)
        from_gap = place - gap
        if (from_home + size if from_home < 0 else from_home) >= (from_gap + size if from_gap < 0 else from_gap):
            words[NODE_WORDS * gap], words[NODE_WORDS * gap + 1] = entry, words[NODE_WORDS * place + 1]
            gap = place
    words[NODE_WORDS * gap] = 0
    words[NODE_WORDS * gap + 1] = 0


@part
def sweep(words: Words, size: int, mask: int, head: int, cursor: int, places: int) -> tuple[int, int]:
    """Remove the dead nodes of so many places from `cursor` on; returns the new cursor and how many were removed."""
    removed = 0
    for _ in range(places):
        while words[NODE_WORDS * cursor] != 0 and dead(words[NODE_WORDS * cursor], mask, head):
            remove(words, size, cursor)
            removed += 1
        cursor += 1
        if cursor == size:
            cursor = 0
    return cursor, removed
