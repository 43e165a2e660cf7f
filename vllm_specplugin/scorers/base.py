"""The contract of a verifier (entry-point group `vllm_specplugin.verifiers`). It imports no vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from vllm_specplugin.types import Verdict

if TYPE_CHECKING:
    import torch


class Verifier(ABC):
    """Decides which drafts stand and what follows them: a pure function, all randomness is an argument."""

    lossless: ClassVar[bool]
    """The emitted tokens follow exactly the target's distribution."""
    needs_probabilities: ClassVar[bool]
    """It works only with proposers that return the distribution they drew from."""

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
            target_probs: `[rows, k + 1, vocab]`, the target's distribution before each draft and after the last one,
                with everything that the request asked for applied.
            draft_probs: `[rows, k, vocab]`, what each draft was drawn from; None for drafts chosen without chance.
            draft_ids: `[rows, k]`; ids at and after `lengths[row]` are ignored.
            lengths: `[rows]`, the number of drafts of each row.
            uniforms: `[rows, k + 1, vocab]`, independent draws from (0, 1); position j decides only about position j.

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
        """The same over probabilities: at each row the exponential race argmax p(x) / -log(u_x) is one draw from p."""
        target_ids = (target_probs / -uniforms.log()).argmax(dim=-1)  # [rows, k + 1]
        return self.walk(target_ids, draft_ids, lengths)
