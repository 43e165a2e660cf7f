"""Counts in the engine core: what the scheduler does with drafts, and what requests are given of them.

`attach` puts two methods around a scheduler's own (on the object). Totals leave with vLLM's statistics of the step, the counts of
a request with its output: both in fields of vLLM's that are free-form dictionaries, since only declared fields cross to the front
end, where `frontend_metrics` takes them out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_specplugin.alarm import Alarm
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.counts import Counts
from vllm_specplugin.errors import ConfigError, SpecPluginError
from vllm_specplugin.registry import PROPOSERS
from vllm_specplugin.request_args import read_draft_limit
from vllm_specplugin.runtime.meter import ReportingOutput
from vllm_specplugin.runtime.spec_config import PluginSpeculativeConfig, uses_rust_front_end

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = init_logger("vllm.specplugin")

KEY = "specplugin"
"""Ours in the dictionaries `SchedulerStats.kv_connector_stats` and `EngineCoreOutput.kv_transfer_params`."""


def attach(scheduler: Scheduler) -> None:
    """Count for one scheduler whose configuration names a proposer."""
    spec = scheduler.vllm_config.speculative_config
    if not isinstance(spec, PluginSpeculativeConfig):
        return
    _Hooks(scheduler, spec)


def _is_learned(proposer: str) -> bool:
    """Whether a proposer was trained for some target."""
    try:
        capabilities = PROPOSERS.resolve(proposer).capabilities
    except SpecPluginError:  # a name that a third party's hybrid made up
        return False
    return capabilities.checkpoint or capabilities.native is not None or capabilities.hidden_states != "none"


class _Hooks:
    """The methods that one scheduler gets."""

    def __init__(self, scheduler: Scheduler, spec: PluginSpeculativeConfig) -> None:
        config = SpecConfig.parse(spec.plugin)
        is_adaptive = config.adaptive and (spec.plans_ahead or not scheduler.vllm_config.scheduler_config.async_scheduling)
        alarm = Alarm(_is_learned, adaptive=is_adaptive)
        self.scheduler = scheduler
        self._synchronous = not scheduler.vllm_config.scheduler_config.async_scheduling
        self._front_end_listens = not uses_rust_front_end()
        """It takes out again what is sent to it; else that would end up in answers."""
        if not self._front_end_listens:
            logger.warning_once(
                "vLLM's Rust front end (VLLM_USE_RUST_FRONTEND) runs no plugins: figures per request, the metrics "
                "vllm:specplugin_* and the 400s for what requests say wrongly need Python's front end. Drafting goes on."
            )
        totals = scheduler.log_stats and self._front_end_listens
        self.counts = Counts(config.proposer, spec.num_speculative_tokens, alarm, totals)
        self._constrained: set[str] = set()
        """Running requests with a grammar."""
        self._with_stops: set[str] = set()
        """Running requests with stop strings: the front end finds these, and needs the counts at hand in every step."""
        self._stock_update, self._stock_drafts = scheduler.update_from_output, scheduler.update_draft_token_ids
        scheduler.update_from_output = self.update_from_output  # type: ignore[method-assign]
        scheduler.update_draft_token_ids = self.update_draft_token_ids  # type: ignore[method-assign]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As in stock; then count what each request was given, which is what the outputs say and not what was sampled."""
        for request in scheduler_output.scheduled_new_reqs:
            self._admit(request)
            known = self.scheduler.requests.get(request.req_id) if self._synchronous else None
            if known is not None:
                # A session may come with drafts of its last turn, which nobody replaces where the worker has none for this step.
                known.spec_token_ids = []
        for request_id in scheduler_output.preempted_req_ids or ():  # its drafts are void, whatever rows it is given next
            self.counts.drafted(request_id, self.counts.proposer, 0)
        passes = self._passes(scheduler_output, model_runner_output)
        outputs = self._stock_update(scheduler_output, model_runner_output)
        for to_client in outputs.values():
            for output in to_client.outputs:
                self._count(output, passes)
        if isinstance(model_runner_output, ReportingOutput) and model_runner_output.report is not None:
            self.counts.report(model_runner_output.report)
        self._forget(scheduler_output.finished_req_ids)
        for line in self.counts.alarm.due():
            logger.warning(line)
        stats = next((each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None), None)
        if stats is not None and self._front_end_listens:
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: self.counts.take()}
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """As in stock, under synchronous scheduling; then count what the grammar cut off."""
        requests, counts = self.scheduler.requests, self.counts
        if not self._constrained and not counts.on_device:
            return self._stock_drafts(draft_token_ids)
        rows = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        drafted = {request_id: len(row) for request_id, row in rows}
        if counts.on_device:  # the worker has waited for them meanwhile
            for request_id, drafts in drafted.items():
                counts.drafted(request_id, counts.proposer, drafts)
            counts.on_device = False
        self._stock_drafts(draft_token_ids)
        for request_id in self._constrained & drafted.keys() & requests.keys():
            counts.trimmed(request_id, drafted[request_id], len(requests[request_id].spec_token_ids))

    def _admit(self, request: NewRequestData) -> None:
        params = request.sampling_params
        if params is None or request.req_id in self.counts:
            return
        try:
            limit = read_draft_limit(params.extra_args)
        except ConfigError:  # said by `Runtime.request`
            limit = None
        self.counts.admit(request.req_id, limit, float(params.temperature or 0.0))
        if params.structured_outputs is not None:
            self._constrained.add(request.req_id)
        if params.stop:
            self._with_stops.add(request.req_id)

    def _forget(self, request_ids: set[str]) -> None:
        self.counts.forget(request_ids)
        self._constrained -= request_ids
        self._with_stops -= request_ids

    def _passes(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Mapping[str, tuple[str, int, int]]:
        """Of each request with drafts: who made them, how many the target verified, and how many tokens came of it."""
        sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        passes = {}
        for request_id, places in scheduler_output.scheduled_spec_decode_tokens.items():
            source, verified = self.counts.scheduled(request_id, len(places), len(places) - invalid.get(request_id, 0))
            row = rows.get(request_id)
            if verified and row is not None and sampled:
                passes[request_id] = source, verified, len(sampled[row])
        return passes

    def _count(self, output: EngineCoreOutput, passes: Mapping[str, tuple[str, int, int]]) -> None:
        request_id, emitted, finished = output.request_id, len(output.new_token_ids), output.finish_reason is not None
        if emitted:
            source, verified, generated = passes.get(request_id) or ("", 0, emitted)
            self.counts.emitted(request_id, source, verified, generated, emitted)
        if not (finished or request_id in self._with_stops) or request_id not in self.counts:
            return
        if self._front_end_listens:
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), KEY: self.counts.dump(request_id)}
        if finished and request_id not in self.scheduler.requests:
            self._forget({request_id})
