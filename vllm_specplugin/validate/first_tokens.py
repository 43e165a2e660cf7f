"""Which places the chi-square looks at: after a few fixed prompts the first token, the second after the likeliest first ones,
the third after the likeliest pairs. All are chosen from plain decoding alone, before the engine under test says anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.validate.chisquare import Cell
from vllm_specplugin.validate.membership import membership, softmax_over
from vllm_specplugin.validate.sampling import Sampling

PROMPTS = 4
"""Of all prompts, the first so many; few, so that each is sampled often."""
SECONDS = 8
"""First tokens per prompt after which the second is looked at."""
THIRDS = 16
"""Pairs per prompt after which the third is."""
LEAST_SAMPLES = 25
"""A place that was reached less often is left out."""

Prefix = tuple[int, tuple[int, ...]]
"""A prompt's index and the output so far."""


def beginnings(prompts: int) -> list[Prefix]:
    """The places of the first tokens."""
    return [(prompt, ()) for prompt in range(min(prompts, PROMPTS))]


def likeliest_after(
    prefixes: Sequence[Prefix], joint: NDArray[np.float32], most: int
) -> tuple[list[Prefix], NDArray[np.float32]]:
    """The likeliest continuations by one token, at most `most` per prompt, and the probability of each, `[continuations]`.

    `joint` is `[prefixes, vocab]`: the probability of each prefix (all of one length) followed by each token.
    """
    chosen: list[Prefix] = []
    weights: list[float] = []
    for prompt in sorted({prompt for prompt, _ in prefixes}):
        rows = [row for row, (owner, _) in enumerate(prefixes) if owner == prompt]
        best = np.argsort(-joint[rows], axis=None, kind="stable")[:most]
        for place, token in zip(*np.unravel_index(best, joint[rows].shape), strict=True):
            row = rows[place]
            if joint[row, token] > 0:
                chosen.append((prompt, (*prefixes[row][1], int(token))))
                weights.append(float(joint[row, token]))
    return chosen, np.array(weights, dtype=np.float32)


def probabilities_at(values: NDArray[np.floating], sampling: Sampling) -> NDArray[np.float32]:
    """`[places, vocab]`: what plain decoding draws from, given its logits of the same shape (see `membership`)."""
    rows = [softmax_over(row, membership(row, sampling, slack=0).possible) for row in values]
    return np.array(rows, dtype=np.float32)


def cells(
    prefixes: Sequence[Prefix],
    values: NDArray[np.floating],
    sampling: Sampling,
    slack: float,
    counts: Sequence[Sequence[int]],
) -> tuple[list[Cell], int]:
    """The samples at each place with what is expected there, and how many samples were left out.

    A cell is about the tokens that are allowed however rounding moved the logits: their probabilities among each other. Samples
    of tokens that rounding may have let in are left out. Samples of tokens that it could not let in stay, with probability 0.

    Args:
        prefixes: all places.
        values: `[prefixes, vocab]`, plain decoding's logits before truncation (see `membership`).
        sampling: the parameters.
        slack: nats by which rounding may have moved any two logits relative to each other.
        counts: `[prompt's index, token, token, token, how often]` each.
    """
    vocab = values.shape[1]
    by_prompt: dict[int, list[Sequence[int]]] = {}
    for entry in counts:
        by_prompt.setdefault(entry[0], []).append(entry)
    found = []
    left_out = 0
    for row, (prompt, output) in enumerate(prefixes):
        depth = len(output)
        there = [entry for entry in by_prompt.get(prompt, []) if tuple(entry[1 : 1 + depth]) == output]
        observed = np.bincount(
            [entry[1 + depth] for entry in there], weights=[entry[-1] for entry in there], minlength=vocab
        ).astype(np.int64)
        if observed.sum() >= LEAST_SAMPLES:
            label = f"prompt {prompt + 1}" + "".join(f", {token}" for token in output)
            tokens = membership(values[row], sampling, slack)
            uncertain = tokens.possible & ~tokens.inside
            left_out += int(observed[uncertain].sum())
            observed[uncertain] = 0
            found.append(Cell(label, softmax_over(values[row], tokens.inside), observed))
    return found, left_out
