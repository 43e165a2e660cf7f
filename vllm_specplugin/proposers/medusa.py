"""Drafts by Medusa heads: every head looks at the target's last hidden state, and all draft at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from vllm_specplugin.errors import ConfigError, DraftError
from vllm_specplugin.heads import checkpoint, medusa_files
from vllm_specplugin.heads.graphs import RowFunction
from vllm_specplugin.heads.law import law_of
from vllm_specplugin.heads.layers import HostLayers, made_on
from vllm_specplugin.heads.medusa import MedusaHeads, TargetOutput
from vllm_specplugin.proposers.base import Proposer, ProposerOptions
from vllm_specplugin.scorers.drawing import draw
from vllm_specplugin.types import Capabilities, Depth, Drafts, Host, Step, Target

if TYPE_CHECKING:
    from torch import nn

    from vllm_specplugin.config import SpecConfig


class MedusaOptions(ProposerOptions):
    """The `options` of the proposer `medusa`. The first three shape what drafts are drawn from, so they need
    `"draft_sampling": "probabilistic"`."""

    temperature: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="Drafts are drawn at the request's temperature times this. Heads are less sure than the target, so that "
        "values a little below 1 can raise the acceptance.",
    )
    top_k: int = Field(default=0, ge=0, description="Draw from a head's likeliest tokens only, this many; 0 for all of them.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Draw from the fewest likeliest tokens of a head that have this much probability."
    )
    keep_top_k: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Keep each head's likeliest tokens of the last step, this many, as `last_top_k`: for code that makes trees "
        "of them. 0 keeps none, and is faster.",
    )


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The likeliest tokens of each head in one step."""

    request_ids: Sequence[str]
    """`[rows]`: the requests that were drafted for."""
    token_ids: torch.Tensor
    """`[rows, k, keep_top_k]` int64, likeliest first."""
    logprobs: torch.Tensor
    """`[rows, k, keep_top_k]` float32, at temperature 1."""


