"""Turns a llama-architecture GGUF file into a Hugging Face model folder.

The folder is written directly (weights, config, tokenizer) instead of through `from_pretrained(gguf_file=...)`: that loader
drops the pre-tokenizer of this model, so that text with digits after two spaces, common in code and JSON, is tokenized
differently from what the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.errors import SpecPluginError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: never split, never produced by merging
ROUND_TRIP = "def add(a, b):\n    return a  + 12  # 3.50 €, naïve\n\t{'id': 2041}"


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor of the llama architecture; SpecPluginError for one it does not know."""
    if gguf_name in OUTER_NAMES:
        return OUTER_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, kind = rest.partition(".")
    if prefix != "blk" or not layer.isdigit() or kind not in BLOCK_NAMES:
        raise SpecPluginError(f"GGUF tensor '{gguf_name}' is not one of a llama model; only that architecture is converted")
    return f"model.layers.{layer}.{BLOCK_NAMES[kind]}"


def unpermute(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Undo llama.cpp's row order of a query or key projection [num_heads * head_dim, hidden].

    llama.cpp rotates neighbouring rows (0,1), (2,3), ... of a head; Hugging Face rotates row i with row i + head_dim/2. The
    export interleaves the two halves of each head, and this takes them apart again.
    """
    rows, hidden = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def model_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json from the GGUF metadata `fields` (name -> value)."""
    if fields["general.architecture"] != "llama":
        raise SpecPluginError(f"GGUF architecture '{fields['general.architecture']}' is not converted; expected 'llama'")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),  # stored as float32
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
    }


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: the ids that end an answer. The chat model ends its turn with <|im_end|>."""
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the GGUF metadata describes, digits one by one as llama.cpp's "smollm" kind says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise SpecPluginError(f"GGUF tokenizer {kind} is not converted; expected ('gpt2', 'smollm')")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, k in zip(tokens, kinds, strict=True) if k == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    """Fail now rather than serve garbage: text survives a round trip, and special tokens are one id each."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    ids = tokenizer.encode(ROUND_TRIP).ids
    broken = [] if tokenizer.decode(ids, skip_special_tokens=False) == ROUND_TRIP else ["a text with digits and accents"]
    for key in ("bos", "eos"):
        token_id = fields[f"tokenizer.ggml.{key}_token_id"]
        if tokenizer.encode(f"a{tokens[token_id]}b").ids.count(token_id) != 1:
            broken.append(f"the special token {tokens[token_id]}")
    if tokenizer.get_vocab_size() != len(tokens) or broken:
        what = ", ".join(broken) or "the number of tokens"
        raise SpecPluginError(f"the converted tokenizer is wrong ({what}); please report this with the version of `tokenizers`")


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, chat template included."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf_file: Path, folder: Path, report: Callable[[int], None] = lambda percent: None) -> None:
    """Write the model folder `folder` (must exist) from `gguf_file`; `report` is told how many percent are done."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise SpecPluginError("converting the demo model needs the package gguf; run `pip install gguf`") from error
    import torch
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    total = sum(int(tensor.n_elements) for tensor in reader.tensors)
    done = 0
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)  # float32, [out, in] or [out]
        kind = tensor.name.split(".", 2)[-1]
        if kind in heads:
            array = unpermute(array, heads[kind])
        weights[hf_name(tensor.name)] = torch.from_numpy(np.array(array, order="C")).to(torch.bfloat16)
        done += int(tensor.n_elements)
        report(90 * done // total)
    tokenizer = build_tokenizer(fields)
    check_tokenizer(tokenizer, fields)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(fields))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # written as private, but a cache may be shared
    report(100)
