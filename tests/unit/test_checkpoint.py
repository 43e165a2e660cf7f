"""Checkpoints as people have them: every layout is recognised and loaded, and what does not fit is refused in one line."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.heads import random_heads, write
from vllm_specplugin import ConfigError, Target
from vllm_specplugin.heads import checkpoint, files, medusa_files
from vllm_specplugin.heads.checkpoint import HeadsInfo, inspect, require
from vllm_specplugin.heads.files import TOKENIZERS
from vllm_specplugin.heads.medusa import MedusaConfig, MedusaHeads

HEADS, LAYERS, HIDDEN, VOCAB = 3, 2, 16, 30
OWN = MedusaConfig(num_heads=HEADS, num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB, bias=True)
HEADS_OF = random_heads(OWN)
TARGET = Target(model="the-target", model_type="llama", hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=2)

Tensors = dict[str, torch.Tensor]


def fasterdecoding(prefix: str = "", heads: MedusaHeads = HEADS_OF) -> Tensors:
    """The heads under FasterDecoding's names."""
    tensors = {}
    for head in range(heads.config.num_heads):
        for layer, block in enumerate(heads.blocks):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = block.linear.weight[head]
            if block.linear.bias is not None:
                tensors[f"{prefix}{head}.{layer}.linear.bias"] = block.linear.bias[head]
        assert heads.output is not None
        tensors[f"{prefix}{head}.{len(heads.blocks)}.weight"] = heads.output.weight[head]
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def safetensors(folder: Path, tensors: Mapping[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}, folder / name)
    return folder


def config_json(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path) -> MedusaHeads:
    info = inspect(str(folder))
    heads = MedusaHeads(medusa_files.config_of(info.shapes, info.config, str(folder)))
    medusa_files.load(heads, checkpoint.tensors(info.folder), str(folder))
    return heads


def assert_equal(actual: MedusaHeads, expected: MedusaHeads) -> None:
    assert actual.config == expected.config
    states, wanted = actual.state_dict(), expected.state_dict()
    assert states.keys() == wanted.keys()
    for name, value in states.items():
        assert torch.equal(value, wanted[name]), name


