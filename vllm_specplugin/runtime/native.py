"""vLLM's own drafters as a proposer sees them, on either model runner.

The drafter runs first in every step and over every row, whatever the proposer or the guard make of it: a token that it has not
seen would leave a hole in its KV cache, and every later draft of that request would suffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.types import Drafts


@dataclass(frozen=True, slots=True)
class NativeDrafts:
    """`NativeDrafter` of a step in which the drafter has run."""

    drafts: Drafts

    def draft(self) -> Drafts:
        return self.drafts


def check_draft_vocabulary(model: Any, vocab_size: int) -> None:
    """A drafter with a smaller vocabulary maps its tokens to the target's; a map that leads outside would end the engine.

    Args:
        model: vLLM's draft model, loaded.
        vocab_size: the target's.

    Raises:
        ConfigError: the checkpoint's map leads outside.
    """
    offsets = getattr(model, "draft_id_to_target_id", None)
    if not isinstance(offsets, torch.Tensor):
        return
    targets = torch.arange(len(offsets), device=offsets.device) + offsets
    if int(targets.min()) < 0 or int(targets.max()) >= vocab_size:
        raise ConfigError(
            f"'model': its tensor 'd2t' maps draft tokens to {int(targets.min())} to {int(targets.max())}, outside the target's "
            f"vocabulary of {vocab_size}; it should hold, for each draft token, the target's token minus the draft token."
        )
