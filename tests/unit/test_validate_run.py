"""The run without an engine: what it asks for, that an interrupt loses nothing, that a resumed run equals one in one go."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_specplugin.cli.main import app
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.validate import run as running
from vllm_specplugin.validate.first_tokens import LEAST_SAMPLES, beginnings, cells, likeliest_after
from vllm_specplugin.validate.outcome import NOTHING_LEFT
from vllm_specplugin.validate.plan import Plan, make_plan
from vllm_specplugin.validate.records import Kind, Tokens
from vllm_specplugin.validate.report import Report
from vllm_specplugin.validate.run import FIRST_TOKENS, round_of, run
from vllm_specplugin.validate.sampling import Sampling
from vllm_specplugin.validate.verdict import Verdict
from vllm_specplugin.validate.wire import pack_tokens

VOCAB = 6
PROMPTS = [[1, 2], [3], [4, 4, 4], [5], [0]]
P = np.array([0.4, 0.3, 0.15, 0.1, 0.05, 0.0])


class FakeEngine:
    """Stands in for `EngineProcess`: an engine whose every token follows P, drafting token 0 at every other place."""

    made: list[FakeEngine] = []  # noqa: RUF012
    lenience = 0.0
    """The chance that the draft is emitted whatever was drawn."""
    interrupt_at: int | None = None
    """Ctrl-C comes during this call of `sample`, counted over all engines."""
    greedy = ((0, 1), (0, 1))
    """What plain decoding and the engine under test say."""
    lossless = True
    """By the verifier's own account."""
    samples = 0

    def __init__(self, title: str, module: str, settings: dict[str, Any], log: Path) -> None:
        self.title, self.settings, self.log, self.closed = title, settings, log, False
        self.random = np.random.default_rng(settings["seed"])
        self.requests: list[list[Any]] = []
        FakeEngine.made.append(self)

    def wait(self) -> dict[str, Any]:
        engine = {"dtype": "float32", "model_runner": "V1"}
        return {"engine": engine, "verifier": "one_hot", "lossless": self.lossless, "prompts": PROMPTS, "vocab_size": VOCAB}

    def close(self) -> None:
        self.closed = True

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self, f"do_{method}")(**arguments)
        return json.loads(json.dumps(answer))

    def do_greedy(self, max_tokens: int) -> dict[str, Any]:
        said = list(self.greedy[self.title != "plain"])
        row = {0: -0.9, 1: -1.2, 2: -1.9}
        return {"outputs": [{"token_ids": said, "logprobs": [row] * len(said)}] * len(PROMPTS)}

    def do_texts(self, token_ids: list[int]) -> dict[str, Any]:
        return {"texts": [f"<{token}>" for token in token_ids]}

    def do_distributions(self, prefixes: Sequence[Any], file: str) -> dict[str, Any]:
        with np.errstate(divide="ignore"):
            np.save(file, np.tile(np.log(P).astype(np.float32), (len(prefixes), 1)))
        return {}

    def do_sample(self, requests: list[list[int]], file: str) -> dict[str, Any]:
        FakeEngine.samples += 1
        if FakeEngine.samples == self.interrupt_at:
            raise KeyboardInterrupt
        self.requests.append(requests)
        lengths = np.array([tokens for _, tokens in requests], dtype=np.int64)
        number = int(lengths.sum())
        drafted = np.arange(number) % 2 == 0
        token = self.random.choice(VOCAB, size=number, p=P)
        token[drafted & (self.random.random(number) < self.lenience)] = 0
        hit = token == 0
        kind = np.where(drafted, np.where(hit, Kind.ACCEPTED, Kind.RESIDUAL), np.where(np.arange(number) % 4 == 1, 2, 3))
        nan, no = np.full(number, np.nan), np.zeros(number, bool)
        tokens = Tokens(
            request=np.repeat(np.arange(len(requests)), lengths).astype(np.int32),
            position=np.zeros(number, np.int32),
            token=token.astype(np.int32),
            kind=kind.astype(np.int8),
            draft_position=drafted.astype(np.int16),
            logprob=np.zeros(number, np.float32),
            p_draft=np.where(drafted, 0.4, nan),
            in_draft=drafted & hit,
            p_residual=np.where(drafted, 0.3, nan),
            in_residual=drafted & (token == 1),
            p_top=np.where(drafted, nan, 0.4),
            in_top=~drafted & hit,
            p_processed=nan,
            in_processed=no,
        )
        Path(file).write_bytes(pack_tokens(tokens))
        starts = np.cumsum(lengths) - lengths
        first: dict[tuple[int, ...], int] = {}
        for (prompt, length), start in zip(requests, starts, strict=True):
            if length == FIRST_TOKENS:
                said = (prompt, *token[start : start + FIRST_TOKENS].tolist())
                first[said] = first.get(said, 0) + 1
        return {"unclear": 1, "first": [[*said, count] for said, count in first.items()]}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    class Fresh(FakeEngine):
        pass

    FakeEngine.made, FakeEngine.samples = [], 0
    monkeypatch.setattr(running, "EngineProcess", Fresh)
    monkeypatch.setattr(running, "FIRST_ROUND", 2_000)
    monkeypatch.setattr(running, "LARGEST_ROUND", 2_000)
    return Fresh


