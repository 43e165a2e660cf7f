"""What is compared: plain decoding, vLLM's own methods, the plugin's proposers, and whatever the user names."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from vllm_specplugin.config import SpecConfig, names_a_proposer, normalised_keys, resolve
from vllm_specplugin.errors import ConfigError, SpecPluginError, suggestion
from vllm_specplugin.registry import PROPOSERS, normalise

PLAIN = "plain"
STOCK_PREFIX = "vllm:"
STOCK: dict[str, dict[str, Any]] = {
    # vLLM has no k of its own for these; 5 is the plugin's for the same search.
    "vllm:ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "vllm:suffix": {"method": "suffix"},
}
STOCK_NEEDS = {"vllm:suffix": "arctic_inference"}
ONLY_WITH_A_REQUEST = {"predicted": "it drafts what requests bring with them, and these bring nothing"}
SHORT = {"num_speculative_tokens": "k"}
"""How names abbreviate a key."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration; None is plain decoding."""

    name: str
    config: dict[str, Any] | None

    @property
    def flag(self) -> str:
        """What to paste behind `vllm serve MODEL`."""
        return "" if self.config is None else f"--speculative-config {shlex.quote(json.dumps(self.config))}"


PLAIN_DECODING = Candidate(PLAIN, None)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A candidate that was not measured, and why."""

    name: str
    why: str


def candidate(config: Mapping[str, Any]) -> Candidate:
    """A configuration that a user wrote, its keys with underscores; one of the plugin's is checked as far as that goes without
    the model.

    Raises:
        SpecPluginError: the plugin would refuse it, or it names neither a proposer nor a method.
    """
    keys = normalised_keys(config)
    if names_a_proposer(keys):
        resolve(SpecConfig.parse(keys))
        if "options" in keys:
            keys["options"] = normalised_keys(keys["options"], "options.")
    elif "method" not in keys and "model" not in keys:
        raise ConfigError(
            f"the configuration {json.dumps(config)} names no drafter; write 'proposer' (the plugin's) or 'method' (vLLM's)."
        )
    return Candidate(name_of(keys), keys)


def name_of(config: Mapping[str, Any]) -> str:
    """`ngram k=3 min_n=1`: the drafter and what was said about it, short enough for a table."""
    rest = {normalise(str(key)): value for key, value in config.items()}
    drafter = str(rest.pop("proposer", "")) or STOCK_PREFIX + str(rest.pop("method", "draft_model"))
    rest |= rest.pop("options", {})
    return " ".join([drafter, *(f"{SHORT.get(key, key)}={_plain(value)}" for key, value in rest.items())])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def unique(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each configuration once, and each with a name of its own."""
    kept: list[Candidate] = []
    for one in candidates:
        if any(one.config == other.config for other in kept):
            continue
        taken = {other.name for other in kept}
        names = [one.name, *(f"{one.name} #{number}" for number in range(2, len(taken) + 3))]
        kept.append(Candidate(next(name for name in names if name not in taken), one.config))
    return kept


def named(name: str) -> Candidate:
    """What `--method` names: a registered proposer with its defaults, or `vllm:ngram`, `vllm:suffix`.

    Raises:
        SpecPluginError: there is none of that name, or it needs more than a name.
    """
    if name.startswith(STOCK_PREFIX):
        if name not in STOCK:
            known = ", ".join(STOCK)
            raise ConfigError(f"--method {name!r} is not among vLLM's methods that need no checkpoint{suggestion(name, STOCK)} "
                              f"Valid: {known}; name any other with --config.")  # fmt: skip
        return Candidate(name, STOCK[name])
    return candidate({"proposer": normalise(name)})


def defaults(temperature: float, cuda: bool) -> tuple[list[Candidate], list[LeftOut]]:
    """Every drafter, vLLM's or registered, that needs nothing but its name; and those that need more, with the reason."""
    chosen: list[Candidate] = []
    left_out: list[LeftOut] = []
    for name, config in STOCK.items():
        why = _stock_obstacle(name, temperature, cuda)
        if why:
            left_out.append(LeftOut(name, why))
        else:
            chosen.append(Candidate(name, config))
    for name in PROPOSERS.names():
        why = ONLY_WITH_A_REQUEST.get(name) or _obstacle(name)
        if why:
            left_out.append(LeftOut(name, why))
        else:
            chosen.append(Candidate(name, {"proposer": name}))
    return chosen, left_out


def _stock_obstacle(name: str, temperature: float, cuda: bool) -> str:
    package = STOCK_NEEDS.get(name)
    if package and find_spec(package) is None:
        return f"it needs the package {package.replace('_', '-')}"
    if temperature > 0 and not cuda:
        return "with a temperature vLLM's own verification samples wrongly on a CPU (see `vllm-specplugin validate`)"
    return ""


def _obstacle(name: str) -> str:
    """Why a registered proposer cannot run on its name alone; empty where it can."""
    try:
        capabilities = resolve(SpecConfig.parse({"proposer": name})).capabilities
    except SpecPluginError as error:
        return str(error)
    return "it needs layers of the target's own; name it with --method where the target has them" if capabilities.native else ""
