"""The compiled loops of `hybrid_estimates`, one call per step, or per step and part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.compiled import kernel

BLANK = 0.6
"""The estimate for drafts of which their part says nothing."""
CERTAIN = 0.995
"""No estimate is higher."""
LEVELS = 16
"""Kinds of drafts whose part gives estimates, by these; drafts without are told apart by their place in the row."""
WEIGHT = 4.0
"""Accepted drafts that stand against the evidence, `w` in `hybrid_estimates`."""
MEMORY = 2048.0
"""Estimated acceptances after which what a kind of draft has shown counts half."""
FADING = 0.9
"""What a request's evidence keeps of its weight with each pass."""

ACCEPTED, ESTIMATED = range(2)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@kernel
def learn(
    slots: Ints,
    tokens: Ints,
    offsets: Ints,
    ids: Ints,
    kind: Ints,
    said: Floats,
    of_kind: Floats,
    of_request: Floats,
    unseen: Ints,
) -> None:
    """Hold the last drafts of every part against what the step committed.

    Args:
        slots: `[rows]`.
        tokens, offsets: `[total]` and `[rows + 1]`, what was committed, row after row.
        ids, kind, said: `[slots, parts, k]`, the drafts, their kinds (-1 from where nothing can be learned), their estimates.
        of_kind: `[2, parts, kinds]`, drafts accepted and estimated.
        of_request: `[slots, 2, parts]`, the same with corrected estimates.
        unseen: `[slots, parts]`, passes since anything was learned.
    """
    parts, k = kind.shape[1], kind.shape[2]
    for row in range(len(slots)):
        slot, first = slots[row], offsets[row]
        count = min(offsets[row + 1] - first, k)
        if count == 0:
            continue
        for part in range(parts):
            accepted, estimated = 0.0, 0.0
            for place in range(count):
                what = kind[slot, part, place]
                if what < 0:
                    break
                evidence = of_kind[:, part, what]
                estimate = said[slot, part, place]
                estimated += estimate * (evidence[ACCEPTED] + WEIGHT) / (evidence[ESTIMATED] + WEIGHT)
                agreed = ids[slot, part, place] == tokens[first + place]
                if evidence[ESTIMATED] >= MEMORY:
                    evidence /= 2
                evidence[ESTIMATED] += estimate
                evidence[ACCEPTED] += agreed
                accepted += agreed
                if not agreed:
                    break
            if kind[slot, part, 0] < 0:
                unseen[slot, part] += 1
                continue
            unseen[slot, part] = 0
            of_request[slot, ACCEPTED, part] = FADING * of_request[slot, ACCEPTED, part] + accepted
            of_request[slot, ESTIMATED, part] = FADING * of_request[slot, ESTIMATED, part] + estimated


@kernel
def judge(
    part: int,
    slots: Ints,
    given: NDArray[np.float32],
    counted: Ints,
    of_kind: Floats,
    of_request: Floats,
    kind: Ints,
    said: Floats,
    expected: Floats,
    worth: Floats,
) -> None:
    """Estimate what a part's drafts are worth; the last four are filled, `[rows, k]` three times and `[rows]`.

    Args:
        part: its number.
        slots: `[rows]`.
        given: `[rows, most k]`, its own estimates; `[rows, 0]` where it gives none.
        counted: `[rows]`, how many drafts there are of it.
        of_kind, of_request: as in `learn`.
    """
    rows, k = kind.shape
    for row in range(rows):
        own = of_request[slots[row], :, part]
        factor = (own[ACCEPTED] + WEIGHT) / (own[ESTIMATED] + WEIGHT)
        reached = 1.0
        for place in range(k):
            estimate, what = BLANK, place
            if given.shape[1]:
                estimate = given[row, place] if place < given.shape[1] else 0.0
                what = k + min(int(estimate * LEVELS), LEVELS - 1)
            evidence = of_kind[:, part, what]
            corrected = estimate * factor * (evidence[ACCEPTED] + WEIGHT) / (evidence[ESTIMATED] + WEIGHT)
            kind[row, place], said[row, place] = what, estimate
            expected[row, place] = min(corrected, CERTAIN)
            if place < counted[row]:
                reached *= expected[row, place]
                worth[row] += reached


@kernel
def keep(
    part: int,
    slots: Ints,
    token_ids: Ints,
    lengths: Ints,
    counted: Ints,
    kinds: Ints,
    estimates: Floats,
    ids: Ints,
    kind: Ints,
    said: Floats,
) -> None:
    """Put a part's drafts of a step, `[rows, k]` with `lengths` and `counted`, where `learn` looks for them.

    Beyond a row's length nothing agrees: a part of which more was to be expected than it drafted is held to it.
    """
    for row in range(len(slots)):
        slot = slots[row]
        for place in range(ids.shape[2]):
            ids[slot, part, place] = token_ids[row, place] if place < lengths[row] else -1
            kind[slot, part, place] = kinds[row, place] if place < counted[row] else -1
            said[slot, part, place] = estimates[row, place]
