"""vLLM's V1 model runner (`v1/worker/gpu_model_runner.py`, and the CPU runner that derives from it).

V1 builds our drafter itself (`custom_class`), but gives it too little: no request ids, no hidden states. So once a runner
is built, `attach` gives that one object its own `propose_draft_token_ids`, `_update_states`, `_input_fits_in_drafter` and
`rejection_sampler`, and short cuts in two methods for steps in which nobody has drafts. No class of vLLM is changed but for the
hook that calls `attach`.

Where the proposer drafts with one of vLLM's own methods, V1 builds that method's drafter, and our `propose_draft_token_ids` calls
the stock one.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_specplugin.guard import CheckedDrafts
from vllm_specplugin.runtime.control import Stopwatch, remember
from vllm_specplugin.runtime.core import Runtime
from vllm_specplugin.runtime.native import NativeDrafts, check_draft_vocabulary
from vllm_specplugin.runtime.spec_config import PluginSpeculativeConfig
from vllm_specplugin.runtime.v1_sampler import Verification, serve_every_logits_processor
from vllm_specplugin.types import Drafts, History, NativeDrafter, Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class V1Drafter:
    """The drafter that V1 builds, loads and holds; the work is done by the methods that `attach` puts on the runner."""

    supports_mm_inputs = False

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.runtime = Runtime(vllm_config, vllm_config.device_config.device, "v1")

    def load_model(self, target: torch.nn.Module) -> None:
        self.runtime.load(target)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Never called: the runner's `propose_draft_token_ids` is replaced."""
        raise RuntimeError("the V1 model runner was not attached to; run `vllm-specplugin doctor`")


def attach(runner: GPUModelRunner) -> None:
    """Take over drafting and verification of one runner whose configuration names a proposer."""
    spec = runner.speculative_config
    if not isinstance(spec, PluginSpeculativeConfig):
        return
    serve_every_logits_processor(runner)
    drafter = getattr(runner, "drafter", None)
    if drafter is None:  # not the last pipeline stage
        return
    hooks = _Hooks(runner, drafter.runtime) if spec.native is None else _NativeHooks(runner)
    remember(runner, hooks.runtime)
    runner._update_states = hooks.update_states
    runner._input_fits_in_drafter = hooks.input_fits_in_drafter
    runner.propose_draft_token_ids = hooks.propose_draft_token_ids
    runner._calc_spec_decode_metadata = hooks.calc_spec_decode_metadata
    runner.take_draft_token_ids = hooks.take_draft_token_ids
    hooks.runtime.meter.attach(runner, runner, "propose_draft_token_ids")
    runner.rejection_sampler = Verification(runner, hooks.runtime)
    if hooks.runtime.capabilities.hidden_states == "aux":
        runner.use_aux_hidden_state_outputs = True


