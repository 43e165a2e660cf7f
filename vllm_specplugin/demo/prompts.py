"""The prompts that the demo runs: its own, of four kinds, or those of a user's file.

The kinds differ in how much of the answer already stands in the prompt, which is what n-gram drafting lives on: nearly all of
it when code is rewritten, some of it in a quotation or in extracted records, next to nothing in a chat.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplugin.demo import texts
from vllm_specplugin.errors import SpecPluginError

CODE, DOCUMENT, EXTRACTION, CHAT = "code rewriting", "document question", "JSON extraction", "chat"
USER_KIND = "your prompts"
QUOTE = "Answer with a quotation from the text."

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


def demo_prompts() -> list[Prompt]:
    """The demo's own prompts, kind by kind, two of each: 40 to 400 tokens long.

    The model has 135 million parameters. Where a bare question leads it into loops, which would flatter any drafter, one worked
    example stands in the conversation before it, as an application would do it.
    """
    return [
        ask(CODE, "rename", f"{_block(texts.INVENTORY_PY)}\n\nRepeat the code above, with `path` renamed to `filename`."),
        Prompt(CODE, "add docstrings", _docstrings()),
        ask(DOCUMENT, "library", f"{texts.LIBRARY}\n\n{texts.LIBRARY_QUESTION} {QUOTE}"),
        ask(DOCUMENT, "lighthouse", f"{texts.LIGHTHOUSE}\n\n{texts.LIGHTHOUSE_QUESTION} {QUOTE}"),
        Prompt(EXTRACTION, "orders", _extraction("order", texts.ORDERS, texts.ORDERS_JSON)),
        Prompt(EXTRACTION, "staff", _extraction("line", texts.STAFF, texts.STAFF_JSON)),
        ask(CHAT, "sleep", "Can you give me three tips for sleeping better?"),
        ask(CHAT, "sky", "Why is the sky blue?"),
    ]


def _block(code: str) -> str:
    return f"```python\n{code}```"


def _docstrings() -> tuple[Message, ...]:
    """A small function with a docstring as the example, then a whole file."""
    task = "Add docstrings.\n\n"
    before, after = _block(texts.WORDS_PY), _block(texts.WORDS_DOCUMENTED_PY)
    return (user(task + before), assistant(after), user(task + _block(texts.TEMPERATURE_PY)))


def _extraction(what: str, records: Sequence[str], as_json: Sequence[str]) -> tuple[Message, ...]:
    """Each record but the last ones with its JSON, then the rest of them."""
    turns: list[Message] = []
    for record, answer in zip(records, as_json, strict=False):
        turns += [user(f"Turn this {what} into JSON.\n\n{record}"), assistant(answer)]
    return (*turns, user(f"Turn this {what} into JSON.\n\n{records[len(as_json)]}"))


def load_prompts(file: Path) -> list[Prompt]:
    """The prompts of a user's file: JSONL where its name ends in .jsonl or .json, else one prompt per line.

    A JSONL line is an object with "prompt" (a string) or "messages" (a list of {"role", "content"}), and may carry "kind", by
    which results are grouped. A line of plain text, or a "prompt", is one user message of a chat; a model without a chat
    template continues it as it stands. Empty lines are skipped. Raises SpecPluginError naming the line that is at fault.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecPluginError(f"cannot read the prompts in {file}: {error}; expected a UTF-8 text or JSONL file") from error
    as_json = Path(file).suffix in (".jsonl", ".json")
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
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
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise SpecPluginError(f'{where} has a message that is not {{"role": string, "content": string}}')
    return Prompt(kind, name, tuple({"role": m["role"], "content": m["content"]} for m in messages))
