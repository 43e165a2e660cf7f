"""In which type a CPU computes fast, and who goes by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import training
from vllm_specplugin import arithmetic
from vllm_specplugin.arithmetic import cpu_has_instructions, fast_type, slow_on_cpu
from vllm_specplugin.train.medusa import MedusaObjective
from vllm_specplugin.train.run import train_heads


def onednn_says(monkeypatch: pytest.MonkeyPatch, *, bfloat16: bool, float16: bool = False) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: float16)


@pytest.mark.parametrize("has", [True, False])
def test_onednn_is_asked_about_the_type_that_is_meant(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    onednn_says(monkeypatch, bfloat16=has, float16=not has)
    assert cpu_has_instructions("bfloat16") is has
    assert cpu_has_instructions("float16") is not has
    assert cpu_has_instructions("float32")


def test_pytorch_has_both_questions() -> None:
    for name in arithmetic._CHECKS.values():
        assert isinstance(getattr(torch.ops.mkldnn, name)(), bool)


def test_where_pytorch_cannot_tell_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_CHECKS", {"bfloat16": "_is_there_no_such_operator"})
    assert cpu_has_instructions("bfloat16")


def test_only_a_cpu_without_instructions_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    onednn_says(monkeypatch, bfloat16=False)
    assert (fast_type("cpu"), fast_type("cuda")) == ("float32", "bfloat16")
    onednn_says(monkeypatch, bfloat16=True)
    assert (fast_type("cpu"), fast_type("cuda")) == ("bfloat16", "bfloat16")


def test_it_is_said_only_where_it_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    onednn_says(monkeypatch, bfloat16=False)
    assert "no instructions for bfloat16" in slow_on_cpu("cpu", "bfloat16")
    assert "--dtype float32" in slow_on_cpu("cpu", "bfloat16")
    assert slow_on_cpu("cpu", "float32") == ""
    assert slow_on_cpu("cuda:0", "bfloat16") == ""
    onednn_says(monkeypatch, bfloat16=True)
    assert slow_on_cpu("cpu", "bfloat16") == ""


@pytest.mark.parametrize("has", [True, False])
def test_training_computes_in_the_fast_type_and_writes_down_which(
    has: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    onednn_says(monkeypatch, bfloat16=has)
    options = training.medusa_options(tmp_path, steps=1, dtype="auto")
    train_heads(options, MedusaObjective.build, training.silent())
    assert f'"dtype": "{"bfloat16" if has else "float32"}"' in (options.out / "run.json").read_text()
