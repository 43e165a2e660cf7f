"""Puts the seams in place, each when vLLM imports the module it lies in; a process that never does pays nothing.

Every replacement asks first whether the configuration is ours and hands on to the stock code where it is not.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

from wrapt import register_post_import_hook

from vllm_specplugin import request_args
from vllm_specplugin.errors import ConfigError, SeamError
from vllm_specplugin.runtime import seams

Wrapper = Callable[..., Any]

_MARK = "__specplugin_seam__"


def install() -> None:
    """Register all hooks; calling it again does nothing."""
    if install.done:  # type: ignore[attr-defined]
        return
    install.done = True  # type: ignore[attr-defined]
    for module, hook in (
        ("vllm.engine.arg_utils", _on_arg_utils),
        ("vllm.config.vllm", _on_vllm_config),
        ("vllm.sampling_params", _on_sampling_params),
        ("vllm.v1.worker.gpu_model_runner", _on_v1_runner),
        ("vllm.v1.worker.gpu.model_runner", _on_v2_runner),
        ("vllm.v1.worker.gpu_worker", _on_gpu_worker),
        ("vllm.v1.worker.cpu_worker", _on_cpu_worker),
        ("vllm.v1.core.sched.scheduler", _on_scheduler),
        ("vllm.v1.metrics.loggers", _on_loggers),
        ("vllm.v1.engine.llm_engine", _on_llm_engine),
        ("vllm.v1.engine.async_llm", _on_async_llm),
        ("llvmlite.binding.ffi", _on_llvmlite),
    ):
        register_post_import_hook(_stepping_aside(hook), module)


install.done = False  # type: ignore[attr-defined]


def _stepping_aside(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """A vLLM without the place that a hook looks for must import as ever; naming a proposer is refused later, by `create`."""

    def safe(module: Any) -> None:
        try:
            hook(module)
        except AttributeError as error:
            logging.getLogger("vllm.specplugin").warning("A seam into vLLM is missing (%s); see `vllm-specplugin doctor`.", error)

    return safe


def _replace(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Set `owner.name` to `wrapper(stock, *arguments)`."""
    stock = getattr(owner, name)
    if getattr(stock, _MARK, False):
        return

    @functools.wraps(stock)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    setattr(replaced, _MARK, True)
    setattr(owner, name, replaced)


# -- configuration ---------------------------------------------------------------


def _on_arg_utils(module: Any) -> None:
    _replace(module.EngineArgs, "create_speculative_config", _create_speculative_config)


