"""`evaluate` without an engine: its statistics, its questions, what is asked of which engine, and its report."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from tests.support import training
from vllm_specplugin.cli import evaluate as command
from vllm_specplugin.cli.evaluate import drafting_config, evaluate_command
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.train import evaluate as module
from vllm_specplugin.train.evaluate import Excerpt, Plan, Request, evaluate, prompt_of, summarise
from vllm_specplugin.train.evaluate_questions import Question, kind_of, read_questions
from vllm_specplugin.train.evaluate_report import Evaluation, markdown, print_evaluation
from vllm_specplugin.train.evaluate_statistics import CONFIDENCE, FEWEST_UNITS, difference, ratio, share

# -- statistics --------------------------------------------------------------------------------------------

TRIALS = 300
# The intervals hold the truth in 95 % of trials; so many misses or more of 300 have a chance below 1e-3 (binomial).
MOST_MISSES = 28
FEWEST_MISSES = 4


def test_intervals_of_ratios_hold_the_truth_as_often_as_they_say() -> None:
    """Texts of different lengths with losses that go together within a text: the unit is the text."""
    random = np.random.default_rng(0)
    misses = 0
    for trial in range(TRIALS):
        tokens = random.integers(5, 40, size=60)
        level = random.normal(2.0, 0.5, size=60)  # of each text, independent of its length
        found = ratio(list(tokens * level), list(tokens), seed=trial)
        misses += not found.low <= 2.0 <= found.high
    assert FEWEST_MISSES <= misses <= MOST_MISSES


def test_intervals_that_take_tokens_for_independent_would_be_too_narrow() -> None:
    """The negative control of the test above: with tokens as units the truth is missed far too often."""
    random = np.random.default_rng(0)
    misses = 0
    for _ in range(TRIALS):
        tokens = random.integers(5, 40, size=60)
        level = random.normal(2.0, 0.5, size=60)
        losses = np.repeat(level, tokens)
        half = 1.96 * losses.std() / math.sqrt(len(losses))
        misses += abs(losses.mean() - 2.0) > half
    assert misses > 2 * MOST_MISSES


def test_a_paired_difference_forgets_what_both_have_in_common() -> None:
    random = np.random.default_rng(1)
    tokens, level = np.full(40, 10.0), random.normal(2.0, 1.0, size=40)
    better = level - 0.05 + random.normal(0.0, 0.02, size=40)
    found = difference(list(tokens * better), list(tokens), list(tokens * level), list(tokens))
    assert found.low < -0.05 < found.high < 0
    assert found.settled
    apart = ratio(list(tokens * level), list(tokens))
    assert apart.high - apart.low > 10 * (found.high - found.low)
    same = difference([1.0, 2.0] * 3, [1.0] * 6, [1.0, 2.0] * 3, [1.0] * 6)
    assert (same.value, same.low, same.high, same.settled) == (0.0, 0.0, 0.0, False)


def test_a_few_units_settle_nothing() -> None:
    """However well they agree: the intervals of so few would have no width, or far too little of it."""
    assert difference([2.0], [1], [1.9], [1]).settled is False
    for units in range(1, FEWEST_UNITS + 2):
        losses = [2.0 + 0.01 * unit for unit in range(units)]
        found = difference(losses, [1.0] * units, [loss - 0.1 for loss in losses], [1.0] * units)
        assert found.value == pytest.approx(0.1)
        assert found.settled is (units >= FEWEST_UNITS)
        assert (found.low is None, found.high is None) == (not found.settled, not found.settled)
        perplexity = ratio(losses, [1.0] * units).map(math.exp)
        assert (perplexity.low is None) is (units < FEWEST_UNITS)
        assert perplexity.value == pytest.approx(math.exp(np.mean(losses)))


def test_wilson() -> None:
    """Against the closed form's known values (Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29)."""
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = share(successes, trials)
        assert (found.value, found.low, found.high) == (
            successes / trials,
            pytest.approx(low, abs=1e-4),
            pytest.approx(high, abs=1e-4),
        )
    assert CONFIDENCE == 0.95


def test_units_without_trials_say_nothing_and_none_at_all_is_an_error() -> None:
    found = ratio([3.0, 0.0, 5.0], [1.0, 0.0, 1.0])
    assert (found.value, found.units) == (4.0, 2)
    with pytest.raises(ValueError, match="no unit"):
        ratio([0.0], [0.0])
    with pytest.raises(ValueError, match="3 successes of 2"):
        share(3, 2)


# -- questions ---------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer: a token per byte."""

    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"[{message['content']}]" for message in messages)


def questions_of(tmp_path: Path, *lines: str) -> list[Question]:
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(lines))
    return read_questions(file, Bytes(), 40)


