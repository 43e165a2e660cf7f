"""The plugin's keys of ``--speculative-config``: parse, validate, dump. Knows no vLLM.

Two steps: `SpecConfig.parse` checks what can be checked without importing a proposer (keys, types, ranges), and
`resolve` looks the names up and checks that the parts go together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specplugin.errors import ConfigError, suggestion
from vllm_specplugin.proposers.base import Proposer
from vllm_specplugin.registry import PROPOSERS, VERIFIERS, normalise
from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.types import Capabilities, Target

HOST_KEYS = frozenset(
    {
        "attention_backend",
        "code_revision",
        "draft_tensor_parallel_size",
        "enforce_eager",
        "kv_cache_dtype",
        "max_model_len",
        "moe_backend",
        "quantization",
        "revision",
    }
)
"""vLLM's own keys that keep their meaning beside ours: all of them say how a draft *checkpoint* is loaded and run."""

MAX_SPECULATIVE_TOKENS = 128
"""vLLM's V1 verification refuses longer drafts (its MAX_SPEC_LEN)."""


class SpecConfig(BaseModel):
    """What a user may say; one field per key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    proposer: str = Field(description="a registered proposer")
    num_speculative_tokens: int | None = Field(
        None, ge=1, le=MAX_SPECULATIVE_TOKENS, description="k, the most tokens drafted per step; None: the proposer's own"
    )
    model: str | None = Field(None, description="heads or draft checkpoint, where the proposer has one")
    verifier: str = Field("auto", description="a registered verifier, or auto")
    draft_sampling: Literal["greedy", "probabilistic"] = Field("greedy", description="how a learned proposer picks its drafts")
    control: Literal["fixed", "adaptive"] | None = Field(
        None,
        description="who sets the draft length: fixed (always k), or adaptive (up to k, as it pays); None: adaptive, unless "
        "num_speculative_tokens is given",
    )
    draft_budget_ms: float = Field(
        100.0, gt=0, le=60_000, description="milliseconds that drafting may take per step; a later draft is dropped"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the proposer's own options")
    host: dict[str, Any] = Field(default_factory=dict, description="vLLM's own keys, passed on", exclude=True)

    @property
    def adaptive(self) -> bool:
        """Whether draft lengths follow what pays."""
        return self.control == "adaptive" if self.control is not None else self.num_speculative_tokens is None

    def control_in_words(self, adaptive: bool) -> str:
        """What sets draft lengths in an engine, and why not what does by default; `adaptive` says whether control really does."""
        if adaptive:
            return "adaptive"
        if self.control is None and self.num_speculative_tokens is not None:
            return "fixed, since num_speculative_tokens is given ('control': 'adaptive' drafts up to as many where it pays)"
        return "fixed"

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> SpecConfig:
        """Read the mapping that a user wrote.

        Raises:
            ConfigError: one line that names the key, the value and what is allowed.
        """
        keys = normalised_keys(raw)
        if "method" in keys:
            raise ConfigError(
                f"'proposer' and 'method' exclude each other: 'method' ({keys['method']!r}) chooses one of vLLM's own "
                "drafters; drop one."
            )
        ours = {key: value for key, value in keys.items() if key in cls.model_fields and key != "host"}
        host = {key: value for key, value in keys.items() if key in HOST_KEYS}
        valid = sorted(({*cls.model_fields} | HOST_KEYS) - {"host"})
        for key in keys:
            if key not in ours and key not in host:
                raise ConfigError(
                    f"'{key}' is no key of --speculative-config with a proposer{suggestion(key, valid)} "
                    f"Valid: {', '.join(valid)}."
                )
        for key in ("proposer", "verifier"):
            if isinstance(ours.get(key), str):
                ours[key] = normalise(ours[key])
        if isinstance(ours.get("options"), Mapping):
            ours["options"] = normalised_keys(ours["options"], "options.")
        try:
            return cls(**ours, host=host)
        except ValidationError as error:
            raise ConfigError(_one_line(error, "")) from error

    def dump(self) -> dict[str, Any]:
        """The mapping that `parse` reads back to an equal configuration; defaults are left out."""
        return {**self.model_dump(exclude_defaults=True), **self.host}


def normalised_keys(raw: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The mapping with dashes in its keys as underscores; a key that is given in both spellings is refused."""
    keys: dict[str, Any] = {}
    for key, value in raw.items():
        name = normalise(str(key))
        if name in keys:
            raise ConfigError(f"'{prefix}{name}' is given twice, as {keys[name]!r} and as {value!r}; drop one.")
        keys[name] = value
    return keys


