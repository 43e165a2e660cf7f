"""Questions with known answers, for a downstream score that needs no network and no judge.

A line of the file is one of
- `{"prompt": ..., "answer": ...}`: right where greedy decoding would say exactly the answer's tokens. Every token of the answer
  is then the model's first choice after those before it, so one pass over prompt and answer decides;
- `{"prompt": ..., "choices": [...], "answer": ...}`: right where the answer (one of the choices, or its number from 0) has the
  highest log-probability per token of all choices, the usual score of multiple choice.

The prompt is text, or `"messages"` for the chat template, where there is one. Spaces belong to the text: an answer that follows
a word usually starts with one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.prompt_files import Prompt, encode, is_message, numbered_lines


@dataclass(frozen=True, slots=True)
class Question:
    """As token ids."""

    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    """One for an exact answer."""
    answer: int
    """Which choice is right."""

    @property
    def texts(self) -> list[list[int]]:
        """What a model has to score: the prompt with each choice."""
        return [[*self.prompt, *choice] for choice in self.choices]

    def is_right(self, logprobs: Sequence[float], tokens: Sequence[float], first_choices: Sequence[float]) -> bool:
        """Whether scores of `texts` (sum of log-probabilities, tokens, how many were the first choice) mean the right answer."""
        if len(self.choices) == 1:
            return first_choices[0] == tokens[0]
        means = [total / count for total, count in zip(logprobs, tokens, strict=True)]
        return means.index(max(means)) == self.answer


def kind_of(questions: Sequence[Question]) -> str:
    """What a right answer is, for the report."""
    exact = sum(len(question.choices) == 1 for question in questions)
    kinds = {"questions whose answer greedy decoding gives word for word": exact}
    kinds["questions with the right choice likeliest per token"] = len(questions) - exact
    return " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)


def read_questions(path: Path, tokenizer: Any, max_length: int) -> list[Question]:
    """The questions of a JSONL file.

    Raises:
        SpecPluginError: the file cannot be read, a line is no question, or the chat template refuses it; it is named.
    """
    try:
        numbered = numbered_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--questions: cannot read {path}: {error}; a JSONL file is expected.") from error
    found = [_question(f"--questions: {path}, line {number}", line, tokenizer, max_length) for number, line in numbered]
    if not found:
        raise ConfigError(f'--questions: {path} holds none; a line is {{"prompt": "2 + 2 =", "answer": " 4"}}.')
    return found


def _question(where: str, line: str, tokenizer: Any, max_length: int) -> Question:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON ({error.msg}).") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry) or "answer" not in entry:
        raise ConfigError(f'{where}: "prompt" (or "messages") and "answer" are expected, "choices" may be there.')
    choices, answer = _choices(where, entry)
    prompt = _encode_prompt(where, entry, tokenizer)
    encoded = tuple(tuple(tokenizer.encode(choice, add_special_tokens=False)) for choice in choices)
    if not prompt or not all(encoded):
        raise ConfigError(f"{where}: the prompt or a choice is empty.")
    longest = len(prompt) + max(map(len, encoded))
    if longest > max_length:
        raise ConfigError(f"{where} has {longest} tokens, more than --max-length {max_length}.")
    return Question(prompt, encoded, answer)


def _choices(where: str, entry: dict[str, Any]) -> tuple[list[str], int]:
    answer, choices = entry["answer"], entry.get("choices")
    if choices is None:
        if not isinstance(answer, str):
            raise ConfigError(f'{where}: "answer" is {answer!r}; text is expected where there are no "choices".')
        return [answer], 0
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f'{where}: "choices" is {choices!r}; a list of at least two texts is expected.')
    if isinstance(answer, str) and answer in choices:
        return choices, choices.index(answer)
    if type(answer) is int and 0 <= answer < len(choices):
        return choices, answer
    raise ConfigError(f'{where}: "answer" is {answer!r}; one of the choices is expected, or its number from 0.')


def _encode_prompt(where: str, entry: dict[str, Any], tokenizer: Any) -> tuple[int, ...]:
    if "messages" in entry:
        messages = entry["messages"]
        if not isinstance(messages, list) or not messages or not all(is_message(message) for message in messages):
            raise ConfigError(f'{where}: "messages" is no list of {{"role": string, "content": string}}.')
        return tuple(encode(Prompt("", where, tuple(messages)), tokenizer))
    if not isinstance(entry["prompt"], str):
        raise ConfigError(f'{where}: "prompt" is {entry["prompt"]!r}; text is expected.')
    return tuple(tokenizer.encode(entry["prompt"]))