class _Hooks:
    """The methods that one runner gets."""

    def __init__(self, runner: GPUModelRunner, runtime: Runtime) -> None:
        self.runner = runner
        self.runtime = runtime
        self._stock_update_states = runner._update_states
        self._stock_metadata, self._stock_take = runner._calc_spec_decode_metadata, runner.take_draft_token_ids
        self._numbers = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32, device=runner.device)

    def update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """As in stock, and the proposer forgets requests that ended or lost their KV cache, or whose session goes on anew."""
        begun = (request.req_id for request in scheduler_output.scheduled_new_reqs)  # known ones: sessions with streamed input
        self.runtime.forget(chain(scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or (), begun))
        return self._stock_update_states(scheduler_output)

    def calc_spec_decode_metadata(
        self, num_draft_tokens: NDArray[np.int32], cu_num_scheduled_tokens: NDArray[np.int32]
    ) -> SpecDecodeMetadata:
        """As in stock, from `[rows]` each; but stock works as hard where nobody has drafts."""
        if num_draft_tokens.any():
            return self._stock_metadata(num_draft_tokens, cu_num_scheduled_tokens)
        rows, numbers = len(num_draft_tokens), self._numbers
        return SpecDecodeMetadata(
            draft_token_ids=numbers[:0],
            num_draft_tokens=[0] * rows,
            cu_num_draft_tokens=torch.zeros_like(numbers[:rows]),
            cu_num_sampled_tokens=numbers[1 : rows + 1],
            target_logits_indices=numbers[:0],
            bonus_logits_indices=numbers[:rows],
            logits_indices=async_tensor_h2d(cu_num_scheduled_tokens - 1, device=self.runner.device),
        )

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """As in stock, but nothing where nobody has drafts: the scheduler has used up those of the step before."""
        drafts = self.runner._draft_token_ids
        return None if isinstance(drafts, list) and not any(drafts) else self._stock_take()

    def input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: stock stops drafting for the whole batch when one request nears max_model_len; here each row has a limit."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        """Draft after bookkeeping: `sampled_token_ids` `[rows][emitted]` is already in the batch's token table."""
        runner = self.runner
        runner._draft_probs = runner._draft_prob_req_ids = None
        batch = runner.input_batch
        counts = np.fromiter(map(len, sampled_token_ids), dtype=np.int64, count=len(batch.req_ids))
        committed = np.fromiter(chain.from_iterable(sampled_token_ids), dtype=np.int32, count=int(counts.sum()))
        lengths = batch.num_tokens_no_spec[: len(counts)].astype(np.int64)
        history = _TokenTable(batch.token_ids_cpu, lengths, runner.device)
        states = (sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata)
        return self._drafts(scheduler_output, committed, counts, lengths, history, states).rows()

    def _drafts(
        self,
        scheduler_output: SchedulerOutput,
        committed: NDArray[np.int32],
        counts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        history: History,
        states: tuple[torch.Tensor, list[torch.Tensor] | None, Any, Any],
        native: NativeDrafter | None = None,
        spent: float = 0.0,
    ) -> CheckedDrafts:
        """One step's drafts; the arguments as in `Runtime.propose`, `states` as in `propose_draft_token_ids`."""
        runtime = self.runtime
        requests = self._requests()
        sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata = states
        if spec_decode_metadata is not None:
            tested = np.asarray(spec_decode_metadata.num_draft_tokens, dtype=np.int64)
            runtime.verified(tested)
            if runtime.wants_verdicts:
                runtime.observe(requests, tested, [tokens.tolist() for tokens in np.split(committed, np.cumsum(counts)[:-1])])
        hidden = aux = None
        if runtime.capabilities.hidden_states != "none":
            rows = _rows_of_last_tokens(counts, spec_decode_metadata, sample_hidden_states.device)
            hidden = sample_hidden_states[rows]
            if aux_hidden_states is not None:
                places = common_attn_metadata.query_start_loc[1 : len(counts) + 1] - 1
                if spec_decode_metadata is not None:
                    places = spec_decode_metadata.logits_indices[rows]
                aux = torch.cat([layer[places] for layer in aux_hidden_states], dim=-1)
        k = scheduler_output.num_spec_tokens_to_schedule
        drafts = runtime.propose(requests, k, committed, counts, lengths, history, hidden, aux, native, spent)
        runtime.meter.drafted(self.runner.input_batch.req_ids, drafts)
        return drafts

    def _requests(self) -> list[Request]:
        runner = self.runner
        request = self.runtime.request
        return [request(request_id, runner.requests[request_id].sampling_params) for request_id in runner.input_batch.req_ids]


