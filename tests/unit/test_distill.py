"""Distillation around a make-believe engine: what is asked, what is written, and going on after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.prompt_files import Prompt, ask
from vllm_specplugin.train import distill as module
from vllm_specplugin.train.distill import Distilled, DistillPlan, distill


class FakeEngine:
    """Answers with the number of the prompt's words, as many times as it is hot; prompts of one word do not fit."""

    made: ClassVar[list[FakeEngine]] = []
    fail_after: ClassVar[int | None] = None

    def __init__(self, title: str, name: str, settings: dict[str, Any], log: Path, every_core: bool) -> None:
        assert every_core
        self.settings, self.asked, self.closed = settings, [], False
        self.made.append(self)

    def wait(self) -> dict[str, Any]:
        return {"max_model_len": 10}

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        if method == "encode":
            texts = [prompt["messages"][0]["content"] for prompt in arguments["prompts"]]
            return {"token_ids": [[len(word) for word in text.split()] if " " in text else [1] * 10 for text in texts]}
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise SpecPluginError("the target's engine failed")
        self.asked.append(arguments["sampling"])
        hot = [int(sampling["temperature"]) for sampling in arguments["sampling"]]
        return {"token_ids": [[len(ids)] * (1 + t) for ids, t in zip(arguments["prompts"], hot, strict=True)]}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    monkeypatch.setattr(module, "EngineProcess", FakeEngine)
    monkeypatch.setattr(module, "SLICE", 2)
    monkeypatch.setattr(FakeEngine, "made", [])
    return FakeEngine.made


PROMPTS = [ask("chat", "one", "a bb ccc"), ask("code", "two", "dd e"), ask("chat", "three", "long")]


def plan(**changes: Any) -> DistillPlan:
    return DistillPlan(**{"target": "the-model", "prompts": PROMPTS, "temperatures": (0.0, 1.0), **changes})


def test_every_prompt_is_answered_at_every_temperature(tmp_path: Path, engines: list[FakeEngine]) -> None:
    out = tmp_path / "answers.jsonl"
    assert distill(plan(max_tokens=7, seed=3), out, progress=False) == Distilled(answers=4, tokens=6, skipped=2)
    header, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    settings = {"target": "the-model", "max_tokens": 7, "temperatures": [0.0, 1.0], "seed": 3, "prompts": 3}
    settings |= {"weights of --target": None, "--engine-args": {}}  # a model that is in no folder here
    assert len(header["distilled_with"].pop("contents of --data")) == 24
    assert header == {"distilled_with": settings}
    assert lines[0] == {"kind": "chat", "temperature": 0.0, "prompt_token_ids": [1, 2, 3], "token_ids": [3]}
    assert lines[1] == {"kind": "code", "temperature": 0.0, "prompt_token_ids": [2, 1], "token_ids": [2]}
    assert lines[2]["skipped"] == "the prompt has 10 tokens, and the context is 10"
    assert lines[3]["token_ids"] == [3, 3]
    assert [line["temperature"] for line in lines] == [0, 0, 0, 1, 1, 1]
    (engine,) = engines
    assert engine.closed
    assert engine.settings == {"model": "the-model", "engine_args": {"seed": 3}}
    assert all(sampling["max_tokens"] == 7 for call in engine.asked for sampling in call)


