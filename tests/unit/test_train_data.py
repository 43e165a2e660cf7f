"""What a data file may hold, and what is said of one that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import tiny_model
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.prompt_files import encode, load_prompts
from vllm_specplugin.train.data import Example, read_examples
from vllm_specplugin.train.evaluate_questions import read_questions
from vllm_specplugin.train.run import ANSWER_WEIGHT, token_counts
from vllm_specplugin.validate.prompts import load_prompts as prompts_to_validate


class Letters:
    """A tokenizer whose tokens are characters; its chat template marks who speaks."""

    chat_template = "yes"
    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{message['content']}>" for message in messages)


def written(folder: Path, *lines: object, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def letters(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_what_distill_writes(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"distilled_with": {"target": "m"}},
        {"prompt_token_ids": [5, 6], "token_ids": [7, 8, 9], "kind": "chat", "temperature": 0.0},
        {"skipped": "too long", "kind": "chat"},
    )
    assert read_examples(file, None, 100) == [Example((5, 6, 7, 8, 9), 2, "chat")]


def test_what_can_be_drafted_goes_by_answers_first_and_by_prompts() -> None:
    counts = token_counts([Example((1, 1, 1, 2, 3), 3), Example((3, 0), 1)], vocab_size=5)
    assert counts.tolist() == [ANSWER_WEIGHT, 3, ANSWER_WEIGHT, ANSWER_WEIGHT + 1, 0]


def test_text_and_messages(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"text": "abc", "kind": "prose"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]},
    )
    prose, talk = read_examples(file, Letters(), 100)
    assert prose == Example((1, *letters("abc")), 0, "prose")
    assert talk == Example((*letters("<a>"), *letters("bc"), 0), 3)


def test_plain_text_is_cut_into_paragraphs(tmp_path: Path) -> None:
    file = written(tmp_path, "one\n\ntwo lines\nhere\n\n\n", name="data.txt")
    first, second = read_examples(file, Letters(), 100)
    assert (first.token_ids, first.answer_from) == ((1, *letters("one")), 0)
    assert second.token_ids == (1, *letters("two lines\nhere"))


def test_sequences_are_cut_and_those_without_an_answer_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(
        tmp_path,
        {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5, 6]},
        {"prompt_token_ids": [1, 2, 3, 4], "token_ids": [5]},  # nothing of the answer is within 4 tokens
        {"token_ids": [9]},  # a single token is predicted by nothing
    )
    with caplog.at_level("WARNING", logger="vllm.specplugin"):
        assert read_examples(file, None, 4) == [Example((1, 2, 3, 4), 3)]
    assert "2 of 3 sequences" in caplog.text
    assert "longer than --max-length 4 and cut there; 1 of them keep nothing" in caplog.text


ASKED = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{nonsense\n", r"line 1 is not JSON"),
        ([1, 2], r"line 1 is a list; an object is expected"),
        ({"token_ids": [1, "2"]}, r'line 1: "token_ids" is no list of token ids'),
        ({"token_ids": [1, -2]}, r'line 1: "token_ids" is no list of token ids'),
        ({"prompt_token_ids": 7, "token_ids": [1]}, r'line 1: "prompt_token_ids" is no list of token ids'),
        ({"prompt": "a question"}, r"has the keys prompt; .* `vllm-specplugin distill` first"),
        ({"messages": [ASKED]}, r"has the keys messages; .*end with an answer"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, r"line 1 has a message that is not \{\"role\": string"),
        ({"messages": [ASKED, {"role": "assistant", "content": ["b"]}]}, r"line 1 has a message that is not"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}, r"line 1 has a message that is not"),
        ({"messages": ["a", {"role": "assistant", "content": "b"}]}, r"line 1 has a message that is not"),
        ({"messages": [ASKED, ASKED]}, r"line 1: the last message is of the role 'user'; an answer, of 'assistant', is"),
        ({"text": "abc"}, r"line 1 holds text, but the target has no tokenizer"),
        ({"token_ids": []}, r"none of its 1 sequences has a token to predict within 50"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, what: str) -> None:
    with pytest.raises(SpecPluginError, match=what) as caught:
        read_examples(written(tmp_path, line), None, 50)
    assert "\n" not in str(caught.value)
    assert "data.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0].missing.more }}", "'dict object' has no attribute 'missing'"),
        ({"one": "a", "two": "b"}, "This model has multiple chat templates with no default specified"),
    ],
)
def test_messages_that_a_chat_template_refuses(tmp_path: Path, template: Any, why: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.chat_template = template
    answered = written(tmp_path, {"messages": [ASKED, {"role": "assistant", "content": "b"}]})
    asked = written(tmp_path, {"messages": [ASKED], "answer": "b"}, name="asked.jsonl")
    said = rf"line 1: the model's chat template refuses these messages \({why}"
    for read in (
        lambda: read_examples(answered, tokenizer, 50),
        lambda: read_questions(asked, tokenizer, 50),
        lambda: encode(load_prompts(asked)[0], tokenizer),
    ):
        with pytest.raises(SpecPluginError, match=said):
            read()


def test_messages_without_a_chat_template_are_joined(tmp_path: Path) -> None:
    class Plain(Letters):
        chat_template = None  # type: ignore[assignment]

    file = written(tmp_path, {"messages": [ASKED, ASKED, {"role": "assistant", "content": "b"}], "answer": "b"})
    (example,) = read_examples(file, Plain(), 100)
    assert example == Example((1, *letters("a\n\na"), *letters("b"), 0), 5)
    (question,) = read_questions(file, Plain(), 100)
    assert question.prompt == (1, *letters("a\n\na\n\nb"))


SEPARATORS = "a\u2028b\u2029c\x85d\x0ce"
"""What Unicode takes for ends of lines, and JSON for characters like others."""


def test_a_line_ends_where_the_file_says_so(tmp_path: Path) -> None:
    """With a mark at the file's start and Windows' ends of lines, too."""
    lines = [{"prompt": SEPARATORS, "answer": " 4"}, {"prompt": "2 + 2 =", "answer": " 4"}]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines)
    file = tmp_path / "lines.jsonl"
    file.write_bytes(text.encode("utf-8-sig"))
    assert [prompt.messages[0]["content"] for prompt in load_prompts(file)] == [SEPARATORS, "2 + 2 ="]
    assert prompts_to_validate(file) == [SEPARATORS, "2 + 2 ="]

    class Bytes:
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(text.encode())

    assert [len(question.prompt) for question in read_questions(file, Bytes(), 99)] == [len(SEPARATORS.encode()), 7]
    file.write_bytes(text.replace("prompt", "text").encode("utf-8-sig"))
    assert [len(example.token_ids) for example in read_examples(file, Bytes(), 99)] == [len(SEPARATORS.encode()), 7]
    plain = tmp_path / "lines.txt"
    plain.write_bytes(f"{SEPARATORS}\r\n\r\nsecond".encode("utf-8-sig"))
    assert [prompt.messages[0]["content"] for prompt in load_prompts(plain)] == [SEPARATORS, "second"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecPluginError, match=r"cannot read .*none\.txt"):
        read_examples(tmp_path / "none.txt", None, 50)
    with pytest.raises(SpecPluginError, match=r"empty\.jsonl holds nothing to learn from: it is empty"):
        read_examples(written(tmp_path, name="empty.jsonl"), None, 50)
