"""The contract of a verifier (entry-point group `vllm_specplugin.verifiers`). It imports no vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from vllm_specplugin.types import Use, Verdict

if TYPE_CHECKING:
    import torch


class Verifier(ABC):
    """Decides which drafts stand and what follows them: a pure function, all randomness is an argument."""

    lossless: ClassVar[bool]
    """The emitted tokens follow exactly the target's distribution."""
    needs_probabilities: ClassVar[bool]
    """It is of use only with proposers that return the distribution they drew from."""

    @abstractmethod
    def verify(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_ids: torch.Tensor,
        lengths: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> Verdict:
        """Verify one step's drafts, ragged over the batch.

        Args:
            target_probs: `[rows, k + 1, vocab]` float32, the target's distribution before each draft and after the last
                one, with everything that the request asked for applied. Entries past a row's `lengths` may be anything.
            draft_probs: `[rows, k, vocab]` float32, what each draft was drawn from; None for drafts chosen deterministically.
                The same holds for its entries past a row's `lengths`.
            draft_ids: `[rows, k]`; ids at and after `lengths[row]` are ignored.
            lengths: `[rows]`, the number of drafts of each row.
            uniforms: `[rows, k + 1, 3]` float64, independent draws from [0, 1), one for each `Use` at each position.
                They belong to this pass alone: no later pass may see them again (see `scorers/block.py` for why).

        Returns:
            Verdict: with `accepted` `[rows]` and `token_ids` `[rows, k + 1]`, on the device of the arguments.
        """


class SampleVerifier(Verifier):
    """A verifier that only looks at what the target itself sampled.

    In the engine the host's own sampler draws a token at every verified row, just as in plain decoding, and `walk` does
    the rest; so every sampling parameter that the host knows is applied at every row, by the host's own code.
    """

    @abstractmethod
    def walk(self, target_ids: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
        """Decide from samples: `target_ids` `[rows, k + 1]`, `draft_ids` `[rows, k]`, `lengths` `[rows]`."""

    def verify(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_ids: torch.Tensor,
        lengths: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> Verdict:
        """The same over probabilities: at each position one draw from the target, with the uniform for `Use.BONUS`."""
        from vllm_specplugin.scorers.drawing import draw

        target_ids, _ = draw(target_probs.flatten(0, 1), uniforms[..., Use.BONUS].flatten())  # [rows * (k + 1)]
        return self.walk(target_ids.view(target_probs.shape[:2]), draft_ids, lengths)
