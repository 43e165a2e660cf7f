"""Speculative decoding in one page: the executable specification of what the engine must do.

A *target* maps known tokens to the distribution of the next one, `[vocab]` float64. A *drafter* maps known tokens to a
list of drafts and may not use chance. Noise is keyed by position, as an engine keys a seeded request's, so decoding with
and without drafts can be compared token by token:

>>> plain(target, prompt, 8, seed=1) == speculative(target, any_drafter, prompt, 8, k=3, seed=1).token_ids
True

Sources: sample-and-walk is algorithm 1 of arXiv 2211.17192 with a one-hot q; see `scorers/one_hot.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_specplugin.scorers.one_hot import walk

Target = Callable[[Sequence[int]], torch.Tensor]
Drafter = Callable[[Sequence[int], int], Sequence[int]]


@dataclass(slots=True)
class Generation:
    """What was generated, and how well the drafts did."""

    token_ids: list[int] = field(default_factory=list)
    passes: int = 0
    """Target passes, of which each verified one draft."""
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target pass, bonus token included."""
        return (self.accepted + self.passes) / self.passes if self.passes else 0.0


def draw(probs: torch.Tensor, position: int, seed: int) -> int:
    """One sample from `probs` `[vocab]` with the noise of a position: the winner of an exponential race."""
    generator = torch.Generator().manual_seed(hash((seed, position)) & 0x7FFF_FFFF_FFFF_FFFF)
    noise = torch.empty(probs.shape, dtype=torch.float64).exponential_(generator=generator)
    return int((probs.double() / noise).argmax())


def plain(target: Target, prompt: Sequence[int], num_tokens: int, seed: int) -> list[int]:
    """Decode without drafts."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(draw(target(known), len(known), seed))
    return known[len(prompt) :]


def speculative(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    num_tokens: int,
    k: int,
    seed: int,
    max_model_len: int | None = None,
    eos: int | None = None,
) -> Generation:
    """Decode with drafts of up to k tokens.

    Args:
        target: the target.
        drafter: called with the known tokens and the most drafts that are of use.
        prompt: its tokens.
        num_tokens: stop after as many.
        k: the most drafts per pass.
        seed: of the noise.
        max_model_len: no token lies at or beyond this position.
        eos: stop after this token; drafts beyond it do not count.

    Returns:
        Generation: the tokens of `plain` with the same seed, and the counts.
    """
    result = Generation()
    known = list(prompt)
    last = min(len(prompt) + num_tokens, max_model_len if max_model_len is not None else len(prompt) + num_tokens)
    while len(known) < last:
        room = k if max_model_len is None else max(0, min(k, max_model_len - 1 - len(known)))
        drafts = list(drafter(known, room))[:room]
        # One pass of the target over the last known token and the drafts gives a row before each draft and one after all.
        rows = [target([*known, *drafts[:row]]) for row in range(len(drafts) + 1)]
        samples = [draw(probs, len(known) + row, seed) for row, probs in enumerate(rows)]
        verdict = walk(torch.tensor([samples]), torch.tensor([drafts], dtype=torch.int64), torch.tensor([len(drafts)]))
        emitted = [token for token in verdict.token_ids[0].tolist() if token >= 0][: last - len(known)]
        if eos in emitted:
            emitted = emitted[: emitted.index(eos) + 1]
        result.passes += 1
        result.drafted += len(drafts)
        result.accepted += len(emitted) - 1
        known += emitted
        if emitted[-1] == eos:
            break
    result.token_ids = known[len(prompt) :]
    return result
