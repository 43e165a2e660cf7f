"""Drawing from unnormalised weights, and the end that the verifiers by probabilities share.

Nothing here holds the vocabulary of every request at once: the weights are made a piece at a time, a piece is summed up
block by block while it lies in the cache, and only the one block per row that the draw falls into is made again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from vllm_specplugin.types import Use, Verdict

BLOCK = 1024
"""Tokens per block of the two-level search."""
PIECE_ON_CPU, PIECE = 1 << 18, 1 << 24
"""Weights held at a time: on a CPU two pieces stay in the cache (2 MiB), elsewhere they make a kernel worth its launch."""
BELOW_ONE = 1.0 - 2.0**-53
"""The largest number below 1; a positive float64 times this is the next smaller one or the one after that."""


class Weights(ABC):
    """One row of weights per draw, `[draws, vocab]`, not negative and not normalised."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.device = device

    @abstractmethod
    def sums(self) -> torch.Tensor:
        """`[draws, blocks]` float32: the weight of each block of the vocabulary."""

    @abstractmethod
    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[draws, tokens]` float32: some tokens' weights, other ones for each draw."""

    def block(self, number: torch.Tensor) -> torch.Tensor:
        """`[draws, BLOCK]` float32: the weights of one block per draw, 0 past the end; `number` is `[draws, 1]`."""
        tokens = number * BLOCK + torch.arange(min(BLOCK, self.vocab), device=self.device)
        if self.vocab % BLOCK == 0:
            return self.at(tokens)
        return self.at(tokens.clamp(max=self.vocab - 1)).masked_fill_(tokens >= self.vocab, 0.0)


class Whole(Weights):
    """Weights that are there already."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights.shape[1], weights.device)
        self.weights = weights

    def sums(self) -> torch.Tensor:
        return _sums(self.weights)

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weights.gather(1, tokens)


class Residual(Weights):
    """[scale p - q]+ at one position of each of some requests; without q it is p itself, or p with one token left out."""

    def __init__(
        self,
        target_probs: torch.Tensor,
        row: torch.Tensor,
        position: torch.Tensor,
        draft_probs: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        left_out: torch.Tensor | None = None,
    ) -> None:
        """Nothing is computed yet.

        Args:
            target_probs: p, `[rows, k + 1, vocab]`.
            row: `[draws]`, which rows of the batch.
            position: `[draws]`, at which of their positions.
            draft_probs: q, `[rows, k, vocab]`; None where nothing is subtracted.
            scale: `[draws]`; 1 where None.
            left_out: `[draws]`, tokens that get no weight; None where all keep theirs.
        """
        super().__init__(target_probs.shape[2], target_probs.device)
        self.target_probs = target_probs
        self.draft_probs = draft_probs
        self.row = row
        self.position = position
        self.scale = None if scale is None else scale.to(target_probs.dtype)[:, None]
        self.left_out = None if left_out is None else left_out[:, None]

    def pieces(self) -> Iterator[torch.Tensor]:
        """The weights in pieces `[draws, a multiple of BLOCK, but for the last piece]`; no token is left out of them."""
        size = PIECE_ON_CPU if self.device.type == "cpu" else PIECE
        width = max(1, size // (len(self.row) * BLOCK)) * BLOCK
        for first in range(0, self.vocab, width):
            columns = slice(first, first + width)
            drawn_from = None if self.draft_probs is None else _columns(self.draft_probs, self.row, self.position, columns)
            yield self._combined(_columns(self.target_probs, self.row, self.position, columns), drawn_from)

    def sums(self) -> torch.Tensor:
        sums = torch.cat([_sums(piece) for piece in self.pieces()], dim=1)
        if self.left_out is not None:
            # Summed up again without the token: to subtract it would leave little but rounding where it has most of the weight.
            number = self.left_out // BLOCK
            sums.scatter_(1, number, self.block(number).sum(dim=1, keepdim=True))
        return sums

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        row, position = self.row[:, None], self.position[:, None]
        drawn_from = None if self.draft_probs is None else self.draft_probs[row, position, tokens]
        weights = self._combined(self.target_probs[row, position, tokens], drawn_from)
        return weights if self.left_out is None else weights.masked_fill_(tokens == self.left_out, 0.0)

    def _combined(self, weights: torch.Tensor, drawn_from: torch.Tensor | None) -> torch.Tensor:
        if self.scale is not None:
            weights.mul_(self.scale)
        return weights if drawn_from is None else weights.sub_(drawn_from).clamp_(min=0.0)


def _columns(probs: torch.Tensor, row: torch.Tensor, position: torch.Tensor, columns: slice) -> torch.Tensor:
    """`[draws, columns]`: a copy of some columns, of `probs` `[rows, positions, vocab]`."""
    if probs.is_contiguous():  # rows in one dimension are copied several times faster than rows in two
        flat = probs.view(-1, probs.shape[2])
        return flat[:, columns].index_select(0, row * probs.shape[1] + position)
    return probs[:, :, columns][row, position]


def _sums(weights: torch.Tensor) -> torch.Tensor:
    """`[draws, blocks]`: the sums over blocks of the columns, of which the last one may be short."""
    whole = weights.shape[1] - weights.shape[1] % BLOCK
    sums = [weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=-1)] if whole else []
    if whole < weights.shape[1]:
        sums.append(weights[:, whole:].sum(dim=-1, keepdim=True))
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def draw(weights: torch.Tensor | Weights, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One draw per row by inverting the cumulative sum, first over blocks of the vocabulary and then within one.

    A cumulative sum over the whole vocabulary in float32 would round away the small weights, and one in float64 would copy
    the vocabulary; here only the blocks' sums and one block per row are held in float64.

    Args:
        weights: `[draws, vocab]` float32, not negative, not normalised.
        uniforms: `[draws]` float64 in [0, 1).

    Returns:
        The tokens `[draws]` int64, each of positive weight, and the rows' total weights `[draws]` float64; where the total
        is 0 the token is arbitrary.
    """
    if isinstance(weights, torch.Tensor):
        weights = Whole(weights)
    sums = weights.sums()
    ends = sums.cumsum(dim=1, dtype=torch.float64)  # [draws, blocks]
    total = ends[:, -1]
    target = (uniforms * total)[:, None]  # below the total, as each uniform is at most BELOW_ONE
    block = _first_above(ends, target)  # [draws, 1]
    before = ends.gather(1, block) - sums.gather(1, block)
    inside = weights.block(block).cumsum(dim=1, dtype=torch.float64)  # [draws, BLOCK]
    # Kept within [0, end) against the rounding of the blocks' sums.
    target = (target - before).clamp_(min=0.0).minimum(inside[:, -1:] * BELOW_ONE)
    token = (block * BLOCK + _first_above(inside, target)).squeeze(1)
    return token.clamp_(max=weights.vocab - 1), total


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`[draws, 1]`: the first column whose end lies above the target `[draws, 1]`, and which therefore has a weight."""
    return torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)


def at_drafts(probs: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """`[rows, k]` float64: the probability of each draft at its position, of `probs` `[rows, >= k, vocab]`."""
    return probs[:, : draft_ids.shape[1]].gather(2, draft_ids[..., None]).squeeze(2).double()


def within(draft_ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids `[rows, k]` int64 with those past each row's length as 0, and which ones count `[rows, k]`."""
    counts = torch.arange(draft_ids.shape[1], device=draft_ids.device) < lengths[:, None]
    return draft_ids.long().masked_fill(~counts, 0), counts


def rows_where(mask: torch.Tensor) -> torch.Tensor:
    """The rows that need some work, at least those where `mask` `[rows]` holds.

    On an accelerator it is all of them: to know how many there are, the host would have to wait for the device, which
    costs more than work whose results are not used. So callers look at the mask again when they put results in place.
    """
    if mask.device.type == "cpu":
        return mask.nonzero().squeeze(1)
    return torch.arange(len(mask), device=mask.device)


def conclude(
    accepted: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_ids: torch.Tensor,
    lengths: torch.Tensor,
    uniforms: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> Verdict:
    """Draw what follows the accepted drafts: from norm([scale p - q]+) after a refusal, else from p.

    Args:
        accepted: `[rows]`.
        target_probs: `[rows, k + 1, vocab]`.
        draft_probs: `[rows, k, vocab]`; None means one-hot at the drafts.
        draft_ids: `[rows, k]`, all valid.
        lengths: `[rows]`.
        uniforms: `[rows, k + 1, 3]`.
        scale: `[rows]`, what p is multiplied with in the residual; 1 where None.
    """
    k = draft_ids.shape[1]
    token = torch.zeros_like(accepted)
    refused = accepted < lengths  # [rows]
    row = rows_where(refused)
    if len(row) > 0 and k > 0:
        position = accepted[row].clamp(max=k - 1)
        refused_id = draft_ids[row, position]
        if draft_probs is None:  # scale p - 1 is negative at the draft, and a scale elsewhere changes nothing
            weights = Residual(target_probs, row, position, left_out=refused_id)
        else:
            weights = Residual(target_probs, row, position, draft_probs, None if scale is None else scale[row])
        drawn, total = draw(weights, uniforms[row, position, Use.RESIDUAL])
        # Without mass the draft was refused with a chance of rounding only (p = q but for the last bits): it is as good.
        token[row] = torch.where(total > 0, drawn, refused_id)
    row = rows_where(~refused)
    if len(row) > 0:
        position = accepted[row]
        drawn, _ = draw(Residual(target_probs, row, position), uniforms[row, position, Use.BONUS])
        token[row] = torch.where(refused[row], token[row], drawn)
    return verdict(accepted, draft_ids, token, lengths)


def verdict(accepted: torch.Tensor, draft_ids: torch.Tensor, token: torch.Tensor, lengths: torch.Tensor) -> Verdict:
    """The accepted drafts of `[rows, k]`, then the token `[rows]`."""
    ids = torch.cat([draft_ids, token[:, None]], dim=1).scatter_(1, accepted[:, None], token[:, None])
    position = torch.arange(ids.shape[1], device=ids.device)
    return Verdict(accepted=accepted, token_ids=ids.masked_fill_(position > accepted[:, None], -1), tested=lengths)
