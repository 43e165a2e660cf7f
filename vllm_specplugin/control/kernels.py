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


@part
def _hold(
    ids: Ints,
    cells: Ints,
    begun: int,
    limit: int,
    committed: Ints,
    tests: Floats,
    accepted: Floats,
    fade: float,
) -> tuple[int, bool]:
    """Hold a row's drafts, of which `begun` are decided, against what it committed: how many were right, and if one was not."""
    right = 0
    for place in range(min(len(committed), limit - begun)):
        cell = cells[begun + place]
        hit = ids[begun + place] == committed[place]
        tests[cell] = tests[cell] * fade + 1
        accepted[cell] = accepted[cell] * fade + hit
        if not hit:
            return right, True
        right += 1
    return right, False


@kernel
def judge(
    slots: Ints,
    tokens: Ints,
    offsets: Ints,
    tested: Ints,
    drafts: tuple[Ints, Ints, Ints, Flags],
    pending: tuple[Ints, Ints, Ints, Ints],
    streaks: Ints,
    of_request: Floats,
    table: tuple[Floats, Floats, Floats],
    tally: Ints,
    lately: tuple[Floats, Floats],
    fade: float,
    request_fade: float,
    step_fade: float,
) -> None:
    """Hold the drafts that are kept against what their requests committed.

    Each step's drafts are judged by the very next tokens. What they leave open goes on being judged as the request goes on,
    until it is decided: far drafts would hardly be heard of otherwise where only near ones are verified.

    Args:
        slots: `[rows]`.
        tokens: `[total]`, row after row.
        offsets: `[rows + 1]`.
        tested: `[rows]`, how many drafts were verified.
        drafts: ids `[slots, k]`, cells `[slots, k]`, lengths, and whether by chance `[slots]`; lengths are 0 afterwards.
        pending: of those that earlier steps left open ids `[slots, k]`, cells `[slots, k]`, lengths, and how many are decided.
        streaks: `[slots]`.
        of_request: `[slots, 3]`.
        table: tests, accepted and estimates of all cells, flat.
        tally: `[sources, 3]`.
        lately: tests of the last steps' own drafts, and how many were accepted, of all cells, flat.
        fade: what a test leaves of those before it in its cell.
        request_fade: the same in its request.
        step_fade: what a step with tests of a source leaves of those before it in `lately`.
    """
    ids, cells, lengths, by_chance = drafts
    open_ids, open_cells, open_lengths, decided = pending
    tests, accepted, estimates = table
    late_tests, late_accepted = lately
    of_source = max(len(tests) // max(len(tally), 1), 1)
    faded = np.zeros(len(tally), dtype=np.bool_)
    for row in range(len(slots)):
        slot = slots[row]
        committed = tokens[offsets[row] : offsets[row + 1]]
        count = len(committed)
        if count == 0:
            continue
        if open_lengths[slot]:
            right, refused = _hold(
                open_ids[slot], open_cells[slot], decided[slot], open_lengths[slot], committed, tests, accepted, fade
            )
            decided[slot] += right
            if refused or decided[slot] >= open_lengths[slot]:
                open_lengths[slot] = 0
        limit = lengths[slot]
        if by_chance[slot]:  # judged by its verification, which was about the drafts of the last step alone
            limit = min(limit, tested[row])
        right, refused = _hold(ids[slot], cells[slot], 0, limit, committed, tests, accepted, fade)
        for place in range(right + refused):
            hit = place < right
            cell = cells[slot, place]
            of_request[slot] *= request_fade
            of_request[slot, TESTS] += 1
            of_request[slot, ACCEPTED] += hit
            of_request[slot, FORESEEN] += estimates[cell]
            source = cell // of_source
            if not faded[source]:
                late_tests[source * of_source : (source + 1) * of_source] *= step_fade
                late_accepted[source * of_source : (source + 1) * of_source] *= step_fade
                faded[source] = True
            late_tests[cell] += 1
            late_accepted[cell] += hit
            tally[source, CHAINS] += place == 0
            tally[source, JUDGED] += 1
            tally[source, RIGHT] += hit
        # Tokens past the drafts say nothing; a request without drafts is on nobody's track.
        streaks[slot] = 0 if refused or right == 0 else streaks[slot] + right
        if not refused and right < limit and not open_lengths[slot] and not by_chance[slot]:
            open_ids[slot], open_cells[slot] = ids[slot], cells[slot]
            open_lengths[slot], decided[slot] = limit, right
        lengths[slot] = 0


@kernel
def rates(
    tests: Floats, accepted: Floats, lean: float, prior: float, prior_tests: float, caution: float
) -> tuple[Floats, Floats]:
    """`[sources, streaks, columns]`: the acceptance of each kind; one leans on its column, and a column on its source.

    Twice: as it seems to be, and less `caution` standard errors, since the best of many estimates are mostly too high.

    Args:
        tests: `[sources, streaks, columns]`.
        accepted: the same.
        lean: how many tests of its own what a kind leans on counts for.
        prior: the acceptance that a new source starts from.
        prior_tests: how many tests that is worth.
        caution: standard errors.
    """
    found, cautious = np.empty_like(tests), np.empty_like(tests)
    for source in range(tests.shape[0]):
        of_source = (accepted[source].sum() + prior * prior_tests) / (tests[source].sum() + prior_tests)
        for column in range(tests.shape[2]):
            all_tests, all_accepted = tests[source, :, column].sum(), accepted[source, :, column].sum()
            of_column = (all_accepted + lean * of_source) / (all_tests + lean)
            for streak in range(tests.shape[1]):
                own = accepted[source, streak, column] + lean * of_column
                known = tests[source, streak, column] + lean
                rate = own / known
                found[source, streak, column] = rate
                cautious[source, streak, column] = max(rate - caution * np.sqrt(rate * (1 - rate) / known), 0.0)
    return found, cautious


@part
def _logit(probability: float) -> float:
    clipped = min(max(probability, 1e-4), 1 - 1e-4)
    return np.log(clipped / (1 - clipped))  # type: ignore[no-any-return]


@kernel
def turns(tests: Floats, accepted: Floats, estimates: Floats, doubt: float, lean: float) -> Floats:
    """`[sources]`: by how much, in log odds, a source does better or worse of late than its estimates say now, beyond chance.

    Args:
        tests: `[sources, streaks, columns]`, of the last steps.
        accepted: the same.
        estimates: the same, as they are after those steps.
        doubt: standard deviations that are put down to chance.
        lean: how many tests the estimates count for.
    """
    found = np.zeros(len(tests))
    for source in range(len(tests)):
        of_source, rates = tests[source].ravel(), estimates[source].ravel()
        foreseen = (of_source * rates).sum()
        beyond = accepted[source].sum() - foreseen
        surplus = abs(beyond) - doubt * np.sqrt((of_source * rates * (1 - rates)).sum())
        if surplus > 0:
            usual = foreseen / of_source.sum()
            now = usual + np.sign(beyond) * surplus / (of_source.sum() + lean)
            found[source] = _logit(now) - _logit(usual)
    return found


@kernel
def estimate(
    slots: Ints, cells: Ints, estimates: Floats, of_request: Floats, of_source: Floats, lean: float, highest: float
) -> Floats:
    """`[rows, k]`: how probably each draft is accepted once those before it are.

    A request that does better or worse than the estimates for all does so at every draft, in odds.

    Args:
        slots: `[rows]`.
        cells: `[rows, k]`.
        estimates: of all cells, flat.
        of_request: `[slots, 3]`.
        of_source: `[sources]`, what is added to the log odds of each source's drafts.
        lean: how many tests of its own what all requests do counts for.
        highest: no draft is more certain.
    """
    found = np.empty(cells.shape)
    per_source = max(len(estimates) // max(len(of_source), 1), 1)
    for row in range(len(slots)):
        tests, accepted, foreseen = of_request[slots[row]]
        shift = 0.0
        if tests > 0:
            usual = foreseen / tests
            shift = _logit((accepted + lean * usual) / (tests + lean)) - _logit(usual)
        if cells.shape[1]:
            shift += of_source[cells[row, 0] // per_source]
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


KERNELS: tuple[Any, ...] = (judge, rates, turns, estimate, ranked)