def refused(folder: Path | str) -> str:
    """The one line with which a checkpoint is refused."""
    with pytest.raises(ConfigError) as error:
        inspect(str(folder))
    text = str(error.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


# -- Medusa ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads.", "model.medusa_head."])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin", "model.safetensors"])
def test_fasterdecodings_files(tmp_path: Path, prefix: str, file: str) -> None:
    tensors = fasterdecoding(prefix)
    if file.endswith(".safetensors"):
        safetensors(tmp_path, tensors, file)
    else:
        torch.save(tensors, tmp_path / file)
    config_json(tmp_path, medusa_num_heads=2, medusa_num_layers=LAYERS, base_model_name_or_path="someone/vicuna")
    info = inspect(str(tmp_path))
    assert (info.family, info.layout, info.depth, info.base_model) == ("medusa", "fasterdecoding", HEADS, "someone/vicuna")
    assert (info.hidden_size, info.vocab_size, info.draft_vocab_size) == (HIDDEN, VOCAB, None)
    assert_equal(loaded(tmp_path), HEADS_OF)
    assert_equal(loaded(tmp_path / file), HEADS_OF)  # the file may be named itself


def test_files_without_a_configuration_and_from_before_zip_archives(tmp_path: Path) -> None:
    torch.save(fasterdecoding(), tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    assert_equal(loaded(tmp_path), HEADS_OF)


def test_heads_beside_the_whole_target(tmp_path: Path) -> None:
    """FasterDecoding's self-distilled models: the target's output layer is not the heads'."""
    target = {"lm_head.weight": torch.randn(VOCAB, HIDDEN), "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    safetensors(tmp_path, fasterdecoding("medusa_head.") | target)
    config_json(tmp_path, architectures=["MedusaLlamaForCausalLM"], hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=32)
    assert_equal(loaded(tmp_path), HEADS_OF)


def test_one_head_beside_the_whole_target(tmp_path: Path) -> None:
    """Even where the target's output layer has rows for padding."""
    one = random_heads(replace(OWN, num_heads=1))
    for place, rows in enumerate((VOCAB, VOCAB + 2)):
        target = {"lm_head.weight": torch.randn(rows, HIDDEN), "model.embed_tokens.weight": torch.randn(rows, HIDDEN)}
        folder = safetensors(tmp_path / str(place), fasterdecoding("medusa_head.", one) | target)
        config_json(folder, hidden_size=HIDDEN, vocab_size=VOCAB)
        assert_equal(loaded(folder), one)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_one_output_for_all_heads_where_that_is_said(tmp_path: Path, heads: int) -> None:
    """With `original_lm_head` vLLM leaves the heads' outputs aside."""
    shared = random_heads(replace(OWN, num_heads=heads, output="shared"))
    tensors, config = medusa_files.dump(shared)
    beside = {f"lm_heads.{head}.weight": torch.randn(VOCAB, HIDDEN) for head in range(heads)}
    config_json(safetensors(tmp_path, tensors | beside), **config)
    assert_equal(loaded(tmp_path), shared)


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors = fasterdecoding()
    shards: dict[str, Tensors] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    weight_map = {}
    for place, (name, tensor) in enumerate(tensors.items()):
        shard = f"model-{1 + place % 2}.safetensors"
        shards[shard][name] = tensor
        weight_map[name] = shard
    for name, part in shards.items():
        safetensors(tmp_path, part, name)
    safetensors(tmp_path, {"9.9.weight": torch.zeros(1, 1)}, "consolidated.safetensors")  # of no concern
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(loaded(tmp_path), HEADS_OF)
    (tmp_path / "model-2.safetensors").unlink()
    assert "model.safetensors.index.json names model-2.safetensors, which is not there" in refused(tmp_path)


def test_vllms_layout_with_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    """`token_map` beside output layers for the whole vocabulary or for that part alone."""
    heads = random_heads(replace(OWN, output="shared", draft_vocab_size=10, bias=False))
    assert heads.draft_to_target is not None
    assert heads.output is not None
    tensors, config = medusa_files.dump(heads)
    assert config["architectures"] == ["MedusaModel"]  # vLLM 0.32 serves it, too
    whole = torch.zeros(VOCAB, HIDDEN)
    whole[heads.draft_to_target] = heads.output.weight[0].detach()
    for place, rows in enumerate((tensors["lm_head.weight"], whole)):
        folder = safetensors(tmp_path / str(place), tensors | {"lm_head.weight": rows})
        config_json(folder, **config)
        info = inspect(str(folder))
        assert (info.layout, info.vocab_size, info.draft_vocab_size) == ("vllm", VOCAB, 10)
        assert_equal(loaded(folder), heads)
    # With `original_lm_head` vLLM takes the first head's layer for all.
    first = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"} | {"lm_heads.0.weight": whole}
    folder = config_json(safetensors(tmp_path / "first", first), **config)
    assert_equal(loaded(folder), heads)


@pytest.mark.parametrize(
    "change",
    [{"gated": True}, {"norm": "pre"}, {"norm": "post"}, {"output_scale": True}, {"output": "target"}],
    ids=lambda change: next(iter(change)),
)
def test_vllm_does_not_take_what_it_would_leave_a_part_out_of(change: dict[str, Any]) -> None:
    _, config = medusa_files.dump(random_heads(replace(OWN, **change)))
    assert config["architectures"] == ["SpecPluginMedusa"]
    assert medusa_files.dump(HEADS_OF)[1]["architectures"] == ["MedusaModel"]


Damage = Callable[[Tensors, dict[str, Any]], object]

DAMAGED: dict[str, tuple[Damage, str]] = {
    "a block is missing": (lambda t, c: t.pop("1.0.linear.weight"), "Medusa head 1 lacks the matrix of block 0"),
    "an output is missing": (lambda t, c: t.pop("1.2.weight"), "Medusa head 1 lacks its output layer"),
    "only outputs": (
        lambda t, c: [t.pop(name) for name in list(t) if "linear" in name],
        "its Medusa heads lack the matrices of their residual blocks",
    ),
    "another shape": (
        lambda t, c: t.update({"2.1.linear.weight": torch.zeros(HIDDEN, 8)}),
        r"2.1.linear.weight has the shape \[16, 8\], not \[16, 16\]",
    ),
    "another vocabulary": (lambda t, c: c.update(vocab_size=31), "its output layer has 30 rows, .* a vocabulary of 31"),
    "another hidden size": (lambda t, c: c.update(hidden_size=17), "names hidden size 17, but its weights have 16"),
    "other blocks": (lambda t, c: c.update(medusa_num_layers=1), "names residual blocks per head 1, but its weights have 2"),
    "more heads": (lambda t, c: c.update(medusa_num_heads=5), "names 5 heads, but its weights hold 3"),
    "no vocabulary": (
        lambda t, c: [t.pop(f"{head}.2.weight") for head in range(3)],
        "its config.json must name the target's 'vocab_size'",
    ),
    "norms of no place": (
        lambda t, c: t.update({f"blocks.{h}.norms.{n}": torch.ones(HIDDEN) for h in range(3) for n in range(2)}),
        "it has norms, and its config.json must say 'norm': 'pre' or 'post'",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_medusa_heads_that_contradict_themselves(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGED[case]
    tensors, config = fasterdecoding(), {"medusa_num_heads": HEADS}
    damage(tensors, config)
    safetensors(tmp_path, tensors)
    config_json(tmp_path, **config)
    assert re.search(message, refused(tmp_path))


@pytest.mark.parametrize(
    ("mapping", "message"), [([0, 1, 30], "leads outside the vocabulary of 30"), ([4, 4, 5], "names a token twice")]
)
def test_a_token_map_that_cannot_be(tmp_path: Path, mapping: list[int], message: str) -> None:
    heads = random_heads(replace(OWN, output="shared", draft_vocab_size=3))
    tensors, config = medusa_files.dump(heads)
    safetensors(tmp_path, tensors | {"token_map": torch.tensor(mapping)})
    config_json(tmp_path, **config)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


# -- other families ----------------------------------------------------------------------------------------


def layer(prefix: str, inputs: int = HIDDEN) -> Tensors:
    return {
        f"{prefix}.self_attn.q_proj.weight": torch.zeros(HIDDEN, inputs),
        f"{prefix}.mlp.up_proj.weight": torch.zeros(8, HIDDEN),
    }


LLAMA = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 1}
D2T = {"d2t": torch.zeros(12, dtype=torch.int64), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}

FAMILIES: dict[str, tuple[Tensors, dict[str, Any], dict[str, Any]]] = {
    "safeailab's eagle": (
        {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), **layer("layers.0")},
        LLAMA | {"architectures": ["LlamaForCausalLM"]},
        {"family": "eagle", "layout": "safeailab", "hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": None},
    ),
    "eagle with its target's configuration inside": (
        {"model.fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)},
        {"architectures": ["EAGLEModel"], "model": LLAMA},
        {"family": "eagle", "hidden_size": HIDDEN, "vocab_size": VOCAB},
    ),
    "safeailab's eagle3": (
        {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN), "norm.weight": torch.zeros(HIDDEN), **layer("midlayer"), **D2T},
        LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 12},
        {"family": "eagle3", "layout": "safeailab", "hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": 12},
    ),
    "eagle3 narrower than its target": (
        {"fc.weight": torch.zeros(HIDDEN, 3 * 24), **layer("midlayer"), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)},
        LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]},
        {"family": "eagle3", "hidden_size": 24, "vocab_size": VOCAB, "draft_vocab_size": None},
    ),
    "eagle3 of as many layers as it says": (
        {"fc.weight": torch.zeros(HIDDEN, 4 * HIDDEN), **layer("midlayer")},
        LLAMA
        | {"architectures": ["LlamaForCausalLMEagle3"], "num_aux_hidden_states": 4}
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
        {"family": "eagle3", "hidden_size": HIDDEN},
    ),
    "eagle3 of as many layers as it names": (
        {"fc.weight": torch.zeros(HIDDEN, 5 * HIDDEN), **layer("midlayer")},
        LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]},
        {"family": "eagle3", "hidden_size": HIDDEN},
    ),
    "eagle3 of as many layers as it names elsewhere": (
        {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), **layer("midlayer")},
        LLAMA
        | {"architectures": ["LlamaForCausalLMEagle3"], "num_aux_hidden_states": None}
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}},
        {"family": "eagle3", "hidden_size": HIDDEN},
    ),
    "qwen's eagle3": (
        {"fc.weight": torch.zeros(HIDDEN, 6 * HIDDEN), **layer("midlayer")},
        LLAMA | {"architectures": ["Eagle3Qwen3ForCausalLM"], "num_aux_layers": 6, "eagle_config": None},
        {"family": "eagle3", "hidden_size": HIDDEN},
    ),
    "eagle3 that says its target's size": (
        {"fc.weight": torch.zeros(HIDDEN, 3 * 24), **layer("midlayer")},
        LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": 24, "num_aux_hidden_states": 4},
        {"family": "eagle3", "hidden_size": 24},
    ),
    "speculators' eagle3": (
        {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN), **layer("layers.0"), **D2T},
        {
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"speculative_tokens": 5}],
                "verifier": {"name_or_path": "someone/llama"},
            },
            "transformer_layer_config": LLAMA,
            "draft_vocab_size": 12,
        },
        {"family": "eagle3", "layout": "speculators", "depth": 5, "base_model": "someone/llama", "draft_vocab_size": 12},
    ),
    "mimo": (
        {"model.mtp_layers.0.input_proj.weight": torch.zeros(HIDDEN, 2 * HIDDEN), **layer("model.layers.0")},
        LLAMA | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
        {"family": "mtp", "layout": "huggingface", "depth": 1},
    ),
    "qwen3-next": (
        {"mtp.fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), **layer("model.layers.0")},
        LLAMA | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_nextn_predict_layers": 1},
        {"family": "mtp", "depth": 1},
    ),
    "deepseek-v3": (
        layer("model.layers.0"),
        LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        {"family": "mtp", "depth": 1},
    ),
    "a language model": (
        {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), **layer("model.layers.0")},
        LLAMA | {"architectures": ["LlamaForCausalLM"]},
        {"family": "draft_model", "layout": "huggingface", "hidden_size": HIDDEN, "vocab_size": VOCAB, "depth": None},
    ),
    "one that also sees": (
        layer("model.layers.0"),
        {"architectures": ["SomeForConditionalGeneration"], "text_config": LLAMA | {"mtp_num_hidden_layers": 2}},
        {"family": "mtp", "depth": 2, "vocab_size": VOCAB},
    ),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_families(tmp_path: Path, case: str) -> None:
    tensors, config, expected = FAMILIES[case]
    info = inspect(str(config_json(safetensors(tmp_path, tensors), **config)))
    assert {name: getattr(info, name) for name in expected} == expected
    assert info.config == config