def plan(tokens: int = 10_000, config: dict[str, Any] | None = None, **more: Any) -> Plan:
    return make_plan("some/model", config or {"proposer": "ngram"}, tokens=tokens, **more)


def test_one_engine_at_a_time_and_all_of_its_tokens_are_counted(engine: type[FakeEngine], tmp_path: Path) -> None:
    report = run(plan(), tmp_path, progress=False)
    plain, tested = FakeEngine.made
    assert plain.closed
    assert tested.closed
    assert (plain.title, plain.settings["speculative_config"]) == ("plain", None)
    assert (tested.title, tested.settings["speculative_config"]) == ("speculative", {"proposer": "ngram"})
    asked = sum(tokens for requests in tested.requests for _, tokens in requests)
    assert asked >= 10_000
    assert report.martingale.tokens == asked
    assert report.martingale.crossed_at is None
    assert report.greedy is not None
    assert report.greedy.equal == len(PROMPTS)
    assert report.chi_square is not None
    assert report.chi_square.p_value > 1e-4
    assert report.martingale.alpha + report.chi_square.alpha == pytest.approx(1e-3)  # they share it
    assert not report.interrupted
    assert any(line.startswith(f"{len(tested.requests)} tokens at places where rounding") for line in report.not_tested)
    assert any(line.startswith("Drafts that adaptive control leaves off") for line in report.not_tested)
    assert Report.read_json(tmp_path / "report.json") == report
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "config",
    [
        {"proposer": "ngram", "control": "fixed"},
        {"proposer": "ngram", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3},
    ],
    ids=str,
)
def test_where_nothing_is_left_off_nothing_is_said_of_it(
    engine: type[FakeEngine], tmp_path: Path, config: dict[str, Any]
) -> None:
    report = run(plan(2_000, config), tmp_path, progress=False)
    assert report.not_tested
    assert not any("adaptive" in line for line in report.not_tested)


def test_places_of_the_chi_square_come_from_plain_decoding(engine: type[FakeEngine], tmp_path: Path) -> None:
    report = run(plan(4_000), tmp_path, progress=False)
    plain = json.loads((tmp_path / "state" / running.STATE).read_text())["plain"]
    places = [(prompt, tuple(output)) for prompt, output in plain["prefixes"]]
    assert places[:4] == [(0, ()), (1, ()), (2, ()), (3, ())]
    assert [output for prompt, output in places if prompt == 0 and len(output) == 1] == [(0,), (1,), (2,), (3,), (4,)]
    pairs = sorted(((P[a] * P[b], (a, b)) for a in range(VOCAB) for b in range(VOCAB)), reverse=True)[:16]
    found = [output for prompt, output in places if prompt == 0 and len(output) == 2]
    assert sum(P[a] * P[b] for a, b in found) == pytest.approx(sum(weight for weight, _ in pairs))
    assert np.load(tmp_path / "state" / running.DISTRIBUTIONS).shape == (len(places), VOCAB)
    assert report.chi_square is not None
    assert any(b.label == "prompt 1, 1" for b in report.chi_square.bins)


