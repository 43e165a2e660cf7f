"""vLLM's own speculators on the V2 runner, with a proposer over them.

A speculator keeps its class, which the runner looks at, and its work: loading, graphs, KV cache. Its `propose` and
`load_draft_model` are replaced on the object. What it drafts stays on the device: the proposers that hand it on as it is need
nothing of a step on the host, so asynchronous scheduling runs ahead as it does in stock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_specplugin.runtime.control import Stopwatch
from vllm_specplugin.runtime.judging import DraftLogits
from vllm_specplugin.runtime.native import NativeDrafts, check_draft_vocabulary
from vllm_specplugin.runtime.v2 import Drafting
from vllm_specplugin.scorers.uniforms import pass_keys
from vllm_specplugin.types import Drafts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


def overlay(speculator: DraftModelSpeculator, runner: GPUModelRunner) -> Drafting:
    """Let the proposer decide on what a speculator drafts; before its model is loaded."""
    drafting = Drafting(runner.vllm_config, runner.device, runner.req_states)
    _Overlay(speculator, drafting)
    return drafting


class _Overlay:
    """The methods that one speculator gets."""

    def __init__(self, speculator: DraftModelSpeculator, drafting: Drafting) -> None:
        self.speculator, self.drafting = speculator, drafting
        self._stopwatch = Stopwatch(drafting.device)
        self._drafts_at_length = isinstance(speculator, StandaloneARSpeculator)
        """It drafts as many as it ever may, however many are wanted."""
        self._stock_propose, self._stock_load = speculator.propose, speculator.load_draft_model
        speculator.propose, speculator.load_draft_model = self.propose, self.load_draft_model  # type: ignore[method-assign]

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        """As in stock; then load the proposer, and make the target name our model state."""
        runtime = self.drafting.runtime
        self.drafting.name_model_state(target_model)
        model = self._stock_load(target_model, target_attn_layer_names)
        check_draft_vocabulary(model, runtime.host.vocab_size)
        runtime.load(target_model)
        return model

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Draft for one step; returns `[requests, k]` int64 in the speculator's own buffer."""
        speculator, drafting = self.speculator, self.drafting
        states = (last_hidden_states, aux_hidden_states, num_sampled, num_rejected)
        dummy_run = options.get("dummy_run", False)
        wanted = options.get("num_speculative_tokens")
        k = drafting.k if wanted is None else wanted
        if not dummy_run and drafting.runtime.meter.leaves_drafter_out(wanted):
            return drafting.skip(input_batch, speculator.draft_tokens[: input_batch.num_reqs])
        if not dummy_run and not drafting.runtime.asks_native(input_batch.req_ids):
            out = speculator.draft_tokens[: input_batch.num_reqs]
            drafting.propose(input_batch, *states, k, out)
            return out
        if speculator.draft_logits is not None and not dummy_run:
            # V2 keys a draft's noise by its place in the request, so that a draft which was refused comes again in the next pass;
            # `block` may have refused it by what came after it (see `noise`). With a key per pass it is drawn anew.
            seeds = pass_keys(seeds, drafting.req_states.total_len.gpu)
        with self._stopwatch, self._passes(k):
            out = self._stock_propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                **options,
            )
        if dummy_run:
            return out
        out = speculator.draft_tokens[: input_batch.num_reqs]
        drawn_from = self._drawn_from(input_batch, temperature, k)
        if drafting.runtime.hands_native_drafts_on:
            self._hand_on(input_batch, num_sampled, k, drawn_from)
        else:
            probabilities = None if drawn_from is None else drawn_from.probabilities(range(input_batch.num_reqs))
            native = NativeDrafts(Drafts(token_ids=out[:, :k].clone(), probabilities=probabilities))
            drafting.propose(input_batch, *states, k, out, native, self._stopwatch)
        return out

    @contextmanager
    def _passes(self, k: int) -> Iterator[None]:
        """Have a draft model run k times, and once for k = 0, so that its KV cache goes on; vLLM's runs as often as it ever may.

        The other speculators do so of their own accord.
        """
        speculator, most = self.speculator, self.speculator.num_speculative_steps
        if self._drafts_at_length:
            speculator.num_speculative_steps = max(k, 1)
        try:
            yield
        finally:
            speculator.num_speculative_steps = most

    def _drawn_from(self, input_batch: InputBatch, temperature: torch.Tensor, k: int) -> DraftLogits | None:
        """What the drafts were drawn from, a row for each request; None where nobody in the step samples."""
        logits, runtime = self.speculator.draft_logits, self.drafting.runtime
        if logits is None or k == 0 or all(runtime.request(name, None).temperature == 0 for name in input_batch.req_ids):
            return None
        slots = input_batch.idx_mapping[: input_batch.num_reqs].clone()  # vLLM writes the next step's over it
        heat = temperature[slots].float()  # [requests]
        heat = torch.where(heat == 0, 1.0, heat)  # greedy requests have no use for theirs
        return DraftLogits(logits, slots, heat, k, runtime.host.vocab_size)

    def _hand_on(self, input_batch: InputBatch, num_sampled: torch.Tensor, k: int, drawn_from: DraftLogits | None) -> None:
        """Note how many of the drafts count, without waiting for the device: what the guard would see to, seen to there."""
        drafting = self.drafting
        runtime, rows = drafting.runtime, input_batch.num_reqs
        # A pass over d drafts can emit d + 1 tokens, and none may lie at or beyond max_model_len.
        room = runtime.max_model_len - 1 - drafting.req_states.total_len.gpu[input_batch.idx_mapping].long()  # [requests]
        wanted = runtime.wanted([runtime.request(name, None) for name in input_batch.req_ids], k)
        if (wanted < k).any():
            room = room.minimum(async_tensor_h2d(wanted, device=drafting.device))
        lengths = torch.where(num_sampled[:rows] > 0, room.clamp(0, k), 0)  # none for rows that are still prefilling
        if drawn_from is not None:
            # A row ends before the first draft that was drawn from something that is no distribution.
            lengths = lengths.minimum(drawn_from.sound().long().cumprod(dim=1).sum(dim=1))
        drafting.keep_lengths(input_batch, lengths)
        runtime.meter.drafted(input_batch.req_ids, None)
        runtime.drafted.keep_all(input_batch.req_ids, drawn_from)
