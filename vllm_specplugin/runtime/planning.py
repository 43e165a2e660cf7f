"""Control under asynchronous scheduling: it sits in the engine core, beside the scheduler, which plans steps ahead.

vLLM's scheduler has a table for speculation by batch size (`dynamic_sd_lookup`), which it asks in every step how many drafts each
request gets; the runner, its CUDA graphs and the drafters follow what it says. `attach` puts a table in its place that asks
`UniformControl`. All it goes by is in the outputs that come back: which drafts were planned, and how many tokens came of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from vllm_specplugin.config import SpecConfig
from vllm_specplugin.control.uniform import UniformControl, schedule
from vllm_specplugin.runtime.meter import ReportingOutput
from vllm_specplugin.runtime.spec_config import PluginSpeculativeConfig, schedules_on_every_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger("vllm.specplugin")


def prepare(vllm_config: VllmConfig) -> None:
    """Have a configuration that is otherwise complete plan the drafts of each step, where that is asked for and can be done."""
    spec = vllm_config.speculative_config
    assert isinstance(spec, PluginSpeculativeConfig)
    scheduler = vllm_config.scheduler_config
    if not scheduler.async_scheduling or spec.runner != "v2" or not SpecConfig.parse(spec.plugin).adaptive or spec.plans_ahead:
        return
    if obstacle := _obstacle(vllm_config):
        if spec.plugin.get("control") == "adaptive":
            logger.warning_once(
                "'control' is 'adaptive', but with %s draft lengths under asynchronous scheduling are fixed. Use "
                "--no-async-scheduling for adaptive ones.",
                obstacle,
            )
        return
    spec.plans_ahead = True
    # vLLM captures CUDA graphs for the numbers of drafts in this schedule; which of them is used when, `attach` sees to.
    spec.num_speculative_tokens_per_batch_size = schedule(spec.num_speculative_tokens, scheduler.max_num_seqs)


def _obstacle(vllm_config: VllmConfig) -> str:
    """What keeps all parts of an engine from following one plan; empty where nothing does."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:  # ranks run their drafters together, but plan each for itself
        return f"--data-parallel-size {parallel.data_parallel_size}"
    if parallel.pipeline_parallel_size > 1:  # a step's time is not the time from output to output
        return f"--pipeline-parallel-size {parallel.pipeline_parallel_size}"
    if schedules_on_every_rank(parallel):  # each would plan by its own clock
        return "--distributed-executor-backend external_launcher"
    return ""


def attach(scheduler: Scheduler) -> None:
    """Plan for one scheduler; after `scheduler_metrics`, which reports what is said here."""
    spec = scheduler.vllm_config.speculative_config
    if isinstance(spec, PluginSpeculativeConfig) and spec.plans_ahead and scheduler.dynamic_sd_lookup is not None:
        Planner(scheduler, spec)


class Planner:
    """What one scheduler gets in the place of its table, and a method around its own."""

    def __init__(self, scheduler: Scheduler, spec: PluginSpeculativeConfig) -> None:
        most = scheduler.scheduler_config.max_num_seqs
        capabilities = spec.resolve().capabilities
        # Others have nothing to see to in steps without drafts; and a hybrid's other parts go on with whoever lapsed.
        can_skip = capabilities.native is not None and not capabilities.parts
        self.control = UniformControl(spec.plugin["proposer"], spec.num_speculative_tokens, most, can_skip)
        self._scheduler = scheduler
        self._newest = ""
        """Who was scheduled for the first time last."""
        self._stock_update = scheduler.update_from_output
        scheduler.dynamic_sd_lookup = self  # type: ignore[assignment]
        scheduler.update_from_output = self.update_from_output  # type: ignore[method-assign]

    def __getitem__(self, requests: int) -> int:
        """How many drafts each request gets in a step of so many; asked once for each step that has any."""
        last = self._scheduler.running[-1] if self._scheduler.running else None
        begins = False
        if last is not None and last.num_output_tokens == 0 and last.request_id != self._newest:
            begins, self._newest = True, last.request_id  # who is scheduled for the first time stands at the end
        return self.control.plan(requests, begins)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Learn of a step; then as in stock."""
        report = model_runner_output.report if isinstance(model_runner_output, ReportingOutput) else None
        self.control.forget(scheduler_output.preempted_req_ids or ())  # they begin anew
        if scheduler_output.num_scheduled_tokens:
            self._learn(scheduler_output, model_runner_output)
        self.control.forget(scheduler_output.finished_req_ids)
        if report is not None:
            for requests, seconds in report.first_passes:
                self.control.passed(requests, seconds)
            if report.pass_seconds is not None:
                self.control.calibrate(list(report.pass_seconds), list(report.pass_seconds.values()))
            if report.draft_length is not None:
                state = self.control.state
                report.paused = state.regime == "paused"
                report.draft_length = 0.0 if report.paused else state.drafts_per_request
        return self._stock_update(scheduler_output, model_runner_output)

    def _learn(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> None:
        scheduled, places = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        drafts = {request_id: len(row) for request_id, row in places.items()}
        decoding = all(tokens == 1 + drafts.get(request_id, 0) for request_id, tokens in scheduled.items())
        # vLLM 0.33 drafts nothing where no request can use it, whatever was planned: what such a step took is no level's time.
        decoding = decoding and not getattr(scheduler_output, "skip_drafts", False)
        sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        if drafts and sampled:  # made before the drafter was left out, if it is in this step
            judged = [request_id for request_id in drafts if request_id in rows and not self.control.has_lapsed(request_id)]
            pairs = [(drafts[request_id], len(sampled[rows[request_id]])) for request_id in judged]
            planned, tokens = np.array([pair for pair in pairs if pair[1]], dtype=np.int64).reshape(-1, 2).T
            self.control.judged(planned, tokens - 1)
        self.control.over(list(scheduled), sum(drafts.values()), decoding)
