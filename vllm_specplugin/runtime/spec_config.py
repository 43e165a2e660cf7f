"""vLLM's speculative configuration with the plugin's keys in it.

A subclass of vLLM's own class travels wherever that class travels: through pickling, spawned processes, Ray, and
`dataclasses.replace`. For a proposer of our own it says `custom_class`, vLLM's one sanctioned door for a drafter from outside;
what vLLM keys on method names therefore treats it as a drafter without a KV cache. For a proposer that drafts with one of
vLLM's methods it says that method's name and lets vLLM read the checkpoint, so that all which hangs on the name is as in stock:
KV cache groups, lookahead slots, what prefix caching holds back, auxiliary hidden states, asynchronous scheduling.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field
from vllm import envs
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.utils import config
from vllm.logger import init_logger

from vllm_specplugin.config import ResolvedConfig, SpecConfig, normalised_keys, resolve
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.request_args import Rules
from vllm_specplugin.runtime.inspect import reason
from vllm_specplugin.types import Host, Target

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.specplugin")

DRAFTER_PATH = "vllm_specplugin.runtime.v1.V1Drafter"
"""What vLLM's V1 runner builds for `custom_class`."""


@config
class PluginSpeculativeConfig(SpeculativeConfig):
    """A `SpeculativeConfig` that names one of the plugin's proposers."""

    plugin: dict[str, Any] = Field(default_factory=dict)
    """The user's keys, as `SpecConfig.dump` gives them."""
    runner: str | None = None
    """'v1' or 'v2', once vLLM has decided."""
    native: str | None = None
    """vLLM's own method that drafts; None for a proposer of our own."""
    plans_ahead: bool = False
    """Control chooses the drafts of a step when the step is scheduled (see `planning`)."""

    def __post_init__(self) -> None:
        if self.native is None:
            self.method = "custom_class"
            self.model = DRAFTER_PATH
        super().__post_init__()
        # vLLM sets 0 here, which its own validation refuses when `dataclasses.replace` makes a copy.
        self.prompt_lookup_max = self.prompt_lookup_min = None
        if self.native is not None and self.method != self.native:
            # For draft_model and mtp vLLM goes by what the path or the checkpoint's config looks like.
            raise ValueError(f"'model' is {self.model!r}, which vLLM takes for {self.method!r} and not for {self.native!r}")

    def resolve(self) -> ResolvedConfig:
        """The classes behind the names."""
        config = SpecConfig.parse(self.plugin)
        control: Literal["fixed", "adaptive"] = "adaptive" if config.adaptive else "fixed"  # by what the user said of k
        return resolve(config.model_copy(update={"num_speculative_tokens": self.num_speculative_tokens, "control": control}))

    def request_rules(self) -> Rules:
        """What requests may say, looked up once per configuration."""
        target = self.target_model_config
        plugin = json.dumps(self.plugin, sort_keys=True)
        return _rules(plugin, target.get_vocab_size(), not target.skip_tokenizer_init, target.max_model_len)

    def compute_hash(self) -> str:
        # The compiled graph of the target depends on k and not on the drafter, but a cached artefact must not outlive a
        # change of configuration.
        text = json.dumps(self.plugin, sort_keys=True, default=str)
        return hashlib.sha256(f"{super().compute_hash()}|{text}".encode()).hexdigest()

    def __repr__(self) -> str:
        return f"PluginSpeculativeConfig({self.plugin}, num_speculative_tokens={self.num_speculative_tokens})"


@functools.lru_cache(maxsize=8)
def _rules(plugin: str, vocab_size: int, tokenizer: bool, max_model_len: int) -> Rules:
    resolved = resolve(SpecConfig.parse(json.loads(plugin)))
    found = resolved.capabilities
    return Rules(resolved.config.proposer, found.parts, found.request_keys, vocab_size, tokenizer, max_model_len)


def create(
    raw: Mapping[str, Any],
    flags: Mapping[str, Any],
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
    async_scheduling: bool = False,
) -> PluginSpeculativeConfig:
    """Build the configuration from what the user wrote.

    Args:
        raw: the mapping of `--speculative-config`.
        flags: what the separate flags (`--spec-model`, `--spec-tokens`, `--spec-method`) said, None where absent.
        target_model_config: the target's.
        target_parallel_config: the target's.
        async_scheduling: it is certain; one length serves all requests of a step then, and k is what suits that.

    Raises:
        SpecPluginError: one line that names what is wrong.
    """
    keys = normalised_keys(raw)
    for key, value in flags.items():
        if value is None:
            continue
        if key in keys:
            raise ConfigError(f"'{key}' is given both by its own flag ({value!r}) and in --speculative-config ({keys[key]!r}).")
        keys[key] = value
    parsed = SpecConfig.parse(keys)
    effective = parsed.model_copy(update={"control": "fixed"}) if async_scheduling else parsed
    resolved = resolve(effective, target_of(target_model_config))
    try:
        return PluginSpeculativeConfig(
            plugin=parsed.dump(),
            num_speculative_tokens=resolved.num_speculative_tokens,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
            **_native_fields(resolved),
        )
    except (OSError, ValueError, NotImplementedError) as error:
        if resolved.capabilities.native is None:
            raise
        raise ConfigError(f"vLLM refuses the proposer {parsed.proposer!r} with this target: {reason(error)}") from error


