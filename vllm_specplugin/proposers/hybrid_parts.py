"""What a hybrid is made of: the parts that a configuration names, checked, and what they need and give together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from vllm_specplugin.config import SpecConfig, normalised_keys, options_of
from vllm_specplugin.errors import ConfigError, RegistryError, suggestion
from vllm_specplugin.proposers.base import Proposer
from vllm_specplugin.registry import PROPOSERS, normalise
from vllm_specplugin.types import Capabilities, Depth, Target

ENTRY_KEYS = ("proposer", "options")
_REACH = ("none", "last", "aux")


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part, as configured."""

    name: str
    proposer: type[Proposer]
    options: BaseModel
    config: SpecConfig
    """As if the part had been configured by itself."""
    capabilities: Capabilities

    @property
    def is_model(self) -> bool:
        """It drafts with weights or a KV cache, of which there can be one set: vLLM's configuration holds one draft model."""
        found = self.capabilities
        return found.checkpoint or found.own_kv_cache or found.native is not None

    @property
    def is_cheap(self) -> bool:
        """It asks nothing of the target's device."""
        return not self.is_model and self.capabilities.on_host_only

    def depth(self, target: Target | None) -> Depth:
        """How many tokens it drafts, as if it were configured by itself."""
        return self.proposer.depth(self.config, self.options, target)


def plan(config: SpecConfig, entries: Sequence[str | Mapping[str, Any]]) -> list[PartPlan]:
    """The parts that a hybrid's configuration names, in its order.

    Raises:
        ConfigError: an unknown or repeated part, options that are wrong for theirs, or parts that exclude each other.
    """
    plans: list[PartPlan] = []
    for place, entry in enumerate(entries):
        part = _one(config, entry, f"options.proposers[{place}]")
        if any(part.name == other.name for other in plans):
            raise ConfigError(f"'options.proposers' names {part.name!r} twice; name each proposer once.")
        plans.append(part)
    models = [part.name for part in plans if part.is_model]
    if len(models) > 1:
        named = " and ".join(map(repr, models))
        raise ConfigError(f"'options.proposers' names {named}, of which each drafts with a model; keep one of them.")
    return plans


def _one(config: SpecConfig, entry: str | Mapping[str, Any], where: str) -> PartPlan:
    said: dict[str, Any] = {"proposer": entry} if isinstance(entry, str) else normalised_keys(entry, f"{where}.")
    for key in said:
        if key not in ENTRY_KEYS:
            raise ConfigError(f"'{where}.{key}' is no key of a part{suggestion(key, ENTRY_KEYS)} Valid: {', '.join(ENTRY_KEYS)}.")
    name, options = said.get("proposer"), said.get("options", {})
    if not isinstance(name, str):
        raise ConfigError(f"'{where}.proposer' is {name!r}; expected a proposer's name.")
    if not isinstance(options, Mapping):
        raise ConfigError(f"'{where}.options' is {options!r}; expected an object.")
    name = normalise(name)
    if name == config.proposer:
        raise ConfigError(f"'{where}' is {name!r} itself; name the proposers that it shall be made of.")
    try:
        proposer = PROPOSERS.resolve(name)
    except RegistryError as error:
        raise ConfigError(f"'{where}': {error}") from error
    validated = options_of(proposer, name, options, f"{where}.options.")
    alone = config.model_copy(update={"proposer": name, "options": dict(options), "model": None})
    capabilities = proposer.capabilities_for(alone, validated)
    if capabilities.checkpoint:
        alone = alone.model_copy(update={"model": config.model})
    return PartPlan(name, proposer, validated, alone, capabilities)


def together(plans: Sequence[PartPlan]) -> Capabilities:
    """What a hybrid of these parts needs and gives. It reads committed tokens on the host, whatever its parts read."""
    each = [part.capabilities for part in plans]
    return Capabilities(
        hidden_states=max((one.hidden_states for one in each), key=_REACH.index),
        tokens="host",
        probabilities=any(one.probabilities for one in each),
        own_kv_cache=any(one.own_kv_cache for one in each),
        checkpoint=any(one.checkpoint for one in each),
        native=next((one.native for one in each if one.native is not None), None),
        request_keys=tuple(sorted({key for one in each for key in one.request_keys})),
        parts=tuple(part.name for part in plans),
    )


def depth_of(plans: Sequence[PartPlan], target: Target | None) -> Depth:
    """The k of one of the host's drafters, which runs k times per step; else as many tokens as any part would draft.

    A part that cannot draft so many (Medusa heads) drafts as many as it can.
    """
    depths = [part.depth(target) for part in plans]
    native = [depth for part, depth in zip(plans, depths, strict=True) if part.capabilities.native is not None]
    asked = native or depths
    default = max(depth.default for depth in asked)
    adaptive = max(depth.adaptive or depth.default for depth in asked)
    limits = [depth for depth in depths if depth.most is not None]
    if len(limits) < len(depths):
        return Depth(default, adaptive=adaptive)
    widest = max(limits, key=lambda depth: depth.most or 0)
    return Depth(default, widest.most, widest.why, adaptive)
