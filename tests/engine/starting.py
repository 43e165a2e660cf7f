"""What tests of starting an engine run inside a worker (`EngineWorker.call("tests.engine.starting:name")`)."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import sys
from typing import Any


def plugin_is_loaded(llm: Any) -> bool:
    """The plugin's entry point has been called, and vLLM's classes carry its marks."""
    from vllm.engine.arg_utils import EngineArgs

    marked = hasattr(EngineArgs.create_speculative_config, "__specplugin_seam__")
    assert marked == ("vllm_specplugin.runtime.install" in sys.modules)
    return marked


def register_again(llm: Any) -> bool:
    """Calling the entry point once more, as vLLM may, changes nothing."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_specplugin.plugin import register

    before = EngineArgs.create_speculative_config
    register()
    return EngineArgs.create_speculative_config is before


# -- configurations ----------------------------------------------------------------------------------------


def facts(spec: Any) -> dict[str, Any]:
    """What tests want to know of an engine's speculative configuration."""
    return {
        "class": type(spec).__name__,
        "plugin": getattr(spec, "plugin", None),
        "k": spec.num_speculative_tokens,
        "method": spec.method,
        "runner": getattr(spec, "runner", None),
    }


def from_command_line(llm: Any, flags: list[str]) -> dict[str, Any]:
    """As `vllm serve` reads its command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
    return facts(arguments.create_engine_config().speculative_config)


def _configured(model: str, speculative_config: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=model, speculative_config=speculative_config, dtype="float32", max_model_len=256)
    return arguments.create_engine_config()


def k_of(llm: Any, model: str, speculative_config: dict[str, Any], flags: dict[str, Any]) -> int:
    """The k of an engine with these flags."""
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=model, speculative_config=speculative_config, dtype="float32", max_model_len=256, **flags)
    spec = arguments.create_speculative_config(arguments.create_model_config(), ParallelConfig())
    return spec.num_speculative_tokens


def round_trips(llm: Any, model: str, speculative_config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The facts of one configuration after each way in which it may travel."""
    import cloudpickle

    config = _configured(model, speculative_config)
    spec = config.speculative_config
    return {
        "as made": facts(spec),
        "pickle": facts(pickle.loads(pickle.dumps(spec))),
        "cloudpickle": facts(cloudpickle.loads(cloudpickle.dumps(spec))),
        "replace": facts(dataclasses.replace(spec)),
        "pickle of all": facts(pickle.loads(pickle.dumps(config)).speculative_config),
        "replace in all": facts(dataclasses.replace(config).speculative_config),
    }


def hashes(llm: Any, model: str, configs: list[dict[str, Any]]) -> list[str]:
    """`compute_hash` of each configuration: what keys vLLM's caches of compiled graphs."""
    return [_configured(model, config).speculative_config.compute_hash() for config in configs]


# -- AsyncLLM ----------------------------------------------------------------------------------------------


def run_async(llm: Any, arguments: dict[str, Any], prompts: list[list[int]], params: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve all prompts at once through an `AsyncLLM`; their tokens, and what is said of speculation, one by one and in all."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    async def serve() -> list[Any]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        async def one(number: int) -> Any:
            prompt, last = {"prompt_token_ids": prompts[number]}, None
            async for output in engine.generate(prompt, SamplingParams(**params[number]), request_id=str(number)):
                last = output
            return last

        try:
            return await asyncio.gather(*map(one, range(len(prompts))))
        finally:
            engine.shutdown()

    outputs = asyncio.run(serve())
    counters = {metric.name: getattr(metric, "value", None) for metric in get_metrics_snapshot()}
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "speculation": [dataclasses.asdict(output.outputs[0].spec_decode_metrics) for output in outputs],
        "kv_transfer_params": [output.kv_transfer_params for output in outputs],
        "drafted": counters["vllm:spec_decode_num_draft_tokens"],
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
    }
