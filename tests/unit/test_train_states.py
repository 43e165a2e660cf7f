"""The cache of hidden states: what is in it, when it is used again, and that it never looks whole when it is not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support import training
from vllm_specplugin.errors import ConfigError, SpecPluginError
from vllm_specplugin.heads import checkpoint
from vllm_specplugin.train import states, target
from vllm_specplugin.train.eagle import EagleObjective
from vllm_specplugin.train.eagle3 import Eagle3Objective
from vllm_specplugin.train.medusa import MedusaObjective
from vllm_specplugin.train.options import Eagle3Options, EagleOptions
from vllm_specplugin.train.run import train_heads
from vllm_specplugin.train.states import StatesSource, cached_states
from vllm_specplugin.train.target import TargetModel, most_frequent
from vllm_specplugin.train.trunk import Trunk

CPU = torch.device("cpu")
EXAMPLES = training.examples(6)


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return TargetModel(str(training.target()), torch.float32, CPU)


class Counted(NamedTuple):
    """A way to the cache of one test, and what it computed."""

    states: Callable[..., StatesSource]
    passes: list[int]
    root: Path

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".json")


@pytest.fixture
def cache(model: TargetModel, tmp_path: Path) -> Counted:
    passes: list[int] = []

    def told(total: int, description: str) -> Callable[[int], None]:
        passes.append(total)
        return lambda done: None

    def get(examples: Any = EXAMPLES, dtype: torch.dtype = torch.float32, aux: bool = False, of: Any = model) -> StatesSource:
        return cached_states(of, examples, dtype, aux, tmp_path, told)

    return Counted(get, passes, tmp_path)


def test_states_are_what_the_output_layer_and_the_layers_read(model: TargetModel, cache: Counted) -> None:
    batch = cache.states(aux=True).read([4, 1])
    seen: dict[int, torch.Tensor] = {}
    layers = model.module.base_model.layers  # type: ignore[union-attr]
    for row, example in enumerate([EXAMPLES[4], EXAMPLES[1]]):
        hooks = [
            layer.register_forward_pre_hook(lambda module, inputs, i=i: seen.update({i: inputs[0][0]}))
            for i, layer in enumerate(layers)  # type: ignore[arg-type]
        ]
        logits = model.module(input_ids=torch.tensor([example.token_ids]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        length = len(example.token_ids)
        hidden = batch.last[row, :length]
        # The same numbers by another batch shape, up to float32 rounding.
        torch.testing.assert_close(hidden @ model.frozen.output.T, logits, rtol=1e-4, atol=1e-4)
        fused = torch.cat([seen[2], seen[training.LAYERS // 2], seen[training.LAYERS - 3]], dim=-1)
        torch.testing.assert_close(batch.aux[row, :length], fused, rtol=1e-4, atol=1e-4)
        assert not batch.last[row, length:].any()


def test_a_second_run_reads_the_files(cache: Counted) -> None:
    first = cache.states().read([0, 5])
    again = cache.states().read([0, 5])
    assert len(cache.passes) == 1
    assert torch.equal(first.last, again.last)
    assert [path.suffix for path in cache.files] == [".bin"]


def test_objectives_share_what_they_have_in_common(cache: Counted) -> None:
    cache.states()
    before = cache.files[0].stat().st_mtime_ns
    cache.states(aux=True)
    cache.states(aux=False)
    assert len(cache.passes) == 2
    assert [path.name for path in cache.files] == ["inputs-of-2-4-5.bin", "last.bin"]
    assert cache.files[1].stat().st_mtime_ns == before


def test_whatever_changes_the_states_makes_new_ones(cache: Counted, tmp_path: Path) -> None:
    cache.states()
    cache.states(dtype=torch.bfloat16)
    cache.states(examples=[*EXAMPLES[:5], EXAMPLES[0]])
    copy = tmp_path / "copy"
    shutil.copytree(training.target(), copy)  # the same weights, written at another time
    os.utime(copy / "model.safetensors", ns=(1, 1))
    cache.states(of=TargetModel(str(copy), torch.float32, CPU))
    assert len(cache.passes) == 4
    assert len(cache.files) == 4 + 1  # and the copied weights


def test_bfloat16_is_the_same_rounded(cache: Counted) -> None:
    exact = cache.states().read([2]).last
    assert torch.equal(cache.states(dtype=torch.bfloat16).read([2]).last, exact.bfloat16())


def test_what_was_interrupted_does_not_look_whole(cache: Counted, model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PASS_TOKENS", 64)
    passes = 0

    def interrupted(token_ids: torch.Tensor, layers: tuple[int, ...] = ()) -> Any:
        nonlocal passes
        passes += 1
        if passes == 2:
            raise KeyboardInterrupt
        return TargetModel.states(model, token_ids, layers)

    monkeypatch.setattr(model, "states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.states()
    assert cache.files == []
    monkeypatch.undo()
    cache.states()
    assert len(cache.passes) == 2


def test_a_truncated_file_is_made_again(cache: Counted) -> None:
    whole = cache.states().read([0]).last
    file = cache.files[0]
    file.write_bytes(file.read_bytes()[:-1])
    assert torch.equal(cache.states().read([0]).last, whole)
    assert len(cache.passes) == 2


def test_too_small_a_disk_is_said_before_the_pass(cache: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(SpecPluginError, match=r"0\.0 GB free; name another --cache"):
        cache.states()
    assert cache.passes == []


def test_a_disk_that_fills_up_is_an_error_and_not_the_end(cache: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is taken before the pass: a hole in a file that cannot be filled would end the process with a bus error."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(states.os, "posix_fallocate", full)
    with pytest.raises(
        SpecPluginError, match=r"cannot write hidden states to .* \(No space left on device\); name another --cache"
    ):
        cache.states()
    monkeypatch.undo()
    assert cache.states().read([0]).last.any()
    assert not list(cache.root.rglob("*.partial"))


# -- the target --------------------------------------------------------------------------------------------


def test_a_target_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"'--target' is '\./nowhere': there is no such folder"):
        TargetModel("./nowhere", torch.float32, CPU)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        TargetModel(str(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize(("factor", "cap"), [(1.0, None), (0.5, None), (1.0, 2.0)])
def test_logits_that_are_scaled_or_capped(model: TargetModel, monkeypatch: pytest.MonkeyPatch, factor: float, cap: float) -> None:
    head = model.module.lm_head

    def changed(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return factor * logits if cap is None else cap * torch.tanh(logits / cap)

    hook = head.register_forward_hook(changed)  # type: ignore[operator, union-attr]
    monkeypatch.setattr(target, "_load", lambda *args: model.module)
    try:
        if cap is None:
            found = TargetModel(str(training.target()), torch.float32, CPU).frozen.output
            torch.testing.assert_close(found, factor * model.frozen.output, rtol=1e-4, atol=0)
        else:
            with pytest.raises(ConfigError, match="a cap or a bias"):
                TargetModel(str(training.target()), torch.float32, CPU)
        if cap is None:  # the same where the target learns, too
            trunk = Trunk(model.module)
            assert trunk.scale == pytest.approx(factor, rel=1e-4)
            torch.testing.assert_close(trunk.output, factor * model.frozen.output, rtol=1e-4, atol=0)
        else:
            with pytest.raises(ConfigError, match="a cap or a bias"):
                Trunk(model.module)
    finally:
        hook.remove()


def test_a_target_whose_configuration_has_other_names(tmp_path: Path) -> None:
    """GPT-2 says `n_layer`. Its states are enough for Medusa, while it has no Llama's layer to size EAGLE's heads by."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": training.VOCAB_SIZE, "n_positions": 64, "n_embd": 32, "n_layer": training.LAYERS, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "target")
    said = {"target": str(tmp_path / "target"), "steps": 2}
    assert TargetModel(said["target"], torch.float32, CPU).frozen.num_layers == training.LAYERS
    heads = train_heads(training.medusa_options(tmp_path, **said), MedusaObjective.build, training.silent())
    assert checkpoint.inspect(str(heads.folder)).family == "medusa"
    for options, objective in ((EagleOptions, EagleObjective), (Eagle3Options, Eagle3Objective)):
        with pytest.raises(ConfigError, match=r"^the target's configuration has no 'hidden_size'.*no Llama-like decoder layer"):
            train_heads(training.run_options(options, tmp_path, **said), objective.build, training.silent())


def test_the_most_frequent_tokens() -> None:
    counts = torch.tensor([0, 5, 2, 5, 0, 9])
    assert most_frequent(counts, 3).tolist() == [1, 3, 5]
    assert most_frequent(counts, 5).tolist() == [0, 1, 2, 3, 5]
    with pytest.raises(ConfigError, match="'--draft-vocab-size' is 7, but the target's vocabulary has only 6 tokens"):
        most_frequent(counts, 7)


def test_positions_of_files_are_those_of_the_examples(cache: Counted) -> None:
    source = cache.states()
    ends = np.cumsum(source.lengths)
    assert torch.equal(source.hidden.rows(int(ends[1]), int(ends[2])), source.read([2]).last[0])
