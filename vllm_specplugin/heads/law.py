"""What drafts are drawn from: a head's logits as a distribution, at a temperature and cut to its likeliest tokens."""

from __future__ import annotations

import torch


def law_of(logits: torch.Tensor, temperature: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """The distribution that drafts are drawn from, in float32, in which it also goes to the verifier.

    Args:
        logits: `[rows, k, vocab]`.
        temperature: `[rows]`, above 0.
        top_k: keep the likeliest tokens, this many, and those that are as likely as the last of them; 0 keeps all.
        top_p: of what is left, keep the fewest likeliest tokens with at least this much probability.

    Returns:
        `[rows, k, vocab]` float32, each row's sum 1 up to rounding.
    """
    logits = logits / temperature[:, None, None].float()  # float32, without a copy of the logits in between
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    law = logits.softmax(dim=-1)
    if top_p >= 1.0:
        return law
    ordered = law.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered  # how much is likelier than each
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(dim=-1, keepdim=True)
    law = law.masked_fill(law < least, 0.0)
    return law / law.sum(dim=-1, keepdim=True)
