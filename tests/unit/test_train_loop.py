"""The loop and the folder of a run: schedule, accumulation, interruption, and what may be gone on with."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import tiny, training
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.heads import checkpoint
from vllm_specplugin.train.batch import Batch, TokenSource
from vllm_specplugin.train.data import Example
from vllm_specplugin.train.eagle import EagleObjective
from vllm_specplugin.train.loop import Loop, device_of, learning_rate
from vllm_specplugin.train.medusa import MedusaObjective
from vllm_specplugin.train.objective import Losses
from vllm_specplugin.train.options import EagleOptions, MedusaOptions, MTPOptions, TrainOptions
from vllm_specplugin.train.pretrain import train_mtp
from vllm_specplugin.train.progress import Screen
from vllm_specplugin.train.run import Outcome, train_heads
from vllm_specplugin.train.state import split

STEPS = 9


class Noisy(MedusaObjective):
    """Draws random numbers while it trains, as EAGLE does."""

    def loss(self, batch: Batch) -> Losses:
        return super().loss(replace(batch, hidden_states=batch.last + 0.1 * torch.randn_like(batch.last)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and hidden states for all runs of this file."""
    made = tmp_path_factory.mktemp("training")
    training.write_data(made / "data.jsonl", count=30)
    return made


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> Callable[..., MedusaOptions]:
    """Options of a short run whose folder is the test's own."""

    def made(**more: Any) -> MedusaOptions:
        short = {"steps": STEPS, "batch_tokens": 200, "out": tmp_path / "out", "evaluations": 3}
        return training.medusa_options(folder, **{**short, **more})

    return made