def test_questions_are_read(tmp_path: Path) -> None:
    exact, choice, numbered, chat = questions_of(
        tmp_path,
        '{"prompt": "2+2=", "answer": "4"}',
        "",
        '{"prompt": "sky", "choices": [" red", " blue"], "answer": " blue"}',
        '{"prompt": "sky", "choices": [" red", " blue"], "answer": 0}',
        '{"messages": [{"role": "user", "content": "hi"}], "answer": "yo"}',
    )
    assert exact == Question(tuple(b"2+2="), (tuple(b"4"),), 0)
    assert choice.texts == [list(b"sky red"), list(b"sky blue")]
    assert (choice.answer, numbered.answer) == (1, 0)
    assert chat.prompt == tuple(b"[hi]")
    assert kind_of([exact, choice, numbered]) == (
        "1 questions whose answer greedy decoding gives word for word and 2 questions with the right choice likeliest per token"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1 is no JSON"),
        ('{"prompt": "a"}', '"answer" are expected'),
        ('{"answer": "a"}', '"answer" are expected'),
        ('{"prompt": "a", "messages": [], "answer": "b"}', '"answer" are expected'),
        ('{"prompt": null, "answer": "b"}', '"prompt" is None; text is expected'),
        ('{"messages": "a", "answer": "b"}', '"messages" is no list'),
        ('{"messages": [], "answer": "b"}', '"messages" is no list'),
        ('{"messages": [{"role": "user"}], "answer": "b"}', '"messages" is no list'),
        ('{"prompt": "a", "answer": 4}', '"answer" is 4; text is expected'),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "at least two texts"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "one of the choices"),
        ('{"prompt": "a", "answer": ""}', "is empty"),
        ('{"prompt": "' + "a" * 40 + '", "answer": "b"}', "41 tokens, more than --max-length 40"),
        ("", "holds none"),
    ],
)
def test_impossible_questions_are_refused(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        questions_of(tmp_path, line)


def test_a_question_is_right() -> None:
    exact = Question((1,), ((2, 3),), 0)
    assert exact.is_right([-9.0], [2], [2])
    assert not exact.is_right([-0.1], [2], [1])
    choice = Question((1,), ((2,), (3, 4, 5)), 1)
    assert choice.is_right([-1.0, -2.4], [1, 3], [1, 0])  # -0.8 per token beats -1.0
    assert not choice.is_right([-1.0, -3.3], [1, 3], [1, 3])


# -- the run -----------------------------------------------------------------------------------------------


class FakeEngine:
    """Instead of an engine process: every model says each token with the log-probability that its name names."""

    made: list[FakeEngine] = []  # noqa: RUF012

    def __init__(self, title: str, name: str, settings: dict[str, Any], log: Path) -> None:
        self.settings, self.closed = settings, False
        self.drafts = settings["speculative_config"] is not None
        self.logprob = {"target": -2.0, "other": -1.5}[settings["model"]]
        self.decoded: list[dict[str, Any]] = []
        FakeEngine.made.append(self)

    def wait(self) -> dict[str, Any]:
        return {"vllm": "0.32.0", "dtype": "float32", "vocab_size": 300}

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return getattr(self, method)(**arguments)  # type: ignore[no-any-return]

    def score(self, texts: list[list[int]], starts: list[int]) -> dict[str, Any]:
        tokens = [len(text) - start for text, start in zip(texts, starts, strict=True)]
        right = [sum(token % 2 == 0 for token in text[start:]) for text, start in zip(texts, starts, strict=True)]
        return {"logprobs": [self.logprob * count for count in tokens], "tokens": tokens, "right": right}

    def decode(self, prompt: list[int], max_tokens: int, temperature: float) -> dict[str, Any]:
        self.decoded.append({"prompt": prompt, "temperature": temperature})
        passes = 4 if self.drafts else 12
        accepted = [3, 3, 2] if self.drafts else []
        return {
            "token_ids": list(range(13)),
            "passes": passes,
            "seconds": 0.1 * passes,
            "drafts": 4 if self.drafts else 0,
            "accepted": accepted,
        }

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    FakeEngine.made = []
    monkeypatch.setattr(module, "EngineProcess", FakeEngine)
    return FakeEngine.made


EXCERPTS = (Excerpt(tuple(range(10, 30)), 12), Excerpt(tuple(range(50, 60)), 0), Excerpt(tuple(range(70, 90)), 12)) * 2


def plan_of(**changes: Any) -> Plan:
    arguments: dict[str, Any] = {
        "target": "target",
        "speculative_config": {"proposer": "mtp"},
        "against": "other",
        "data": "held_out.jsonl",
        "excerpts": EXCERPTS,
        "questions": [Question((1, 2), ((4, 6),), 0), Question((1, 2), ((5,),), 0)],
        "questions_file": "questions.jsonl",
        "prompts": 6,
        "max_tokens": 13,
    }
    return Plan(**(arguments | changes))


def run(plan: Plan, tmp_path: Path) -> Evaluation:
    with Progress(disable=True) as bars:
        return evaluate(plan, tmp_path, bars)


def test_everything_is_measured_on_the_right_engine(engines: list[FakeEngine], tmp_path: Path) -> None:
    report = run(plan_of(), tmp_path)
    plain, drafting, other = engines
    assert [engine.settings["model"] for engine in engines] == ["target", "target", "other"]
    assert [engine.settings["speculative_config"] for engine in engines] == [None, {"proposer": "mtp"}, None]
    assert all(engine.closed for engine in engines)
    assert plain.settings["engine_args"] == {"max_model_len": 20 + 13 + 32, "seed": 0}
    # A prompt up to the answer, or half a text; one to warm up, then both engines in turns, per temperature.
    prompts = [list(range(10, 22)), list(range(50, 55)), list(range(70, 82))] * 2
    for engine in (plain, drafting):
        assert [one["prompt"] for one in engine.decoded] == [prompts[0], *prompts] * 2
        assert [one["temperature"] for one in engine.decoded] == [0.0] * 7 + [1.0] * 7
    assert other.decoded == []
    target, with_drafts, against = report.main_head
    assert report.scored_tokens == 2 * (8 + 9 + 8)
    assert (target.loss.value, with_drafts.loss.value, against.loss.value) == (2.0, 2.0, 1.5)
    assert target.perplexity.value == pytest.approx(math.exp(2.0))
    assert target.next_token.value == pytest.approx((4 + 4 + 4) / 25)
    assert target.downstream is not None
    assert target.downstream.value == 0.5
    assert with_drafts.loss_difference is not None
    assert against.loss_difference is not None
    assert not with_drafts.loss_difference.settled
    assert against.loss_difference.value == -0.5
    assert against.loss_difference.settled
    greedy = report.acceptance[0]
    assert greedy.length.value == 3.0  # 12 tokens after the first in 4 passes
    assert [position.value for position in greedy.by_position] == [0.75, 0.75, 0.5]
    assert greedy.speed_up == pytest.approx(3.0)
    assert (greedy.length.units, greedy.drafts, greedy.tokens) == (6, 24, 72)


def test_a_target_alone(engines: list[FakeEngine], tmp_path: Path) -> None:
    report = run(plan_of(speculative_config=None, against=None, questions=[], questions_file=None), tmp_path)
    assert len(engines) == len(report.main_head) == 1
    assert report.acceptance == []
    assert report.main_head[0].downstream is report.downstream_kind is None


def test_a_failing_engine_leaves_none_behind(engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeEngine, **_: Any) -> dict[str, Any]:
        raise ConfigError("no")

    monkeypatch.setattr(FakeEngine, "decode", fail)
    with pytest.raises(ConfigError):
        run(plan_of(), tmp_path)
    assert all(engine.closed for engine in engines)


def test_a_text_of_another_vocabulary_is_refused(engines: list[FakeEngine], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token id 300, but a model's vocabulary has 300 tokens"):
        run(plan_of(excerpts=[Excerpt((1, 300), 0)]), tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"excerpts": []}, "--data: held_out.jsonl"),
        ({"prompts": 0}, "--prompts is 0"),
        ({"max_tokens": 1}, "--max-tokens 1"),
        ({"temperatures": (-0.5,)}, "--temperature is -0.5"),
    ],
)
def test_impossible_plans_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(**changes)


