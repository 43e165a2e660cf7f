"""Metrics where users look: Prometheus, beside vLLM's own, and the output of each request.

The engine core sends its counts along (`scheduler_metrics`). `attach_logger` adds a stat logger, as vLLM knows them, to those of
an engine; `attach_outputs` puts two methods around the output processor's own (on the object).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, RequestSpecDecodeMetrics, SchedulerStats

from vllm_specplugin.counts import STATES, SequenceCounts, SourceCounts, Surplus, by_position
from vllm_specplugin.guard import Fallback, Fault
from vllm_specplugin.runtime.scheduler_metrics import KEY
from vllm_specplugin.runtime.spec_config import PluginSpeculativeConfig

PREFIX = "vllm:specplugin_"

SECONDS = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
"""Buckets for times: from a look-up in a table to a large model on a CPU."""


# -- the output of a request -----------------------------------------------------------


@dataclass
class SequenceMetrics(RequestSpecDecodeMetrics):
    """What speculation did for one sequence: `output.outputs[0].spec_decode_metrics` of a finished request.

    vLLM's own figures of this name (`histogram`, `num_draft_tokens`, ...), here in every request, with more beside them.
    """

    passes: int = 0
    """Passes of the target that gave it tokens, with drafts or without."""
    emitted: int = 0
    """Tokens that they gave it."""
    by_source: dict[str, SourceCounts] = field(default_factory=dict)
    """The proposers that drafted for it, and what became of their drafts."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass of the target; 1 is what plain decoding has."""
        return self.emitted / self.passes if self.passes else 1.0

    @property
    def drafted(self) -> int:
        return sum(part.drafted for part in self.by_source.values())

    @property
    def verified(self) -> int:
        return sum(part.verified for part in self.by_source.values())

    @property
    def accepted(self) -> int:
        return sum(part.accepted for part in self.by_source.values())


def _metrics_of(counts: SequenceCounts, of_vllm: RequestSpecDecodeMetrics | None) -> SequenceMetrics:
    return SequenceMetrics(
        num_spec_tokens=len(counts.histogram) - 1,
        histogram=counts.histogram,
        num_draft_tokens=sum(part.verified for part in counts.by_source.values()),
        per_step_accepted=[] if of_vllm is None else of_vllm.per_step_accepted,
        per_step_drafted=[] if of_vllm is None else of_vllm.per_step_drafted,
        passes=counts.passes,
        emitted=counts.emitted,
        by_source=counts.by_source,
    )


