"""What one request may say to the plugin: `SamplingParams(extra_args={"specplugin": {...}})`. Knows no vLLM.

Over HTTP vLLM's field for such arguments, `vllm_xargs`, takes strings and numbers but no objects, so there the same
object is written as JSON text: `"vllm_xargs": {"specplugin": "{\\"enabled\\": false}"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from reprlib import repr  # shortens: what a client sent may be long
from typing import Any

from vllm_specplugin.errors import ConfigError

KEY = "specplugin"
EXAMPLE = '{"enabled": false}'

MAX_PREDICTION = 1 << 20
"""Most characters, or token ids, of a request's prediction: longer than any answer, and quick to look through."""


def read(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The mapping under the plugin's key, empty where there is none; keys unknown here are left to the proposer.

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


def draft_limit(said: Mapping[str, Any]) -> int | None:
    """The most drafts per step that a request wants, given what `read` returned; None where it leaves that open."""
    return said.get("max_draft_tokens") if said.get("enabled", True) else 0
