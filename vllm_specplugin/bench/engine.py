"""One engine of `bench` and `tune`, in a process of its own: serves batches of requests, a slice at a time, and times them.

The only file of the package that imports vLLM. The engine's core runs inside this process, as in the demo: what is timed is the
engine and not the wires between its processes, and an idle engine leaves the machine to the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_specplugin.control.clock import STEP_CLOCK
from vllm_specplugin.engine_process import serve_engine, spec_counters
from vllm_specplugin.guard import wait_for_late_work
from vllm_specplugin.kv_cache import draft_bytes, target_bytes

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

GPU_SHARE = 0.9
"""Of a GPU's memory, for all engines together."""
KV_MARGIN = 1.25
"""Times what the layers need by themselves: places for drafts, and blocks of one size for layers that differ, come on top."""
LEAST_KV = 2**27
LONGEST_WAIT = 1.0
"""Seconds, for drafts that come too late: who makes them pays for them, not who has the next turn."""


@dataclass
class Timed:
    """One request that is being timed; seconds count from the start of its batch."""

    submitted: float
    stamps: list[float] = field(default_factory=list)
    """After each step that emitted tokens."""
    tokens: int = 0


@dataclass
class Batch:
    """The requests that are being served; the clock stands still between two slices."""

    waiting: Iterator[tuple[Sequence[int], SamplingParams]]
    at_once: int
    before: Mapping[str, Any] = field(default_factory=dict)
    """The counters of speculation when it began."""
    start: float = 0.0
    """By the clock of steps."""
    requests: dict[str, Timed] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Emitted so far."""
        return sum(request.tokens for request in self.requests.values())


class Engine:
    """A vLLM engine that serves timed batches."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the engine.

        `settings`: model, speculative_config (or None), engine_args, max_model_len, max_num_seqs, engines (alive at once).
        """
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        arguments: dict[str, Any] = {
            "enforce_eager": on_cpu,  # there as fast for a small model, and starts in a fifth of the time
            "enable_prefix_caching": False,  # every engine must pay for each prompt
            "max_num_seqs": settings["max_num_seqs"],
            "max_model_len": settings["max_model_len"],
            "disable_log_stats": False,  # the counters of speculation come from there
        }
        if not on_cpu:
            arguments["gpu_memory_utilization"] = GPU_SHARE / settings["engines"]  # checked at the start, while others load
        arguments |= {"model": settings["model"], **settings["engine_args"]}
        if settings["speculative_config"] is not None:
            arguments["speculative_config"] = settings["speculative_config"]
        if "kv_cache_memory_bytes" not in arguments:  # by default each engine would take what it finds free
            arguments["kv_cache_memory_bytes"] = kv_bytes(arguments)
        self.llm = LLM(**arguments)
        self.served = 0
        self.batch: Batch | None = None

    def facts(self) -> dict[str, Any]:
        """What a report says about the engine."""
        import torch
        import vllm
        from vllm.platforms import current_platform

        config, cache = self.llm.llm_engine.model_config, self.llm.llm_engine.vllm_config.cache_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": current_platform.get_device_name() or current_platform.device_type,
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "kv_cache_tokens": (cache.num_gpu_blocks or 0) * (cache.block_size or 0),
            "pausable": is_pausable(self.llm),
        }

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int],
        temperature: float,
        ignore_eos: bool,
        at_once: int | None = None,
    ) -> dict[str, Any]:
        """Take prompts, all of them to be served at once, or so many at any time; `go_on` serves them.

        `max_tokens` is one number for all answers, or one for each.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        delta = RequestOutputKind.DELTA
        sampling = [
            SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=ignore_eos, output_kind=delta)
            for length in lengths
        ]
        # None of them is handed over yet: a core in a process of its own would begin at once, beside the other engines.
        self.batch = Batch(zip(prompts, sampling, strict=True), at_once or len(prompts))
        return {}

    def go_on(self, seconds: float | None = None) -> dict[str, Any]:
        """Serve what was begun: to its end, or for so many seconds, at least a step.

        Returns `tokens` emitted since it began and the `seconds` that it took, and at its end the `sample`: what was measured,
        the fields of `samples.Sample`.
        """
        assert self.batch is not None
        engine, batch = self.llm.llm_engine, self.batch
        STEP_CLOCK.resume()
        resumed = STEP_CLOCK()
        if not batch.requests:  # it has not begun
            batch.before, batch.start = spec_counters(self.llm), STEP_CLOCK()
            self._submit(batch, batch.at_once)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = STEP_CLOCK() - batch.start
            for output in outputs:
                request, emitted = batch.requests[output.request_id], len(output.outputs[0].token_ids)  # type: ignore[union-attr]
                if emitted:
                    request.tokens += emitted
                    request.stamps.append(now)
            self._submit(batch, sum(output.finished for output in outputs))
            if seconds is not None and STEP_CLOCK() - resumed >= seconds:
                break
        if engine.has_unfinished_requests():
            wait_for_late_work(LONGEST_WAIT)
        spent = STEP_CLOCK() - batch.start
        sample = None if engine.has_unfinished_requests() else self._sample(batch, spent)
        STEP_CLOCK.pause()
        return {"tokens": batch.tokens, "seconds": spent, "sample": sample}

    def _submit(self, batch: Batch, count: int) -> None:
        """Hand so many of the waiting requests to the engine."""
        from vllm.inputs import TokensPrompt

        for prompt, params in islice(batch.waiting, count):
            self.served += 1
            name = str(self.served)
            batch.requests[name] = Timed(STEP_CLOCK() - batch.start)
            self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), params)

    def _sample(self, batch: Batch, seconds: float) -> dict[str, Any]:
        after = spec_counters(self.llm)
        drafted = {name: after.get(name, 0) - batch.before.get(name, 0) for name in ("draft_tokens", "accepted_tokens")}
        return {**measured(list(batch.requests.values())), "seconds": seconds, **drafted}


def is_pausable(llm: LLM) -> bool:
    """Whether who asks for a step computes all of it, so that nothing goes on between two steps but a proposer's late work."""
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # none where it is in a process of its own
    return current_platform.is_cpu() and isinstance(getattr(core, "model_executor", None), UniProcExecutor)


def measured(requests: Sequence[Timed]) -> dict[str, Any]:
    """What the requests of a batch add up to."""
    return {
        "requests": len(requests),
        "tokens": sum(request.tokens for request in requests),
        "first_token": [request.stamps[0] - request.submitted for request in requests],
        "per_token": [(r.stamps[-1] - r.stamps[0]) / (r.tokens - 1) for r in requests if r.tokens > 1],
        "passes": sum(len(request.stamps) - 1 for request in requests),
    }


def kv_bytes(arguments: Mapping[str, Any]) -> int:
    """What the KV cache takes where as many requests as may run are as long as they may be."""
    from vllm.engine.arg_utils import EngineArgs

    # Of a copy, since vLLM adds to the speculative configuration that it is given.
    config = EngineArgs(**copy.deepcopy(dict(arguments))).create_engine_config()
    per_token = target_bytes(config) + draft_bytes(config)
    block = config.cache_config.block_size or 128
    longest = -(-arguments["max_model_len"] // block) * block
    return max(int(KV_MARGIN * per_token * longest * arguments["max_num_seqs"]), LEAST_KV)


if __name__ == "__main__":
    serve_engine(Engine)