def test_a_model_whose_weights_only_the_engine_can_read(tmp_path: Path) -> None:
    config_json(tmp_path, **LLAMA, architectures=["LlamaForCausalLM"])
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert inspect(str(tmp_path)).family == "draft_model"


def test_what_is_of_no_known_family(tmp_path: Path) -> None:
    safetensors(tmp_path, {"encoder.weight": torch.zeros(2, 2)})
    assert "its tensors (encoder.weight, ...) are neither Medusa, EAGLE, EAGLE-3 or MTP heads" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["eagle", "mtp", "peagle", "dflash", "eagle4", None])
def test_speculators_of_a_kind_that_is_not_served(tmp_path: Path, kind: str | None) -> None:
    """Whatever their tensors: of EAGLE heads and MTP layers vLLM reads other layouts."""
    tensors, config, _ = FAMILIES["speculators' eagle3"]
    config_json(safetensors(tmp_path, tensors), **{**config, "speculators_model_type": kind})
    assert refused(tmp_path) == (
        f"'model' is '{tmp_path}': a speculator of the kind {kind!r}, which no proposer here serves; in the format of "
        "`speculators` only the kind 'eagle3' is served."
    )


# -- what does not fit (case 12) ---------------------------------------------------------------------------


def info_of(tmp_path: Path, case: str) -> HeadsInfo:
    tensors, config, _ = FAMILIES[case]
    return inspect(str(config_json(safetensors(tmp_path, tensors), **config)))


