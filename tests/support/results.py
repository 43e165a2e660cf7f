"""What travels from an engine worker back to the tests. Nothing here imports vLLM."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None  # 1 = the most likely token


@dataclasses.dataclass(frozen=True)
class Completion:
    """One of the `n` outputs of a request."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    text: str
    # Per emitted token: the asked-for number of likeliest tokens, and the emitted one.
    logprobs: tuple[dict[int, Logprob], ...] | None
    # `spec_decode_metrics` as a mapping; None where there is none.
    speculation: dict[str, Any] | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished request. The short properties speak of its first completion."""

    prompt_token_ids: tuple[int, ...]
    # One entry per prompt token; the first is None, as nothing predicts it.
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None
    completions: tuple[Completion, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.completions[0].stop_reason

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        return self.completions[0].logprobs


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that was raised inside the worker."""

    kind: str  # the class's name
    message: str
    traceback: str