def test_answers_that_end_at_once_count_for_nothing() -> None:
    ended = Request([7], passes=0, seconds=0.0, drafts=0, accepted=[0])
    went_on = Request([7, 8, 9], passes=1, seconds=0.5, drafts=1, accepted=[1])
    plain = Request([7, 8, 9], passes=2, seconds=1.0, drafts=0, accepted=[])
    found = summarise(0.0, [ended, went_on], [plain, plain])
    assert (found.length.value, found.length.units) == (2.0, 1)
    with pytest.raises(ConfigError, match="ended with its first token"):
        summarise(0.0, [ended], [plain])
    never = summarise(0.0, [Request([7, 8], 1, 0.5, 0, [0, 0])], [plain])
    assert never.by_position == []
    assert never.length.value == 1.0


def test_prompts() -> None:
    assert prompt_of(Excerpt((5, 6, 7, 8), 3)) == (5, 6, 7)
    assert prompt_of(Excerpt((5, 6, 7, 8), 0)) == (5, 6)
    assert prompt_of(Excerpt((5, 6), 1)) == (5,)


# -- the report and the command ----------------------------------------------------------------------------


def test_the_report_reads_back_and_says_what_it_rests_on(engines: list[FakeEngine], tmp_path: Path) -> None:
    report = run(plan_of(), tmp_path)
    report.write_json(tmp_path / "evaluation.json")
    assert Evaluation.model_validate_json((tmp_path / "evaluation.json").read_text()) == report
    text = io.StringIO()
    print_evaluation(report, Console(file=text, width=200))
    for shown in (text.getvalue(), markdown(report)):
        assert "2.000 [2.000, 2.000]" in shown
        assert "3.00 [3.00, 3.00]" in shown
        assert "75% 75% 50%" in shown
        assert "50 tokens of 6 texts in held_out.jsonl" in shown
        assert "2 questions whose answer greedy decoding gives word for word" in shown
        assert "At temperature 0: 6 requests, 72 tokens, 24 drafts." in shown
        assert "target with drafts: its loss is not told apart from the target's" in shown
        assert "other: its loss is different from the target's (by -0.5000 [-0.5000, -0.5000]" in shown
        assert "other: its downstream score is not told apart from the target's (by 0.0000 [-])." in shown
        assert "[-]: fewer than 6 texts or questions, too few for an interval or a difference." in shown


