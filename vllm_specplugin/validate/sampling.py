"""The sampling parameters that the validator can apply by itself, and so can test.

The names and their ranges are vLLM's. Any other parameter is refused: what it does to the distribution is not known here, and
a test against the wrong distribution would accuse an engine that is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specplugin.errors import ConfigError, suggestion

OPTION = "--sampling-params"
LEAST_TEMPERATURE = 0.01
"""vLLM raises anything lower to this, and below 1e-5 it decodes greedily."""


class Sampling(BaseModel):
    """What a user may say in `--sampling-params`; one field per key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=-1, description="0 and -1 mean all")
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, description="token id -> what is added to its logit"
    )
    allowed_token_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    max_tokens: int = Field(default=64, ge=4, description="tokens per request; the first three are tested by themselves, too")

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Sampling:
        """Read what a user wrote.

        Raises:
            ConfigError: one line that names the key, the value and what is allowed.
        """
        for key in raw:
            if key not in cls.model_fields:
                known = sorted(cls.model_fields)
                raise ConfigError(
                    f"{OPTION} has the key {key!r}, which validate cannot test{suggestion(key, known)} "
                    f"It tests: {', '.join(known)}."
                )
        if isinstance(raw.get("temperature"), int | float) and 0 <= raw["temperature"] < LEAST_TEMPERATURE:
            raise ConfigError(
                f"{OPTION} has temperature {raw['temperature']}, which leaves nothing to chance; use {LEAST_TEMPERATURE} or more "
                "(greedy decoding is compared in any case)."
            )
        try:
            return cls(**raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{OPTION}: '{key}' is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}.") from error

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncated(self) -> bool:
        """Whether top-k or top-p applies."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def processes(self) -> bool:
        """Whether any parameter changes softmax(logits)."""
        changed = bool(self.logit_bias) or self.allowed_token_ids is not None or self.min_p > 0 or self.temperature != 1
        return changed or self.penalised or self.truncated

    def for_vllm(self) -> dict[str, Any]:
        """Arguments of vLLM's SamplingParams; max_tokens and seed are the engine's to choose."""
        said = self.model_dump(exclude_defaults=True, exclude={"max_tokens"})
        if self.allowed_token_ids is not None:
            said["allowed_token_ids"] = list(self.allowed_token_ids)
        return {"temperature": self.temperature, **said}