@pytest.mark.parametrize("family", ["medusa", "eagle", "eagle3", "mtp", "draft_model"])
@pytest.mark.parametrize("case", ["safeailab's eagle", "safeailab's eagle3", "mimo", "a language model"])
def test_another_family(tmp_path: Path, case: str, family: Any) -> None:
    info = info_of(tmp_path, case)
    if info.family == family or (info.family, family) == ("mtp", "draft_model"):  # a model with MTP layers can draft alone
        require(info, family, TARGET)
        return
    with pytest.raises(ConfigError) as error:
        require(info, family, TARGET)
    holds = f"'model' is '{tmp_path}', which holds {checkpoint.NAMES[info.family]}"
    needs = f"but the proposer {family!r} needs {checkpoint.NAMES[family]}; use 'proposer': {info.family!r}"
    assert str(error.value) == f"{holds}, {needs} or another checkpoint."


def test_medusa_heads_under_another_name(tmp_path: Path) -> None:
    info = inspect(str(write(tmp_path, HEADS_OF, "the-target")))
    with pytest.raises(ConfigError, match="holds Medusa heads, but the proposer 'eagle' needs an EAGLE head"):
        require(info, "eagle", None)
    require(info, "medusa", None)
    require(info, "medusa", TARGET)


def test_another_target(tmp_path: Path) -> None:
    """A hidden size or vocabulary that differs; a draft model may have any hidden size."""
    heads = info_of(tmp_path / "eagle", "safeailab's eagle")
    model = info_of(tmp_path / "model", "a language model")
    wider, more = replace(TARGET, hidden_size=HIDDEN + 1), replace(TARGET, vocab_size=VOCAB + 1)
    with pytest.raises(ConfigError, match="an EAGLE head for a hidden size of 16, but the target 'the-target' has 17"):
        require(heads, "eagle", wider)
    require(model, "draft_model", wider)
    for info in (heads, model):
        with pytest.raises(ConfigError, match="for a vocabulary of 30 tokens, but the target 'the-target' has 31"):
            require(info, info.family, more, key="draft")
    trained = inspect(str(write(tmp_path / "medusa", HEADS_OF, "its/own")))
    with pytest.raises(ConfigError, match=r"for a vocabulary of 30 tokens \(made for its/own\), but"):
        require(trained, "medusa", more)