def _create_speculative_config(stock: Wrapper, self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
    from vllm_specplugin.config import names_a_proposer

    raw = self.speculative_config
    if not names_a_proposer(raw):
        return stock(self, target_model_config, target_parallel_config)
    _require_seams()
    from vllm_specplugin.runtime.spec_config import create

    flags = {
        "method": getattr(self, "spec_method", None),
        "model": getattr(self, "spec_model", None),
        "num_speculative_tokens": getattr(self, "spec_tokens", None),
    }
    ahead = self.async_scheduling is True or target_parallel_config.pipeline_parallel_size > 1
    return create(raw, flags, target_model_config, target_parallel_config, async_scheduling=ahead)


def _require_seams() -> None:
    package = seams.installed_package()
    if package is None:
        return
    missing = [f"{finding.seam.name}: {finding.missing}" for finding in seams.check(package) if finding.missing]
    if missing:
        _, found = seams.installed_version() or ("vllm", "of unknown version")
        raise SeamError(
            f"vLLM {found} lacks what vllm-specplugin attaches to ({'; '.join(missing)}); tested with "
            f"{' and '.join(seams.SUPPORTED)}. Install such a version, or drop 'proposer' from --speculative-config."
        )


def _on_vllm_config(module: Any) -> None:
    _replace(module.VllmConfig, "_get_v2_model_runner_unsupported_features", _v2_unsupported_features)
    _replace(module.VllmConfig, "__post_init__", _vllm_config_post_init)


def _ours(vllm_config: Any) -> Any:
    """The speculative configuration, where it is ours, else None."""
    spec = getattr(vllm_config, "speculative_config", None)
    return spec if hasattr(spec, "plugin") else None


def _v2_unsupported_features(stock: Wrapper, self: Any) -> list[str]:
    features: list[str] = stock(self)
    if _ours(self) is None:
        return features
    return [feature for feature in features if "custom_class" not in feature]


NEEDS_ASYNC_FOR_STAGES = (
    "Pipeline parallelism with speculation needs asynchronous scheduling on vLLM's V2 model runner: under synchronous scheduling "
    "vLLM plans a step's drafts before the token that they follow is known. Use --pipeline-parallel-size 1, or V2 without "
    "--no-async-scheduling."
)


def _vllm_config_post_init(stock: Wrapper, self: Any) -> Any:
    spec = _ours(self)
    if spec is None:
        return stock(self)
    from vllm_specplugin.runtime import planning, spec_config

    spec.runner = "v2" if self.use_v2_model_runner else "v1"
    spec_config.check_deployment(self)
    scheduler = self.scheduler_config
    if scheduler.async_scheduling and spec.runner == "v1":
        raise ConfigError(
            "Asynchronous scheduling with a proposer needs vLLM's V2 model runner, and this engine uses V1; use "
            "--no-async-scheduling."
        )
    staged = self.parallel_config.pipeline_parallel_size > 1
    if scheduler.async_scheduling is None and (spec.runner == "v1" or (_waits_for_tokens(spec.resolve()) and not staged)):
        # A drafter that waits for the sampled tokens anyhow may draft fewer than k when the scheduler is told.
        scheduler.async_scheduling = False
    if scheduler.async_scheduling is False or spec.native is not None:
        stock(self)
    else:
        # vLLM 0.32 allows asynchronous scheduling by method name, on V2 as on V1; 0.33 on V1 only.
        name, spec.method = spec.method, "ngram_gpu"
        try:
            stock(self)
        finally:
            spec.method = name
    if staged and not scheduler.async_scheduling:  # whoever decided that
        raise ConfigError(NEEDS_ASYNC_FOR_STAGES)
    planning.prepare(self)
    return None


def _waits_for_tokens(resolved: Any) -> bool:
    """Whether drafting, or the control of it, looks at each step's tokens on the host."""
    return resolved.capabilities.tokens == "host" or (resolved.config.adaptive and resolved.capabilities.native is None)


# -- requests ---------------------------------------------------------------------


def _on_sampling_params(module: Any) -> None:
    _replace(module.SamplingParams, "_validate_spec_decode", _validate_spec_decode)


def _validate_spec_decode(stock: Wrapper, self: Any, speculative_config: Any) -> None:
    if not hasattr(speculative_config, "plugin"):
        return stock(self, speculative_config)
    # min_p and logit_bias are served: on V1 by SampleVerification, on V2 by its own sampler at every row.
    from vllm.exceptions import VLLMValidationError

    if speculative_config.runner == "v1" and getattr(self, "thinking_token_budget", None) is not None:
        raise VLLMValidationError(
            "thinking_token_budget is not served with a proposer on vLLM's V1 model runner; leave it out, or use V2."
        )
    try:
        if (self.extra_args or {}).get(request_args.KEY) is not None:
            said = speculative_config.request_rules().read(self.extra_args)
            # A dictionary of its own, since the caller's may serve other requests; looked at once, for the engine and its
            # workers, which read it while others wait, and for each of n sequences.
            self.extra_args = {**self.extra_args, request_args.KEY: request_args.pack(said)}
    except ConfigError as error:
        raise VLLMValidationError(str(error)) from error
    return None


# -- runners ----------------------------------------------------------------------


def _on_v1_runner(module: Any) -> None:
    _replace(module.GPUModelRunner, "__init__", _v1_init)


def _v1_init(stock: Wrapper, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, vllm_config, *args, **kwargs)
    if _ours(vllm_config) is not None:
        from vllm_specplugin.runtime import v1

        v1.attach(self)


def _on_v2_runner(module: Any) -> None:
    _replace(module, "init_speculator", _init_speculator)
    _replace(module.GPUModelRunner, "__init__", _v2_init)


def _init_speculator(stock: Wrapper, vllm_config: Any, device: Any, req_states: Any) -> Any:
    spec = _ours(vllm_config)
    if spec is None or spec.native is not None:  # a speculator of vLLM's is overlaid once its runner is built
        return stock(vllm_config, device, req_states)
    from vllm_specplugin.runtime import v2

    return v2.PluginSpeculator(vllm_config, device, req_states)


def _v2_init(stock: Wrapper, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, vllm_config, *args, **kwargs)
    if _ours(vllm_config) is not None:
        from vllm_specplugin.runtime import v2

        v2.attach(self)


def _on_gpu_worker(module: Any) -> None:
    _replace(module.Worker, "compile_or_warm_up_model", _warm_up)


def _on_cpu_worker(module: Any) -> None:
    _replace(module.CPUWorker, "compile_or_warm_up_model", _warm_up)


def _warm_up(stock: Wrapper, self: Any) -> Any:
    if _ours(self.vllm_config) is None:
        return stock(self)
    from vllm_specplugin.runtime import control

    with control.warming_up(self.model_runner):
        times = stock(self)
    # vLLM 0.33 counts which experts the tokens go to, and spreads them by that; these tokens are random.
    suppress = getattr(getattr(self.model_runner, "eplb", None), "suppress", contextlib.nullcontext)
    with suppress():
        control.calibrate(self.model_runner, self.vllm_config)
    return times


# -- metrics ----------------------------------------------------------------------


def _on_scheduler(module: Any) -> None:
    _replace(module.Scheduler, "__init__", _scheduler_init)


def _scheduler_init(stock: Wrapper, self: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, *args, **kwargs)
    if _ours(self.vllm_config) is not None:
        from vllm_specplugin.runtime import planning, scheduler_metrics

        scheduler_metrics.attach(self)
        planning.attach(self)


def _on_loggers(module: Any) -> None:
    _replace(module.StatLoggerManager, "__init__", _loggers_init)


def _loggers_init(stock: Wrapper, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, vllm_config, *args, **kwargs)
    if _ours(vllm_config) is not None:
        from vllm_specplugin.runtime import frontend_metrics

        frontend_metrics.attach_logger(self, vllm_config)


def _on_llm_engine(module: Any) -> None:
    _replace(module.LLMEngine, "__init__", _front_end_init)


def _on_async_llm(module: Any) -> None:
    _replace(module.AsyncLLM, "__init__", _front_end_init)


def _front_end_init(stock: Wrapper, self: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, *args, **kwargs)
    if _ours(self.vllm_config) is not None:
        from vllm_specplugin.runtime import frontend_metrics

        frontend_metrics.attach_outputs(self.output_processor)


# -- numba ------------------------------------------------------------------------


def _on_llvmlite(module: Any) -> None:
    """Let proposers use numba on the CPU.

    When a worker starts there, vLLM looks for its kernels in the `__dict__` of everything in every module. llvmlite's library
    object takes any name for a C function, this one too, and the engine would die of it.
    """
    module.lib._fntab.setdefault("__dict__", {})