def test_an_interrupted_run_goes_on(tmp_path: Path, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole.jsonl"
    distill(plan(), whole, progress=False)
    out = tmp_path / "answers.jsonl"
    monkeypatch.setattr(FakeEngine, "fail_after", 1)
    with pytest.raises(SpecPluginError, match="engine failed"):
        distill(plan(), out, progress=False)
    assert engines[-1].closed
    kept = out.read_text()
    out.write_text(kept + '{"kind": "chat", "temp')  # cut off in the middle of a line
    monkeypatch.setattr(FakeEngine, "fail_after", None)
    result = distill(plan(), out, progress=False)
    assert out.read_text() == whole.read_text()
    assert 0 < kept.count("\n") < whole.read_text().count("\n")
    assert sum(map(len, engines[-1].asked)) < sum(map(len, engines[0].asked)), "what was answered is asked again"
    assert result == Distilled(answers=4, tokens=6, skipped=2)


def test_a_finished_file_starts_no_engine(tmp_path: Path, engines: list[FakeEngine]) -> None:
    out = tmp_path / "answers.jsonl"
    first = distill(plan(), out, progress=False)
    assert distill(plan(), out, progress=False) == first
    assert len(engines) == 1


def test_a_file_made_with_something_else_is_left_alone(tmp_path: Path, engines: list[FakeEngine]) -> None:
    out = tmp_path / "answers.jsonl"
    distill(plan(), out, progress=False)
    before = out.read_text()
    for changes, named in (
        ({"max_tokens": 9}, "max_tokens"),
        ({"target": "other"}, "target"),
        ({"engine_args": {"quantization": "fp8"}}, "--engine-args"),
        ({"prompts": PROMPTS[:1]}, "prompts, contents of --data"),
        ({"prompts": PROMPTS[::-1]}, "contents of --data"),
    ):
        with pytest.raises(SpecPluginError, match=f"made with another {named}; name another file"):
            distill(plan(**changes), out, progress=False)
    first, *answers = before.splitlines(keepends=True)
    header = json.loads(first)
    for key in ("contents of --data", "weights of --target", "--engine-args"):  # which earlier releases did not write
        del header["distilled_with"][key]
    out.write_text("".join([json.dumps(header) + "\n", *answers]))
    distill(plan(engine_args={"quantization": "fp8"}), out, progress=False)
    assert len(engines) == 1
    assert "token_ids" in before


def test_a_target_that_was_trained_on_in_its_folder_is_another_one(tmp_path: Path, engines: list[FakeEngine]) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"before")
    out = tmp_path / "answers.jsonl"
    first = distill(plan(target=str(target)), out, progress=False)
    assert distill(plan(target=str(target)), out, progress=False) == first
    (target / "model.safetensors").write_bytes(b"and after")
    with pytest.raises(SpecPluginError, match="made with another weights of --target; name another file"):
        distill(plan(target=str(target)), out, progress=False)
    assert len(engines) == 1


@pytest.mark.parametrize(
    "content",
    [b'{"a": 1}', b'{"a":1}\n{"b":2}', b"no JSON", b"no JSON\n", b"\xff\xfe", b"\xff\xfe\n", b"[1]\n5\n"],
)
def test_a_file_of_something_else_keeps_its_bytes(tmp_path: Path, engines: list[FakeEngine], content: bytes) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_bytes(content)
    with pytest.raises(SpecPluginError, match="exists and is no file of this command"):
        distill(plan(), out, progress=False)
    assert out.read_bytes() == content
    assert not engines


def test_only_a_file_that_is_gone_on_with_is_cut(tmp_path: Path, engines: list[FakeEngine]) -> None:
    out = tmp_path / "answers.jsonl"
    distill(plan(), out, progress=False)
    whole = out.read_bytes()
    for kept in (0, 20):  # interrupted within the header
        out.write_bytes(whole[:kept])
        distill(plan(), out, progress=False)
        assert out.read_bytes() == whole
    half_a_line, half_a_header = whole[:-5], whole[: whole.index(b"\n")]
    for content, said in ((half_a_line, "made with another max_tokens"), (half_a_header, "is no file of this command")):
        out.write_bytes(content)
        with pytest.raises(SpecPluginError, match=said):
            distill(plan(max_tokens=9), out, progress=False)
        assert out.read_bytes() == content
    out.write_bytes(whole + b"5\n")
    with pytest.raises(SpecPluginError, match="no file of this command"):
        distill(plan(), out, progress=False)


def test_prompts_are_handed_over_whole(tmp_path: Path, engines: list[FakeEngine]) -> None:
    talk = Prompt("chat", "talk", ({"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}))
    seen: list[Any] = []
    original = FakeEngine.call

    def call(self: FakeEngine, method: str, **arguments: Any) -> dict[str, Any]:
        seen.extend(arguments["prompts"] if method == "encode" else [])
        return original(self, method, **arguments)

    FakeEngine.call = call  # type: ignore[method-assign]
    try:
        distill(plan(prompts=[talk]), tmp_path / "answers.jsonl", progress=False)
    finally:
        FakeEngine.call = original  # type: ignore[method-assign]
    assert Prompt(**{**seen[0], "messages": tuple(seen[0]["messages"])}) == talk
