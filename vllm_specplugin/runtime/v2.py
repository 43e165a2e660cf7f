"""vLLM's V2 model runner (`v1/worker/gpu/`), where stock vLLM has no door for a drafter from outside.

One factory is replaced (`init_speculator`); the rest are hooks that V2 has: a `DraftModelSpeculator` subclass is loaded by
the runner, and a `ModelState` subclass, which the target model may name, gives the verifier and the life of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_specplugin.guard import CheckedDrafts
from vllm_specplugin.runtime.core import Runtime
from vllm_specplugin.runtime.judging import Judge
from vllm_specplugin.types import Request

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.states import RequestState


class PluginSpeculator(DraftModelSpeculator):
    """V2's speculator: hands each step to the proposer, and its drafts to the runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        self.runtime = Runtime(vllm_config, device, "v2")
        self.req_states = req_states
        self.draft_lengths = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        """`[request slots]`: how many of a request's k draft tokens are drafts; the others only fill up the row."""
        self.drafts_of: dict[str, int] = {}
        """The same by request id, of the last step."""
        self._tested: NDArray[np.int64] | None = None

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        """Load the proposer, and make the target name our model state."""
        state = _model_state(self, resolve_model_state_cls(self.vllm_config, target_model))
        target_model.get_model_state_cls = lambda: state
        self.runtime.load(target_model)
        return torch.nn.Module()  # vLLM looks here for layers with a KV cache, of which there are none

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """No graphs: drafting runs between the target's."""

    def capture(self) -> None:
        """No graphs."""

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
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft for one step; returns `[requests, k]` int64, every id valid, of which `draft_lengths` say what counts."""
        rows = input_batch.num_reqs
        out = self.draft_tokens[:rows]  # [requests, k]
        if dummy_run:
            return out.zero_()
        k = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        drafts = self._drafts(input_batch, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, k)
        packed = np.zeros((rows, self.num_speculative_steps + 1), dtype=np.int64)
        packed[:, :k] = drafts.token_ids
        packed[:, -1] = drafts.lengths
        on_device = torch.from_numpy(packed).to(self.device, non_blocking=True)
        if self.runtime.host.tensor_parallel_size > 1:
            # Ranks must verify the same drafts, and a time budget may end differently on each.
            on_device = get_tp_group().broadcast(on_device, src=0)
            packed = on_device.cpu().numpy()
        out.copy_(on_device[:, :-1])
        self.draft_lengths[input_batch.idx_mapping] = on_device[:, -1]
        self.drafts_of = dict(zip(input_batch.req_ids, packed[:, -1].tolist(), strict=True))
        return out

    def _drafts(
        self,
        input_batch: InputBatch,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        k: int,
    ) -> CheckedDrafts:
        runtime, states = self.runtime, self.req_states
        rows = input_batch.num_reqs
        requests = [runtime.request(request_id, None) for request_id in input_batch.req_ids]
        slots = input_batch.idx_mapping
        # What was sampled is in the request states already; one copy to the host brings it, with both counts.
        total = states.total_len.gpu[slots].long()  # [requests]
        sampled = num_sampled[:rows].long()
        width = self.num_speculative_steps + 1
        places = (total - sampled)[:, None] + torch.arange(width, device=total.device)  # [requests, k + 1]
        tokens = states.all_token_ids.gpu[slots[:, None], places.clamp(max=self.max_model_len - 1)]
        copied = torch.cat([sampled[:, None], total[:, None], tokens.long()], dim=1).cpu().numpy()
        counts, lengths = copied[:, 0], copied[:, 1]
        committed = copied[:, 2:][np.arange(width) < counts[:, None]].astype(np.int32)
        if runtime.wants_verdicts and input_batch.num_draft_tokens_per_req is not None:
            tested = np.asarray(input_batch.num_draft_tokens_per_req[:rows], dtype=np.int64)
            runtime.observe(requests, tested, [row[2 : 2 + row[0]].tolist() for row in copied])
        hidden = aux = None
        if runtime.capabilities.hidden_states != "none":
            last = input_batch.query_start_loc[1 : rows + 1] - 1 - num_rejected[:rows]
            hidden = last_hidden_states[last]
            if aux_hidden_states is not None:
                aux = torch.cat([layer[last] for layer in aux_hidden_states], dim=-1)
        history = _TokenStates(states, input_batch.idx_mapping_np, lengths)
        return runtime.propose(requests, k, committed, counts, lengths, history, hidden, aux)


class _TokenStates:
    """`History` over V2's table of token ids, `[slots, max_model_len]` where the device can read it."""

    def __init__(self, states: RequestState, slots: NDArray[np.intp], lengths: NDArray[np.int64]) -> None:
        self._table, self._slots, self._lengths = states.all_token_ids.gpu, slots, lengths

    def host(self, row: int) -> NDArray[np.int32]:
        return self.device(row).cpu().numpy()

    def device(self, row: int) -> torch.Tensor:
        return self._table[int(self._slots[row]), : int(self._lengths[row])]


