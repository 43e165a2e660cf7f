"""The process behind `EngineWorker`: imports vLLM at most once and serves one caller over a pipe.

Run as `python -m tests.support.worker DESCRIPTOR`. A message is `(method, args, kwargs)`, the answer either
`(True, value)` or `(False, Failure)`. Everything printed goes to the log file that the parent gave as stdout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from tests.support.results import Completion, Failure, Logprob, Result

_freeze = gc.freeze


class Server:
    """One live LLM at most."""

    def __init__(self) -> None:
        self.llm: Any = None

    def load(self) -> dict[str, Any]:
        """Import vLLM, once per process."""
        began = time.perf_counter()
        import vllm
        from vllm import LLM, SamplingParams  # noqa: F401  (the imports that cost)

        _spare_the_collector()
        _rebind_kernels_once()
        _look_at_models_in_this_process()
        return {"vllm": vllm.__version__, "pid": os.getpid(), "import_seconds": time.perf_counter() - began}

    def open(self, engine_args: dict[str, Any], force_async: bool) -> None:
        from vllm import LLM

        self.shut()
        try:
            with _asynchronous_scheduling() if force_async else contextlib.nullcontext():
                self.llm = LLM(**engine_args)
        except BaseException:
            _clear_the_ruins()
            raise

    def shut(self) -> None:
        """Close the engine and give its memory back."""
        llm, self.llm = self.llm, None
        if llm is None:
            return
        llm.llm_engine.engine_core.shutdown()  # runner, KV cache, process groups
        del llm
        gc.collect()
        _freeze()  # what that engine has imported

    def generate(self, prompts: list[Any], params: list[dict[str, Any]]) -> list[Result]:
        llm = self._live()
        inputs = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
        try:
            outputs = llm.generate(inputs, [_sampling_params(p) for p in params], use_tqdm=False)
        except BaseException:
            _abort_everything(llm)  # otherwise the next generate() would be handed this one's remains
            raise
        return [_result(output) for output in outputs]

    def metrics(self) -> dict[str, Any]:
        return _flatten(self._live().get_metrics())

    def call(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, _, name = target.partition(":")
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return function(self.llm, *args, **kwargs)

    def _live(self) -> Any:
        if self.llm is None:
            raise RuntimeError("no engine is open in this worker: call open(model) first")
        return self.llm


@contextlib.contextmanager
def _asynchronous_scheduling() -> Iterator[None]:
    """Let a configuration that asked for asynchronous scheduling keep it on the CPU.

    The CPU platform sets the flag to False without looking ("not required"); the machinery itself runs.
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.__dict__["check_and_update_config"]

    def keep_asynchronous(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        stock.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(keep_asynchronous)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = stock


def _spare_the_collector() -> None:
    """vLLM collects garbage eight times per engine, each time walking the million objects of the imports.

    They are frozen here instead; what an engine makes stays collectable, and opening one takes a fifth of the
    time. vLLM's own freeze and unfreeze would undo this.
    """
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _clear_the_ruins() -> None:
    """An engine that failed half-way leaves its process groups behind, and the next one would trip over them."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def _rebind_kernels_once() -> None:
    """For each engine vLLM looks through every module to swap its CPU kernels in; once is enough.

    Also, the search breaks on some modules that a first engine may bring in: with numba loaded (stock n-gram)
    it dies of "'_lib_fn_wrapper' object has no attribute 'get'".
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.register_triton_kernel_overrides
    CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(stock))


def _look_at_models_in_this_process() -> None:
    """vLLM imports each kind of model in a process of its own first, lest that touches a GPU: ten seconds for every kind."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def _sampling_params(fields: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = fields.get("structured_outputs")
    if isinstance(structured, dict):
        fields = fields | {"structured_outputs": StructuredOutputsParams(**structured)}
    return SamplingParams(**fields)


def _abort_everything(llm: Any) -> None:
    with contextlib.suppress(Exception):
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)


def _logprobs(position: Any) -> dict[int, Logprob]:
    return {int(token): Logprob(float(entry.logprob), entry.rank) for token, entry in position.items()}


def _result(output: Any) -> Result:
    prompt_logprobs = output.prompt_logprobs
    return Result(
        prompt_token_ids=tuple(output.prompt_token_ids or ()),
        prompt_logprobs=None
        if prompt_logprobs is None
        else tuple(None if position is None else _logprobs(position) for position in prompt_logprobs),
        completions=tuple(
            Completion(
                token_ids=tuple(completion.token_ids),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                text=completion.text,
                logprobs=None if completion.logprobs is None else tuple(_logprobs(position) for position in completion.logprobs),
                speculation=dataclasses.asdict(completion.spec_decode_metrics) if completion.spec_decode_metrics else None,
            )
            for completion in output.outputs
        ),
    )


def _flatten(metrics: list[Any]) -> dict[str, Any]:
    """`name` or `name{label=value}` -> number; per-position counters -> tuple; histograms -> {count, sum}."""
    flat: dict[str, Any] = {}
    for metric in metrics:
        labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
        name = metric.name
        if labels:
            name += "{" + ",".join(f"{key}={labels[key]}" for key in sorted(labels)) + "}"
        if hasattr(metric, "values"):
            flat[name] = tuple(metric.values)
        elif hasattr(metric, "buckets"):
            flat[name] = {"count": metric.count, "sum": metric.sum}
        else:
            flat[name] = metric.value
    return flat


def _die_with_the_parent() -> None:
    """A worker whose test run was killed may be spinning inside vLLM, deaf to its pipe."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def main(descriptor: int) -> None:
    _die_with_the_parent()
    connection = Connection(descriptor)
    server = Server()
    while True:
        try:
            method, args, kwargs = connection.recv()
        except EOFError:
            break
        try:
            answer: tuple[bool, Any] = (True, getattr(server, method)(*args, **kwargs))
        except BaseException as error:
            answer = (False, Failure(type(error).__name__, str(error), traceback.format_exc()))
        try:
            connection.send(answer)
        except Exception as error:  # the value does not pickle
            connection.send((False, Failure(type(error).__name__, f"the answer cannot be sent: {error}", "")))
    # Not a return: vLLM's finalizers and non-daemon threads can hang an exit, and nothing is left to save.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":  # tensor-parallel workers are spawned and import this file again
    main(int(sys.argv[1]))
