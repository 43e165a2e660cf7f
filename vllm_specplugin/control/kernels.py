"""The loops of control over a step's rows and drafts; `acceptance` and `policy` say what they are about.

Kinds of drafts are counted in tables `[sources, streaks, columns]`, which are flat here: a *cell* is a place in one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.compiled import kernel, part

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Columns of `of_request[slot]`: tests, how many were accepted, how many would have been by the estimates for all requests.
TESTS, ACCEPTED, FORESEEN = range(3)

# Columns of `tally[source]`: first drafts that were judged, all drafts that were, and how many of those were right.
CHAINS, JUDGED, RIGHT = range(3)


@kernel
def judge(
    slots: Ints,
    tokens: Ints,
    offsets: Ints,
    tested: Ints,
    drafts: tuple[Ints, Ints, Ints, Ints, Flags],
    streaks: Ints,
    of_request: Floats,
    table: tuple[Floats, Floats, Floats],
    tally: Ints,
    fade: float,
    request_fade: float,
) -> None:
    """Hold the drafts that are kept against what their requests committed.

    Args:
        slots: `[rows]`.
        tokens: `[total]`, row after row.
        offsets: `[rows + 1]`.
        tested: `[rows]`, how many drafts were verified.
        drafts: ids `[slots, k]`, cells `[slots, k]`, lengths, how many are decided, and whether by chance `[slots]`.
        streaks: `[slots]`.
        of_request: `[slots, 3]`.
        table: tests, accepted and estimates of all cells, flat.
        tally: `[sources, 3]`.
        fade: what a test leaves of those before it in its cell.
        request_fade: the same in its request.
    """
    ids, cells, lengths, decided, by_chance = drafts
    tests, accepted, estimates = table
    of_source = max(len(tests) // max(len(tally), 1), 1)
    for row in range(len(slots)):
        slot = slots[row]
        count = offsets[row + 1] - offsets[row]
        if count == 0:
            continue
        limit = lengths[slot]
        if by_chance[slot]:  # judged by its verification, which was about the drafts of the last step alone
            limit = min(limit, tested[row])
        begun = decided[slot]
        right = 0
        refused = False
        for place in range(min(count, limit - begun)):
            cell = cells[slot, begun + place]
            hit = ids[slot, begun + place] == tokens[offsets[row] + place]
            tests[cell] = tests[cell] * fade + 1
            accepted[cell] = accepted[cell] * fade + hit
            of_request[slot] *= request_fade
            of_request[slot, TESTS] += 1
            of_request[slot, ACCEPTED] += hit
            of_request[slot, FORESEEN] += estimates[cell]
            source = cell // of_source
            tally[source, CHAINS] += begun + place == 0
            tally[source, JUDGED] += 1
            tally[source, RIGHT] += hit
            if not hit:
                refused = True
                break
            right += 1
        decided[slot] = begun + right
        # Tokens past the drafts say nothing; a request without drafts is on nobody's track.
        streaks[slot] = 0 if refused or right == 0 else streaks[slot] + right
        if refused or decided[slot] >= limit:
            lengths[slot] = 0


@kernel
def rates(tests: Floats, accepted: Floats, lean: float, prior: float, prior_tests: float) -> Floats:
    """`[sources, streaks, columns]`: the acceptance of each kind; one leans on its column, and a column on its source.

    Args:
        tests: `[sources, streaks, columns]`.
        accepted: the same.
        lean: how many tests of its own what a kind leans on counts for.
        prior: the acceptance that a new source starts from.
        prior_tests: how many tests that is worth.
    """
    found = np.empty_like(tests)
    for source in range(tests.shape[0]):
        of_source = (accepted[source].sum() + prior * prior_tests) / (tests[source].sum() + prior_tests)
        for column in range(tests.shape[2]):
            all_tests, all_accepted = tests[source, :, column].sum(), accepted[source, :, column].sum()
            of_column = (all_accepted + lean * of_source) / (all_tests + lean)
            for streak in range(tests.shape[1]):
                own = accepted[source, streak, column] + lean * of_column
                found[source, streak, column] = own / (tests[source, streak, column] + lean)
    return found


@part
def _logit(probability: float) -> float:
    clipped = min(max(probability, 1e-4), 1 - 1e-4)
    return np.log(clipped / (1 - clipped))  # type: ignore[no-any-return]


@kernel
def estimate(slots: Ints, cells: Ints, estimates: Floats, of_request: Floats, lean: float, highest: float) -> Floats:
    """`[rows, k]`: how probably each draft is accepted once those before it are.

    A request that does better or worse than the estimates for all does so at every draft, in odds.

    Args:
        slots: `[rows]`.
        cells: `[rows, k]`.
        estimates: of all cells, flat.
        of_request: `[slots, 3]`.
        lean: how many tests of its own what all requests do counts for.
        highest: no draft is more certain.
    """
    found = np.empty(cells.shape)
    for row in range(len(slots)):
        tests, accepted, foreseen = of_request[slots[row]]
        shift = 0.0
        if tests > 0:
            usual = foreseen / tests
            shift = _logit((accepted + lean * usual) / (tests + lean)) - _logit(usual)
        for place in range(cells.shape[1]):
            found[row, place] = min(1 / (1 + np.exp(-_logit(estimates[cells[row, place]]) - shift)), highest)
    return found


@kernel
def ranked(acceptance: Floats, lengths: Ints) -> tuple[Floats, Ints]:
    """The gains of all drafts, largest first, and whose they are: `[drafts]` both, but for drafts that gain nothing.

    By position first: of equal gains the earlier position comes first, so that any number of them leaves no gap in a row.
    """
    rows, k = acceptance.shape
    gains = np.empty(rows * k)
    owners = np.empty(rows * k, dtype=np.int64)
    left = np.ones(rows)
    count = 0
    for place in range(k):
        for row in range(rows):
            if place < lengths[row]:
                left[row] *= acceptance[row, place]
                if left[row] > 0:
                    gains[count], owners[count] = left[row], row
                    count += 1
    order = np.argsort(-gains[:count], kind="mergesort")
    return gains[:count][order], owners[:count][order]


KERNELS: tuple[Any, ...] = (judge, rates, estimate, ranked)
