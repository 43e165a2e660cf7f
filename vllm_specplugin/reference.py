"""Speculative decoding in one page: the executable specification of what the engine must do.

A *target* maps known tokens to the distribution of the next one, `[vocab]`. A *drafter* maps known tokens to drafts: a list
of ids chosen deterministically, or ids with the distributions that they were drawn from. A *verifier* decides which drafts stand
and what follows them. What is emitted follows the target's distribution whatever the drafter does; with the verifier
`one_hot`, whose noise is keyed by position as an engine keys a seeded request's, it even is what plain decoding emits:

>>> plain(target, prompt, 8, seed=1) == speculative(target, any_drafter, prompt, 8, k=3, seed=1).token_ids
True

Sources: speculative sampling is algorithm 1 of arXiv 2211.17192; that a deterministic draft makes it sample-and-walk, see
`scorers/one_hot.py`; the other rules are in `scorers/`, each with its paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from vllm_specplugin.noise import DraftNoise
from vllm_specplugin.scorers.base import SampleVerifier, Verifier
from vllm_specplugin.scorers.one_hot import OneHotVerifier
from vllm_specplugin.scorers.uniforms import key_of, uniforms
from vllm_specplugin.types import Request, Verdict

Target = Callable[[Sequence[int]], torch.Tensor]
"""known tokens -> `[vocab]`"""


class Drawn(NamedTuple):
    """Drafts that were drawn by chance."""

    ids: Sequence[int]
    """`[n]`"""
    probabilities: torch.Tensor
    """`[n, vocab]`: exactly what each was drawn from."""


Drafter = Callable[[Sequence[int], int], Sequence[int] | Drawn]
"""(known tokens, the most drafts that are of use) -> drafts `[n]`, with probabilities where chance chose them"""


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


def sampled(model: Target, seed: int) -> Drafter:
    """A drafter that draws each draft from a model of its own, with noise apart from the verifier's."""
    request = Request("reference", seed=seed)

    def drafter(known: Sequence[int], room: int) -> Drawn:
        noise = DraftNoise(0, [request], np.array([len(known)]))
        drafts: list[int] = []
        probs: list[torch.Tensor] = []
        for place in range(room):
            probs.append(model([*known, *drafts]).float())
            # A stream for each pass: a refused draft has been looked at by `block`, and must not come again in the next one.
            stream = noise.generator(0, place, use=f"draft of the pass at {len(known)}")
            ends = probs[-1].double().cumsum(0)
            drafts.append(int(torch.searchsorted(ends, ends[-1] * stream.random(), right=True)))
        return Drawn(drafts, torch.stack(probs) if probs else torch.empty(0))

    return drafter


def speculative(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    num_tokens: int,
    k: int,
    seed: int,
    max_model_len: int | None = None,
    eos: int | None = None,
    verifier: Verifier | None = None,
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
        verifier: `one_hot` where None.

    Returns:
        Generation: tokens that follow the target's distribution, and the counts. With `one_hot` they are those of `plain`
        with the same seed.
    """
    verifier = verifier or OneHotVerifier()
    result = Generation()
    known = list(prompt)
    last = min(len(prompt) + num_tokens, max_model_len if max_model_len is not None else len(prompt) + num_tokens)
    while len(known) < last:
        room = k if max_model_len is None else max(0, min(k, max_model_len - 1 - len(known)))
        drafted = drafter(known, room)
        drafts, drawn_from = drafted if isinstance(drafted, Drawn) else (drafted, None)
        drafts = list(drafts)[:room]
        # One pass of the target over the last known token and the drafts gives a row before each draft and one after all.
        rows = [target([*known, *drafts[:row]]) for row in range(len(drafts) + 1)]
        verdict = _verify(verifier, rows, drawn_from, drafts, len(known), seed)
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


def _verify(
    verifier: Verifier, rows: list[torch.Tensor], drawn_from: torch.Tensor | None, drafts: list[int], position: int, seed: int
) -> Verdict:
    """One pass over one request: the target's rows `[drafts + 1][vocab]`, of which the first is for this position."""
    ids, lengths = torch.tensor([drafts], dtype=torch.int64), torch.tensor([len(drafts)])
    if isinstance(verifier, SampleVerifier):
        samples = [draw(probs, position + row, seed) for row, probs in enumerate(rows)]
        return verifier.walk(torch.tensor([samples]), ids, lengths)
    p = torch.stack(rows)[None].float()  # [1, drafts + 1, vocab]
    q = None if drawn_from is None or not drafts else drawn_from[None, : len(drafts)].float()
    noise = uniforms(torch.tensor([key_of(f"seed:{seed}")]), torch.tensor([position]), len(drafts))
    return verifier.verify(p, q, ids, lengths, noise)
