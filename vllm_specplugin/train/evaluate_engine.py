"""One engine of `evaluate`, in a process of its own: scores given texts, and generates while it counts drafts.

As `distill_engine`, one of the files of training that import vLLM.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specplugin.engine_process import serve_engine, spec_counters

PER_POSITION = "accepted_tokens_per_pos"


class Engine:
    """A vLLM engine that is asked for scores and for measured requests, all as token ids."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the engine. `settings`: model, speculative_config (or None), engine_args."""
        eager = settings["engine_args"].get("enforce_eager", True)
        if eager:  # else the first request with log-probabilities waits 16 s for a compiler
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        from vllm import LLM
        from vllm.platforms import current_platform

        arguments: dict[str, Any] = {
            "enforce_eager": eager,  # starts in a fifth of the time; on a CPU as fast for a small model
            "enable_prefix_caching": False,  # a repeated prompt must cost what it cost the first time
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 2**29,  # by default each engine would take what the machine has
            "disable_log_stats": False,  # the counters of speculation come from there
        }
        if not current_platform.is_cpu():
            arguments["gpu_memory_utilization"] = 0.4  # checked at the start; two engines share the device
        arguments |= {"model": settings["model"], **settings["engine_args"]}
        if settings["speculative_config"] is not None:
            arguments["speculative_config"] = settings["speculative_config"]
        self.llm = LLM(**arguments)
        self.requests = 0

    def facts(self) -> dict[str, Any]:
        import torch
        import vllm

        config = self.llm.llm_engine.model_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "vocab_size": config.get_vocab_size(),
        }

    # -- scores ----------------------------------------------------------------------------------------------

    def score(self, texts: Sequence[Sequence[int]], starts: Sequence[int]) -> dict[str, Any]:
        """How the model takes given texts, as if it had to say them.

        Args:
            texts: token ids.
            starts: of each text, the place from which tokens count; at least 1, since nothing predicts the first.

        Returns:
            per text "logprobs" (the sum over its tokens that count, natural logarithm), "tokens" (how many count) and "right"
            (how many of them are the model's first choice).
        """
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        inputs: list[Any] = [{"prompt_token_ids": list(text)} for text in texts]
        found: dict[str, list[float]] = {"logprobs": [], "tokens": [], "right": []}
        for output, text, start in zip(self.llm.generate(inputs, parameters, use_tqdm=False), texts, starts, strict=True):
            assert output.prompt_logprobs is not None
            places = range(start, len(text))
            entries = [output.prompt_logprobs[place][text[place]] for place in places]  # type: ignore[index]
            found["logprobs"].append(sum(entry.logprob for entry in entries))
            found["tokens"].append(len(entries))
            found["right"].append(sum(entry.rank == 1 for entry in entries))
        return found

    # -- drafting --------------------------------------------------------------------------------------------

    def decode(self, prompt: Sequence[int], max_tokens: int, temperature: float) -> dict[str, Any]:
        """Serve one request alone and say what it took: the fields of `evaluate.Request`.

        `passes` are the target passes after the first token; each of them emits at least one.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        engine, before = self.llm.llm_engine, spec_counters(self.llm)
        parameters = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        self.requests += 1
        emitted: list[int] = []
        stamps: list[float] = []
        engine.add_request(str(self.requests), TokensPrompt(prompt_token_ids=list(prompt)), parameters)
        while engine.has_unfinished_requests():
            for output in engine.step():
                stamps.append(time.perf_counter())
                emitted = list(output.outputs[0].token_ids)  # type: ignore[union-attr]
        after = spec_counters(self.llm)
        accepted = zip(after.get(PER_POSITION, ()), before.get(PER_POSITION, ()), strict=True)
        return {
            "token_ids": emitted,
            "passes": len(stamps) - 1,
            "seconds": stamps[-1] - stamps[0],
            "drafts": after.get("drafts", 0) - before.get("drafts", 0),
            "accepted": [new - old for new, old in accepted],
        }


if __name__ == "__main__":
    serve_engine(Engine)