def attach_outputs(processor: OutputProcessor) -> None:
    """Put the counts of requests into their outputs."""
    surplus = Surplus()
    stock_process, stock_update = processor.process_outputs, processor.update_scheduler_stats

    def process_outputs(engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
        counted = [_take(output) for output in engine_core_outputs if output.kv_transfer_params]
        for output, _, counts, _ in filter(None, counted):
            source, emitted = counts.last
            if source and output.request_id not in processor.request_states and processor.log_stats:
                surplus.add(source, emitted, emitted)  # of a pass that was on its way when its request ended at a stop string
        processed = stock_process(engine_core_outputs, *args, **kwargs)
        for output, tokens, counts, metrics in filter(None, counted):
            dropped = tokens - len(output.new_token_ids)  # vLLM cuts the list at the end of a stop string
            if dropped:
                source, emitted = counts.last
                counts.cut(dropped)
                metrics.emitted = counts.emitted
                if source and processor.log_stats:  # without, no totals arrive that it could be taken out of
                    surplus.add(source, emitted, dropped)
        return processed

    def update_scheduler_stats(scheduler_stats: SchedulerStats | None) -> None:
        taken = scheduler_stats and (scheduler_stats.kv_connector_stats or {}).get(KEY)
        if taken:
            surplus.take_out_of(taken)
        stock_update(scheduler_stats)

    processor.process_outputs = process_outputs  # type: ignore[method-assign]
    processor.update_scheduler_stats = update_scheduler_stats  # type: ignore[method-assign]


def _take(output: EngineCoreOutput) -> tuple[EngineCoreOutput, int, SequenceCounts, SequenceMetrics] | None:
    """Move the counts of a request from where they travel to where vLLM hands such figures on."""
    params = dict(output.kv_transfer_params or {})
    dumped = params.pop(KEY, None)
    if dumped is None:
        return None
    output.kv_transfer_params = params or None
    counts = SequenceCounts.load(dumped)
    metrics = _metrics_of(counts, output.spec_decode_metrics)
    output.spec_decode_metrics = metrics
    return output, len(output.new_token_ids), counts, metrics


# -- Prometheus ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Family:
    """One metric as Prometheus has it."""

    name: str
    kind: str
    """'counter', 'gauge' or 'histogram'."""
    help: str
    labels: tuple[str, ...] = ()
    """Beside vLLM's own two, the model's name and the engine's number."""


_PER_POSITION = ("proposer", "position")

FAMILIES = (
    _Family("drafted_tokens", "counter", "Drafts made, after the guard's checks and control's choice.", _PER_POSITION),
    _Family("scheduled_tokens", "counter", "Drafts that a pass of the target was planned for.", _PER_POSITION),
    _Family("trimmed_tokens", "counter", "Drafts that a request's grammar refused before verification.", _PER_POSITION),
    _Family("verified_tokens", "counter", "Drafts that the target judged.", _PER_POSITION),
    _Family("accepted_tokens", "counter", "Drafts that the target accepted.", _PER_POSITION),
    _Family(
        "emitted_tokens",
        "counter",
        "Tokens that passes with drafts gave requests, the one after the accepted drafts included, none past a request's end.",
        _PER_POSITION,
    ),
    _Family("passes", "counter", "Passes that gave a request tokens; proposer 'none' for those without drafts.", ("proposer",)),
    _Family("fallbacks", "counter", "Rows that had no drafts for want of an answer from the proposer.", ("proposer", "reason")),
    _Family("faults", "counter", "What the guard caught of a proposer.", ("proposer", "kind")),
    _Family("drafting_seconds", "histogram", "Time that a step spends on drafting."),
    _Family("verification_seconds", "histogram", "Time of a pass over drafts, the target's work and the verdict together."),
    _Family("draft_length", "gauge", "Drafts per request and step: k, or what adaptive control lets through on average."),
    _Family("paused", "gauge", "1 while adaptive control has left off drafting."),
)


def attach_logger(manager: StatLoggerManager, vllm_config: VllmConfig) -> None:
    """Add ours to the stat loggers of an engine whose configuration names a proposer."""
    spec = vllm_config.speculative_config
    if not isinstance(spec, PluginSpeculativeConfig):
        return
    prometheus = next((each for each in manager.stat_loggers if isinstance(each, PrometheusStatLogger)), None)
    kinds = PrometheusStatLogger if prometheus is None else type(prometheus)  # with Ray, vLLM's metrics are Ray's
    # The first, since it takes our counts out of what the others look at.
    manager.stat_loggers.insert(0, PluginStatLogger(vllm_config, manager.engine_indexes, kinds))


class PluginStatLogger(AggregateStatLoggerBase):
    """Our metrics beside vLLM's own."""

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: list[int], kinds: type[PrometheusStatLogger] = PrometheusStatLogger
    ) -> None:
        spec, model_name = vllm_config.speculative_config, vllm_config.model_config.served_model_name
        assert isinstance(spec, PluginSpeculativeConfig)
        self._of_engine = {index: (model_name, str(index)) for index in engine_indexes}
        make: dict[str, Callable[..., Any]] = {
            "counter": kinds._counter_cls,
            "gauge": lambda **named: kinds._gauge_cls(multiprocess_mode="mostrecent", **named),
            "histogram": lambda **named: kinds._histogram_cls(buckets=SECONDS, **named),
        }
        self._families = {
            family.name: make[family.kind](
                name=PREFIX + family.name, documentation=family.help, labelnames=["model_name", "engine", *family.labels]
            )
            for family in FAMILIES
        }
        self._children: dict[tuple[str, ...], Any] = {}
        for engine in self._of_engine.values():
            self._show_zeros(engine, spec.plugin["proposer"])

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take our counts out of a step's statistics, and add them up."""
        stats = scheduler_stats and scheduler_stats.kv_connector_stats
        if not stats or KEY not in stats:
            return
        assert scheduler_stats is not None
        scheduler_stats.kv_connector_stats = {key: value for key, value in stats.items() if key != KEY} or None
        engine = self._of_engine.get(engine_idx)
        if engine is not None:
            self._add(engine, stats[KEY])

    def log_engine_initialized(self) -> None:
        """Nothing to say: the worker does, when the proposer is loaded."""

    def _show_zeros(self, engine: tuple[str, str], proposer: str) -> None:
        """Whoever watches for faults must see that there are none, rather than nothing."""
        for name in ("drafted_tokens", "verified_tokens", "accepted_tokens", "emitted_tokens"):
            self._child(name, *engine, proposer, "0")
        for proposed in (proposer, "none"):
            self._child("passes", *engine, proposed)
        for reason in Fallback:
            self._child("fallbacks", *engine, proposer, str(reason))
        for kind in Fault:
            self._child("faults", *engine, proposer, str(kind))
        for name in ("drafting_seconds", "verification_seconds", "draft_length", "paused"):
            self._child(name, *engine)

    def _add(self, engine: tuple[str, str], taken: Mapping[str, Any]) -> None:
        """`taken` is what `Counts.take` gave."""
        for source, states in taken["lengths"].items():
            for state in STATES:
                self._add_positions(engine, state, source, by_position(states[state]))
            self._inc("passes", sum(states["verified"][1:]), *engine, source)
        self._inc("passes", taken["plain"], *engine, "none")
        for name in ("fallbacks", "faults"):
            for source, numbers in taken.get(name, {}).items():
                for kind, number in numbers.items():
                    self._inc(name, number, *engine, source, kind)
        for name in ("drafting_seconds", "verification_seconds"):
            for seconds in taken.get(name, ()):
                self._child(name, *engine).observe(seconds)
        if "draft_length" in taken:
            self._child("draft_length", *engine).set(taken["draft_length"])
            self._child("paused", *engine).set(int(taken["paused"]))

    def _add_positions(self, engine: tuple[str, str], state: str, source: str, counts: Sequence[int]) -> None:
        for position, count in enumerate(counts):
            self._inc(f"{state}_tokens", count, *engine, source, str(position))

    def _inc(self, name: str, count: int, *labels: str) -> None:
        if count > 0:
            self._child(name, *labels).inc(count)

    def _child(self, name: str, *labels: str) -> Any:
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._families[name].labels(*labels)
        return child