def test_continuations_are_those_that_the_parameters_allow(engine: type[FakeEngine], tmp_path: Path) -> None:
    run(plan(4_000, sampling_params={"top_k": 2}), tmp_path, progress=False)
    plain = json.loads((tmp_path / "state" / running.STATE).read_text())["plain"]
    assert [output for prompt, output in plain["prefixes"] if prompt == 0] == [[], [0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]


def test_samples_of_tokens_that_rounding_may_let_in_are_left_out(engine: type[FakeEngine], tmp_path: Path) -> None:
    """The engine ignores the parameters: tokens far below the cut show that, those at it (0.3 / 0.4 is 0.75) do not."""
    cut = run(plan(4_000, sampling_params={"min_p": 0.75}), tmp_path / "cut", progress=False)
    assert cut.chi_square is not None
    assert {item.token for item in cut.chi_square.impossible} == {2, 3, 4}
    (line,) = (line for line in cut.not_tested if "of the chi-square" in line)
    number = int(line.split()[0].replace(",", ""))
    # Of token 1 against those of token 0; the impossible ones make no bin.
    assert number / (number + cut.chi_square.samples) == pytest.approx(0.3 / 0.7, abs=0.1)
    beyond = run(plan(4_000, sampling_params={"min_p": 0.7}), tmp_path / "beyond", progress=False)
    assert not any("of the chi-square" in line for line in beyond.not_tested)
    assert beyond.chi_square is not None
    assert {item.token for item in beyond.chi_square.impossible} == {2, 3, 4}


def test_where_nothing_is_left_to_measure_it_is_said(engine: type[FakeEngine], tmp_path: Path) -> None:
    first = run(plan(4_000), tmp_path, progress=False)
    again = run(plan(4_000), tmp_path, progress=False)
    assert len(FakeEngine.made) == 2
    assert NOTHING_LEFT not in first.not_tested
    assert again.not_tested == [NOTHING_LEFT, *first.not_tested]
    assert NOTHING_LEFT not in run(plan(8_000), tmp_path, progress=False).not_tested
    assert NOTHING_LEFT not in run(plan(4_000), tmp_path, fresh=True, progress=False).not_tested


def test_other_weights_are_not_mixed_in(engine: type[FakeEngine], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    asked = make_plan(str(model), {"proposer": "ngram"}, tokens=4_000)
    run(asked, tmp_path / "out", progress=False)
    assert NOTHING_LEFT in run(asked, tmp_path / "out", progress=False).not_tested  # the same weights go on
    (model / "model.safetensors").write_bytes(b"trained")
    with pytest.raises(SpecPluginError, match=r"other settings, weights or code.*--fresh"):
        run(asked, tmp_path / "out", progress=False)


def test_a_biased_engine_is_stopped_when_it_is_found(engine: type[FakeEngine], tmp_path: Path) -> None:
    engine.lenience = 0.2
    report = run(plan(200_000), tmp_path, progress=False)
    assert report.verdict is Verdict.BIASED
    assert report.verdict.exit_code == 1
    assert report.martingale.tokens < 20_000
    made = len(FakeEngine.made)
    again = run(plan(200_000), tmp_path, progress=False)  # it stays found
    assert len(FakeEngine.made) == made
    assert again.martingale == report.martingale


def test_an_interrupt_keeps_whole_rounds_and_the_same_command_goes_on(engine: type[FakeEngine], tmp_path: Path) -> None:
    engine.interrupt_at = 3
    report = run(plan(), tmp_path, progress=False)
    assert report.interrupted
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.verdict.exit_code == 2
    assert "the run was interrupted" in report.reason
    seen = report.martingale.tokens
    assert 0 < seen < 10_000
    report = run(plan(), tmp_path, progress=False)
    assert not report.interrupted
    assert report.martingale.tokens >= 10_000
    plain, first, second = FakeEngine.made  # plain decoding is not done again
    assert [plain.title, first.title, second.title] == ["plain", "speculative", "speculative"]
    assert first.settings["seed"] != second.settings["seed"]  # and no sample is drawn again
    asked = sum(tokens for part in (first, second) for requests in part.requests for _, tokens in requests)
    assert report.martingale.tokens == asked
    assert report.chi_square is not None
    shorts = sum(tokens == FIRST_TOKENS for part in (first, second) for requests in part.requests for _, tokens in requests)
    state = json.loads((tmp_path / "state" / running.STATE).read_text())
    assert sum(entry[-1] for entry in state["first"]) == shorts


def test_an_interrupt_within_a_round_drops_that_round(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the bets and the file: half of the round must not be reported, nor be counted twice later."""
    write, calls = running.State.write, []

    def interrupted(self: running.State, file: Path) -> None:
        calls.append(1)
        if len(calls) == 2 + 3:  # after plain and greedy decoding, the third round
            raise KeyboardInterrupt
        write(self, file)

    monkeypatch.setattr(running.State, "write", interrupted)
    report = run(plan(), tmp_path, progress=False)
    kept = json.loads((tmp_path / "state" / running.STATE).read_text())
    asked = [sum(tokens for _, tokens in requests) for requests in FakeEngine.made[1].requests]
    assert len(asked) == 3
    assert report.interrupted
    assert report.martingale.tokens == kept["tokens"] == sum(asked[:2])
    assert kept["rounds"] == 2


def test_resumed_equals_in_one_go(engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_by_round(self: FakeEngine, requests: list[list[int]], file: str) -> dict[str, Any]:
        """The same samples whoever asks: those of the round."""
        self.random = np.random.default_rng(requests[0][0])
        return FakeEngine.do_sample(self, requests, file)

    monkeypatch.setattr(engine, "do_sample", draw_by_round, raising=False)
    whole = run(plan(), tmp_path / "whole", progress=False)
    FakeEngine.samples = 0
    engine.interrupt_at = 4
    assert run(plan(), tmp_path / "parts", progress=False).interrupted
    engine.interrupt_at = None
    parts = run(plan(), tmp_path / "parts", progress=False)
    assert parts.martingale == whole.martingale
    assert parts.chi_square == whole.chi_square
    assert (parts.verdict, parts.reason) == (whole.verdict, whole.reason)


def test_an_interrupt_before_anything_was_measured(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(self: FakeEngine) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "wait", wait)
    report = run(plan(), tmp_path, progress=False)
    assert FakeEngine.made[0].closed
    assert (report.verdict, report.interrupted) == (Verdict.INCONCLUSIVE, True)
    assert report.greedy is None
    assert "Greedy equality: the run ended before it." in report.not_tested


def test_more_tokens_go_on_with_what_is_there(engine: type[FakeEngine], tmp_path: Path) -> None:
    few = run(plan(4_000), tmp_path, progress=False)
    more = run(plan(8_000), tmp_path, progress=False)
    assert more.martingale.tokens >= 8_000 > few.martingale.tokens
    assert len(FakeEngine.made[2].requests) < len(FakeEngine.made[1].requests) + 3


def test_other_settings_are_not_mixed_in(engine: type[FakeEngine], tmp_path: Path) -> None:
    run(plan(4_000), tmp_path, progress=False)
    with pytest.raises(SpecPluginError, match=r"other settings.*--fresh"):
        run(plan(4_000, sampling_params={"temperature": 0.7}), tmp_path, progress=False)
    report = run(plan(4_000, sampling_params={"temperature": 0.7}), tmp_path, fresh=True, progress=False)
    assert report.settings.sampling_params == {"temperature": 0.7}
    assert report.martingale.tokens < 8_000
    (tmp_path / "state" / running.STATE).write_text("{")
    with pytest.raises(SpecPluginError, match=r"cannot be read.*--fresh"):
        run(plan(4_000), tmp_path, progress=False)


def test_fresh_drops_what_is_ours_and_nothing_else(engine: type[FakeEngine], tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = run(plan(4_000), tmp_path, progress=False)
    assert {file.name for file in state.iterdir()} <= set(running.OURS)
    (state / running.ROUND).write_bytes(b"of a round that was interrupted")
    (state / "letters").mkdir()
    for mine in ("notes.txt", "letters/one.txt"):
        (state / mine).write_text("mine")
    again = run(plan(4_000), tmp_path, fresh=True, progress=False)
    assert NOTHING_LEFT not in again.not_tested
    assert again.martingale.tokens == first.martingale.tokens
    assert (state / "notes.txt").read_text() == (state / "letters" / "one.txt").read_text() == "mine"
    assert not (state / running.ROUND).exists()


def test_a_full_disk_loses_no_round(engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = running.State.write

    def full(self: running.State, file: Path) -> None:
        if self.rounds == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write(self, file)

    monkeypatch.setattr(running.State, "write", full)
    with pytest.raises(SpecPluginError, match=r"No space left on device.*the same command goes on"):
        run(plan(), tmp_path, progress=False)
    monkeypatch.setattr(running.State, "write", write)
    report = run(plan(), tmp_path, progress=False)
    asked = [sum(tokens for _, tokens in requests) for part in FakeEngine.made[1:] for requests in part.requests]
    assert report.martingale.tokens == sum(asked) - asked[2]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "vllm-specplugin: the run ended with [Errno 28]"),
        (RuntimeError("a bug of ours"), "Traceback (most recent call last)"),
    ],
    ids=["full disk", "bug"],
)
def test_no_failure_ends_like_a_bias(
    error: Exception, says: str, engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 is the exit code of BIASED, and of a Python that ends with a traceback."""

    def fail(self: running.State, file: Path) -> None:
        raise error

    monkeypatch.setattr(running.State, "write", fail)
    config = json.dumps({"proposer": "ngram"})
    done = CliRunner().invoke(app, ["validate", "some/model", "-sc", config, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(says)
    assert str(error).splitlines()[0] in done.stderr


def test_greedy_outputs_that_part_are_explained(engine: type[FakeEngine], tmp_path: Path) -> None:
    engine.greedy = ((0, 1), (0, 2))
    report = run(plan(4_000), tmp_path, progress=False)
    assert report.verdict is Verdict.BIASED
    assert report.greedy is not None
    name, mismatch = report.greedy.mismatches[0]
    assert name == "1: token ids 1, 2"
    assert (mismatch.position, mismatch.plain_text, mismatch.tested_text) == (1, "<1>", "<2>")


def test_a_lossy_verifier_is_taken_at_its_word(engine: type[FakeEngine], tmp_path: Path) -> None:
    engine.lossless = False
    report = run(plan(4_000), tmp_path, progress=False)
    assert report.settings.lossy
    assert report.verdict is Verdict.BIASED
    assert "'one_hot' is lossy by its own account" in report.reason


def test_an_engine_without_tokens_is_an_error(engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: FakeEngine, requests: list[list[int]], file: str) -> dict[str, Any]:
        return FakeEngine.do_sample(self, [], file)

    monkeypatch.setattr(engine, "do_sample", nothing, raising=False)
    with pytest.raises(SpecPluginError, match="no token that could be recorded"):
        run(plan(), tmp_path, progress=False)


def test_a_folder_that_cannot_be_used(engine: type[FakeEngine], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecPluginError, match=r"--out .* cannot be used"):
        run(plan(), tmp_path / "file", progress=False)


# -- what is asked for ---------------------------------------------------------------------------------------


def test_a_round_covers_all_prompts_and_begins_with_the_few() -> None:
    requests = round_of(10_000, prompts=10, max_tokens=64, number=0)
    long = [prompt for prompt, tokens in requests if tokens == 64]
    short = [prompt for prompt, tokens in requests if tokens == FIRST_TOKENS]
    assert abs(sum(tokens for _, tokens in requests) - 10_000) < 64
    assert abs(len(short) * FIRST_TOKENS - 2_500) < 3
    assert set(long) == set(range(10))
    assert set(short) == {0, 1, 2, 3}
    assert len(long) + len(short) == len(requests)
    assert round_of(10, prompts=1, max_tokens=64, number=3) == [(0, 64), (0, 3)]
    later = round_of(100, prompts=10, max_tokens=64, number=7)  # each round begins with other prompts
    assert (later[0], next(entry for entry in later if entry[1] == FIRST_TOKENS)) == ((7, 64), (3, 3))


def test_places_of_the_chi_square_are_the_likeliest() -> None:
    level = beginnings(9)
    assert level == [(0, ()), (1, ()), (2, ()), (3, ())]
    joint = np.array([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]], dtype=np.float32)
    level, weights = likeliest_after([(0, ()), (1, ())], joint, 2)
    assert level == [(0, (0,)), (0, (1,)), (1, (2,))]  # what has no probability is no place
    np.testing.assert_allclose(weights, [0.5, 0.3, 1.0])
    joint = np.array([[0.1, 0.4, 0.0], [0.2, 0.05, 0.05], [0.9, 0.1, 0.0]], dtype=np.float32)
    level, weights = likeliest_after(level, joint, 2)
    assert level == [(0, (0, 1)), (0, (1, 0)), (1, (2, 0)), (1, (2, 1))]
    np.testing.assert_allclose(weights, [0.4, 0.2, 0.9, 0.1])
    assert likeliest_after(level, np.ones((4, 3), np.float32), 0)[0] == []


def test_cells_hold_the_samples_after_their_prefix_alone() -> None:
    prefixes = [(0, ()), (0, (1,)), (0, (1, 2)), (1, ()), (1, (0,))]
    values = np.log(np.tile(np.array([0.25, 0.25, 0.5], np.float32), (5, 1)))
    counts = [[0, 1, 2, 0, 30], [0, 1, 2, 1, 10], [0, 1, 0, 0, 5], [0, 2, 1, 1, 7], [1, 0, 1, 1, 26], [1, 0, 2, 2, 3]]
    made, left_out = cells(prefixes, values, Sampling(), 0.0, counts)
    assert left_out == 0
    assert {cell.label: cell.observed.tolist() for cell in made} == {
        "prompt 1": [0, 45, 7],
        "prompt 1, 1": [5, 0, 40],
        "prompt 1, 1, 2": [30, 10, 0],
        "prompt 2": [29, 0, 0],
        "prompt 2, 0": [0, 26, 3],
    }
    np.testing.assert_allclose([cell.probabilities for cell in made], np.tile([0.25, 0.25, 0.5], (5, 1)), rtol=1e-6)
    rare = [[0, 1, 2, 0, LEAST_SAMPLES - 1]]
    assert cells(prefixes, values, Sampling(), 0.0, rare) == ([], 0)


def test_cells_are_about_tokens_that_are_allowed_in_any_case() -> None:
    values = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05]]))
    counts = [[0, 0, 50], [0, 1, 30], [0, 2, 12], [0, 4, 3]]
    (cell,), left_out = cells([(0, ())], values, Sampling(top_k=3), 0.0, counts)
    np.testing.assert_allclose(cell.probabilities, np.array([0.4, 0.3, 0.15, 0, 0]) / 0.85)
    assert (cell.observed.tolist(), left_out) == ([50, 30, 12, 0, 3], 0)
    (cell,), left_out = cells([(0, ())], values, Sampling(top_k=3), 0.5, counts)  # 0.15 and 0.1 are 0.41 nats apart
    np.testing.assert_allclose(cell.probabilities, np.array([0.4, 0.3, 0, 0, 0]) / 0.7)
    assert (cell.observed.tolist(), left_out) == ([50, 30, 0, 0, 3], 12)
    (cell,), left_out = cells([(0, ())], values, Sampling(top_k=1), 0.5, counts)  # no token is certain
    assert (cell.probabilities.any(), cell.observed.tolist(), left_out) == (False, [0, 0, 12, 0, 3], 80)
