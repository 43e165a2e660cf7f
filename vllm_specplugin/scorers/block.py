"""`block`: block verification (arXiv 2403.10444, algorithm 2), which never accepts fewer drafts than `token`.

The drafts of a pass are judged together: with r_0 = 1 and r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i)), draft i stands with
probability h_i = Z_i / (Z_i + 1 - r_i), where Z_i = sum [r_i p_{i+1} - q_{i+1}]+, and the last one with h = r. The longest
prefix whose last draft stands is accepted, so a refusal in the middle does not end it.

That is also why noise must belong to a pass: a refused draft's uniform was looked at, and is known to lie above its h. If
the next pass, which decides about the same positions again, met the same number there, it would refuse too often. (The
token rule looks at nothing behind its first refusal, so there a number per position would do.)
"""

from __future__ import annotations

import torch

from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.scorers.drawing import Residual, at_drafts, conclude, rows_where, within
from vllm_specplugin.types import Use, Verdict


class BlockVerifier(Verifier):
    """Judge the drafts of a pass together: lossless, and the longest accepted prefix that a single chain allows.

    Drafts without probabilities are taken as one-hot, for which it is the token rule.
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
        k = ids.shape[1]
        p = at_drafts(target_probs, ids)  # [rows, k]
        q = torch.ones_like(p) if draft_probs is None else at_drafts(draft_probs, ids)
        ratio = p / q  # past the length it may be anything, and is not looked at
        r = torch.ones(len(ids), k + 1, dtype=torch.float64, device=p.device)  # r_0 to r_k
        for i in range(k):
            # Cut at 1 in each step, so that a likely draft cannot make up for what comes after it.
            torch.mul(r[:, i], ratio[:, i], out=r[:, i + 1]).clamp_(max=1.0)
        # h <= r, as Z <= r: where the uniform is not below r, Z need not be known. Nor is it where a later draft stands.
        may_stand = counts & (uniforms[:, :k, Use.ACCEPT] < r[:, 1:])  # [rows, k]
        is_last = torch.arange(1, k + 1, device=ids.device) == lengths[:, None]
        accepted = (may_stand & is_last).sum(dim=1) * lengths  # [rows]
        may_stand &= ~is_last
        for i in reversed(range(1, k)):
            open_still = may_stand[:, i - 1] & (accepted == 0)
            row = rows_where(open_still)
            if len(row) > 0:
                h = _chance(row, i, r[row, i], target_probs, draft_probs, p)
                stands = open_still[row] & (uniforms[row, i - 1, Use.ACCEPT] < h)
                accepted[row] = torch.where(stands, i, accepted[row])
        return conclude(accepted, target_probs, draft_probs, ids, lengths, uniforms, r.gather(1, accepted[:, None]).squeeze(1))


def _chance(
    row: torch.Tensor,
    i: int,
    r: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    p: torch.Tensor,
) -> torch.Tensor:
    """`[draws]` float64: h_i in some rows that have more than i drafts, from r_i `[draws]` and the drafts' `p` `[rows, k]`."""
    if draft_probs is None:
        mass = r * (1.0 - p[row, i])
    else:
        mass = Residual(target_probs, row, torch.full_like(row, i), draft_probs, r).sums().sum(dim=1, dtype=torch.float64)
    below = mass + 1.0 - r
    return torch.where(below > 0, mass / below, 1.0)
