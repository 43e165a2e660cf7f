"""Values of options that are more than one word."""

from __future__ import annotations

import json
from typing import Any

from vllm_specplugin.errors import ConfigError


def parse_object(option: str, text: str | None, example: str) -> dict[str, Any]:
    """The JSON object that an option was given, {} where it was not."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is no JSON ({error}): {text}; write for example '{example}'.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {text}, no JSON object; write for example '{example}'.")
    return value
