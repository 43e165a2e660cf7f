"""What heads are trained on: token sequences, and which of their tokens the target wrote."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.prompt_files import Prompt, encode, is_message, lines_in

logger = logging.getLogger("vllm.specplugin.train")


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence."""

    token_ids: tuple[int, ...]
    """`[length]`"""
    answer_from: int
    """The tokens from here on count: the target wrote them, or the whole text is to be learnt from."""
    kind: str = ""
    """By which results may be grouped."""


def read_examples(file: Path, tokenizer: Any, max_length: int) -> list[Example]:
    """The sequences of a file, each cut at `max_length` tokens; what is then left without a token to predict is dropped.

    Args:
        file: JSONL where its name ends in .jsonl or .json, else a text whose paragraphs (between empty lines) are sequences.
            A JSONL line is what `vllm-specplugin distill` writes (`{"prompt_token_ids": [...], "token_ids": [...]}`, perhaps
            with "kind"), or `{"text": "..."}`, or `{"messages": [...]}` whose last message is the answer. Lines with
            "distilled_with" or "skipped" are passed over.
        tokenizer: a Hugging Face tokenizer; None where the file holds token ids only.
        max_length: the most tokens of a sequence.

    Raises:
        SpecPluginError: naming the file, the line and what was expected.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecPluginError(f"--data: cannot read {file}: {error}; a UTF-8 text or JSONL file is expected.") from error
    if file.suffix in (".jsonl", ".json"):
        read = [_json_line(f"--data: {file}, line {number}", line, tokenizer) for number, line in lines_in(text)]
        examples = [example for example in read if example is not None]
    else:
        examples = [_whole(paragraph, tokenizer, str(file)) for paragraph in text.split("\n\n") if paragraph.strip()]
    cut = [Example(e.token_ids[:max_length], e.answer_from, e.kind) for e in examples]
    # The first token of a sequence is predicted by nothing.
    kept = [example for example in cut if len(example.token_ids) > max(example.answer_from, 1)]
    if not kept:
        why = f"none of its {len(examples)} sequences has a token to predict within {max_length}" if examples else "it is empty"
        raise SpecPluginError(f"--data: {file} holds nothing to learn from: {why}.")
    shorter = [example for example in examples if len(example.token_ids) > max_length]
    if shorter:
        nothing = sum(max(example.answer_from, 1) >= max_length for example in shorter)
        text = "%d of %d sequences of %s are longer than --max-length %d and cut there; %d of them keep nothing to learn from."
        logger.warning(text, len(shorter), len(examples), file, max_length, nothing)
    return kept


def _json_line(where: str, line: str, tokenizer: Any) -> Example | None:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecPluginError(f"{where} is not JSON ({error.msg}).") from error
    if not isinstance(entry, dict):
        raise SpecPluginError(f"{where} is a {type(entry).__name__}; an object is expected.")
    if "distilled_with" in entry or "skipped" in entry:
        return None
    kind = str(entry.get("kind", ""))
    if "token_ids" in entry:
        prompt, answer = entry.get("prompt_token_ids", []), entry["token_ids"]
        for key, ids in (("prompt_token_ids", prompt), ("token_ids", answer)):
            if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
                raise SpecPluginError(f'{where}: "{key}" is no list of token ids.')
        return Example((*prompt, *answer), len(prompt), kind)
    if isinstance(entry.get("text"), str):
        return _whole(entry["text"], tokenizer, where, kind)
    messages = entry.get("messages")
    if isinstance(messages, list) and len(messages) > 1:
        return _conversation(messages, tokenizer, where, kind)
    raise SpecPluginError(
        f'{where} has the keys {", ".join(map(str, entry)) or "none"}; expected "token_ids" (and "prompt_token_ids"), "text", or '
        '"messages" that end with an answer. Prompts without answers go through `vllm-specplugin distill` first.'
    )


def _whole(text: str, tokenizer: Any, where: str, kind: str = "") -> Example:
    return Example(tuple(_tokenizer(tokenizer, where).encode(text)), 0, kind)


def _conversation(messages: list[Any], tokenizer: Any, where: str, kind: str) -> Example:
    """The last message is the answer, the others with the chat template around them the prompt."""
    if not all(is_message(message) for message in messages):
        raise SpecPluginError(f'{where} has a message that is not {{"role": string, "content": string}}.')
    if (role := messages[-1]["role"]) != "assistant":
        raise SpecPluginError(f"{where}: the last message is of the role {role!r}; an answer, of 'assistant', is expected.")
    prompt = encode(Prompt(kind, where, tuple(messages[:-1])), _tokenizer(tokenizer, where))
    answer = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Example((*prompt, *answer, *end), len(prompt), kind)


def _tokenizer(tokenizer: Any, where: str) -> Any:
    if tokenizer is None:
        raise SpecPluginError(f"{where} holds text, but the target has no tokenizer; give token ids.")
    return tokenizer
