"""The demo's own prompts, of four kinds.

The kinds differ in how much of the answer already stands in the prompt, which is what n-gram drafting lives on: nearly all of
it when code is rewritten, some of it in a quotation or in extracted records, next to nothing in a chat.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specplugin.demo import texts
from vllm_specplugin.prompt_files import Message, Prompt, ask, assistant, user

CODE, DOCUMENT, EXTRACTION, CHAT = "code rewriting", "document question", "JSON extraction", "chat"
QUOTE = "Answer with a quotation from the text."


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
