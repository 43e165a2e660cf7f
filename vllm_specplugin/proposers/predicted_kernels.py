"""The compiled loops of `predicted`: follow each request's answer through its prediction, one call per engine step.

While answer and prediction agree, a cursor stands behind the last token that they share, and what follows it is the draft. Where
they part, the answer's last tokens are looked for in the prediction: a place that agrees with the last n of them, d tokens away
from where the two last agreed, scores `TOKEN_BITS * n - bits(d)`. That is a likelihood in bits: a token agrees by chance once in
16 times, and an edit that skips or repeats d tokens is the rarer the larger d is. So one agreeing token is believed up to 15
places away, two up to 255, and an edit near by is preferred to a coincidence far off. Where nothing scores, the answer is taken
to have replaced one token by another, a few times over, and then to be lost until something does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.compiled import kernel, part

# Columns of `state[slot]`. START and SIZE say where a prediction lies in `tokens`; CURSOR is the place that is expected next, RUN
# the number of tokens on which the two agree before it (0: a guess; negative: lost), ANCHOR the cursor when they last agreed on
# TRUSTED tokens. GUESSES and LOST count tokens and steps since; LENGTH is the request's known tokens; NEW until it is first seen.
START, SIZE, CURSOR, RUN, ANCHOR, GUESSES, LOST, LENGTH, NEW = range(9)
STATE_COLUMNS = 9

TAIL = 32
"""Tokens of the answer that a place is compared with."""
TRUSTED = 4
"""Agreeing tokens in a row after which nobody thinks of a coincidence."""
TOKEN_BITS = 4
"""What an agreeing token is worth."""
BACK_BITS = 2
"""What going back costs beside the distance: edits seldom repeat what they have passed."""
MAX_GUESSES = 4
"""Tokens in a row that may each have replaced one of the prediction's."""

BUCKETS = 7
"""Lengths of agreement told apart when counting how often the next token agrees, too: 0, 1, 2, 3-4, 5-8, 9-16, more."""
PRIOR = np.array([0.35, 0.55, 0.65, 0.75, 0.85, 0.92, 0.95])
PRIOR_WEIGHT = 4.0
"""Tokens of evidence that the prior stands for, and that all requests together stand for beside a single one."""
MEMORY = 4096.0
REQUEST_MEMORY = 64.0
"""Tokens per bucket after which older evidence is halved, of all requests and of one."""

Words = NDArray[np.int64]
Tokens = NDArray[np.int32]
Counts = NDArray[np.float64]


@part
def bits(number: int) -> int:
    """Of a number from 0 on, as `int.bit_length`."""
    length = 0
    while number > 0:
        number >>= 1
        length += 1
    return length


@part
def bucket(run: int) -> int:
    return min(run, 2) if run <= 2 else min(2 + bits(run - 1) - 1, BUCKETS - 1)


@part
def agreement(tokens: Tokens, start: int, place: int, tail: Tokens, known: int) -> int:
    """On how many of the last `known` tokens of `tail` the prediction agrees before `place`."""
    most = min(known, place)
    same = 0
    while same < most and tokens[start + place - 1 - same] == tail[TAIL - 1 - same]:
        same += 1
    return same


@part
def search(
    tokens: Tokens, state: Words, tail: Tokens, first: int, last: int, found: tuple[int, int, int]
) -> tuple[int, int, int]:
    """The best of the places from `first` to `last` and the one `found` before: its score, place and agreement.

    The nearest behind the anchor comes first, so that it wins among equals.
    """
    start, anchor = state[START], state[ANCHOR]
    known = min(TAIL, state[LENGTH])
    newest = tail[TAIL - 1]
    best, where, run = found
    for place in range(max(anchor, first), last + 1):
        if tokens[start + place - 1] == newest:
            same = agreement(tokens, start, place, tail, known)
            score = TOKEN_BITS * same - bits(place - anchor)
            if score > best:
                best, where, run = score, place, same
                if same == known:
                    break
    for place in range(min(anchor - 1, last), first - 1, -1):
        if tokens[start + place - 1] == newest:
            same = agreement(tokens, start, place, tail, known)
            score = TOKEN_BITS * same - bits(anchor - place) - BACK_BITS
            if score > best:
                best, where, run = score, place, same
                if same == known:
                    break
    return best, where, run


