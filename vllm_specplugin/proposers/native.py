"""What the proposers have in common that draft with one of the host's own methods.

EAGLE, EAGLE-3, MTP and draft models need what an engine has: its layers, a paged KV cache, attention metadata, tensor
parallelism, graphs. So the host runs them, in every step and whoever drafts, since their KV cache must see every token; a
`NativeProposer` says which method it is, what must fit together, and what becomes of the drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplugin.errors import DraftError
from vllm_specplugin.heads import checkpoint
from vllm_specplugin.proposers.base import Proposer, ProposerOptions
from vllm_specplugin.types import Depth, Drafts, Step, Target

if TYPE_CHECKING:
    from vllm_specplugin.config import SpecConfig


class NativeProposer(Proposer[ProposerOptions]):
    """Hands on the drafts of the host's drafter as they are.

    A subclass may override `propose`, to shorten rows or to draft otherwise in some of them: the drafter has run all the same.
    """

    def propose(self, step: Step) -> Drafts:
        """Token ids `[rows, k]` on the device, and with 'draft_sampling': 'probabilistic' what they were drawn from."""
        if step.native is None:
            raise DraftError(f"{type(self).__name__} needs the host's own drafter, and this step has none")
        return step.native.draft()

    @classmethod
    def depth(cls, config: SpecConfig, options: ProposerOptions, target: Target | None) -> Depth:
        """Any k: the drafter runs once per token. Where the target is known, the checkpoint is held against it."""
        family = cls.capabilities.native
        if target is None or config.model is None or family is None:
            return Depth(cls.default_num_speculative_tokens)
        info = checkpoint.inspect(config.model, config.host.get("revision"))
        checkpoint.require(info, family, target)
        return Depth(info.depth or cls.default_num_speculative_tokens)
