"""`train mtp` from its options to what it leaves in the folder: frozen, joint and from scratch, both variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiny import tiny_model
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads import medusa_files
from vllm_specplugin.heads.checkpoint import Tensors, inspect, tensors
from vllm_specplugin.heads.files import read_json
from vllm_specplugin.heads.medusa import MedusaHeads
from vllm_specplugin.train.export_mtp import check_fits_mimo
from vllm_specplugin.train.options import MTPOptions, parse_options
from vllm_specplugin.train.pretrain import train_mtp
from vllm_specplugin.train.progress import Screen
from vllm_specplugin.train.run import Outcome
from vllm_specplugin.train.trunk import load_trunk

VOCAB = 64
MODULE = {
    *(f"{norm}_layernorm.weight" for norm in ("token", "hidden", "input", "post_attention", "final")),
    "input_proj.weight",
    *(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
    "self_attn.o_proj.weight",
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
}
"""The tensors of one module in MiMo's layout."""


@pytest.fixture(scope="module")
def target(pytestconfig: pytest.Config) -> Path:
    """Small, and with attention heads that together are as wide as its states, as MiMo's layout wants them."""
    return tiny_model(pytestconfig.cache.mkdir("tiny"), vocab_size=VOCAB, hidden=64, heads=2, kv_heads=1, layers=2, mlp=96)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    lines = [{"prompt_token_ids": [n, n + 1], "token_ids": [(n + 3 * place) % VOCAB for place in range(20)]} for n in range(12)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def train(target: Path, data: Path, out: Path, **options: Any) -> Outcome:
    general = {"target": str(target), "data": data, "out": out, "steps": 3, "dtype": "float32", "device": "cpu", "depth": 3}
    chosen = parse_options(MTPOptions, {**general, "cache": out.parent / "cache", "held_out": 0.2, **options})
    return train_mtp(chosen, Screen(enabled=False))


def same(left: Tensors | dict[str, Tensor], right: Tensors | dict[str, Tensor], name: str) -> bool:
    return torch.equal(left[name], right[name])


def logits(folder: Path) -> Tensor:
    trunk = load_trunk(folder)
    with torch.no_grad():
        states = trunk(torch.arange(10)[None])
        return states.after_norm @ states.output.T


def test_modules_for_a_frozen_target(target: Path, data: Path, tmp_path: Path) -> None:
    """The folder is the target, bit for bit, with a module in it; and it says how it came about."""
    outcome = train(target, data, tmp_path / "out", gated=True, output_scale=True)
    info = inspect(str(tmp_path / "out"))
    assert (info.family, info.depth, info.vocab_size) == ("mtp", 1, VOCAB)
    before, after = tensors(target), tensors(tmp_path / "out")
    assert all(same(before, after, name) for name in before)
    prefix = "model.mtp_layers.0."
    assert {name.removeprefix(prefix) for name in after if name.startswith(prefix)} == MODULE
    biases = {f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in (0, 1) for part in "qkv"}
    assert set(after) == {*before, *(prefix + name for name in MODULE), *biases}
    assert not any(after[name].any() for name in biases)
    assert torch.equal(logits(target), logits(tmp_path / "out"))
    # And is loaded as it: the type that training ran in, for one, is not the model's.
    layout = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    written = read_json(tmp_path / "out" / "config.json")
    assert written.pop("vllm_specplugin") == info.provenance
    assert written == {**read_json(target / "config.json"), **layout}
    assert info.provenance["options"]["variant"] == "sequential"
    assert info.provenance["data"]["sha256"]
    assert set(outcome.results) >= {"depth 2", "depth 3", "acceptance_1", "acceptance_length"}
    assert "main" not in outcome.results


def test_parallel_heads_for_a_frozen_target_are_medusa_heads(target: Path, data: Path, tmp_path: Path) -> None:
    train(target, data, tmp_path / "out", variant="parallel", gated=True, norm="pre", output_scale=True, num_layers=2)
    info = inspect(str(tmp_path / "out"))
    assert (info.family, info.depth, info.hidden_size, info.vocab_size) == ("medusa", 2, 64, VOCAB)
    heads = MedusaHeads(medusa_files.config_of(info.shapes, info.config, "out"))
    medusa_files.load(heads, tensors(tmp_path / "out"), "out")
    assert (heads.config.gated, heads.config.norm, heads.config.output_scale) == (True, "pre", True)
    assert heads.config.output == "target"
    assert heads.blocks[0].gate.any()  # it has learnt


@pytest.mark.parametrize(("trunk", "dtype"), [("joint", "float32"), ("scratch", "bfloat16")])
def test_a_trunk_that_learns_with_its_modules(target: Path, data: Path, tmp_path: Path, trunk: str, dtype: str) -> None:
    outcome = train(target, data, tmp_path / "out", trunk=trunk, dtype=dtype, modules="separate", gated=True)
    info = inspect(str(tmp_path / "out"))
    assert (info.family, info.depth) == ("mtp", 2)
    before, after = tensors(target), tensors(tmp_path / "out")
    changed = {name for name in before if not same(before, after, name)}
    assert changed == set(before) or (trunk == "scratch" and changed >= {n for n in before if n.endswith("proj.weight")})
    close = torch.allclose(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"], atol=0.05)
    assert close == (trunk == "joint")  # three small steps away, or another draw
    assert {name.split(".")[2] for name in after if name.startswith("model.mtp_layers.")} == {"0", "1"}
    assert set(outcome.results) >= {"main", "depth 2", "depth 3"}


def test_a_trunk_that_learns_with_parallel_heads(target: Path, data: Path, tmp_path: Path) -> None:
    """A plain model in the layout of the target, and its heads in a folder inside."""
    train(target, data, tmp_path / "out", trunk="joint", variant="parallel")
    assert inspect(str(tmp_path / "out")).family == "draft_model"
    assert inspect(str(tmp_path / "out" / "medusa")).family == "medusa"
    assert set(tensors(target)) == set(tensors(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert not torch.equal(logits(target), logits(tmp_path / "out"))


@pytest.mark.parametrize("trunk", ["joint", "scratch"])
def test_a_model_of_several_parts_does_not_learn(data: Path, tmp_path: Path, trunk: str) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"vocab_size": VOCAB}}))
    with pytest.raises(ConfigError, match=f"config.json has no 'vocab_size'; --trunk {trunk} needs a Llama-like"):
        train(folder, data, tmp_path / "out", trunk=trunk)


