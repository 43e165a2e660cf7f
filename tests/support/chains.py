"""What an EAGLE head drafts in plain PyTorch, and what speculative decoding must come to with it: no engine, no training code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_specplugin.heads.decoder import Cached
from vllm_specplugin.heads.eagle import AUX_LAYERS, DraftHead, Eagle3Head


@dataclass(frozen=True)
class Target:
    """A small target model in transformers, for as much of it as heads need."""

    model: Any

    @classmethod
    def load(cls, folder: Path) -> Target:
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight  # type: ignore[no-any-return]

    @property
    def output(self) -> Tensor:
        return self.model.get_output_embeddings().weight  # type: ignore[no-any-return]

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Prompts of one length, each with what the target says to it."""
        ids = torch.tensor(prompts)
        said = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # or a token with the number of the padding would be taken for it
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return said.tolist()  # type: ignore[no-any-return]

    @torch.no_grad()
    def states(self, tokens: Sequence[int], aux_layers: Sequence[int] = ()) -> Tensor:
        """The last hidden states `[1, length, hidden]`, or the inputs of some layers side by side."""
        seen = self.model.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.cat([seen[layer] for layer in aux_layers], dim=-1) if aux_layers else seen[-1]


@torch.no_grad()
def draft(head: DraftHead, target: Target, tokens: Sequence[int], place: int, k: int, aux_layers: Sequence[int]) -> list[int]:
    """The k tokens that the head drafts behind `tokens[: place + 2]`, one pass after another over a cache, as in serving."""
    fused = isinstance(head, Eagle3Head)
    assert not fused or len(aux_layers) == AUX_LAYERS
    states = head.fuse(target.states(tokens[: place + 1], aux_layers if fused else ()))
    cache, embedding = Cached(), target.embedding
    hidden = head(embedding[torch.tensor(tokens[1 : place + 2])][None], states, torch.arange(place + 1), cache)[:, -1:]
    drafts: list[int] = []
    while True:
        best = int(head.logits(hidden, target.output).argmax())
        drafts.append(int(head.draft_tokens[best]) if isinstance(head, Eagle3Head) else best)
        if len(drafts) == k:
            return drafts
        hidden = head(embedding[drafts[-1]][None, None], hidden, torch.tensor([place + len(drafts)]), cache)


@dataclass
class Acceptance:
    """What a text came to, drafted and verified."""

    passes: int = 0
    """Verifying passes."""
    accepted: list[int] = field(default_factory=list)
    """`[k]`: how often each draft was accepted."""

    def __add__(self, other: Acceptance) -> Acceptance:
        both = [one + more for one, more in zip(self.accepted, other.accepted, strict=True)]
        return Acceptance(self.passes + other.passes, both)


def speculate(
    head: DraftHead, target: Target, tokens: Sequence[int], prompt: int, answer: int, k: int, aux_layers: Sequence[int]
) -> Acceptance:
    """Walk along a greedy text as speculative decoding does: draft, count what agrees, go on behind it.

    Args:
        tokens: the prompt and the target's answer to it, k tokens longer than was asked for: drafts at its end are judged, too.
        prompt: how many of them are the prompt.
        answer: how many tokens were asked for.
        k: drafts per pass.
        aux_layers: whose inputs an EAGLE-3 head fuses.
    """
    came = Acceptance(accepted=[0] * k)
    place = prompt - 1  # the last place whose state is known; the token after it is the prompt's answer
    while place + 2 < prompt + answer:
        drafts = draft(head, target, tokens, place, k, aux_layers)
        right = 0
        while right < k and drafts[right] == tokens[place + 2 + right]:
            came.accepted[right] += 1
            right += 1
        came.passes += 1
        place += right + 1
    return came
