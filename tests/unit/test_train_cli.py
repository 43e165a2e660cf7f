"""The command line of training: made from the options' models, with errors of one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support import training
from vllm_specplugin.cli.main import app
from vllm_specplugin.train.options import MedusaOptions, TrainOptions
from vllm_specplugin.train.target import TargetModel

REQUIRED = ["--target", "t", "--data", "d", "--out", "o"]


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr."""
    done = CliRunner().invoke(app, ["train", "medusa", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    return done.exit_code, done.stderr or done.stdout


def test_every_option_is_in_the_help_with_its_default() -> None:
    code, text = run("--help")
    assert code == 0
    for name, field in MedusaOptions.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert str(field.description).split()[0] in text
    assert "none|pre|post" in text
    assert text.index("--num-heads") < text.index("--max-length") < text.index("--epochs")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lr", "0"], "'--lr' is 0.0: input should be greater than 0."),
        (["--norm", "batch"], "'--norm' is 'batch': input should be 'none', 'pre' or 'post'."),
        (["--epochs", "1", "--minutes", "2"], "--epochs and --minutes exclude each other; give one of them."),
        (["--output", "own", "--freeze-output"], "--freeze-output makes the output layers of all heads the same"),
        (["--target", "./nowhere"], "'--target' is './nowhere': there is no such folder or file."),
        (["--device", "abacus"], "'--device' is 'abacus'"),
    ],
)
def test_errors_are_one_line(arguments: list[str], said: str) -> None:
    code, text = run(*REQUIRED, *arguments)
    assert code == 2
    assert text.startswith(f"vllm-specplugin: {said}")
    assert len(text.splitlines()) == 1


def test_faulty_data_is_one_line(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    for content, said in (
        ("", "holds nothing to learn from"),
        ('{"prompt_token_ids": [1], "token_ids": [2, 61]}', "has the token 61, but"),
    ):
        data.write_text(content)
        code, text = run("--target", str(training.target()), "--data", str(data), "--out", str(tmp_path / "out"))
        assert code == 2
        assert said in text
        assert len(text.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    data = training.write_data(tmp_path / "data.jsonl")
    given = {"--target": str(training.target()), "--data": str(data), "--out": str(tmp_path / "out")}
    more = {"--steps": "2", "--draft-vocab-size": "32", "--cache": str(tmp_path / "cache"), "--batch-tokens": "400"}
    code, text = run(*(part for pair in {**given, **more}.items() for part in pair), "--gated")
    assert code == 0, text
    assert "hidden states of" in text
    assert "acceptance length" in text
    assert str(tmp_path / "out") in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "curves.csv",
        "curves.png",
        "model.safetensors",
        "run.json",
    ]


def test_options_that_are_of_every_objective_are_in_one_place() -> None:
    own = set(MedusaOptions.model_fields) - set(TrainOptions.model_fields)
    assert own == {
        "num_heads",
        "num_layers",
        "output",
        "draft_vocab_size",
        "freeze_output",
        "gated",
        "norm",
        "output_scale",
        "decay",
        "distill_soft",
    }


def test_the_tokenizer_may_be_missing() -> None:
    import torch

    assert TargetModel(str(training.target()), torch.float32, torch.device("cpu")).tokenizer is None
