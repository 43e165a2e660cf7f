"""What one request may say to the plugin: `SamplingParams(extra_args={"specplugin": {...}})`. Knows no vLLM.

Over HTTP vLLM's field for such arguments, `vllm_xargs`, takes strings and numbers but no objects, so there the same
object is written as JSON text: `"vllm_xargs": {"specplugin": "{\\"enabled\\": false}"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr  # shortens: what a client sent may be long
from typing import Any

from vllm_specplugin.errors import ConfigError, suggestion
from vllm_specplugin.registry import normalise

KEY = "specplugin"
EXAMPLE = '{"enabled": false}'

COMMON_KEYS = ("enabled", "max_draft_tokens", "proposer")
"""What every request may say, whichever proposer is configured."""

MAX_PREDICTION = 1 << 20
"""Most characters, or token ids, of a request's prediction: longer than any answer, and quick to look through."""


def read(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The mapping under the plugin's key, empty where there is none; which keys there may be depends on the proposer (`Rules`).

    Raises:
        ConfigError: one line that names the key, the value and what is allowed.
    """
    said = (extra_args or {}).get(KEY)
    if said is None:
        return {}
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except (ValueError, RecursionError) as error:  # the latter: brackets without end
            raise ConfigError(f"'{KEY}' is {repr(said)}, which is not JSON; expected an object, e.g. {EXAMPLE}.") from error
    if not isinstance(said, Mapping):
        raise ConfigError(f"'{KEY}' is {repr(said)}; expected an object, e.g. {EXAMPLE}.")
    enabled, most = said.get("enabled", True), said.get("max_draft_tokens", 0)
    if enabled not in (True, False):  # 0 and 1 too: that is what vLLM's HTTP server makes of booleans
        raise ConfigError(f"'{KEY}.enabled' is {repr(enabled)}; expected true or false.")
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise ConfigError(f"'{KEY}.max_draft_tokens' is {repr(most)}; expected an integer from 0 on.")
    proposer, prediction = said.get("proposer", ""), said.get("prediction", "")
    if not isinstance(proposer, str):
        raise ConfigError(f"'{KEY}.proposer' is {repr(proposer)}; expected a proposer's name.")
    if isinstance(prediction, str):
        unit = "characters"
    elif isinstance(prediction, list | tuple) and all(type(token) is int and token >= 0 for token in prediction):
        unit = "token ids"
    else:
        raise ConfigError(f"'{KEY}.prediction' is {repr(prediction)}; expected a text, or a list of token ids from 0 on.")
    if len(prediction) > MAX_PREDICTION:
        raise ConfigError(f"'{KEY}.prediction' is {repr(prediction)}, of {len(prediction)} {unit}; at most {MAX_PREDICTION}.")
    return dict(said)


@dataclass(frozen=True, slots=True)
class Rules:
    """What requests may say to an engine, by its configuration."""

    proposer: str
    """The configured one."""
    parts: tuple[str, ...] = ()
    """What it is made of, and may be chosen from."""
    keys: tuple[str, ...] = ()
    """What it reads beside `COMMON_KEYS`."""
    vocab_size: int | None = None
    tokenizer: bool = True
    """Texts can be made tokens of."""

    def check(self, said: Mapping[str, Any]) -> None:
        """Look at what `read` returned.

        Raises:
            ConfigError: one line that names the key, the value and what is allowed.
        """
        valid = sorted({*COMMON_KEYS, *self.keys})
        for key in said:
            if key == "prediction" and key not in valid:
                raise ConfigError(
                    f"'{KEY}.prediction' is of no use to the proposer {self.proposer!r}; leave it out, or start the engine with "
                    "the proposer 'predicted', or with a 'hybrid' that has 'predicted' among its proposers."
                )
            if key not in valid:
                raise ConfigError(
                    f"'{KEY}.{str(key)[:60]}' is nothing that the proposer {self.proposer!r} reads of a request"
                    f"{suggestion(str(key)[:60], valid)} Valid: {', '.join(valid)}."
                )
        named = said.get("proposer")
        choice = (self.proposer, *self.parts)
        if named and normalise(named) not in choice:
            raise ConfigError(
                f"'{KEY}.proposer' is {repr(named)}{suggestion(normalise(named)[:60], choice)} This engine offers "
                f"{', '.join(f'{name!r}' for name in choice)}."
            )
        self._check_prediction(said.get("prediction") or ())

    def _check_prediction(self, prediction: str | list[int] | tuple[()]) -> None:
        if isinstance(prediction, str):
            if not self.tokenizer:
                raise ConfigError(
                    f"'{KEY}.prediction' is {repr(prediction)}, a text, and the engine runs without a tokenizer; send token ids."
                )
            return
        if self.vocab_size is not None and max(prediction, default=0) >= self.vocab_size:
            raise ConfigError(
                f"'{KEY}.prediction' holds the token id {repr(max(prediction))}; the target's ids run from 0 to "
                f"{self.vocab_size - 1}."
            )


def draft_limit(said: Mapping[str, Any]) -> int | None:
    """The most drafts per step that a request wants, given what `read` returned; None where it leaves that open."""
    return said.get("max_draft_tokens") if said.get("enabled", True) else 0