def test_which_files_hold_the_weights() -> None:
    """One kind of file, and neither a second copy in another layout nor what training left behind."""
    rest = ["config.json", "optimizer.pt", "training_args.bin", "onnx/model.safetensors"]
    assert files.weight_files([*rest, "consolidated.safetensors", "model.safetensors", "pytorch_model.bin"]) == [
        "model.safetensors"
    ]
    assert files.weight_files([*rest, "b.bin", "a.bin", "heads.pt"]) == ["a.bin", "b.bin"]
    assert files.weight_files(rest) == []


# -- what cannot be read -----------------------------------------------------------------------------------


def test_names_that_lead_nowhere(tmp_path: Path, no_network: None) -> None:
    for name in (str(tmp_path / "gone"), "./gone", "a/b/c", "~/surely/not/here", "not a name"):
        assert "there is no such folder or file" in refused(name)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert "the folder is empty" in refused(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"")
    assert "it holds no weights (*.safetensors, *.bin, *.pt, *.pth)" in refused(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "medusa_lm_head.pt"])
def test_a_truncated_file(tmp_path: Path, file: str) -> None:
    if file.endswith(".pt"):
        torch.save(fasterdecoding(), tmp_path / file)
    else:
        safetensors(tmp_path, fasterdecoding())
    whole = (tmp_path / file).read_bytes()
    for size in (len(whole) - 100, len(whole) // 2, 20, 0):
        (tmp_path / file).write_bytes(whole[:size])
        assert f"{file} is damaged or no file of weights" in refused(tmp_path)


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code from a checkpoint ran",)


def test_a_pickle_with_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"0.0.linear.weight": torch.zeros(2, 2), "more": Evil()}, tmp_path / "medusa_lm_head.pt")
    assert "it holds Python objects and not tensors alone" in refused(tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path)
    assert "code from a checkpoint ran" not in capsys.readouterr().out


def test_a_file_of_something_else(tmp_path: Path) -> None:
    torch.save([1, 2, 3], tmp_path / "medusa_lm_head.pt")
    assert "it is no mapping from names to tensors" in refused(tmp_path)
    (tmp_path / "medusa_lm_head.pt").unlink()
    safetensors(tmp_path, fasterdecoding())
    for text, message in (("[1]", "config.json holds no JSON object"), ("{", "config.json cannot be read")):
        (tmp_path / "config.json").write_text(text)
        assert message in refused(tmp_path)


