"""What vLLM would make of a command line, asked without starting an engine; `vllm-specplugin doctor` prints the answer.

Importable where vLLM is missing or broken: every import of it lies inside a function, and what it logs is swallowed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.kv_cache import draft_bytes
from vllm_specplugin.runtime.seams import Runner
from vllm_specplugin.types import Host


class EngineFlagError(SpecPluginError, ValueError):
    """vLLM refuses the model or a flag, with or without speculation."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that was not started, as its configuration describes it."""

    platform: str
    """vLLM's platform and the device's own name."""
    runner: Runner
    runner_why: str
    problem: str = ""
    """Why vLLM or the plugin refuses this configuration; empty where it does not."""
    ours: bool = False
    """The engine's speculative configuration is one of the plugin's."""
    async_scheduling: bool | None = None
    """None where the scheduler was not configured (no model, or a problem)."""
    scheduling_why: str = ""
    plans_ahead: bool = False
    """Control chooses the draft lengths of steps that are planned ahead."""
    max_num_batched_tokens: int | None = None
    host: Host | None = None
    """What a proposer would be told; None as above, or where the configuration is not ours."""
    native_kv_bytes: int | None = None
    """What vLLM's own drafter keeps for each token in the KV cache, on one rank; None where none of its drafters is used."""


def describe(model: str | None, speculative_config: Mapping[str, Any] | None, flags: Mapping[str, Any]) -> Engine:
    """Configure an engine as `vllm serve` would, and say what came of it.

    Without a model only the platform and the model runner can be told.

    Args:
        model: the target's name or path.
        speculative_config: the mapping of `--speculative-config`; None for plain decoding.
        flags: further fields of vLLM's EngineArgs, those that the user gave.

    Raises:
        EngineFlagError: vLLM refuses the model or a flag for reasons that have nothing to do with speculation.
        Exception: whatever the import of vLLM raises where its installation is broken.
    """
    if model is not None and model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists():
        raise EngineFlagError(f"the model's folder {model} does not exist")
    with _quiet():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform

        from vllm_specplugin.runtime.install import install

        # Here even where VLLM_PLUGINS keeps the plugin out of engines, so that all the rest can be told as well.
        install()
        if current_platform.is_unspecified():
            text = "vLLM finds no device here that it can run on (a build for GPUs on a machine without one, perhaps)"
            return Engine("none", *_guessed_runner(), problem=text)
        if model is None:
            return _without_model()
        _one_line_errors(lambda: EngineArgs(model=model, **flags).create_model_config())
        try:
            given = None if speculative_config is None else dict(speculative_config)
            config = _configure(EngineArgs(model=model, speculative_config=given, **flags))
        except Exception as error:
            return _without_model(problem=reason(error))
        return _from_config(config, flags)


def reason(error: BaseException) -> str:
    """What an exception of vLLM says, on one line, without what pydantic wraps around it."""
    errors: Callable[..., list[Any]] | None = getattr(error, "errors", None)
    if errors is not None:
        first = errors()[0]
        cause = (first.get("ctx") or {}).get("error")
        place = ".".join(str(part) for part in first.get("loc", ()) if "[" not in str(part))
        text = str(cause) if cause is not None else f"{place}: {first['msg']} (given: {first.get('input')!r})"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def _configure(arguments: Any) -> Any:
    from vllm.usage.usage_lib import UsageContext

    return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)  # the defaults of `vllm serve`


def _one_line_errors(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:
        raise EngineFlagError(f"vLLM refuses the model or a flag: {reason(error)}") from error


def _without_model(problem: str = "") -> Engine:
    from vllm.config import VllmConfig

    try:
        runner, why = _runner(VllmConfig())
    except Exception as error:  # V2 asked for where it cannot run, for example
        runner, why = _guessed_runner()
        problem = problem or reason(error)
    return Engine(platform=_platform(), runner=runner, runner_why=why, problem=problem)


def _from_config(config: Any, flags: Mapping[str, Any]) -> Engine:
    spec = config.speculative_config
    runner, runner_why = _runner(config)
    ours = hasattr(spec, "plugin")
    host, tokens, adaptive = None, "", False
    if ours:
        from vllm_specplugin.runtime.spec_config import host_of

        resolved = spec.resolve()
        host = host_of(config, resolved, runner, str(config.device_config.device_type))
        tokens, adaptive = resolved.capabilities.tokens, resolved.config.adaptive
    return Engine(
        platform=_platform(),
        runner=runner,
        runner_why=runner_why,
        ours=ours,
        async_scheduling=bool(config.scheduler_config.async_scheduling),
        scheduling_why=_scheduling_why(config, runner, tokens, adaptive, flags.get("async_scheduling")),
        plans_ahead=ours and spec.plans_ahead,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        host=host,
        native_kv_bytes=draft_bytes(config) if ours and spec.native is not None else None,
    )


def _guessed_runner() -> tuple[Runner, str]:
    """The runner that would be taken, where vLLM refuses to make any configuration."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    if asked is not None:
        return ("v2" if asked else "v1"), f"VLLM_USE_V2_MODEL_RUNNER={int(asked)}"
    return ("v2" if HAS_TRITON else "v1"), "a guess, since vLLM refuses every configuration here"


def _runner(config: Any) -> tuple[Runner, str]:
    """Which model runner a configuration gets, and why; in the order in which vLLM asks."""
    from vllm.triton_utils import HAS_TRITON

    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    runner: Runner = "v2" if config.use_v2_model_runner else "v1"
    if asked is not None:
        return runner, f"VLLM_USE_V2_MODEL_RUNNER={asked}"
    if runner == "v2":
        return runner, "vLLM's default: Triton works here, and V2 has every feature asked for"
    if not HAS_TRITON:
        installed = "the installed Triton has no backend for this device" if find_spec("triton") else "Triton is not installed"
        return runner, f"V2 needs Triton, and {installed}"
    unsupported = config._get_v2_model_runner_unsupported_features()
    return runner, f"V2 does not support {', '.join(unsupported)}" if unsupported else "vLLM chose it"


def _scheduling_why(config: Any, runner: Runner, tokens: str, adaptive: bool, asked: bool | None) -> str:
    from vllm.platforms import current_platform

    if config.scheduler_config.async_scheduling:
        return "--async-scheduling" if asked else "vLLM's default, and the proposer does not wait for tokens on the host"
    if current_platform.is_cpu():
        return "vLLM's CPU platform knows no other" + (", whatever --async-scheduling says" if asked else "")
    if asked is False:
        return "--no-async-scheduling"
    if runner == "v1":
        return "the V1 model runner drafts once the step's tokens are known"
    if tokens == "host":
        return "the proposer reads tokens on the host, and so has to wait for them anyhow"
    if adaptive:
        return "adaptive control looks at each step's tokens on the host"
    return "vLLM chose it"


def _platform() -> str:
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type or "none")
    with contextlib.suppress(Exception):
        name = str(current_platform.get_device_name())
        return kind if name.lower() == kind else f"{kind} ({name})"
    return kind


def checkpoint_bytes(model: str) -> int | None:
    """The size of the weight files in a checkpoint's folder (or of one file); None where it is not on this machine."""
    path = Path(model)
    if path.is_file():
        return path.stat().st_size
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        if files := list(path.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow what vLLM and its dependencies print, log and warn about while they are imported and asked."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
