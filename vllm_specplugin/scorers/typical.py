"""`typical`: Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1). It changes the answers, and says so."""

from __future__ import annotations

import torch

from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.scorers.drawing import Residual, at_drafts, draw, rows_where, verdict, within
from vllm_specplugin.types import Use, Verdict

EPSILON = 0.09
"""A draft that is likelier than this is always accepted; Medusa's own default."""
DELTA = 0.3
"""Where the target is undecided a less likely one will do: more than DELTA exp(-entropy). The square root of EPSILON."""


class TypicalVerifier(Verifier):
    """Accept a draft that the target finds typical: p(x) > min(EPSILON, DELTA exp(-H(p))).

    Lossy: accepted drafts follow the drafter's taste within what the target finds plausible, not the target's
    distribution. It needs no draft probabilities. Greedy requests are verified exactly, as by every verifier.
    """

    lossless = False
    needs_probabilities = False

    def verify(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_ids: torch.Tensor,
        lengths: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> Verdict:
        ids, counts = within(draft_ids, lengths)
        k = ids.shape[1]
        p = at_drafts(target_probs, ids)  # [rows, k]
        stands = counts & (p > EPSILON)
        accepted = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        for i in range(k):
            # The entropy costs a pass over the vocabulary; only these may owe it their place.
            undecided = counts[:, i] & ~stands[:, i] & (accepted == i)
            row = rows_where(undecided)
            if len(row) > 0:
                typical = p[row, i] > DELTA * torch.exp(-_entropy(target_probs, row, i))
                stands[row, i] |= undecided[row] & typical
            accepted += stands[:, i] & (accepted == i)
        use = torch.where(accepted < lengths, Use.RESIDUAL, torch.full_like(accepted, Use.BONUS))
        row = torch.arange(len(ids), device=ids.device)
        token, _ = draw(Residual(target_probs, row, accepted), uniforms[row, accepted, use])
        return verdict(accepted, ids, token, lengths)


def _entropy(target_probs: torch.Tensor, row: torch.Tensor, position: int) -> torch.Tensor:
    """`[draws]`, in nats: the entropy of one position in some rows."""
    nats = torch.zeros(len(row), dtype=torch.float64, device=row.device)
    tiny = torch.finfo(target_probs.dtype).tiny
    for piece in Residual(target_probs, row, torch.full_like(row, position)).pieces():
        # Not torch.special.entr, which takes more than twice as long on a CPU.
        nats -= piece.clamp(min=tiny).log_().mul_(piece).sum(dim=1)
    return nats
