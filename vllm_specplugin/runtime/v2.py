"""vLLM's V2 model runner (`v1/worker/gpu/`), where stock vLLM has no door for a drafter from outside.

One factory is replaced (`init_speculator`); the rest are hooks that V2 has: a `DraftModelSpeculator` subclass is loaded by
the runner, and a `ModelState` subclass, which the target model may name, gives the verifier and the life of requests. Where the
proposer drafts with one of vLLM's own methods, the factory's own speculator stays, overlaid by `native_v2`.
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
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_specplugin.guard import CheckedDrafts
from vllm_specplugin.runtime.control import Stopwatch, remember
from vllm_specplugin.runtime.core import Runtime
from vllm_specplugin.runtime.spec_config import PluginSpeculativeConfig
from vllm_specplugin.runtime.v2_sampler import Verification
from vllm_specplugin.types import NativeDrafter

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.states import RequestState


class Drafting:
    """What the plugin keeps beside a speculator of V2's: the proposer, and how many of each request's k tokens are drafts."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        self.vllm_config, self.device, self.req_states = vllm_config, device, req_states
        self.runtime = Runtime(vllm_config, device, "v2")
        self.k = self.runtime.k
        self.draft_lengths = torch.zeros(self.runtime.host.max_num_seqs, dtype=torch.int64, device=device)
        """`[request slots]`: how many of a request's k draft tokens are drafts; the others only fill up the row."""
        self._last: tuple[Sequence[str], Sequence[int] | torch.Tensor] = ((), ())
        """The same of the last step's requests: their ids, and the numbers."""

    def name_model_state(self, target_model: torch.nn.Module) -> None:
        """Make the target name our model state; before the runner asks for one."""
        state = _model_state(self, resolve_model_state_cls(self.vllm_config, target_model))
        target_model.get_model_state_cls = lambda: state

    def propose(
        self,
        input_batch: InputBatch,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        k: int,
        out: torch.Tensor,
        native: NativeDrafter | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Have the proposer draft, and put its tokens into `out` `[requests, most k]` int64, every id valid."""
        if self.runtime.warming_up:
            out.zero_()
            self.keep_lengths(input_batch, torch.zeros(len(out), dtype=torch.int64, device=self.device))
            return
        drafts = self._drafts(input_batch, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, k, native, stopwatch)
        packed = np.zeros((len(out), self.k + 1), dtype=np.int64)
        packed[:, :k] = drafts.token_ids
        packed[:, -1] = drafts.lengths
        on_device = torch.from_numpy(packed).to(self.device, non_blocking=True)
        if self.runtime.host.tensor_parallel_size > 1:
            # Ranks must verify the same drafts, and a time budget may end differently on each.
            on_device = get_tp_group().broadcast(on_device, src=0)
        out.copy_(on_device[:, :-1])
        # Where it matters what the host knows, the scheduler hears it from the first rank, whose own these are.
        self.keep_lengths(
            input_batch, on_device[:, -1], drafts.lengths.tolist() if self.runtime.host.tensor_parallel_rank == 0 else None
        )
        self.runtime.meter.drafted(input_batch.req_ids, drafts)

    def skip(self, input_batch: InputBatch, out: torch.Tensor) -> torch.Tensor:
        """A step that the host's drafter is left out of: no drafts, in `out` `[requests, most k]` int64, now or later."""
        self.runtime.skip(input_batch.req_ids)
        self.keep_lengths(input_batch, torch.zeros(len(out), dtype=torch.int64, device=self.device))
        self.runtime.meter.drafted(input_batch.req_ids, None)
        return out

    def reserve(self) -> None:
        """Take and give back what drafts drawn by chance will take, so that vLLM finds it when it measures what a step needs.

        That is, in float32 over the vocabulary: what the last step's drafts were drawn from, this step's, and their logits.
        """
        runtime = self.runtime
        if self.device.type != "cpu" and runtime.resolved.config.draft_sampling == "probabilistic":
            host = runtime.host
            torch.empty(3 * host.max_num_seqs * self.k * host.vocab_size, dtype=torch.float32, device=self.device)

    def keep_lengths(self, input_batch: InputBatch, lengths: torch.Tensor, on_host: Sequence[int] | None = None) -> None:
        """Note how many drafts each request of a step has: `[requests]` on the device, and on the host where known there."""
        self.draft_lengths[input_batch.idx_mapping] = lengths
        self._last = (input_batch.req_ids, lengths if on_host is None else on_host)

    @property
    def has_none(self) -> bool:
        """The host knows that the last step has no drafts."""
        lengths = self._last[1]
        return not isinstance(lengths, torch.Tensor) and not any(lengths)

    def trim(self, drafts: DraftTokenIds) -> DraftTokenIds:
        """What the scheduler shall verify of the last step's drafts."""
        ids, lengths = self._last
        of_request = dict(zip(ids, lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths, strict=True))
        pairs = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        return DraftTokenIds(drafts.req_ids, [row[: of_request.get(request_id, 0)] for request_id, row in pairs])

    def _drafts(
        self,
        input_batch: InputBatch,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        k: int,
        native: NativeDrafter | None,
        stopwatch: Stopwatch | None,
    ) -> CheckedDrafts:
        runtime, states = self.runtime, self.req_states
        rows = input_batch.num_reqs
        requests = [runtime.request(request_id, None) for request_id in input_batch.req_ids]
        slots = input_batch.idx_mapping
        # What was sampled is in the request states already; one copy to the host brings it, with both counts.
        total = states.total_len.gpu[slots].long()  # [requests]
        sampled = num_sampled[:rows].long()
        width = self.k + 1
        places = (total - sampled)[:, None] + torch.arange(width, device=total.device)  # [requests, k + 1]
        tokens = states.all_token_ids.gpu[slots[:, None], places.clamp(max=states.all_token_ids.gpu.shape[1] - 1)]
        copied = torch.cat([sampled[:, None], total[:, None], tokens.long()], dim=1).cpu().numpy()
        counts, lengths = copied[:, 0], copied[:, 1]
        committed = copied[:, 2:][np.arange(width) < counts[:, None]].astype(np.int32)
        if input_batch.num_draft_tokens_per_req is not None:
            tested = np.asarray(input_batch.num_draft_tokens_per_req[:rows], dtype=np.int64)
            runtime.verified(tested)
            if runtime.wants_verdicts:
                runtime.observe(requests, tested, [row[2 : 2 + row[0]].tolist() for row in copied])
        hidden = aux = None
        if runtime.capabilities.hidden_states != "none":
            last = input_batch.query_start_loc[1 : rows + 1] - 1 - num_rejected[:rows]
            hidden = last_hidden_states[last]
            if aux_hidden_states is not None:
                aux = torch.cat([layer[last] for layer in aux_hidden_states], dim=-1)
        history = _TokenStates(states, input_batch.idx_mapping_np, lengths)
        spent = 0.0 if native is None or stopwatch is None else stopwatch.seconds  # known, since the device was waited for
        return runtime.propose(requests, k, committed, counts, lengths, history, hidden, aux, native, spent)


class PluginSpeculator(DraftModelSpeculator):
    """V2's speculator for a proposer of our own: hands each step to it, and its drafts to the runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        self.drafting = Drafting(vllm_config, device, req_states)

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        """Load the proposer, and make the target name our model state."""
        self.drafting.name_model_state(target_model)
        self.drafting.runtime.load(target_model)
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
        out = self.draft_tokens[: input_batch.num_reqs]  # [requests, k]
        if dummy_run:
            if is_profile:
                self.drafting.reserve()
            return out.zero_()
        k = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        self.drafting.propose(input_batch, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, k, out)
        return out


class _TokenStates:
    """`History` over V2's table of token ids, `[slots, max_model_len]` where the device can read it."""

    def __init__(self, states: RequestState, slots: NDArray[np.intp], lengths: NDArray[np.int64]) -> None:
        self._table, self._slots, self._lengths = states.all_token_ids.gpu, slots, lengths

    def host(self, row: int) -> NDArray[np.int32]:
        return self.device(row).cpu().numpy()

    def device(self, row: int) -> torch.Tensor:
        return self._table[int(self._slots[row]), : int(self._lengths[row])]


def _model_state(drafting: Drafting, base: type) -> type:
    """The target's own model state, with our verifier, and telling the proposer of requests that come and go."""

    class PluginModelState(base):  # type: ignore[misc, valid-type]
        def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
            super().add_request(req_index, new_req_data)
            drafting.runtime.request(new_req_data.req_id, new_req_data.sampling_params)

        def remove_request(self, req_id: str) -> None:
            super().remove_request(req_id)
            drafting.runtime.forget([req_id])

        def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
            custom = super().custom_sampler(sampler)
            if custom is not None:
                sampler = custom[0]
            spec_config = drafting.vllm_config.speculative_config
            assert spec_config is not None
            return sampler, Verification(drafting.runtime, drafting.draft_lengths, spec_config, sampler)

    return PluginModelState


def attach(runner: GPUModelRunner) -> None:
    """Lay ours over a speculator of vLLM's; under synchronous scheduling, tell how many drafts each request really has."""
    speculator = getattr(runner, "speculator", None)
    if isinstance(speculator, PluginSpeculator):
        drafting = speculator.drafting
    elif speculator is not None and isinstance(runner.speculative_config, PluginSpeculativeConfig):
        from vllm_specplugin.runtime.native_v2 import overlay

        drafting = overlay(speculator, runner)
    else:
        return
    drafting.runtime.meter.attach(runner, speculator, "propose")
    remember(runner, drafting.runtime)
    if drafting.runtime.capabilities.hidden_states == "aux":
        runner.use_aux_hidden_state_outputs = True
    if runner.scheduler_config.async_scheduling:
        return
    stock_take = runner.take_draft_token_ids

    def take_draft_token_ids() -> DraftTokenIds | None:
        if drafting.has_none:  # the scheduler has used up those of the step before
            return None
        drafts = stock_take()
        return None if drafts is None else drafting.trim(drafts)

    runner.take_draft_token_ids = take_draft_token_ids