# -- headers alone -----------------------------------------------------------------------------------------


def test_nothing_is_loaded_to_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a tensor of a safetensors file, and no more of a PyTorch file than its pickle."""
    safetensors(tmp_path / "new", fasterdecoding())
    (tmp_path / "old").mkdir()
    torch.save(fasterdecoding(), tmp_path / "old" / "medusa_lm_head.pt")
    monkeypatch.setattr(files.Tensors, "__getitem__", lambda *_: pytest.fail("a tensor was read"))
    arguments = []
    load = torch.load

    def spy(*args: Any, **kwargs: Any) -> Any:
        arguments.append(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    assert inspect(str(tmp_path / "new")).depth == HEADS
    assert arguments == []
    assert inspect(str(tmp_path / "old")).depth == HEADS
    assert arguments == [{"map_location": "cpu", "mmap": True, "weights_only": True}]


# -- the hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the hub fails the test."""
    import huggingface_hub

    def asked(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "HfApi", asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)


def test_a_local_folder_needs_no_network(tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "owner" / "name", HEADS_OF)
    monkeypatch.chdir(tmp_path)
    assert inspect("owner/name").family == "medusa"  # also where it is spelt like a name on the hub
    assert inspect(str(tmp_path / "owner" / "name")).family == "medusa"


def test_a_name_on_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = safetensors(tmp_path, fasterdecoding())
    names = ["README.md", "config.json", "medusa_lm_head.pt", "medusa_lm_head.safetensors", "optimizer.pt", "onnx/x.bin"]
    asked: list[Any] = []

    class Api:
        def list_repo_files(self, model: str, revision: str | None = None) -> list[str]:
            asked.append((model, revision))
            return names

    def snapshot(model: str, **kwargs: Any) -> str:
        asked.append((model, kwargs))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert inspect("owner/heads", "v2").depth == HEADS
    wanted = {"revision": "v2", "allow_patterns": ["*.json", *TOKENIZERS, "medusa_lm_head.safetensors"]}  # one kind of weights
    assert asked == [("owner/heads", "v2"), ("owner/heads", wanted)]


def test_the_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in its cache is used; otherwise the line says both that there is no folder and what became of asking."""
    import huggingface_hub

    folder = safetensors(tmp_path, fasterdecoding())
    cached = [True]

    class Api:
        def list_repo_files(self, model: str, revision: str | None = None) -> list[str]:
            raise ConnectionError("no route to host")

    def snapshot(model: str, **kwargs: Any) -> str:
        assert kwargs["local_files_only"]
        if not cached[0]:
            raise FileNotFoundError("nothing in the cache")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert inspect("owner/heads").depth == HEADS
    cached[0] = False
    assert "there is no such folder here, and the Hugging Face hub cannot be asked (no route to host)" in refused("owner/heads")


# -- writing -----------------------------------------------------------------------------------------------


def test_provenance_goes_into_both_files(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    said = checkpoint.provenance(
        target="the-target", data=data, tokens=12, seed=3, losses={"head 0": 1.5}, command="vllm-specplugin train medusa", steps=7
    )
    assert said["data"] == {
        "file": "data.jsonl",
        "sha256": "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356",
        "tokens": 12,
    }
    assert {"command", "versions", "date", "target", "data", "seed", "losses", "steps"} <= said.keys()
    assert {"torch", "vllm-specplugin"} <= said["versions"].keys()
    tensors, config = medusa_files.dump(HEADS_OF)
    checkpoint.save(tmp_path / "heads", tensors, config, said)
    info = inspect(str(tmp_path / "heads"))
    assert info.provenance == said
    assert info.base_model == "the-target"
    with safe_open(tmp_path / "heads" / "model.safetensors", framework="pt") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["vllm_specplugin"]) == said
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == ["config.json", "model.safetensors"]


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    checkpoint.save(tmp_path, {"whole": base, "row": base[1], "turned": base.T}, {}, {})
    tensors = checkpoint.tensors(tmp_path)
    assert tensors["row"].tolist() == [4, 5, 6, 7]
    assert torch.equal(tensors["turned"], base.T)
    assert dict(tensors.shapes) == {"whole": (3, 4), "row": (4,), "turned": (4, 3)}
    assert len(tensors) == 3


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.zeros(2)}, {"model_type": "medusa"}, {})
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
