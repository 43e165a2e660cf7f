"""One engine of the demo, in a process of its own.

The only file of the demo that imports vLLM. The engine core runs inside this process, so that what is timed is the engine and
not the wires between its processes, and so that an idle engine leaves the cores to the other one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_specplugin.arithmetic import fast_type
from vllm_specplugin.control.clock import STEP_CLOCK
from vllm_specplugin.engine_process import serve_engine, spec_counters
from vllm_specplugin.prompt_files import Prompt, encode

SLACK = 32  # room in the context beyond the longest request, for drafts past its end
TOP = 20  # log-probabilities per position; vLLM's default limit
PER_POSITION = "accepted_tokens_per_pos"


@dataclass
class TimedRequest:
    """The one request that is being timed."""

    counters: dict[str, Any]  # vLLM's totals before it
    seconds: float = 0.0  # spent on it so far, pauses between slices excluded
    stamps: list[float] = field(default_factory=list)  # `seconds` after each step that emitted tokens
    token_ids: list[int] = field(default_factory=list)


class Engine:
    """A vLLM engine and the demo's prompts as token ids."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the engine. `settings`: model, speculative_config, max_tokens, prompts (messages or text)."""
        from transformers import AutoTokenizer
        from vllm import LLM
        from vllm.platforms import current_platform

        self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        self.prompts = [encode(Prompt(**prompt), self.tokenizer) for prompt in settings["prompts"]]
        arguments: dict[str, Any] = {
            "model": settings["model"],
            "dtype": fast_type(str(current_platform.device_type)),
            "enforce_eager": True,  # starts in a fifth of the time and is as fast for a small model on a CPU
            "enable_prefix_caching": False,  # a repeated prompt must cost what it cost the first time
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 2**30,  # by default each engine would take what the machine has
            "max_model_len": max(map(len, self.prompts)) + settings["max_tokens"] + SLACK,
            "disable_log_stats": False,  # the counters of speculation come from there
        }
        if not current_platform.is_cpu():
            arguments["gpu_memory_utilization"] = 0.4  # checked at the start; two engines share the device
        if settings["speculative_config"] is not None:
            arguments["speculative_config"] = settings["speculative_config"]
        self.llm = LLM(**arguments)
        self.requests = 0

    def facts(self) -> dict[str, Any]:
        """What the parent prints about this engine."""
        import torch
        import vllm

        lengths = [len(prompt) for prompt in self.prompts]
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": str(self.llm.llm_engine.model_config.dtype).removeprefix("torch."),
            "prompt_tokens": lengths,
        }

    def submit(self, prompt: list[int], **sampling: Any) -> None:
        """Hand one greedy request to the engine."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self.requests += 1
        parameters = SamplingParams(temperature=0.0, **sampling)
        self.llm.llm_engine.add_request(str(self.requests), TokensPrompt(prompt_token_ids=prompt), parameters)

    def complete(self, prompt: list[int], **sampling: Any) -> Any:
        """Serve one greedy request to its end, untimed."""
        STEP_CLOCK.resume()
        self.submit(prompt, **sampling)
        outputs: list[Any] = []
        while self.llm.llm_engine.has_unfinished_requests():
            outputs = self.llm.llm_engine.step() or outputs
        return outputs[-1]

    def begin(self, prompt: int, max_tokens: int) -> dict[str, Any]:
        """Start a timed request; `advance` carries it on in slices, `finish` reports it."""
        self.timed = TimedRequest(spec_counters(self.llm))
        start = time.perf_counter()
        self.submit(self.prompts[prompt], max_tokens=max_tokens)
        self.timed.seconds += time.perf_counter() - start
        STEP_CLOCK.pause()
        return {}

    def advance(self, until: int) -> dict[str, Any]:
        """Step until the timed request has `until` output tokens, or ends. Only the steps count as its time."""
        engine, timed = self.llm.llm_engine, self.timed
        STEP_CLOCK.resume()  # what passed was the other engine's: control shall not take it for a slow step
        while engine.has_unfinished_requests() and len(timed.token_ids) < until:
            start = time.perf_counter()
            outputs = engine.step()
            timed.seconds += time.perf_counter() - start
            for output in outputs:
                timed.token_ids = list(output.outputs[0].token_ids)
                timed.stamps.append(timed.seconds)
        STEP_CLOCK.pause()
        return {"tokens": len(timed.token_ids), "finished": not engine.has_unfinished_requests()}

    def finish(self) -> dict[str, Any]:
        """What was measured of the timed request: the fields of `measure.Sample`."""
        before, after, timed = self.timed.counters, spec_counters(self.llm), self.timed
        names = [name for name in ("drafts", "draft_tokens", "accepted_tokens") if name in after]
        per_position = zip(after.get(PER_POSITION, []), before.get(PER_POSITION, []), strict=True)
        return {
            "token_ids": timed.token_ids,
            "seconds": timed.seconds,
            "first_token_seconds": timed.stamps[0],
            "passes": len(timed.stamps) - 1,
            "accepted_per_position": [new - old for new, old in per_position],
            **{name: after[name] - before[name] for name in names},
        }

    def decode_logprobs(self, prompt: int, max_tokens: int) -> dict[str, Any]:
        """Decode token by token and report the likeliest tokens of every position."""
        result = self.complete(self.prompts[prompt], max_tokens=max_tokens, logprobs=TOP).outputs[0]
        return {"token_ids": list(result.token_ids), "logprobs": [plain_logprobs(entry) for entry in result.logprobs]}

    def forced_logprobs(self, prompt: int, token_ids: list[int]) -> dict[str, Any]:
        """The likeliest tokens at the positions of a given output, all computed in one pass over prompt and output."""
        text = self.prompts[prompt] + token_ids
        entries = self.complete(text, max_tokens=1, prompt_logprobs=TOP).prompt_logprobs
        return {"logprobs": [plain_logprobs(entry) for entry in entries[len(self.prompts[prompt]) :]]}

    def text(self, token_ids: list[int]) -> dict[str, Any]:
        """The text of an output, special tokens included."""
        return {"text": self.tokenizer.decode(token_ids)}


def plain_logprobs(entry: Mapping[int, Any]) -> dict[int, float]:
    """vLLM's log-probabilities of one position as token id -> number."""
    return {token: value.logprob for token, value in entry.items()}


if __name__ == "__main__":
    serve_engine(Engine)
