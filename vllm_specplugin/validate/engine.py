"""One engine of `validate`, in a process of its own: the only file of the package that imports vLLM.

The plain engine and the one under test differ in `speculative_config` alone. Both carry the recorder in their worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_specplugin.engine_process import serve_engine
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.validate.distribution import Ties, scaled
from vllm_specplugin.validate.prompts import TEXTS, generated
from vllm_specplugin.validate.sampling import Sampling
from vllm_specplugin.validate.wire import unpack

EXTENSION = "vllm_specplugin.validate.recorder.RecorderExtension"
SLACK = 32
"""Room in the context beyond the longest request, for drafts past its end."""
LIKELIEST = 20
"""Tokens per position whose log-probabilities are compared between the engines."""
CPU_CACHE_BYTES = 2**30
"""For the KV cache on a CPU, where vLLM would take a large part of the machine's memory."""
FIRST_TOKENS = 3
"""Of a short request: what the chi-square looks at."""


class Engine:
    """A vLLM engine and the prompts as token ids."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the engine.

        `settings`: model, speculative_config (None for the plain one), engine_args, prompts (None for built-in ones), sampling
        (fields of `Sampling`), seed.
        """
        self.sampling = Sampling(**settings["sampling"])
        self.model = settings["model"]
        self.tokenizer = self._tokenizer(settings["engine_args"])
        self.prompts = self._prompts(settings["prompts"])
        from vllm import LLM

        self.llm = LLM(**self._arguments(settings))
        self.watched = self.llm.collective_rpc("specplugin_watch")[0]
        self.vocab_size: int = self.llm.llm_engine.vllm_config.model_config.get_vocab_size()
        self.ties = _ties()

    def _tokenizer(self, engine_args: Mapping[str, Any]) -> Any:
        """The model's, None where it has none."""
        from transformers import AutoTokenizer

        if engine_args.get("skip_tokenizer_init"):
            return None
        options = {"revision": engine_args.get("tokenizer_revision"), "trust_remote_code": engine_args.get("trust_remote_code")}
        name = engine_args.get("tokenizer") or self.model
        try:
            return AutoTokenizer.from_pretrained(name, **{key: value for key, value in options.items() if value is not None})
        except (OSError, ValueError):
            return None

    def _prompts(self, given: Sequence[Any] | None) -> list[list[int]]:
        if given is None:
            if self.tokenizer is None:
                return generated(self._config().vocab_size)
            given = TEXTS
        if self.tokenizer is None and any(isinstance(prompt, str) for prompt in given):
            raise SpecPluginError(f"{self.model} has no tokenizer, but a prompt is text; give token ids in a .jsonl file")
        return [list(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt) for prompt in given]

    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model).get_text_config()

    def _arguments(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        from vllm.platforms import current_platform

        longest = max(map(len, self.prompts)) + self.sampling.max_tokens + SLACK
        limit = getattr(self._config(), "max_position_embeddings", None) or longest
        arguments: dict[str, Any] = {
            "max_model_len": min(longest, limit),
            "skip_tokenizer_init": self.tokenizer is None,
            "enable_prefix_caching": False,  # each sample pays for its prompt: what is cached could hide a fault
        }
        if current_platform.is_cpu():
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        arguments |= settings["engine_args"]
        if settings["speculative_config"] is not None:
            arguments["speculative_config"] = settings["speculative_config"]
        seed = {"model": self.model, "seed": settings["seed"]}
        return arguments | seed | {"worker_extension_cls": EXTENSION, "disable_log_stats": False}

    # -- what the parent asks for ---------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What this engine is, and the settings that took effect."""
        import torch
        import vllm

        config = self.llm.llm_engine.vllm_config
        model, spec = config.model_config, config.speculative_config
        engine = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": config.device_config.device_type,
            "model_runner": self.watched["model_runner"],
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "num_speculative_tokens": None if spec is None else spec.num_speculative_tokens,
            "max_model_len": model.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "enforce_eager": model.enforce_eager,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        }
        return {
            "engine": engine,
            "verifier": self.watched["verifier"] or (None if spec is None else f"vLLM's own ({spec.rejection_sample_method})"),
            "lossless": self.watched["lossless"] and getattr(spec, "rejection_sample_method", None) != "synthetic",
            "vocab_size": self.vocab_size,
            "prompts": self.prompts,
        }

    def greedy(self, max_tokens: int) -> dict[str, Any]:
        """Every prompt decoded greedily, with the log-probabilities of the likeliest tokens at each position.

        They come from the recorder: asking vLLM for log-probabilities could lead it along other paths.
        """
        params = {"temperature": 0.0, "max_tokens": max_tokens}
        answers = self._likeliest(self.prompts, params, min(LIKELIEST, self.vocab_size))
        outputs = []
        for token_ids, ids, logits, normaliser in answers:
            logprobs = (logits - normaliser[:, None]).tolist()
            outputs.append(
                {
                    "token_ids": token_ids,
                    "logprobs": [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs, strict=True)],
                }
            )
        return {"outputs": outputs}

    def sample(self, requests: Sequence[Sequence[int]], file: str) -> dict[str, Any]:
        """Serve a batch of `requests` (prompt's index, tokens) with the sampling parameters; the records go to `file`.

        Answers with the number of places that cannot be tested, and how often the short requests began with which tokens:
        `[prompt's index, token, ..., count]`.
        """
        from vllm import SamplingParams

        said = self.sampling.for_vllm()
        params = [SamplingParams(**said, max_tokens=tokens, ignore_eos=True, detokenize=False) for _, tokens in requests]
        self.llm.collective_rpc("specplugin_record", args=(self.sampling.model_dump(), self.ties))
        results = self._generate([self.prompts[prompt] for prompt, _ in requests], params)
        unclear, records = self.llm.collective_rpc("specplugin_take")[0]
        Path(file).write_bytes(records)
        first = Counter(
            (prompt, *result.outputs[0].token_ids)
            for (prompt, tokens), result in zip(requests, results, strict=True)
            if tokens == FIRST_TOKENS
        )
        return {"unclear": unclear, "first": [[*beginning, count] for beginning, count in sorted(first.items())]}

    def distributions(self, prefixes: Sequence[tuple[int, Sequence[int]]], file: str) -> dict[str, Any]:
        """What follows each prefix (prompt's index, output so far): its logits, `scaled`, `[prefixes, vocab]` to `file`."""
        import numpy as np
        import torch

        asked = [[*self.prompts[prompt], *output] for prompt, output in prefixes]
        answers = self._likeliest(asked, {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}, self.vocab_size)
        logits = torch.empty(len(asked), self.vocab_size)
        for row, (_, ids, values, _) in enumerate(answers):
            logits[row, torch.from_numpy(ids[0]).long()] = torch.from_numpy(values[0])
        seen, said = torch.zeros_like(logits, dtype=torch.bool), torch.zeros_like(logits)
        for row, (prompt, output) in enumerate(prefixes):
            seen[row, self.prompts[prompt]] = True
            for token in output:
                said[row, token] += 1
        np.save(file, scaled(logits, self.sampling, seen, said).numpy())
        return {}

    def texts(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The text of each token, itself where there is no tokenizer."""
        return {"texts": [str(token) if self.tokenizer is None else self.tokenizer.decode([token]) for token in token_ids]}

    def _likeliest(
        self, prompts: Sequence[list[int]], params: Mapping[str, Any], count: int
    ) -> list[tuple[list[int], Any, Any, Any]]:
        """Serve `prompts`, and for each: its output, and by token of it the ids and logits of the likeliest, and normalisers."""
        from vllm import SamplingParams

        self.llm.collective_rpc("specplugin_record_likeliest", args=(count,))
        results = self._generate(prompts, SamplingParams(**params, detokenize=False))
        kept = unpack(self.llm.collective_rpc("specplugin_take")[0][1])
        place = {name.split("-")[0]: number for number, name in enumerate(kept["names"])}  # vLLM adds a random ending to its ids
        answers = []
        for result in results:
            token_ids = list(result.outputs[0].token_ids)
            rows = (kept["request"] == place[result.request_id]).nonzero()[0][: len(token_ids)]  # it may have emitted more
            answers.append((token_ids, kept["ids"][rows], kept["logits"][rows], kept["normaliser"][rows]))
        return answers

    def _generate(self, prompts: Sequence[list[int]], params: Any) -> Any:
        from vllm.inputs import TokensPrompt

        return self.llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)


def _ties() -> Ties:
    """What this engine's samplers do with tokens as likely as the k-th (see `distribution.Ties`)."""
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    if flashinfer_sampler_supported():  # it serves some rows, a kernel with another rule the others
        return "skip"
    return "cut" if HAS_TRITON else "keep"


if __name__ == "__main__":
    serve_engine(Engine)
