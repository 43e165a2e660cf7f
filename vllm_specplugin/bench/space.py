"""What `tune` tries: neighbours of a configuration that change one thing, the ones that the plugin would refuse left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_specplugin.bench.candidates import Candidate, candidate, unique
from vllm_specplugin.config import SpecConfig, names_a_proposer, resolve
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.registry import VERIFIERS

LENGTHS = (1, 2, 3, 5, 8)
"""Draft lengths that are tried; acceptance changes little from one to the next beyond."""
TRIED_VALUES = "tune"
"""Key of an option's `json_schema_extra`: the values that are worth a try, `Field(2, json_schema_extra={"tune": [1, 2, 3]})`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One question of the search, put to the best configuration so far."""

    title: str
    neighbours: Callable[[Candidate], list[Candidate]]


def stages(temperature: float) -> list[Stage]:
    """In the order of what they usually bring; which proposer comes first of all and is not among them."""
    found = [Stage("draft length", lengths)]
    if temperature > 0:  # greedily every lossless verifier accepts the same drafts
        found.append(Stage("verifier", verifiers))
    return [*found, Stage("options", options)]


def lengths(best: Candidate) -> list[Candidate]:
    """Fixed draft lengths, and the adaptive one."""
    config = best.config or {}
    if not names_a_proposer(config):
        return _valid(best, ({**config, "num_speculative_tokens": k} for k in LENGTHS))
    rest = {key: value for key, value in config.items() if key not in ("num_speculative_tokens", "control")}
    fixed = ({**rest, "num_speculative_tokens": k, "control": "fixed"} for k in LENGTHS)
    return _valid(best, [rest, *fixed])


def verifiers(best: Candidate) -> list[Candidate]:
    """Deterministic drafts, and drawn ones with every lossless verifier of this package that weighs them.

    Others only say that they are lossless; whoever trusts one names it in the configuration to begin with.
    """
    config = best.config or {}
    if not names_a_proposer(config) or not resolve(SpecConfig.parse(config)).capabilities.probabilities:
        return []
    rest = {key: value for key, value in config.items() if key not in ("verifier", "draft_sampling")}
    ours = [entry.name for entry in VERIFIERS.entries() if entry.target.startswith(f"{__package__.partition('.')[0]}.")]
    lossless = [name for name in ours if VERIFIERS.resolve(name).lossless]
    drawn = ({**rest, "draft_sampling": "probabilistic", "verifier": name} for name in lossless)
    return _valid(best, [rest, *drawn])


def options(best: Candidate) -> list[Candidate]:
    """One option of the proposer at a time, over the values that its author names."""
    config = best.config or {}
    if not names_a_proposer(config):
        return []
    resolved = resolve(SpecConfig.parse(config))
    given = dict(resolved.config.options)
    found = []
    for name, field in resolved.proposer.Options.model_fields.items():
        extra = field.json_schema_extra
        values: Any = extra.get(TRIED_VALUES, ()) if isinstance(extra, Mapping) else ()
        now = getattr(resolved.options, name)
        found += [{**config, "options": {**given, name: value}} for value in values if value != now]
    return _valid(best, found)


def _valid(best: Candidate, configs: Iterable[Mapping[str, Any]]) -> list[Candidate]:
    """Those that the plugin takes, without the one whose neighbours they are."""
    found: list[Candidate] = []
    for config in configs:
        try:
            found.append(candidate(config))
        except ConfigError:  # more tokens than there are heads, for example
            continue
    return [one for one in unique(found) if one.config != best.config]


def halved(standing: Mapping[str, float], keep: Sequence[str]) -> list[str]:
    """The names that stay: the better half, and those in `keep`; at least one beside them."""
    others = sorted((name for name in standing if name not in keep), key=lambda name: -standing[name])
    return [*keep, *others[: max(1, -(-len(others) // 2))]]
