"""A verifier in one file that is wrong on purpose: one refusal in a hundred is overlooked.

It calls itself lossless, as a verifier with a bug would. Its outputs look right, its acceptance rate is hardly higher, and no
test with greedy decoding can see it where drafts agree. `vllm-specplugin validate` does.
"""

from __future__ import annotations

import torch

from vllm_specplugin import SampleVerifier, Verdict

LENIENCE = 0.01
"""The chance that a draft is accepted although the target sampled another token."""


class BiasedVerifier(SampleVerifier):
    """Sample-and-walk that overlooks some refusals; for `validate` to find."""

    lossless = True  # a lie
    needs_probabilities = False

    def walk(self, target_ids: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
        """As the lossless `one_hot`, but for a few places where the draft is emitted instead of the target's sample.

        Args:
            target_ids: `[rows, k + 1]`, what the target sampled before each draft and after the last one.
            draft_ids: `[rows, k]`.
            lengths: `[rows]`, drafts per row.
        """
        k = draft_ids.shape[1]
        position = torch.arange(k + 1, device=target_ids.device)
        drafted = position[:k] < lengths[:, None]  # [rows, k]
        lenient = drafted & (_chance(target_ids, draft_ids) < LENIENCE)
        stands = drafted & ((target_ids[:, :k] == draft_ids) | lenient)
        accepted = stands.long().cumprod(dim=1).sum(dim=1)  # [rows]
        emitted = target_ids.clone()
        emitted[:, :k] = torch.where(lenient, draft_ids, target_ids[:, :k])
        return Verdict(accepted, emitted.masked_fill(position > accepted[:, None], -1), tested=lengths)


def _chance(target_ids: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """`[rows, k]`, a number in [0, 1) for each place, hashed from everything that the row holds.

    A verifier has no other source of chance here. All tokens of the row go in, so that the number is not the same whenever
    one token is drafted where another was sampled.
    """
    tokens = torch.cat([target_ids.long(), draft_ids.long()], dim=1)  # [rows, 2 k + 1]
    mixed = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    for column in tokens.T:
        mixed = ((mixed ^ column) * 0x9E3779B1 + 0x7F4A7C15) & 0x7FFFFFFF
        mixed = mixed ^ (mixed >> 15)
    place = torch.arange(draft_ids.shape[1], device=tokens.device)
    number = ((mixed[:, None] + place * 0x2545F491) * 0x5851F42D) & 0x7FFFFFFF
    return ((number ^ (number >> 13)) % 1_000_003) / 1_000_003
