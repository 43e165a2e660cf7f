"""The demo without an engine: arithmetic, table, prompts, the order of events. Its engine run is `make demo`."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_specplugin.cli.options import parse_object
from vllm_specplugin.demo import command, run, table
from vllm_specplugin.demo.measure import (
    DemoResult,
    Difference,
    Noise,
    PromptResult,
    Sample,
    first_difference,
    margin_between,
    margin_changes,
    summed,
)
from vllm_specplugin.demo.prompts import CHAT, CODE, DOCUMENT, demo_prompts
from vllm_specplugin.engine_process import EngineProcess, engine_environment, models_of, preload_libraries
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.neighbours import NeighbourMeter, machine_ticks, process_ticks
from vllm_specplugin.progress import progress_bars
from vllm_specplugin.prompt_files import USER_KIND, load_prompts


def sample(tokens: int, seconds: float, passes: int, drafts: int = 0, accepted: tuple[int, ...] = (), first: int = 0) -> Sample:
    """A request of `tokens` tokens numbered from `first`, of which the prefill took half a second."""
    ids = tuple(range(first, first + tokens))
    return Sample(ids, seconds, 0.5, passes, drafts, 5 * drafts, sum(accepted), accepted)


def result_of(*prompts: PromptResult, others: float | None = 0.02) -> DemoResult:
    environment = {"vllm": "0.32.0", "cores": 2, "dtype": "bfloat16", "others_share": others}
    return DemoResult("/models/Tiny", {"proposer": "ngram"}, 80, 1, list(prompts), Noise(0.125, 40), environment)


CODE_PROMPT = PromptResult(CODE, "one", 100, [sample(41, 4.5, 40)], [sample(41, 2.5, 20, 10, (8, 6, 6))])
CHAT_PROMPT = PromptResult(CHAT, "two", 20, [sample(21, 2.5, 20)], [sample(21, 2.5, 20, 0)])


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_row_of_one_prompt() -> None:
    row = result_of(CODE_PROMPT).rows()[0]
    assert row.plain_rate == pytest.approx(41 / 4.5)
    assert row.speculative_rate == pytest.approx(41 / 2.5)
    assert row.ratio == pytest.approx(4.5 / 2.5)
    assert row.plain_decode_rate == pytest.approx(10.0)
    assert row.acceptance_length == pytest.approx(2.0)  # 40 tokens after the first in 20 passes
    assert row.drafted_passes == pytest.approx(0.5)
    assert row.acceptance_per_position == pytest.approx((0.8, 0.6, 0.6))
    assert row.acceptance_rate == pytest.approx(20 / 50)
    assert (row.same, row.prompts, row.ratio_range) == (1, 1, None)


def test_rows_are_kinds_and_a_total_that_weighs_by_tokens() -> None:
    rows = result_of(CODE_PROMPT, CHAT_PROMPT).rows()
    assert [row.kind for row in rows] == [CODE, CHAT, "all"]
    assert rows[-1].plain_rate == pytest.approx(62 / 7.0)
    assert rows[-1].acceptance_length == pytest.approx(60 / 40)
    assert rows[1].acceptance_per_position == ()  # nothing was drafted: no division by zero


def test_repetitions_count_by_their_median_time_and_give_a_range() -> None:
    plain = [sample(41, seconds, 40) for seconds in (4.0, 8.0, 5.0)]
    speculative = [sample(41, 2.0, 20, 10, (5,)) for _ in range(3)]
    row = result_of(PromptResult(CODE, "one", 100, plain, speculative)).rows()[0]
    assert row.plain_rate == pytest.approx(41 / 5.0)
    assert row.ratio == pytest.approx(2.5)
    assert row.ratio_range == pytest.approx((2.0, 4.0))
    assert row.acceptance_per_position == pytest.approx((0.5,))


def test_summed_pads_shorter_vectors() -> None:
    assert summed([(1, 2), (), (1, 1, 1)]) == (2, 3, 1)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((1, 2), (1, 2), None), ((1, 2, 3), (1, 5, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (4,), 0), ((), (), None)],
)
def test_first_difference(first: tuple[int, ...], second: tuple[int, ...], expected: int | None) -> None:
    assert first_difference(first, second) == expected


def test_unrepeatable_prompts_are_seen() -> None:
    prompt = PromptResult(CODE, "one", 9, [sample(4, 1.0, 3)] * 2, [sample(4, 1.0, 3), sample(4, 1.0, 3, first=7)])
    assert not prompt.repeatable
    assert prompt.same  # by the first repetition
    lines = table.differences(result_of(prompt))
    assert lines == ["code rewriting (one): speculative decoding gave different outputs in different repetitions"]


# --- where outputs part ----------------------------------------------------------------------------------------------


def test_margin_changes_compares_the_top_two_and_skips_what_is_missing() -> None:
    decoded = [{"1": -0.1, "2": -2.1, "3": -9.0}, {"1": -0.5, "2": -0.6}, {"1": -0.2}]
    forced = [{"2": -2.0, "1": -0.25}, {"1": -0.5, "7": -0.6}, {"1": -0.2}]
    assert margin_changes(decoded, forced) == pytest.approx([0.25])


def test_margin_between_needs_both_tokens() -> None:
    logprobs = {"5": -0.5, "9": -0.75}
    assert margin_between(logprobs, 5, 9) == pytest.approx(0.25)
    assert margin_between(logprobs, 5, 4) is None
    assert margin_between(logprobs, 5, None) is None


def test_verdicts() -> None:
    tie = Difference(3, " a", " b", 0.125, 0.125)
    assert tie.near_tie
    assert tie.verdict == "near-tie (margin 0.125, noise up to 0.125)"
    clear = Difference(3, " a", " b", 1.5, 0.125)
    assert not clear.near_tie
    assert clear.verdict.startswith("UNEXPLAINED (margin 1.500")
    assert Difference(3, " a", " b", None, 0.125, "no such token").verdict == "UNEXPLAINED (no such token)"


def test_noise_keeps_the_largest() -> None:
    noise = Noise().including([0.1, 0.3]).including([]).including([0.2])
    assert (noise.largest, noise.positions) == (0.3, 3)


# --- table and files -------------------------------------------------------------------------------------------------


def parted() -> PromptResult:
    prompt = PromptResult(CHAT, "two", 20, [sample(21, 2.5, 20)], [sample(21, 2.5, 20, first=1)])
    prompt.difference = Difference(0, " A", " The", 0.0625, 0.125)
    return prompt


def rendered(result: DemoResult) -> str:
    console = Console(file=io.StringIO(), width=80)
    table.print_result(result, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table_tells_all() -> None:
    shown = " ".join(rendered(result_of(CODE_PROMPT, parted())).split())
    for text in ("code rewriting", "1.80x", "80 60 60", "no drafts", "1 of 2", "near-tie (margin 0.062"):
        assert text in shown
    assert "Other processes" not in shown


def test_table_fits_80_columns() -> None:
    long_drafts = sample(41, 2.5, 20, 10, (10, 10, 10, 10, 10))
    shown = rendered(result_of(PromptResult(DOCUMENT, "one", 100, [sample(410, 4.5, 40)] * 2, [long_drafts] * 2), parted()))
    assert "…" not in shown  # nothing was cut


def test_a_busy_machine_is_called_busy() -> None:
    assert "Other processes took 40% of the processors" in " ".join(rendered(result_of(CODE_PROMPT, others=0.4)).split())
    assert "Other processes" not in rendered(result_of(CODE_PROMPT, others=None))


def test_markdown_has_a_table_of_the_same_cells() -> None:
    text = table.markdown(result_of(CODE_PROMPT, parted()))
    lines = text.splitlines()
    assert lines[0] == 'Tiny, plain and with `{"proposer": "ngram"}`, greedy, bfloat16, one request at a time:'
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert len(rows) == 2 + 3
    assert any("outputs part at token 0" in line for line in lines)


def test_dump_is_json_with_samples_and_verdicts() -> None:
    dumped = json.loads(json.dumps(result_of(CODE_PROMPT, parted()).dump()))
    assert dumped["rows"][0]["ratio"] == pytest.approx(1.8)
    assert dumped["prompts"][0]["plain"][0]["passes"] == 40
    assert dumped["prompts"][1]["difference"]["verdict"].startswith("near-tie")
    assert Sample.load(dumped["prompts"][0]["speculative"][0]) == CODE_PROMPT.speculative[0]


# --- other processes -------------------------------------------------------------------------------------------------


def test_ticks_from_proc() -> None:
    assert machine_ticks("cpu  10 1 5 80 4 0 2 3 7 0\ncpu0 1 2 3") == (10 + 1 + 5 + 2 + 3, 105)
    fields = " ".join(str(number) for number in range(3, 30))
    assert process_ticks(f"123 (a (b) c) S {' '.join(fields.split()[1:])}") == 14 + 15


def test_neighbour_meter_gives_a_share() -> None:
    meter = NeighbourMeter([os.getpid()])
    sum(range(3_000_000))
    share = meter.share()
    assert share is None or 0.0 <= share <= 1.0
    assert NeighbourMeter([2**30]).share() is None  # no such process


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_demo_prompts_are_four_kinds_ending_with_the_user() -> None:
    prompts = demo_prompts()
    kinds = [prompt.kind for prompt in prompts]
    assert len(set(kinds)) == 4
    assert all(kinds.count(kind) >= 2 for kind in kinds)
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)
    assert len({(prompt.kind, prompt.name) for prompt in prompts}) == len(prompts)


def test_prompts_from_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Hello there\n\n  Count to ten \n", encoding="utf-8")
    prompts = load_prompts(file)
    assert [prompt.name for prompt in prompts] == ["line 1", "line 3"]
    assert prompts[1].messages == ({"role": "user", "content": "Count to ten"},)
    assert {prompt.kind for prompt in prompts} == {USER_KIND}


def test_prompts_from_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "extra": 1}]
    file.write_text("\n".join(json.dumps(entry) for entry in ({"prompt": "p", "kind": "x"}, {"messages": turns})))
    first, second = load_prompts(file)
    assert (first.kind, first.messages) == ("x", ({"role": "user", "content": "p"},))
    assert second.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no prompts"),
        ("{nonsense", "line 1 is not JSON"),
        ("[1]", "line 1 is a list"),
        ('{"prompt": "a"}\n{"promt": "b"}', "line 2 has the keys promt"),
        ('{"prompt": "a", "messages": []}', 'either "prompt"'),
        ('{"messages": [{"role": "user"}]}', "line 1 has a message"),
    ],
)
def test_faulty_prompt_files_name_the_line(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(SpecPluginError, match=told):
        load_prompts(file)


def test_missing_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(SpecPluginError, match="cannot read the prompts"):
        load_prompts(tmp_path / "none.txt")


# --- the command's own checks ----------------------------------------------------------------------------------------


def test_an_empty_configuration_is_refused() -> None:
    with pytest.raises(SpecPluginError, match="--speculative-config is empty"):
        command.demo_command(model="m", speculative_config={})


@pytest.mark.parametrize("text", ["{", "[]", '"ngram"'])
def test_speculative_config_must_be_an_object(text: str) -> None:
    with pytest.raises(SpecPluginError, match="--speculative-config"):
        parse_object("--speculative-config", text, "{}")


def test_unwritable_outputs_fail_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(SpecPluginError, match=r"--json .* its folder does not exist"):
        command.demo_command(model="m", json=tmp_path / "no" / "file.json")


@pytest.mark.parametrize(("max_tokens", "repeat", "prompts"), [(1, 1, None), (80, 0, None), (80, 1, [])])
def test_nothing_to_measure_is_refused(max_tokens: int, repeat: int, prompts: list | None) -> None:
    with pytest.raises(SpecPluginError):
        run.run_demo("m", max_tokens=max_tokens, repeat=repeat, prompts=prompts, progress=False)


# --- engine process --------------------------------------------------------------------------------------------------


class ScriptedEngine:
    """Stands in for an EngineProcess: emits a given output, so many tokens per step, and records the turns it gets."""

    def __init__(self, title: str, token_ids: list[int], per_step: int, turns: list[str]) -> None:
        self.title, self.token_ids, self.per_step, self.turns = title, token_ids, per_step, turns

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return getattr(self, method)(**arguments)

    def begin(self, prompt: int, max_tokens: int) -> dict[str, Any]:
        self.done = 0
        return {}

    def advance(self, until: int) -> dict[str, Any]:
        self.turns.append(self.title)
        while self.done < min(until, len(self.token_ids)):
            self.done = min(self.done + self.per_step, len(self.token_ids))
        return {"tokens": self.done, "finished": self.done == len(self.token_ids)}

    def finish(self) -> dict[str, Any]:
        passes = -(-len(self.token_ids) // self.per_step)
        return {"token_ids": self.token_ids, "seconds": 1.0, "first_token_seconds": 0.1, "passes": passes}

    def decode_logprobs(self, prompt: int, max_tokens: int) -> dict[str, Any]:
        ids = self.token_ids[:max_tokens]
        return {"token_ids": ids, "logprobs": [{str(token): -0.5, "99": -0.6} for token in ids]}

    def forced_logprobs(self, prompt: int, token_ids: list[int]) -> dict[str, Any]:
        return {"logprobs": [{str(token): -0.5, "99": -0.75} for token in token_ids]}

    def text(self, token_ids: list[int]) -> dict[str, Any]:
        return {"text": " ".join(map(str, token_ids))}


def test_engines_take_turns_and_a_finished_one_is_left_alone() -> None:
    turns: list[str] = []
    engines = [ScriptedEngine("plain", list(range(20)), 1, turns), ScriptedEngine("fast", list(range(10)), 3, turns)]
    counts: list[int] = []
    first, second = run._race(engines, 0, 80, counts.append)  # type: ignore[arg-type]
    assert turns == ["plain", "fast", "fast", "plain", "plain"]  # to 8, to 16 in the other order, to 24
    assert counts[-1] == 30
    assert (len(first.token_ids), len(second.token_ids)) == (20, 10)


def test_a_difference_is_explained_by_the_margin_at_its_position() -> None:
    plain = ScriptedEngine("plain", [1, 2, 3], 1, [])
    prompts = [PromptResult(CHAT, name, 9, [sample(1, 1.0, 1)], [sample(1, 1.0, 1)]) for name in ("same", "parted", "odd")]
    for prompt, other in zip(prompts, ((1, 2, 3), (1, 2, 99), (1, 7, 3)), strict=True):
        prompt.plain[0] = replace(prompt.plain[0], token_ids=(1, 2, 3))
        prompt.speculative[0] = replace(prompt.speculative[0], token_ids=other)
    noise = run._explain(plain, prompts, Noise(), progress_bars(False))  # type: ignore[arg-type]
    assert noise == Noise(pytest.approx(0.15), 3 + 2)
    same, parted_at, odd = (prompt.difference for prompt in prompts)
    assert same is None
    assert parted_at == Difference(2, "3", "99", pytest.approx(0.1), pytest.approx(0.15))
    assert parted_at.near_tie
    assert odd is not None
    assert odd.verdict == "UNEXPLAINED (the other token was not among the likely ones)"


def test_plain_decoding_that_does_not_repeat_itself_explains_nothing() -> None:
    prompt = PromptResult(CHAT, "two", 9, [sample(3, 1.0, 2)], [sample(3, 1.0, 2, first=0)])
    prompt.speculative[0] = replace(prompt.speculative[0], token_ids=(0, 1, 9))
    run._explain(ScriptedEngine("plain", [5, 6, 7], 1, []), [prompt], Noise(), progress_bars(False))  # type: ignore[arg-type]
    assert prompt.difference is not None
    assert prompt.difference.verdict == "UNEXPLAINED (plain decoding did not repeat itself)"


def test_what_the_user_preloads_stays_and_is_not_doubled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("glob.glob", lambda pattern: [pattern.replace("*", "")])
    assert len(preload_libraries([])) == 2
    assert preload_libraries(["/opt/libgomp.so.1", "/opt/libjemalloc.so"]) == []
    monkeypatch.setenv("LD_PRELOAD", "/opt/mine.so")
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    environment = engine_environment("some/hub-model")
    assert environment["LD_PRELOAD"].startswith("/opt/mine.so:")
    assert environment["KMP_BLOCKTIME"] == "7"
    assert "HF_HUB_OFFLINE" not in environment
    assert engine_environment(str(tmp_path))["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine_environment(str(tmp_path), "some/heads")  # which may have to be fetched
    settings = {"model": "a", "speculative_config": {"proposer": "eagle", "model": "b"}, "engine_args": {"tokenizer": "c"}}
    assert models_of(settings) == ["a", "b", "c"]
    assert models_of({"model": "a", "speculative_config": None}) == ["a"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in engine_environment("some/hub-model")
    assert engine_environment("some/hub-model", every_core=True)["OMP_NUM_THREADS"] == str(os.cpu_count())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert engine_environment("some/hub-model", every_core=True)["OMP_NUM_THREADS"] == "3"


def test_an_engine_that_dies_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    engine = EngineProcess("plain", "any.module", {"model": "m"}, tmp_path / "plain.log")
    with pytest.raises(SpecPluginError, match=r"the plain engine failed \(start\): its process ended with 1; log: .*plain\.log"):
        engine.wait()
    engine.close()