def test_with_lambda_0_the_trunk_is_trained_as_without_heads(target: Path, data: Path, tmp_path: Path) -> None:
    """So the baseline of a comparison is the same command: neither the kind of the heads nor their number matters to it."""
    # Clipping takes the norm over all parameters, and another number of them rounds otherwise.
    train(target, data, tmp_path / "one", trunk="scratch", lambdas="0", clip=0.0)
    train(target, data, tmp_path / "other", trunk="scratch", lambdas="0", clip=0.0, variant="parallel", depth=2)
    train(target, data, tmp_path / "mtp", trunk="scratch", lambdas="1", clip=0.0)
    one, other, mtp = (tensors(tmp_path / name) for name in ("one", "other", "mtp"))
    assert all(same(one, other, name) for name in other)
    assert not same(one, mtp, "model.layers.0.mlp.up_proj.weight")


def test_a_trunk_learns_the_prompts_where_asked_to(target: Path, data: Path, tmp_path: Path) -> None:
    """Which is what pre-training on questions and answers wants; held-out texts stay as they are served."""
    runs = {flag: train(target, data, tmp_path / str(flag), trunk="joint", steps=1, learn_prompts=flag) for flag in (False, True)}
    first = [next(row for row in run.rows if row["split"] == "train") for run in runs.values()]
    assert first[0]["main"] != first[1]["main"]
    provenance = [inspect(str(tmp_path / str(flag))).provenance["options"]["learn_prompts"] for flag in runs]
    assert provenance == [False, True]


def test_the_tokenizer_comes_along(data: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    target = tiny_model(pytestconfig.cache.mkdir("tiny"), hidden=64, heads=2, kv_heads=1, layers=1, mlp=96)
    train(target, data, tmp_path / "out", steps=1)
    from transformers import AutoTokenizer

    # With "qwen2" as its model_type the folder would be given Qwen's normaliser, which joins a letter and its accent.
    text = "So, 2 ways, cafe\u0301"
    ids = AutoTokenizer.from_pretrained(tmp_path / "out").encode(text)
    assert ids == list(text.encode()) == AutoTokenizer.from_pretrained(target).encode(text)


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma2"}, "'model_type' is 'gemma2'"),
        ({"head_dim": 64}, "'head_dim' 64 is not"),
        ({"attention_bias": True}, "biases outside"),
        ({"mlp_bias": True}, "biases outside"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
    ],
)
def test_models_that_mimos_layout_cannot_hold_are_refused(change: dict[str, Any], said: str) -> None:
    check_fits_mimo(LLAMA)
    check_fits_mimo({**LLAMA, "model_type": "qwen2", "attention_bias": True, "sliding_window": 9})
    with pytest.raises(ConfigError, match=said):
        check_fits_mimo({**LLAMA, **change})


def test_a_target_that_does_not_fit_is_refused_before_training(tmp_path: Path, data: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'head_dim' 32 is not .*use --variant parallel"):
        train(tiny_model, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"variant": "parallel", "modules": "separate"}, "--modules separate is for --variant sequential"),
        ({"norm": "pre"}, "--norm is for --variant parallel"),
        ({"num_layers": 2}, "--num-layers is for --variant parallel"),
        ({"variant": "parallel", "num_layers": 0}, "'--num-layers' is 0"),
        ({"trunk": "joint", "labels": "soft"}, "need --trunk frozen"),
        ({"trunk": "scratch", "loss_vocab_size": 9}, "need --trunk frozen"),
        ({"depth": 1}, "'--depth' is 1"),
        ({"lambdas": "a"}, "'--lambdas' is 'a'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    target: Path, data: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(target, data, tmp_path / "out", **options)
