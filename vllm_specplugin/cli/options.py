"""Values of options that are more than one word."""

from __future__ import annotations

import json
from typing import Any

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.files import locate


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


def tokenizer_of(option: str, model: str) -> Any:
    """The Hugging Face tokenizer of the model that an option names."""
    from transformers import AutoTokenizer

    folder = locate(model)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"{option} is {model!r}, whose tokenizer cannot be loaded: {reason}") from error
