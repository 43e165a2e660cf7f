"""The tensor code and the rules of `scorers/exact.py` on the same numbers, verdict by verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from vllm_specplugin.scorers import drawing
from vllm_specplugin.scorers.base import Use, Verifier
from vllm_specplugin.scorers.drawing import Residual, Weights
from vllm_specplugin.scorers.exact import Distribution, FromUniforms, Rule

NEAR = 1e-6
"""So near to a threshold, in probability mass, a verdict may go either way: some ten times float32's rounding of 1."""
ROUNDING = 2.0**-23
"""Of an entry of a residual before it is normalised: p, q, the scale and the product are rounded to float32 once each."""

Arguments = dict[str, Any]
"""What `Verifier.verify` is called with."""


class Reference(FromUniforms):
    """The reference's choices; it keeps the weights of the last draw."""

    weights: Distribution = ()

    def one_of(self, weights: Distribution, use: int, position: int) -> int:
        self.weights = weights
        # A residual without mass follows a refusal by rounding only; whoever sees -1 finds a margin of 0 beside it.
        return super().one_of(weights, use, position) if math.fsum(weights) > 0 else -1


class Margins(Reference):
    """The same, and how near any choice was to going the other way, in probability mass."""

    nearest = math.inf

    def happens(self, probability: float, use: int, position: int) -> bool:
        if 0 < probability < 1:  # at 0 and 1 there is nothing to round
            self.nearest = min(self.nearest, abs(self.uniforms[position][use] - probability))
        return super().happens(probability, use, position)

    def one_of(self, weights: Distribution, use: int, position: int) -> int:
        # Not relative to the weights' total: a residual of little mass magnifies what was rounded in p and q.
        total, reached = math.fsum(weights), 0.0
        if total <= 0:
            self.nearest = 0.0
        for weight in weights:
            reached += weight
            if weight > 0 and reached < total:
                self.nearest = min(self.nearest, abs(self.uniforms[position][use] * total - reached))
        return super().one_of(weights, use, position)


@dataclass
class Comparison:
    """What came of some batches."""

    rows: int = 0
    accepted: int = 0
    refused: int = 0
    """Rows of which not all drafts were accepted."""
    differing: list[float] = field(default_factory=list)
    """For each row with another verdict, how near the reference was to another choice."""
    residuals: list[float] = field(default_factory=list)
    """For each row with the same verdict, the largest error of the weights that the last token was drawn from, over ROUNDING."""

    def far(self) -> list[float]:
        """The rows that no rounding explains."""
        return [margin for margin in self.differing if margin > NEAR]


def compare(verifier: Verifier, rule: Rule, arguments: Arguments, into: Comparison) -> None:
    """Both on the same numbers; the reference computes in float64 with the float32 probabilities."""
    residuals: dict[int, torch.Tensor] = {}

    def draw(weights: torch.Tensor | Weights, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(weights, Residual):
            every = torch.arange(weights.vocab).expand(len(weights.row), -1)
            residuals.update(zip(weights.row.tolist(), weights.at(every).double(), strict=True))
        return original(weights, uniforms)

    original = drawing.draw
    with mock.patch.object(drawing, "draw", draw):
        verdict = verifier.verify(**arguments)
    for row, length in enumerate(arguments["lengths"].tolist()):
        uniforms = arguments["uniforms"][row].tolist()
        p = arguments["target_probs"][row, : length + 1].tolist()
        q = None if arguments["draft_probs"] is None else arguments["draft_probs"][row, :length].tolist()
        drafts = arguments["draft_ids"][row, :length].tolist()
        reference = Reference(uniforms)
        expected = rule(p, q, drafts, reference)
        emitted = [token for token in verdict.token_ids[row].tolist() if token >= 0]
        into.rows += 1
        into.accepted += len(expected) - 1
        into.refused += len(expected) <= length
        if emitted != expected or int(verdict.accepted[row]) != len(expected) - 1:
            margins = Margins(uniforms)
            rule(p, q, drafts, margins)
            into.differing.append(margins.nearest)
        elif row in residuals:
            into.residuals.append(error(residuals[row], reference.weights))


def error(ours: torch.Tensor, theirs: Sequence[float]) -> float:
    """The largest difference of two weight vectors after normalising, in units of what rounding explains."""
    expected = torch.tensor(theirs, dtype=torch.float64)
    total = expected.sum()
    return float((ours / ours.sum() - expected / total).abs().max() / (ROUNDING / total))


def random_batch(
    seed: int, rows: int, k: int, vocab: int, zeros: float = 0.3, one_hot: bool = False, past: float = math.nan
) -> Arguments:
    """Arguments of `verify`: ragged, with zeros, ties, peaks and equal rows; drafts that q could have drawn.

    Past each row's length probabilities are `past` throughout, and ids token 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def laws(*shape: int) -> torch.Tensor:
        sharpness = torch.tensor([0.0, 1.0, 4.0, 16.0])[torch.randint(0, 4, (*shape, 1), generator=generator)]
        logits = (torch.randn(*shape, vocab, generator=generator) * sharpness).mul(2).round().div(2)
        gone = torch.rand(*shape, vocab, generator=generator) < zeros * (torch.rand(*shape, 1, generator=generator) < 0.5)
        gone.scatter_(-1, torch.randint(0, vocab, (*shape, 1), generator=generator), False)
        return logits.masked_fill(gone, -torch.inf).softmax(-1)

    p, q = laws(rows, k + 1), laws(rows, k)
    same = torch.rand(rows, k, 1, generator=generator) < 0.2
    q = torch.where(same, p[:, :k], q)
    guess = p[:, :k].argmax(-1, keepdim=True)  # what a good drafter would say
    guess = torch.where(torch.rand(guess.shape, generator=generator) < 0.1, (guess + 1) % vocab, guess)
    certain = torch.zeros_like(q).scatter_(-1, guess, 1.0)
    q = torch.where(torch.rand(rows, k, 1, generator=generator) < (1.0 if one_hot else 0.3), certain, q)
    ids = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, k) if k else torch.zeros(rows, 0).long()
    lengths = torch.randint(0, k + 1, (rows,), generator=generator)
    gone = torch.arange(k + 1) > lengths[:, None]
    return {
        "target_probs": p.masked_fill(gone[..., None], past),
        "draft_probs": q.masked_fill(gone[:, 1:, None], past),
        "draft_ids": ids.masked_fill(gone[:, 1:], 0),
        "lengths": lengths,
        "uniforms": torch.rand(rows, k + 1, len(Use), generator=generator, dtype=torch.float64),
    }
