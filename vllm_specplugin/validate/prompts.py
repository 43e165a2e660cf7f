"""What the engine is asked: the user's prompts, or built-in ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.prompt_files import numbered_lines

Prompt = str | list[int]
"""Text, or token ids as they stand."""

TEXTS = (
    "Monday: soup. Tuesday: rice. Wednesday: soup. Thursday: rice. Friday: soup. Saturday:",
    "def double(values):\n    return [2 * value for value in values]\n\n\ndef triple(values):\n",
    "The lighthouse keeper wrote one line in the log every evening. Tonight he wrote:",
    "Q: Capital of France?\nA: Paris\nQ: Capital of Italy?\nA: Rome\nQ: Capital of Spain?\nA:",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "Grace", "age":',
    "one two three one two three one two three one two",
    "Dear neighbour,\n\nthank you for watering the plants while we were away. As a small sign of thanks,",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at",
    "SELECT name, price FROM products WHERE price > 10 ORDER BY price;\nSELECT name, price FROM products WHERE",
    "It rained, and then it rained again, and after that it",
    "<ul>\n  <li>bread</li>\n  <li>butter</li>\n  <li>cheese</li>\n",
    "Once there was a fox who could count to seven. Every morning she counted the hens:",
)

GENERATED = 8
"""Prompts of token ids, for a model without a tokenizer."""


def generated(vocab_size: int) -> list[list[int]]:
    """Short prompts that repeat themselves, each from other tokens."""
    return [
        [(7 * salt + 5 * (place % (2 + salt % 3))) % vocab_size for place in range(4 + 2 * salt)] for salt in range(GENERATED)
    ]


def load_prompts(file: Path) -> list[Prompt]:
    """The prompts of a user's file, one per line; empty lines are skipped.

    In a file that ends in .jsonl or .json a line is a list of token ids, or an object with "prompt_token_ids" (such a list) or
    "prompt" (text); in any other file it is text. Raises SpecPluginError naming the line that is at fault.
    """
    try:
        numbered = numbered_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecPluginError(f"--prompts: cannot read {file}: {error}; a UTF-8 text or JSONL file is expected.") from error
    if not numbered:
        raise SpecPluginError(f"--prompts: {file} holds no prompts; one per line is expected.")
    if file.suffix not in (".jsonl", ".json"):
        return [line for _, line in numbered]
    return [_json_line(f"--prompts: {file}, line {number}", line) for number, line in numbered]


def _json_line(where: str, line: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecPluginError(f"{where} is not JSON ({error.msg}).") from error
    if isinstance(entry, dict) and ("prompt" in entry) != ("prompt_token_ids" in entry):
        entry = entry.get("prompt", entry.get("prompt_token_ids"))
    if isinstance(entry, str) and entry:
        return entry
    if isinstance(entry, list) and entry and all(type(token) is int and token >= 0 for token in entry):
        return entry
    raise SpecPluginError(
        f'{where} is {_short(line)}; a list of token ids, {{"prompt_token_ids": [...]}} or {{"prompt": "text"}} is expected.'
    )


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def name_of(index: int, prompt: Prompt | Sequence[int]) -> str:
    """How the report calls a prompt."""
    text = " ".join(prompt.split()) if isinstance(prompt, str) else f"token ids {', '.join(map(str, prompt))}"
    return f"{index + 1}: {_short(text, 48)}"