def train(options: MedusaOptions, screen: Screen | None = None, build: Any = Noisy.build) -> Outcome:
    return train_heads(options, build, screen or training.silent())


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    return dict(checkpoint.tensors(outcome.folder))


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """The curves without the clock."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in outcome.rows]


class Stopping(Screen):
    """Does something when a step is done."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        super().__init__(enabled=False)
        self.at, self.act = at, act

    def step(self, progress: Any, *rest: Any) -> None:
        super().step(progress, *rest)
        if progress.step == self.at:
            self.act()


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """Ctrl-C as in a terminal: in a process that was started in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def crash() -> None:
    raise RuntimeError("the machine is gone")


# -- interruption ---------------------------------------------------------------------------------------------


RUNS: Mapping[str, tuple[type[TrainOptions], Callable[..., Outcome], Mapping[str, Any]]] = {
    "medusa": (MedusaOptions, partial(train_heads, build=Noisy.build), {"num_heads": 3}),
    "eagle": (EagleOptions, partial(train_heads, build=EagleObjective.build), {"ttt_steps": 2, "noise": 0.1}),
    "mtp": (MTPOptions, train_mtp, {"depth": 3, "loss_vocab_size": 40}),
    "joint mtp": (MTPOptions, train_mtp, {"depth": 3, "trunk": "joint", "lambda_schedule": "ramp", "lr": 2e-3}),
}
"""Kinds of runs: stored states or a trunk that learns, with and without chance in a step, constant and changing weights."""


def with_dropout(folder: Path) -> Path:
    """A target whose attention drops half of its weights, where it learns."""
    # Attention heads that together are as wide as the states, as the layout of MTP layers wants them.
    shutil.copytree(tiny.tiny_model(vocab_size=training.VOCAB_SIZE, heads=2, kv_heads=1), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    return folder


@pytest.mark.parametrize("kind", RUNS)
def test_an_interrupted_run_ends_as_if_it_had_not_been(folder: Path, tmp_path: Path, kind: str) -> None:
    model, run, own = RUNS[kind]
    target = with_dropout(tmp_path / "target")
    said = {"target": str(target), "steps": STEPS, "batch_tokens": 200, "evaluations": 3, "accumulate": 2, "clip": 0.5, **own}

    def options(out: str = "out", **more: Any) -> TrainOptions:
        return training.run_options(model, folder, out=tmp_path / out, **{**said, **more})

    whole = run(options("whole"), screen=training.silent())
    with pytest.raises(SpecPluginError, match=r"stopped at 33% \(step 3\); the same command goes on"):
        run(options(), screen=Stopping(3, ctrl_c))
    # Then it dies in step 7, with a state that is written after every step.
    with pytest.raises(RuntimeError, match="gone"):
        run(options(checkpoint_minutes=1e-9), screen=Stopping(7, crash))
    torch.manual_seed(99)
    resumed = run(options(), screen=training.silent())
    assert training.same_tensors(weights(whole), weights(resumed))
    assert rows(whole) == rows(resumed)
    assert {row["step"] for row in rows(whole) if row["split"] == "held_out"} == {3, 6, 9}
    assert not (resumed.folder / "resume.pt").exists()


def test_a_job_scheduler_interrupts_like_ctrl_c(options: Callable[..., MedusaOptions]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SpecPluginError, match=r"step 1\); the same command"):
        train(options(), Stopping(1, terminate))
    assert (options().out / "resume.pt").is_file()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_ctrl_c_interrupts_at_once(options: Callable[..., MedusaOptions]) -> None:
    def twice() -> None:
        ctrl_c()
        ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        train(options(), Stopping(2, twice))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_fails_behind_the_training_does_not_lose_it(options: Callable[..., MedusaOptions]) -> None:
    class Full(Noisy):
        def export(self, folder: Path, provenance: Any) -> None:
            raise OSError("no space left")

    class Over(Screen):
        def step(self, progress: Any, *rest: Any) -> None:
            raise AssertionError("it trains again")

    with pytest.raises(OSError, match="no space"):
        train(options(), build=Full.build)
    assert train(options(), Over(enabled=False)).rows[-1]["step"] == STEPS


def test_evaluation_changes_nothing(options: Callable[..., MedusaOptions], tmp_path: Path) -> None:
    often = train(options(evaluations=9, out=tmp_path / "often"))
    never = train(options(evaluations=0, out=tmp_path / "never"))
    assert training.same_tensors(weights(often), weights(never))


def test_a_trunk_drops_out_from_the_first_step_on(folder: Path, tmp_path: Path) -> None:
    """And not only from the first evaluation on, behind which an objective is set to train again."""
    dropping = with_dropout(tmp_path / "target")
    whole = tiny.tiny_model(vocab_size=training.VOCAB_SIZE, heads=2, kv_heads=1)

    def run(target: Path, evaluations: int) -> dict[str, torch.Tensor]:
        out = tmp_path / f"{target.name}-{evaluations}"
        said = {"target": str(target), "out": out, "trunk": "joint", "depth": 3, "steps": 3, "batch_tokens": 200}
        options = training.run_options(MTPOptions, folder, **said, evaluations=evaluations)
        return weights(train_mtp(options, screen=training.silent()))

    never = run(dropping, 0)
    assert training.same_tensors(never, run(dropping, 3))
    assert not training.same_tensors(never, run(whole, 0))


def test_another_seed_is_another_run(options: Callable[..., MedusaOptions], tmp_path: Path) -> None:
    one, other = (train(options(seed=seed, out=tmp_path / str(seed))) for seed in (0, 1))
    assert not training.same_tensors(weights(one), weights(other))


# -- the folder of a run ---------------------------------------------------------------------------------------


def test_other_options_do_not_go_on_with_a_run(options: Callable[..., MedusaOptions], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecPluginError, match="stopped"):
        train(options(), Stopping(1, ctrl_c))
    with pytest.raises(SpecPluginError, match=r"holds a run with --lr 0\.02 instead of 0\.5; drop it with --fresh"):
        train(options(lr=0.5))
    with pytest.raises(SpecPluginError, match="holds a run with the contents of --data"):
        train(options(data=training.write_data(tmp_path / "other.jsonl", count=30, seed=1)))
    outcome = train(options(checkpoint_minutes=1.0))  # says nothing about the result
    with pytest.raises(SpecPluginError, match="holds this run, finished"):
        train(options())
    assert train(options(fresh=True)).rows[0]["step"] == 1
    assert json.loads((outcome.folder / "run.json").read_text())["finished"] is True


def test_a_folder_with_something_else_is_left_alone(options: Callable[..., MedusaOptions]) -> None:
    out = options().out
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(SpecPluginError, match=r"holds other files \(thesis\.tex\); name a new folder"):
        train(options(fresh=True))
    with pytest.raises(SpecPluginError, match="which is a file"):
        train(options(out=out / "thesis.tex"))


def test_a_folder_that_cannot_be_made_is_said(options: Callable[..., MedusaOptions], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    with pytest.raises(SpecPluginError, match=r"'--out' is '.*out', which cannot be written \(Not a directory\); name another"):
        train(options(out=out))


def test_a_damaged_state_is_said(options: Callable[..., MedusaOptions]) -> None:
    with pytest.raises(SpecPluginError, match="stopped"):
        train(options(), Stopping(1, ctrl_c))
    file = options().out / "resume.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SpecPluginError, match=r"resume\.pt cannot be read .*--fresh"):
        train(options())


def test_what_a_finished_run_leaves(options: Callable[..., MedusaOptions]) -> None:
    outcome = train(options())
    table = list(csv.DictReader((outcome.folder / "curves.csv").open()))
    assert [row["split"] for row in table].count("train") == STEPS
    assert float(table[-1]["acceptance_length"]) == outcome.results["acceptance_length"]
    assert {"loss", "head_1", "head_3", "acceptance_1", "acceptance_3"} <= set(table[0])
    assert (outcome.folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    said = checkpoint.inspect(str(outcome.folder)).provenance
    assert said["steps"] == STEPS
    assert said["options"]["lr"] == 0.02
    assert said["losses"] == outcome.results
    assert said["data"]["file"] == "data.jsonl"


# -- the loop --------------------------------------------------------------------------------------------------


class Line(MedusaObjective):
    """The least that the loop asks for: (weight - mean of the counted tokens) squared."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.shares: list[float] = []

    depth = 1  # type: ignore[assignment]

    def loss(self, batch: Batch) -> Losses:
        places = (self.weight - batch.token_ids[batch.counts]) ** 2
        return Losses(places.sum() / batch.num_counted, {}, torch.zeros(1), torch.zeros(1))

    def schedule(self, share: float) -> None:
        self.shares.append(share)


