"""What the worker knows about drafting, sent to the engine core: one `StepReport` with each step's output.

`Meter.attach` puts itself around three methods of a model runner (on the object): `execute_model` and the drafter's `propose` are
timed, and what `sample_tokens` returns carries the report. On a GPU times are taken by events in the stream and read when they
are over, steps later: nobody waits for them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specplugin.control.uniform import NoPass
from vllm_specplugin.counts import StepReport
from vllm_specplugin.guard import CheckedDrafts, Guard

if TYPE_CHECKING:
    from vllm_specplugin.runtime.core import Runtime


@dataclass
class ReportingOutput(ModelRunnerOutput):
    """vLLM's own output of a step, and ours beside it; it travels wherever vLLM's does."""

    report: StepReport | None = None


class Meter:
    """Times the steps of one model runner, and gathers what there is to report of each."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._runtime = runtime
        self._guards: dict[str, Guard] = {runtime.guard.name: runtime.guard, **runtime.guard.proposer.guards}
        self._clock = _Clock(device)
        self._step = StepReport()
        self._pass_began: Any = None
        """When a pass over drafts began that is not over yet."""
        self._planned_without = False
        """The step was planned without the drafter."""
        self._known: dict[str, dict[Any, int]] = {}
        """The guards' counters as they were reported last."""

    def attach(self, runner: Any, drafter: Any, propose: str) -> None:
        """Measure a runner.

        Args:
            runner: V1's or V2's.
            drafter: the object that drafts.
            propose: the name of its method.
        """
        stock_execute, stock_propose, stock_sample = runner.execute_model, getattr(drafter, propose), runner.sample_tokens

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._pass_began = self._clock.now() if scheduler_output.scheduled_spec_decode_tokens else None
            self._planned_without = isinstance(scheduler_output.num_spec_tokens_to_schedule, NoPass)
            return stock_execute(scheduler_output, *args, **kwargs)

        def timed_propose(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return stock_propose(*args, **kwargs)
            began = self._clock.now()
            if self._pass_began is not None:
                self._clock.spent("verification", self._pass_began, began)
                self._pass_began = None
            drafts = stock_propose(*args, **kwargs)
            wanted = kwargs.get("num_speculative_tokens")
            if self.leaves_drafter_out(wanted):
                return drafts
            first_pass_of = self._decoding(args[0]) if wanted == 0 else 0
            self._clock.spent("drafting", began, self._clock.now(), first_pass_of)
            return drafts

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            return self._reporting(stock_sample(*args, **kwargs))

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
        setattr(drafter, propose, timed_propose)

    def leaves_drafter_out(self, wanted: int | None) -> bool:
        """Whether the step was planned without the drafter, which is asked for so many drafts.

        Where nobody can use drafts vLLM 0.33 asks for a plain 0, whatever was planned.
        """
        return isinstance(wanted, NoPass) or (wanted == 0 and self._planned_without)

    def _decoding(self, input_batch: Any) -> int:
        """How many requests one of V2's batches has; 0 if one of them is at its prompt."""
        return input_batch.num_reqs if input_batch.num_scheduled_tokens.max() <= self._runtime.k + 1 else 0

    def drafted(self, request_ids: Sequence[str], drafts: CheckedDrafts | None) -> None:
        """The drafts for the rows `[rows]` of a step; None where only the device knows how many there are."""
        step = self._step
        step.request_ids = list(request_ids)
        if drafts is not None:
            step.lengths = drafts.lengths.tolist()
            step.sources = None if drafts.sources is None else list(drafts.sources)
        else:
            step.without = [request_id for request_id in request_ids if request_id in self._runtime.lapsed]
        control = self._runtime.controller
        step.draft_length = float(self._runtime.k)
        if control is not None:
            state = control.state
            step.paused = state.regime == "paused"
            step.draft_length = 0.0 if step.paused else state.drafts_per_request
            step.judged = control.acceptance.take()

    def timed(self, pass_seconds: dict[int, float]) -> None:
        """What passes of the target took at start-up, by rows: for control in the engine core."""
        self._step.pass_seconds = pass_seconds

    def _reporting(self, output: Any) -> Any:
        """The output with this step's report; an asynchronous one gives it when it is waited for."""
        if isinstance(output, ModelRunnerOutput):
            return ReportingOutput(**vars(output), report=self._report()) if output.req_ids else output
        pending = getattr(output, "model_runner_output", None)
        if isinstance(pending, ModelRunnerOutput):
            output.model_runner_output = ReportingOutput(**vars(pending), report=self._report())
        return output

    def _report(self) -> StepReport:
        step, self._step = self._step, StepReport()
        for kind, seconds, first_pass_of in self._clock.over():
            (step.drafting_seconds if kind == "drafting" else step.verification_seconds).append(seconds)
            if first_pass_of:
                step.first_passes.append((first_pass_of, seconds))
        for name, guard in self._guards.items():
            if faults := self._new(f"faults of {name}", guard.faults):
                step.faults[name] = faults
            if fallbacks := self._new(f"fallbacks of {name}", guard.fallbacks):
                step.fallbacks[name] = fallbacks
        return step

    def _new(self, name: str, counter: Counter[Any]) -> dict[str, int]:
        """What was added to a counter since the last report."""
        now = dict(counter)  # a copy at once: a proposer's thread may be counting
        before, self._known[name] = self._known.get(name, {}), now
        return {str(kind): count - before.get(kind, 0) for kind, count in now.items() if count > before.get(kind, 0)}


class _Clock:
    """Times on the host's clock, or on a CUDA device's, where the host runs ahead of what it measures."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: deque[tuple[str, Any, Any, int]] = deque()

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spent(self, kind: str, began: Any, ended: Any, first_pass_of: int = 0) -> None:
        """Note a span; for drafting that was the drafter's first pass alone, of how many requests."""
        self._spans.append((kind, began, ended, first_pass_of))

    def over(self) -> list[tuple[str, float, int]]:
        """The spans that the device is through with, their seconds, and the requests of a first pass."""
        done = []
        while self._spans and (not self._cuda or self._spans[0][2].query()):
            kind, began, ended, first_pass_of = self._spans.popleft()
            done.append((kind, began.elapsed_time(ended) / 1000 if self._cuda else ended - began, first_pass_of))
        return done
