"""The engine that writes the answers, in a process of its own: the only file of `train` that imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specplugin.arithmetic import cpu_has_instructions
from vllm_specplugin.engine_process import serve_engine
from vllm_specplugin.prompt_files import Prompt, encode

ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 2**31, "max_num_seqs": 64, "max_model_len": -1}
"""vLLM would take most of the memory there, and compile for longer than it then saves; -1 is as long a context as has room."""


class Engine:
    """A plain vLLM engine: whatever drafter is trained on its answers, they are the target's own."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the engine. `settings`: model, engine_args (of `vllm.LLM`)."""
        from transformers import AutoTokenizer
        from vllm import LLM
        from vllm.platforms import current_platform

        self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        defaults: dict[str, Any] = {}
        if current_platform.is_cpu():
            defaults = {**ON_CPU, "dtype": "auto" if cpu_has_instructions("bfloat16") else "float32"}
        self.llm = LLM(model=settings["model"], **{**defaults, **settings["engine_args"]})

    def facts(self) -> dict[str, Any]:
        """What the parent checks prompts against."""
        return {"max_model_len": self.llm.llm_engine.vllm_config.model_config.max_model_len}

    def encode(self, prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The fields of `Prompt` each, as token ids."""
        return {"token_ids": [encode(Prompt(**prompt), self.tokenizer) for prompt in prompts]}

    def answer(self, prompts: list[list[int]], sampling: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Answer prompts of token ids, each with its own sampling parameters: `[prompts][tokens]`, and why each ended."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(inputs, [SamplingParams(**each) for each in sampling], use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return {"token_ids": [list(a.token_ids) for a in answers], "finish_reasons": [a.finish_reason for a in answers]}


if __name__ == "__main__":
    serve_engine(Engine)