@part
def count(counts: Counts, column: int, agreed: bool, memory: float) -> None:
    """Note in `counts` `[2, BUCKETS]` (tokens, agreeing tokens) what came of an agreement of this length."""
    if counts[0, column] >= memory:
        counts[0, column] /= 2
        counts[1, column] /= 2
    counts[0, column] += 1
    counts[1, column] += agreed


@part
def follow(tokens: Tokens, state: Words, tail: Tokens, token: int, own: Counts, overall: Counts) -> None:
    """Take in one token of the answer."""
    cursor, run = state[CURSOR], state[RUN]
    tail[: TAIL - 1] = tail[1:]
    tail[TAIL - 1] = token
    state[LENGTH] += 1
    if run < 0 or cursor >= state[SIZE]:
        state[RUN] = -1
        state[GUESSES] = MAX_GUESSES
        return
    agreed = tokens[state[START] + cursor] == token
    count(own, bucket(run), agreed, REQUEST_MEMORY)
    count(overall, bucket(run), agreed, MEMORY)
    state[CURSOR] = cursor + 1
    if not agreed:
        state[RUN] = -1
        state[GUESSES] += 1
        return
    state[RUN] = run + 1
    if run + 1 >= TRUSTED:
        state[ANCHOR] = cursor + 1
        state[GUESSES] = 0


@part
def realign(tokens: Tokens, state: Words, tail: Tokens, window: int) -> None:
    """Look for the answer in the prediction: `window` places ahead, a quarter of it back, and as many of all others in turn."""
    size, anchor = state[SIZE], state[ANCHOR]
    found = (-1, 0, 0)
    if state[NEW]:
        found = search(tokens, state, tail, 1, size, found)
    else:
        found = search(tokens, state, tail, max(1, anchor - window // 4), min(size, anchor + window), found)
        if size > window:
            first = 1 + state[LOST] * window % size
            found = search(tokens, state, tail, first, min(size, first + window - 1), found)
    state[NEW] = 0
    if found[0] >= 0:
        state[CURSOR], state[RUN], state[LOST] = found[1], found[2], 0
        if found[2] >= TRUSTED:
            state[ANCHOR], state[GUESSES] = found[1], 0
    elif state[GUESSES] < MAX_GUESSES:
        state[RUN] = 0
    else:
        state[RUN] = -1
        state[LOST] += 1


@kernel
def advance(
    tokens: Tokens,
    state: Words,
    tails: Tokens,
    counts: Counts,
    overall: Counts,
    slots: Words,
    ids: Tokens,
    offsets: Words,
    limits: Words,
    rules: tuple[int, int],
    least: float,
    drafts: Tokens,
    lengths: Words,
    expected: NDArray[np.float32],
) -> None:
    """Take in one step and draft.

    Args:
        tokens: the arena that predictions lie in.
        state: `[slots, STATE_COLUMNS]`.
        tails: `[slots, TAIL]`, each request's last tokens, the newest last.
        counts: `[slots, 2, BUCKETS]`, see `count`.
        overall: `[2, BUCKETS]`, the same over all requests.
        slots: `[rows]`, -1 for a row without a prediction.
        ids, offsets, limits: as in Step.
        rules: how far to look, and the size of the vocabulary.
        least: the least probability that all drafts of a row up to one are accepted, below which it is left out.
        drafts, lengths, expected: `[rows, k]`, `[rows]`, `[rows, k]`, filled with the answer.
    """
    window, vocab = rules
    for row in range(len(slots)):
        slot = slots[row]
        if slot < 0:
            continue
        mine, tail, own = state[slot], tails[slot], counts[slot]
        for place in range(offsets[row], offsets[row + 1]):
            follow(tokens, mine, tail, ids[place], own, overall)
        if mine[RUN] < 0 and (mine[NEW] or offsets[row + 1] > offsets[row]):
            realign(tokens, mine, tail, window)
        run, first, reached = mine[RUN], mine[START] + mine[CURSOR], 1.0
        if run < 0:
            continue
        for draft in range(min(limits[row], mine[SIZE] - mine[CURSOR])):
            column = bucket(run + draft)
            common = (overall[1, column] + PRIOR_WEIGHT * PRIOR[column]) / (overall[0, column] + PRIOR_WEIGHT)
            probability = (own[1, column] + PRIOR_WEIGHT * common) / (own[0, column] + PRIOR_WEIGHT)
            reached *= probability
            token = tokens[first + draft]
            if token >= vocab or reached < least:
                break
            drafts[row, draft] = token
            expected[row, draft] = probability
            lengths[row] = draft + 1
