"""`one_hot`: sample-and-walk, for drafts that were chosen deterministically.

At every drafted position draw y from the target as plain decoding would, emit it, and go on while it equals the draft.
With a deterministic draft this *is* speculative sampling (arXiv 2211.17192, algorithm 1, with q one-hot: the draft x is
accepted with probability p(x), and what follows a refusal is p with x zeroed and renormalised). It needs no q at all, so
no wrong q can make it lossy; and where the noise belongs to (seed, position) it emits exactly plain decoding's tokens.
"""

from __future__ import annotations

import torch

from vllm_specplugin.scorers.base import SampleVerifier
from vllm_specplugin.types import Verdict


class OneHotVerifier(SampleVerifier):
    """Draw from the target as plain decoding does, and go on while the draft says the same: lossless for any draft.

    The output is what was drawn, whatever was drafted, so long as its length is decided without looking at the target's noise.
    """

    lossless = True
    needs_probabilities = False

    def walk(self, target_ids: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
        return walk(target_ids, draft_ids, lengths)


def walk(target_ids: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
    """Accept drafts while they equal what the target sampled; emit one token more than was accepted.

    Args:
        target_ids: `[rows, k + 1]`, what the target sampled before each draft and after the last one; entries past
            `lengths[row]` are ignored.
        draft_ids: `[rows, k]`.
        lengths: `[rows]`, drafts per row.

    Returns:
        Verdict: `accepted` `[rows]` int64; `token_ids` `[rows, k + 1]`, -1 after the last emitted token.
    """
    k = draft_ids.shape[1]
    position = torch.arange(k + 1, device=target_ids.device)  # [k + 1]
    agrees = (target_ids[:, :k] == draft_ids) & (position[:k] < lengths[:, None])  # [rows, k]
    accepted = agrees.cumprod(dim=1).sum(dim=1)  # [rows]
    token_ids = target_ids.masked_fill(position > accepted[:, None], -1)  # [rows, k + 1]
    return Verdict(accepted=accepted, token_ids=token_ids, tested=lengths)