class _NativeHooks(_Hooks):
    """The same where vLLM's own drafter drafts."""

    def __init__(self, runner: GPUModelRunner) -> None:
        super().__init__(runner, Runtime(runner.vllm_config, runner.device, "v1"))
        self._stock_propose = runner.propose_draft_token_ids
        self._stock_input_fits = runner._input_fits_in_drafter
        self._stock_load_model = runner.drafter.load_model
        runner.drafter.load_model = self.load_model
        self._stopwatch = Stopwatch(runner.device)

    def load_model(self, target: torch.nn.Module) -> None:
        """Load the drafter, then the proposer."""
        self._stock_load_model(target)
        check_draft_vocabulary(self.runner.drafter.model, self.runtime.host.vocab_size)
        self.runtime.load(target)

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: torch.Tensor,  # type: ignore[override]
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        """Draft before bookkeeping: `sampled_token_ids` `[rows, longest]` on the device, -1 after a row's last token."""
        runner = self.runner
        if not self._fits(common_attn_metadata):
            return self._without_drafter()
        native = None
        if self.runtime.asks_native(runner.input_batch.req_ids):
            with self._stopwatch:
                token_ids = self._stock_propose(
                    scheduler_output,
                    sampled_token_ids,
                    sampling_metadata,
                    hidden_states,
                    sample_hidden_states,
                    aux_hidden_states,
                    spec_decode_metadata,
                    common_attn_metadata,
                    slot_mappings,
                )
            # What they were drawn from, after temperature; None where nobody in the batch samples.
            native = NativeDrafts(Drafts(token_ids=token_ids, probabilities=runner._draft_probs))
        runner._draft_probs = runner._draft_prob_req_ids = None
        batch = runner.input_batch
        emitted = sampled_token_ids.cpu().numpy()  # by now the drafter's work is queued, so the device does not run dry
        valid = emitted >= 0
        valid[runner.discard_request_mask.np[: len(emitted)]] = False  # still prefilling
        counts, committed = valid.sum(axis=1), emitted[valid].astype(np.int32)
        known = batch.num_tokens_no_spec[: len(emitted)].astype(np.int64)
        history = _GrowingTokenTable(batch.token_ids_cpu, known, committed, counts, runner.device)
        states = (sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata)
        spent = 0.0 if native is None else self._stopwatch.seconds
        return self._drafts(scheduler_output, committed, counts, known + counts, history, states, native, spent).rows()

    def _fits(self, common_attn_metadata: Any) -> bool:
        """Whether the drafter can go k tokens beyond each row.

        Stock asks that no row comes nearer to the edge than that, or nobody drafts. But vLLM's drafters keep to max_model_len,
        and rows have limits here; so that matters only where the draft model's own limit is lower, or max_model_len was lowered
        after the drafter was built.
        """
        runner = self.runner
        if runner.drafter.max_model_len <= runner.max_model_len <= runner.effective_drafter_max_model_len:
            return True
        return bool(self._stock_input_fits(common_attn_metadata))

    def _without_drafter(self) -> list[list[int]]:
        runner = self.runner
        for request_id in runner.input_batch.req_ids:
            self.runtime.drafted.drop(request_id)
        if runner.parallel_config.data_parallel_size > 1:  # other data-parallel ranks may run theirs, and would wait for this one
            runner.drafter.dummy_run(num_tokens=1)
        return [[] for _ in runner.input_batch.req_ids]


class _TokenTable:
    """`History` over V1's table of token ids, `[slots, max_model_len]` on the host."""

    def __init__(self, table: NDArray[np.int32], lengths: NDArray[np.int64], device: torch.device) -> None:
        self._table, self._lengths, self._device = table, lengths, device

    def host(self, row: int) -> NDArray[np.int32]:
        return self._table[row, : self._lengths[row]]

    def device(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.host(row)).to(self._device)


class _GrowingTokenTable:
    """The same before bookkeeping, when the step's own tokens are not in the table yet."""

    def __init__(
        self,
        table: NDArray[np.int32],
        known: NDArray[np.int64],
        committed: NDArray[np.int32],
        counts: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        self._table, self._known, self._committed, self._device = table, known, committed, device
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

    def host(self, row: int) -> NDArray[np.int32]:
        return np.concatenate([self._table[row, : self._known[row]], self._committed[self._starts[row] : self._ends[row]]])

    def device(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.host(row)).to(self._device)


def _rows_of_last_tokens(counts: NDArray[np.int64], spec_decode_metadata: Any, device: torch.device) -> torch.Tensor:
    """`[rows]`: where in the sampled hidden states the one behind each row's last committed token lies.

    A row with m drafts owns m + 1 consecutive states; having emitted n tokens, its last came from the n-th.
    """
    if spec_decode_metadata is None:
        return torch.arange(len(counts), device=device)
    owned = np.asarray(spec_decode_metadata.num_draft_tokens, dtype=np.int64) + 1
    first = np.cumsum(owned) - owned
    return torch.from_numpy(first + np.maximum(counts, 1) - 1).to(device)
