"""`token`: speculative sampling draft by draft (arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2)."""

from __future__ import annotations

import torch

from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.scorers.drawing import at_drafts, conclude, within
from vllm_specplugin.types import Use, Verdict


class TokenVerifier(Verifier):
    """Accept each draft with probability min(1, p/q); replace the first refused one by a draw from norm([p - q]+).

    Lossless. A draft is accepted with probability sum(min(p, q)). Drafts without probabilities are taken as one-hot:
    accepted with probability p(x), and replaced by a draw from p with x left out.
    """

    lossless = True
    needs_probabilities = True

    def verify(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_ids: torch.Tensor,
        lengths: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> Verdict:
        ids, counts = within(draft_ids, lengths)
        p = at_drafts(target_probs, ids)  # [rows, k]
        q = torch.ones_like(p) if draft_probs is None else at_drafts(draft_probs, ids)
        stands = (uniforms[:, : ids.shape[1], Use.ACCEPT] * q < p) & counts
        accepted = stands.cumprod(dim=1).sum(dim=1)  # [rows]
        return conclude(accepted, target_probs, draft_probs, ids, lengths, uniforms)
