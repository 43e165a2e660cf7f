"""Files of prompts, as the commands that run a user's own prompts read them, and prompts as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplugin.errors import SpecPluginError

USER_KIND = "your prompts"

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One conversation to be continued: `messages` as in a chat request, or a bare `text` that no chat template touches."""

    kind: str
    name: str
    messages: tuple[Message, ...] = ()
    text: str | None = None


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def ask(kind: str, name: str, question: str) -> Prompt:
    """A prompt of one user message."""
    return Prompt(kind, name, (user(question),))


def is_message(value: Any) -> bool:
    """Whether it is an object with "role" and "content", both texts."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """The lines of a UTF-8 file that are not empty, with their numbers from 1 on.

    Lines end where editors and JSON lines say so: other line separators that Unicode knows may stand inside a text.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is no UTF-8.
    """
    return lines_in(file.read_text(encoding="utf-8-sig"))


def lines_in(text: str) -> list[tuple[int, str]]:
    """The same of a text."""
    return [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def load_prompts(file: Path) -> list[Prompt]:
    """The prompts of a user's file: JSONL where its name ends in .jsonl or .json, else one prompt per line.

    A JSONL line is an object with "prompt" (a string) or "messages" (a list of {"role", "content"}), and may carry "kind", by
    which results are grouped. A line of plain text, or a "prompt", is one user message of a chat; a model without a chat
    template continues it as it stands. Empty lines are skipped. Raises SpecPluginError naming the line that is at fault.
    """
    try:
        numbered = numbered_lines(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecPluginError(f"cannot read the prompts in {file}: {error}; expected a UTF-8 text or JSONL file") from error
    as_json = Path(file).suffix in (".jsonl", ".json")
    if not numbered:
        raise SpecPluginError(f"{file} holds no prompts; expected one per line")
    return [_json_line(file, n, line) if as_json else ask(USER_KIND, f"line {n}", line) for n, line in numbered]


def _json_line(file: Path, number: int, line: str) -> Prompt:
    """One line of a JSONL file as a prompt."""
    where = f"{file}, line {number}"
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecPluginError(f"{where} is not JSON ({error.msg}); expected one object per line") from error
    if not isinstance(entry, dict):
        raise SpecPluginError(f'{where} is a {type(entry).__name__}; expected an object with "prompt" or "messages"')
    kind, name = str(entry.get("kind", USER_KIND)), str(entry.get("name", f"line {number}"))
    if isinstance(entry.get("prompt"), str) and "messages" not in entry:
        return ask(kind, name, entry["prompt"])
    messages = entry.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        keys = ", ".join(map(str, entry)) or "none"
        raise SpecPluginError(f'{where} has the keys {keys}; expected either "prompt" (a string) or "messages" (a list)')
    for message in messages:
        if not is_message(message):
            raise SpecPluginError(f'{where} has a message that is not {{"role": string, "content": string}}')
    return Prompt(kind, name, tuple({"role": m["role"], "content": m["content"]} for m in messages))


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """A prompt as token ids, through the model's chat template where it has one; `tokenizer` is a Hugging Face tokenizer.

    Raises:
        SpecPluginError: the template refuses the messages, as some do a system message; the prompt is named.
    """
    text = prompt.text
    if text is None and tokenizer.chat_template:
        from jinja2 import TemplateError  # only templates need it

        try:
            text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:  # transformers' ValueError: several templates, and none by default
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise SpecPluginError(f"{prompt.name}: the model's chat template refuses these messages ({reason}).") from error
        return list(tokenizer.encode(text, add_special_tokens=False))
    if text is None:
        text = "\n\n".join(message["content"] for message in prompt.messages)
    return list(tokenizer.encode(text))