def test_a_report_on_a_few_texts_has_no_intervals(engines: list[FakeEngine], tmp_path: Path) -> None:
    report = run(plan_of(excerpts=EXCERPTS[:5], questions=[]), tmp_path)
    report.write_json(tmp_path / "evaluation.json")
    assert Evaluation.model_validate_json((tmp_path / "evaluation.json").read_text()) == report
    shown = markdown(report)
    assert "| 2.000 [-] | 7.39 [-] |" in shown
    assert "| 3.00 [-] |" in shown
    assert "other: its loss is not told apart from the target's (by -0.5000 [-])." in shown
    assert "[-]: fewer than 6 texts or questions" in shown
    assert "different from" not in shown


def write_model(folder: Path, **more: Any) -> Path:
    """As much of a model as its configuration tells."""
    folder.mkdir()
    sizes = {"hidden_size": 8, "vocab_size": 16, "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **sizes, **more}))
    return folder


def test_what_drafts_is_found_out(tmp_path: Path) -> None:
    mtp, plain = write_model(tmp_path / "mtp", num_nextn_predict_layers=1), write_model(tmp_path / "plain")
    (empty := tmp_path / "empty").mkdir()
    assert drafting_config(str(mtp), None, None) == {"proposer": "mtp", "control": "fixed"}
    assert drafting_config(str(plain), None, None) is None
    assert drafting_config(str(empty), None, None) is None  # which is for the engine to refuse
    assert drafting_config(str(mtp), None, '{"method": "mtp"}') == {"method": "mtp"}
    assert drafting_config(str(plain), str(plain), None) == {"proposer": "draft_model", "model": str(plain), "control": "fixed"}
    with pytest.raises(ConfigError, match="exclude each other"):
        drafting_config(str(plain), str(plain), "{}")
    with pytest.raises(ConfigError, match="give it as --target"):
        drafting_config(str(plain), str(mtp), None)


@pytest.mark.parametrize("layers", [1, 0])
def test_a_target_on_the_hub(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    """Its own MTP layers draft; where it has none, that nothing drafts is said, and not on stdout."""
    import huggingface_hub

    class Api:
        def list_repo_files(self, model: str, revision: str | None) -> list[str]:
            return ["config.json"]

    snapshot = str(write_model(tmp_path / "snapshot", num_nextn_predict_layers=layers))
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: snapshot)
    monkeypatch.setattr(command, "tokenizer_of", lambda *_: Bytes())
    monkeypatch.chdir(tmp_path)  # where no folder is called as the target
    data = training.write_data(tmp_path / "data.jsonl", count=3)
    evaluate_command("target", None, None, None, data, None, 3, 1, 13, 64, (0.0,), None, 0, None, as_json=True)
    said = capsys.readouterr()
    report = Evaluation.model_validate_json(said.out)
    if layers:
        assert report.speculative_config == {"proposer": "mtp", "control": "fixed"}
        assert len(report.acceptance) == 1
        assert not said.err
    else:
        assert report.acceptance == []
        assert said.err == command.nothing_drafts("target") + "\n"
        assert "no MTP layers were found in 'target'" in said.err
        assert "--heads DIR" in said.err
        config = said.err.split("--speculative-config '")[1].split("'")[0]
        assert drafting_config("target", None, config) == json.loads(config)