def _native_fields(resolved: ResolvedConfig) -> dict[str, Any]:
    """What vLLM's class is told of a proposer that drafts with one of vLLM's methods."""
    native = resolved.capabilities.native
    if native is None:
        return {}
    config = resolved.config
    drawing = {"draft_sample_method": config.draft_sampling}
    return {"native": native, "method": native, "model": config.model, **drawing, **config.host}


def target_of(model: ModelConfig) -> Target:
    """What heads and draft checkpoints are held against."""
    config = model.hf_text_config
    return Target(
        model=model.model,
        model_type=str(getattr(config, "model_type", "")),
        hidden_size=model.get_hidden_size(),
        vocab_size=model.get_vocab_size(),
        num_hidden_layers=model.get_total_num_hidden_layers(),
        num_mtp_layers=_num_mtp_layers(model.hf_config) or _num_transformers_mtp_layers(model),
    )


def _num_mtp_layers(config: Any) -> int:
    """As vLLM counts them, which knows each family's own name for their number."""
    if not getattr(config, "architectures", None):
        return 0
    try:
        return getattr(SpeculativeConfig.hf_config_override(copy.deepcopy(config)), "n_predict", None) or 0
    except ValueError:  # a family with such layers, in a checkpoint without
        return 0


def _num_transformers_mtp_layers(model: ModelConfig) -> int:
    """Those that the Transformers backend runs, from vLLM 0.33 on: whatever the family, under one name."""
    if "transformers_mtp_overrides" not in inspect.signature(SpeculativeConfig.hf_config_override).parameters:
        return 0
    return (getattr(model.hf_text_config, "num_mtp_layers", None) or 0) if model.using_transformers_backend() else 0


def check_deployment(vllm_config: VllmConfig) -> None:
    """Hold the proposer against how the engine will run, once its model runner is known.

    Raises:
        ConfigError: one line that names what does not go together.
    """
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    assert isinstance(spec, PluginSpeculativeConfig)
    if spec.runner == "v1" and schedules_on_every_rank(parallel):
        raise ConfigError(
            "'external_launcher' schedules on every rank, and on vLLM's V1 model runner ranks may draft differently; use V2 "
            "(VLLM_USE_V2_MODEL_RUNNER=1), or --distributed-executor-backend mp or ray."
        )
    name, capabilities = spec.plugin["proposer"], spec.resolve().capabilities
    if capabilities.native is not None:  # drafts with vLLM's layers, which vLLM feeds and reloads
        return
    if capabilities.hidden_states == "aux" and parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"'proposer' is {name!r}, which reads hidden states of several layers, but with pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size} these lie on several ranks; use tensor parallelism, or another proposer."
        )
    if capabilities.checkpoint and vllm_config.model_config.enable_sleep_mode:
        logger.warning_once(
            "The weights of %r are no part of what vLLM reloads. Sleep level 1 keeps them; after level 2 they are gone, and the "
            "engine must be restarted.",
            name,
        )


def schedules_on_every_rank(parallel: ParallelConfig) -> bool:
    """Whether each rank has a scheduler of its own (torchrun), so that all must decide alike."""
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.prefill_context_parallel_size
    return parallel.distributed_executor_backend == "external_launcher" and ranks > 1


def uses_rust_front_end() -> bool:
    """Whether requests and answers go through vLLM's front end in Rust, where no plugin runs."""
    return bool(getattr(envs, "VLLM_USE_RUST_FRONTEND", False))


def seed_of(seed: int, data_parallel_index: int) -> int:
    """One of several engines' own seed: they are started with the same one, and must not answer the same prompt alike.

    As vLLM tells them apart itself (`set_random_seed`).
    """
    return int(np.random.SeedSequence((seed, data_parallel_index)).generate_state(1)[0]) if data_parallel_index else seed


def host_of(
    vllm_config: VllmConfig, resolved: ResolvedConfig, runner: Literal["v1", "v2"], device: str, tensor_parallel_rank: int = 0
) -> Host:
    """What a proposer is told of the engine that a configuration describes."""
    model = vllm_config.model_config
    return Host(
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        num_speculative_tokens=resolved.num_speculative_tokens,
        hidden_size=model.get_hidden_size(),
        device=device,
        dtype=str(model.dtype).removeprefix("torch."),
        seed=seed_of(model.seed or 0, vllm_config.parallel_config.data_parallel_index),
        runner=runner,
        config=resolved.config,
        model=model.model,
        tensor_parallel_rank=tensor_parallel_rank,
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        data_parallel_rank=vllm_config.parallel_config.data_parallel_index,  # the "rank" is 0 in each engine of a dense model
    )
