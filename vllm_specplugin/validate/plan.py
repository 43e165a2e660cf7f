"""What a run is to do, checked before any engine starts: every mistake of a user is one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_specplugin.config import SpecConfig, names_a_proposer, normalised_keys, resolve
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.validate.identity import code_of, draft_weights_of, environment, weights_of
from vllm_specplugin.validate.prompts import Prompt
from vllm_specplugin.validate.sampling import Sampling

OWN_ENGINE_ARGS = {
    "model": "MODEL",
    "speculative_config": "--speculative-config",
    "seed": "--seed",
    "worker_extension_cls": "the recorder, which sits there",
    "disable_log_stats": "the run, which needs them",
}
"""Engine arguments that the run itself sets, and where they come from."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run; see `make_plan` for what each part means."""

    model: str
    speculative_config: dict[str, Any]
    sampling: Sampling
    engine_args: dict[str, Any]
    prompts: list[Prompt] | None
    tokens: int
    alpha: float
    bias: float
    seed: int

    def fingerprint(self) -> str:
        """Equal for runs whose samples may be put together: all but the number of tokens, and the bias asked about."""
        parts = {
            "model": str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model,
            "weights": [weights_of(self.model), draft_weights_of(self.speculative_config)],
            "code": code_of(self.speculative_config),
            "environment": environment(),
            "speculative_config": self.speculative_config,
            "sampling": self.sampling.model_dump(mode="json"),
            "engine_args": self.engine_args,
            "prompts": self.prompts,
            "alpha": self.alpha,
            "seed": self.seed,
        }
        text = json.dumps(parts, sort_keys=True, default=str)
        return blake2b(text.encode(), digest_size=12).hexdigest()

    def engine_seed(self, rounds: int) -> int:
        """Another one for every engine start, so that a resumed run never draws the same samples again."""
        name = f"validate|{self.seed}|{rounds}".encode()
        return int.from_bytes(blake2b(name, digest_size=4).digest(), "little") >> 1  # vLLM wants 31 bits


def make_plan(
    model: str,
    speculative_config: Mapping[str, Any],
    *,
    sampling_params: Mapping[str, Any] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    prompts: list[Prompt] | None = None,
    tokens: int = 100_000,
    alpha: float = 1e-3,
    bias: float = 0.01,
    seed: int = 0,
) -> Plan:
    """Check everything that can be checked without an engine.

    Args:
        model: a folder or a hub name, as `vllm serve` takes it.
        speculative_config: a proposer of the plugin, or any of vLLM's own methods.
        sampling_params: fields of `Sampling`.
        engine_args: keyword arguments of `vllm.LLM`.
        prompts: None for built-in ones.
        tokens: how many to test; an engine that is found biased is stopped before.
        alpha: the chance that a lossless engine is called biased.
        bias: the share of probability that must not go astray unseen.
        seed: of the run.

    Raises:
        SpecPluginError: one line that says what is wrong, why, and what to do.
    """
    for option, value in (("--alpha", alpha), ("--bias", bias)):
        if not 0 < value < 1:
            raise ConfigError(f"{option} is {value}; a number between 0 and 1, both excluded, is expected.")
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; at least 1 is expected.")
    if seed < 0:
        raise ConfigError(f"--seed is {seed}; 0 or more is expected.")
    _check_model(model)
    args = normalised_keys(engine_args or {}, "engine-args.")
    for key, source in OWN_ENGINE_ARGS.items():
        if key in args:
            raise ConfigError(f"--engine-args has the key {key!r}, which is set by {source}; drop it.")
    _check_config(speculative_config)
    return Plan(
        model=str(Path(model).expanduser()) if model.startswith("~") else model,
        speculative_config=dict(speculative_config),
        sampling=Sampling.parse(sampling_params or {}),
        engine_args=args,
        prompts=prompts,
        tokens=tokens,
        alpha=alpha,
        bias=bias,
        seed=seed,
    )


def _check_model(model: str) -> None:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"MODEL is {model}, a folder without a config.json; give the folder of a model.")
    elif path.is_file() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"MODEL is {model}, but there is no such folder; give the folder of a model, or its name on the hub.")


def _check_config(config: Mapping[str, Any]) -> None:
    if not config:
        raise ConfigError('--speculative-config is missing or empty; write for example \'{"proposer": "ngram"}\'.')
    if names_a_proposer(config):
        resolve(SpecConfig.parse(config))
        return
    keys = normalised_keys(config)
    if "method" not in keys and "model" not in keys:
        raise ConfigError(
            f"--speculative-config has neither 'proposer' (the plugin's) nor 'method' or 'model' (vLLM's): {json.dumps(config)}."
        )
    k = keys.get("num_speculative_tokens", 1)
    if type(k) is not int or k < 1:
        raise ConfigError(f"'num_speculative_tokens' is {k!r}; a whole number of at least 1 is expected.")