def line_loop(options: MedusaOptions, lengths: list[int], held_out: TokenSource | None = None) -> Loop:
    tokens = [np.arange(length) + 10 * i for i, length in enumerate(lengths)]
    options.out.mkdir(exist_ok=True)
    source = TokenSource(tokens, [length // 3 for length in lengths])
    return Loop(Line(), source, held_out, options, torch.device("cpu"), training.silent())


def test_accumulated_batches_are_one_large_batch(options: Callable[..., MedusaOptions], tmp_path: Path) -> None:
    gradients = []
    for batch_tokens, accumulate in ((1000, 1), (20, 4)):
        said = options(steps=1, batch_tokens=batch_tokens, accumulate=accumulate, clip=0, out=tmp_path / str(accumulate))
        loop = line_loop(said, [9, 12, 17, 20])
        step = loop.optimizer.step
        loop.optimizer.step = lambda loop=loop, step=step: (gradients.append(loop.objective.weight.grad.clone()), step())  # type: ignore[method-assign]
        loop.run()
    # Places count alike, whichever batch they are in; float32 summed in another order.
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)


def test_epochs_see_every_example(options: Callable[..., MedusaOptions]) -> None:
    loop = line_loop(options(steps=None, epochs=3, batch_tokens=20), [9, 12, 17, 20, 6])
    progress = loop.run()
    assert progress.tokens == 3 * (9 + 12 + 17 + 20 + 6)
    assert (progress.epoch, progress.batch) == (3, 0)


def test_the_schedule_follows_the_run(options: Callable[..., MedusaOptions]) -> None:
    loop = line_loop(options(steps=10, warmup=0.2, final_lr=0.1, lr=0.5), [9, 12])
    loop.run()
    assert loop.objective.shares == [step / 10 for step in range(10)]  # type: ignore[union-attr]
    rates = [row["learning_rate"] for row in loop.progress.rows if row["split"] == "train"]
    assert rates == [0.5 * learning_rate(step / 10, 0.2, 0.1) for step in range(10)]


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(share, 0.25, 0.1) for share in (0.125, 0.25, 0.625, 1.0)]
    assert rates == pytest.approx([0.5, 1.0, 0.55, 0.1])
    assert learning_rate(0.0, 0.25, 0.1) > 0


def test_a_run_by_the_clock(options: Callable[..., MedusaOptions]) -> None:
    loop = line_loop(options(steps=None, minutes=0.005), [9, 12])
    progress = loop.run()
    assert progress.step > 1
    assert 0.3 <= progress.seconds < 10  # the last step may be late, on a busy machine too
    assert loop.share() == 1


def test_a_loss_that_is_no_number_stops_the_run(options: Callable[..., MedusaOptions]) -> None:
    loop = line_loop(options(lr=1e30, warmup=0, clip=0), [9, 12])
    with pytest.raises(SpecPluginError, match=r"gradient is (inf|nan) at step [23], .* lower --lr"):
        loop.run()


def test_held_out_examples_are_others() -> None:
    examples = [Example((prompt, 7, 8), 1) for prompt in range(40)]
    trained, held_out = split(examples, 0.1, seed=3)
    assert sorted(trained + held_out) == list(range(40))
    assert len(held_out) == 4
    assert split(examples, 0.1, seed=3) == (trained, held_out)
    assert split(examples, 0.1, seed=4)[1] != held_out
    assert len(split(examples[:3], 0.01, seed=0)[1]) == 1
    assert split(examples[:1], 0.5, seed=0) == ([0], [])
    assert split(examples[:5], 0.0, seed=0)[1] == []


def test_answers_to_one_prompt_are_held_out_together() -> None:
    """As `distill` writes them at several temperatures: they begin alike."""
    examples = [Example((prompt, 3, 7, temperature), 2) for temperature in range(3) for prompt in range(20)]
    trained, held_out = split(examples, 0.1, seed=3)
    assert sorted(trained + held_out) == list(range(60))
    assert len(held_out) == 6
    assert {examples[place].token_ids[0] for place in trained}.isdisjoint(examples[place].token_ids[0] for place in held_out)
    assert split(examples[::20], 0.5, seed=0) == ([0, 1, 2], [])  # all of one prompt
    texts = [Example((1, 2, 3), 0)] * 10  # without prompts each is a text of its own
    assert len(split(texts, 0.2, seed=0)[1]) == 2


def test_devices() -> None:
    assert device_of("cpu").type == "cpu"
    with pytest.raises(SpecPluginError, match="'--device' is 'abacus'"):
        device_of("abacus")