def names_a_proposer(raw: object) -> bool:
    """Whether a user's `speculative_config` is ours: it has the key `proposer`."""
    return isinstance(raw, Mapping) and any(normalise(str(key)) == "proposer" for key in raw)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration whose names are classes and whose parts go together."""

    config: SpecConfig
    proposer: type[Proposer]
    options: BaseModel
    verifier_name: str
    verifier: type[Verifier]
    num_speculative_tokens: int
    capabilities: Capabilities
    """What the proposer needs and gives with these options."""

    def verifier_why(self) -> str:
        """Why it is this verifier, and what it does to the answers."""
        promise = (
            "lossless" if self.verifier.lossless else "lossy: it changes what requests with a temperature above 0 are answered"
        )
        if self.config.verifier != "auto":
            return f"named in the configuration; {promise}"
        if self.config.draft_sampling == "greedy":
            return f"chosen by auto: drafts are picked deterministically, for which it is {promise} and needs no probabilities"
        return f"chosen by auto: {promise} with drafts that are drawn by chance"

    def ignored(self) -> list[str]:
        """What was said but has no effect with this proposer, one line each."""
        capabilities, heeded = self.capabilities, self.proposer.host_keys
        if capabilities.native or (capabilities.checkpoint and heeded is None):
            return []
        why = "heeds no such key" if capabilities.checkpoint else "loads no checkpoint"
        keys = sorted(set(self.config.host).difference(heeded or ()))
        return [f"'{key}': the proposer {self.config.proposer!r} {why}" for key in keys]


def resolve(config: SpecConfig, target: Target | None = None) -> ResolvedConfig:
    """Look up the names of a configuration and check that the parts go together, and fit the target where it is known.

    Raises:
        RegistryError: an unknown or broken proposer or verifier.
        ConfigError: wrong options, or parts that do not go together.
    """
    proposer = PROPOSERS.resolve(config.proposer)
    options = options_of(proposer, config.proposer, config.options)
    capabilities = proposer.capabilities_for(config, options)
    if config.model is not None and not capabilities.checkpoint:
        raise ConfigError(f"'model' is {config.model!r}, but the proposer {config.proposer!r} loads no checkpoint; drop the key.")
    if config.model is None and capabilities.checkpoint:
        raise ConfigError(f"'model' is missing: the proposer {config.proposer!r} needs the path of its checkpoint.")
    if config.draft_sampling == "probabilistic" and not capabilities.probabilities:
        raise ConfigError(
            f"'draft_sampling' is 'probabilistic', but the proposer {config.proposer!r} gives no probabilities; use 'greedy'."
        )
    verifier_name = _automatic(config) if config.verifier == "auto" else config.verifier
    verifier = VERIFIERS.resolve(verifier_name)
    if verifier.needs_probabilities and config.draft_sampling != "probabilistic":
        raise ConfigError(
            f"'verifier' is {verifier_name!r}, which needs the drafts' probabilities, but 'draft_sampling' is 'greedy'; "
            "use 'one_hot' or 'auto', or a proposer with probabilities and 'draft_sampling': 'probabilistic'."
        )
    return ResolvedConfig(
        config=config,
        proposer=proposer,
        options=options,
        verifier_name=verifier_name,
        verifier=verifier,
        num_speculative_tokens=_num_speculative_tokens(proposer, config, options, target),
        capabilities=capabilities,
    )


def _num_speculative_tokens(proposer: type[Proposer], config: SpecConfig, options: BaseModel, target: Target | None) -> int:
    depth = proposer.depth(config, options, target)
    wanted = config.num_speculative_tokens
    if wanted is None:
        return depth.default if depth.adaptive is None or not config.adaptive else depth.adaptive
    if depth.most is not None and wanted > depth.most:
        raise ConfigError(f"'num_speculative_tokens' is {wanted}, but it can be at most {depth.most}: {depth.why}.")
    return wanted


def _automatic(config: SpecConfig) -> str:
    """The verifier for `auto`: by how drafts are chosen."""
    return "token" if config.draft_sampling == "probabilistic" else "one_hot"


def options_of(proposer: type[Proposer], name: str, raw: Mapping[str, Any], prefix: str = "options.") -> BaseModel:
    """A proposer's own options, validated; `prefix` says where the user wrote them.

    Raises:
        ConfigError: one line that names the key, the value and what is allowed.
    """
    given = normalised_keys(raw, prefix)
    known = proposer.Options.model_fields
    for key in given:
        if key not in known and proposer.Options.model_config.get("extra") == "forbid":
            raise ConfigError(
                f"'{prefix}{key}' is no option of the proposer {name!r}{suggestion(key, known)} "
                f"Valid: {', '.join(sorted(known)) or 'none'}."
            )
    try:
        return proposer.Options(**given)
    except ValidationError as error:
        raise ConfigError(_one_line(error, prefix)) from error


def _one_line(error: ValidationError, prefix: str) -> str:
    first = error.errors(include_url=False)[0]
    key = prefix + ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"'{key}' is missing from --speculative-config."
    # A validator over several fields has no place of its own, and its text names the fields.
    subject = f"'{key}' is {first['input']!r}" if first["loc"] else f"'{prefix.rstrip('.') or '--speculative-config'}'"
    return f"{subject}: {first['msg'][0].lower()}{first['msg'][1:]}."