class MedusaProposer(Proposer[MedusaOptions]):
    """Drafts the next k tokens from the target's last hidden state by one head each (arXiv 2401.10774).

    A head knows nothing of what the ones before it drafted; in return all of them together cost about one layer of the
    target. Greedy drafts are each head's likeliest token. Probabilistic ones are drawn from
    q = softmax(logits / (the request's temperature x `options.temperature`)), cut to `top_k` and `top_p`, and q goes to the
    verifier as it is; requests at temperature 0 among them get greedy drafts.
    """

    Options = MedusaOptions
    capabilities = Capabilities(hidden_states="last", tokens="none", probabilities=True, checkpoint=True)
    host_keys = frozenset({"enforce_eager", "revision"})

    def __init__(self, host: Host, options: MedusaOptions) -> None:
        super().__init__(host, options)
        self.last_top_k: TopTokens | None = None
        """The last step's likeliest tokens, where `options.keep_top_k` asks for them."""
        self._probabilistic = host.config.draft_sampling == "probabilistic"

    @classmethod
    def depth(cls, config: SpecConfig, options: MedusaOptions, target: Target | None) -> Depth:
        """A token per head."""
        for name in ("temperature", "top_k", "top_p"):
            value = getattr(options, name)
            if config.draft_sampling == "greedy" and value != MedusaOptions.model_fields[name].default:
                raise ConfigError(
                    f"'options.{name}' is {value!r}, but greedy drafts are not drawn; drop it, or add "
                    "'draft_sampling': 'probabilistic'."
                )
        info = checkpoint.inspect(str(config.model), config.host.get("revision"))
        checkpoint.require(info, "medusa", target)
        heads = info.depth or 0
        return Depth(heads, heads, f"{config.model} has {heads} Medusa head{'s' if heads > 1 else ''}")

    # -- loading ---------------------------------------------------------------------------------

    def load(self, target: nn.Module) -> None:
        """Load the first k heads, and record CUDA graphs where greedy drafts can come from them."""
        host = self.host
        named = str(host.config.model)
        info = checkpoint.inspect(named, host.config.host.get("revision"))
        made = medusa_files.config_of(info.shapes, info.config, named)
        layers = host.layers or HostLayers()
        dtype: torch.dtype = getattr(torch, host.dtype)
        with made_on(host.device, dtype):
            self.heads = MedusaHeads(replace(made, num_heads=host.num_speculative_tokens), layers.projection)
        medusa_files.load(self.heads, checkpoint.tensors(info.folder), named)
        self.heads.requires_grad_(False).eval().finish()
        self._target_output: TargetOutput | None = getattr(target, "compute_logits", None)
        self._best: RowFunction = self._best_of
        if not self._probabilistic and not self.options.keep_top_k:
            example = torch.zeros(host.max_num_seqs, host.hidden_size, dtype=dtype, device=host.device)
            with torch.inference_mode():
                self._best = layers.recorded(self._best_of, example)

    # -- drafting --------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, step: Step) -> Drafts:
        """Ids `[rows, k]` on the target's device, and with 'draft_sampling': 'probabilistic' what they were drawn from."""
        self.last_top_k = None
        wanted = np.flatnonzero(step.limits)
        if len(wanted) == 0:
            return Drafts.none(step.num_rows)
        if step.hidden_states is None:
            raise DraftError("Medusa heads need the target's last hidden states, and this step has none")
        if len(wanted) < step.num_rows:
            return _for_all_rows(self.propose(step.select(wanted.tolist())), wanted, step)
        if self._probabilistic:
            token_ids, probabilities = self._drawn(step, step.hidden_states)
        else:
            token_ids, probabilities = self._picked(step, step.hidden_states), None
        if token_ids.shape[1] > step.k:
            token_ids = token_ids[:, : step.k]
        return Drafts(token_ids, lengths=step.limits, probabilities=probabilities)

    def _best_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` -> `[rows, heads]`: each head's likeliest token."""
        return self.heads.best(self.heads(hidden), self._target_output)

    def _picked(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, heads]`: greedy drafts."""
        if not self.options.keep_top_k:
            return self._best(hidden)
        logits = self.heads.logits(self.heads(hidden), self._target_output)
        return self._keep_top_k(step, logits)[..., 0]

    def _drawn(self, step: Step, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[rows, heads]` and `[rows, k, vocab]`: drafts, and what they were drawn from; None where no request draws."""
        temperature = np.array([request.temperature for request in step.requests]) * self.options.temperature
        drawing = np.flatnonzero(temperature)
        if len(drawing) == 0:
            return self._picked(step, hidden), None
        logits = self.heads.logits(self.heads(hidden), self._target_output)  # [rows, heads, draft vocab]
        likeliest = self._keep_top_k(step, logits)[..., 0] if self.options.keep_top_k else None
        noise = step.noise.uniforms(logits.shape[1])
        if len(drawing) == step.num_rows:
            return self._draw(logits, temperature, noise, step.k)
        # A request at temperature 0 is verified by the target's own choice: it gets a greedy draft, and one-hot rows.
        if likeliest is None:
            likeliest = self._to_target(logits.argmax(dim=-1))
        rows = torch.from_numpy(drawing).to(hidden.device)
        drawn, law = self._draw(logits[rows], temperature[drawing], noise[drawing], step.k)
        token_ids = likeliest.index_copy(0, rows, drawn)
        probabilities = law.new_zeros(step.num_rows, *law.shape[1:]).scatter_(2, token_ids[:, : step.k, None], 1.0)
        return token_ids, probabilities.index_copy_(0, rows, law)

    def _draw(
        self, logits: torch.Tensor, temperature: NDArray[np.float64], noise: NDArray[np.float64], k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw from logits `[rows, heads, draft vocab]` by `noise` `[rows, heads]`: `[rows, heads]` and `[rows, k, vocab]`."""
        device = logits.device
        law = law_of(logits, torch.from_numpy(temperature).to(device), self.options.top_k, self.options.top_p)
        drawn, _ = draw(law.flatten(0, 1), torch.from_numpy(noise).to(device).flatten())
        token_ids = self._to_target(drawn.view(law.shape[:2]))
        law = law[:, :k]
        mapping = self.heads.draft_to_target
        if mapping is None:
            return token_ids, law
        whole = law.new_zeros(*law.shape[:2], self.host.vocab_size)
        return token_ids, whole.index_copy_(2, mapping, law)

    def _to_target(self, ids: torch.Tensor) -> torch.Tensor:
        mapping = self.heads.draft_to_target
        return ids if mapping is None else mapping[ids]

    def _keep_top_k(self, step: Step, logits: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, keep_top_k]`: the likeliest tokens, which are also kept; logits are `[rows, heads, draft vocab]`."""
        logprobs, ids = logits.float().log_softmax(dim=-1).topk(min(self.options.keep_top_k, logits.shape[-1]), dim=-1)
        ids = self._to_target(ids)
        self.last_top_k = TopTokens(step.request_ids, ids[:, : step.k], logprobs[:, : step.k])
        return ids


def _for_all_rows(drafts: Drafts, rows: NDArray[np.intp], step: Step) -> Drafts:
    """Drafts for some rows of a step as drafts for all, of which the others have none."""
    assert isinstance(drafts.token_ids, torch.Tensor)
    places = torch.from_numpy(rows).to(drafts.token_ids.device)

    def spread(part: torch.Tensor) -> torch.Tensor:
        return part.new_zeros(step.num_rows, *part.shape[1:]).index_copy_(0, places, part)

    return Drafts(
        spread(drafts.token_ids),
        lengths=step.limits,
        probabilities=None if drafts.probabilities is None else spread(drafts.probabilities),
    )