def _model_state(speculator: PluginSpeculator, base: type) -> type:
    """The target's own model state, with our verifier, and telling the proposer of requests that come and go."""

    class PluginModelState(base):  # type: ignore[misc, valid-type]
        def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
            super().add_request(req_index, new_req_data)
            speculator.runtime.request(new_req_data.req_id, new_req_data.sampling_params)

        def remove_request(self, req_id: str) -> None:
            super().remove_request(req_id)
            speculator.runtime.forget([req_id])

        def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
            custom = super().custom_sampler(sampler)
            if custom is not None:
                sampler = custom[0]
            return sampler, Verification(speculator, sampler)

    return PluginModelState


class Verification(RejectionSampler):
    """V2's rejection sampler with the decision replaced: sample every row as plain decoding would and walk, or judge.

    V2 keys its noise by (seed, position), so a seeded request, which is walked, emits plain decoding's tokens.
    """

    def __init__(self, speculator: PluginSpeculator, sampler: Any) -> None:
        super().__init__(sampler, speculator.speculative_config, speculator.device)
        self.speculator = speculator
        self.judge = Judge(speculator.runtime)
        self._requests: dict[int, Request] = {}
        """By slot, of this step."""
        self._num_drafts: dict[int, int] = {}
        """By slot, of this step: how many rows beyond its first a request has."""

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> Any:
        # Row j holds draft j - 1. Under asynchronous scheduling every row is k long, so what only fills it up is marked.
        filler = input_batch.expanded_local_pos > self.speculator.draft_lengths[input_batch.expanded_idx_mapping]
        invalid = filler if invalid_drafts is None else filler | invalid_drafts
        slots = input_batch.idx_mapping_np.tolist()
        request = self.speculator.runtime.request
        self._requests = {slot: request(name, None) for slot, name in zip(slots, input_batch.req_ids, strict=True)}
        self._num_drafts = dict(zip(slots, (np.diff(input_batch.cu_num_logits_np) - 1).tolist(), strict=True))
        return super().__call__(logits, input_batch, draft_logits, invalid)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: NDArray[np.intp],
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: NDArray[np.int32],
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns processed logits `[total, vocab]`, sampled `[requests, k + 1]`, number sampled `[requests]`."""
        sampling = (
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        slots = idx_mapping_np.tolist()
        requests = [self._requests[slot] for slot in slots]
        num_drafts = np.array([self._num_drafts[slot] for slot in slots], dtype=np.int64)
        judged = self.judge.choose(requests, num_drafts, logits.device)
        first = cu_num_logits[:-1].long()  # [requests]
        lengths = cu_num_logits[1:].long() - first - 1
        position = torch.arange(self.num_speculative_steps + 1, device=first.device)
        row_at = (first[:, None] + position).clamp(max=logits.shape[0] - 1)  # [requests, k + 1]
        drafts = verify_draft_sampled[row_at[:, 1:]]  # [requests, k]; -1 where a draft is marked invalid
        if judged is None or not judged.every:
            target_ids, processed = self.sampler.sample(*sampling, return_logprobs=True)
        else:
            target_ids = torch.zeros_like(verify_draft_sampled)  # nobody is walked
        if judged is not None:  # a fused sampler applies top-k and top-p where its caller does not see it
            processed = self.sampler.apply_sampling_params(*sampling)
        walked = self.judge.walk(target_ids[row_at], drafts.to(target_ids.dtype), lengths)
        verdict = None
        if judged is not None:
            probs = processed.softmax(dim=-1, dtype=torch.float32)  # [total, vocab]
            rows = row_at[judged.rows]  # [judged, k + 1]
            every_row = judged.every and len(probs) == rows.numel()
            target_probs = probs.view(*rows.shape, -1) if every_row else probs[rows]
            drafts = drafts[judged.rows]
            within = position[:-1] < lengths[judged.rows, None]
            valid = ((drafts >= 0) & within).long().cumprod(dim=1).sum(dim=1)  # [judged]
            known = pos[first[judged.rows]].long() + 1
            verdict = self.judge.verify(judged, target_probs, drafts, valid, known)
        merged = self.judge.merge(walked, judged, verdict)
        return processed, merged.token_ids.clamp(min=0), (merged.accepted + 1).to(torch.int32)


def attach(runner: GPUModelRunner) -> None:
    """Under synchronous scheduling, tell the scheduler how many drafts each request really has."""
    speculator = getattr(runner, "speculator", None)
    if not isinstance(speculator, PluginSpeculator):
        return
    if speculator.runtime.capabilities.hidden_states == "aux":
        runner.use_aux_hidden_state_outputs = True
    if runner.scheduler_config.async_scheduling:
        return
    stock_take = runner.take_draft_token_ids

    def take_draft_token_ids() -> DraftTokenIds | None:
        drafts = stock_take()
        return None if drafts is None else _trim(drafts, speculator.drafts_of)

    runner.take_draft_token_ids = take_draft_token_ids


def _trim(drafts: DraftTokenIds, lengths: dict[str, int]) -> DraftTokenIds:
    rows: Sequence[list[int]] = drafts.draft_token_ids
    return DraftTokenIds(
        drafts.req_ids, [row[: lengths.get(request_id, 0)] for request_id, row in zip(drafts.req_ids, rows, strict=True)]
    )
