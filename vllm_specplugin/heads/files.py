"""The files of a checkpoint: where a model's name leads, what tensors lie there, and their shapes without reading them.

Reads safetensors and PyTorch files, whole or in shards with an index; a PyTorch file may hold tensors only, as anything else
would be code to run.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specplugin.errors import ConfigError

if TYPE_CHECKING:
    import torch

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Endings of files with tensors, best first."""

TOKENIZERS = ("*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Files of tokenizers and chat templates, beside JSON; without them another tokenizer would be made of the rest, silently."""

_NOT_WEIGHTS = re.compile(r"optimizer|scheduler|training_args|rng_state|scaler|consolidated|trainer", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def locate(model: str, revision: str | None = None) -> Path:
    """The local folder or file of a checkpoint; a name from the Hugging Face hub is fetched into its cache.

    Raises:
        ConfigError: there is nothing of that name.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or not _HUB_NAME.fullmatch(model):
        raise ConfigError(f"'model' is {model!r}: there is no such folder or file.")
    return _fetch(model, revision)


def _fetch(model: str, revision: str | None) -> Path:
    """A snapshot of the repository with its configuration, its tokenizer and one kind of weights."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        names = HfApi().list_repo_files(model, revision=revision)
        wanted = ["*.json", *TOKENIZERS, *weight_files(names)]
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = f"revision {revision!r} of it" if isinstance(error, RevisionNotFoundError) else "repository of that name"
        raise ConfigError(f"'model' is {model!r}: there is no such folder here, and no {what} on the Hugging Face hub.") from None
    except Exception as error:  # each version of the hub's client has another HTTP library, with errors of its own
        try:
            return Path(snapshot_download(model, revision=revision, local_files_only=True))
        except (OSError, ValueError):
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"'model' is {model!r}: there is no such folder here, and the Hugging Face hub cannot be asked ({reason})."
            ) from None


def weight_files(names: list[str]) -> list[str]:
    """Those of a folder's file names that hold its weights: the best kind of file that is there, an index's shards included."""
    here = [name for name in sorted(names) if "/" not in name and not _NOT_WEIGHTS.search(name)]
    for ending in WEIGHTS:
        found = [name for name in here if name.endswith(ending)]
        if found:
            return found
    return []


def weights_identity(path: Path) -> str:
    """Changes when a checkpoint's weights or configuration do: from names, sizes and times of the files, which are not read.

    `path` is a folder, or one file of weights.
    """
    config = path / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    files = [path / name for name in weight_files([file.name for file in path.iterdir()])] if path.is_dir() else [path]
    for file in sorted(files):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class Tensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint, by the names they have there; each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Reads the headers.

        Args:
            path: a folder, or one file.

        Raises:
            ConfigError: there are no weights, or a file cannot be read.
        """
        self.path = path
        self._file_of: dict[str, Path] = {}
        self._torch_files: dict[Path, Mapping[str, torch.Tensor]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        files = files_of(path)
        if not files:
            raise ConfigError(f"'model' is '{path}': it holds no weights ({', '.join('*' + ending for ending in WEIGHTS)}).")
        for file in files:
            self._read_header(file)

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        if file in self._torch_files:
            return self._torch_files[file][name]
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor."""
        return self._shapes

    def _read_header(self, file: Path) -> None:
        try:
            if file.suffix == ".safetensors":
                from safetensors import safe_open

                with safe_open(file, framework="pt") as opened:
                    shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            else:
                self._torch_files[file] = tensors = _torch_file(file)
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        except ConfigError:
            raise
        except Exception as error:  # truncated files fail in many ways
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ConfigError(f"'model' is '{self.path}': {file.name} is damaged or no file of weights ({reason}).") from None
        self._shapes.update(shapes)
        self._file_of.update(dict.fromkeys(shapes, file))


def files_of(path: Path) -> list[Path]:
    """The files that hold a checkpoint's weights; none where there are none.

    Raises:
        ConfigError: an index names a file that is not there.
    """
    if path.is_file():
        return [path]
    for kind in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{kind}.index.json"
        if index.is_file():
            shards = sorted({path / name for name in read_json(index).get("weight_map", {}).values()})
            missing = [shard.name for shard in shards if not shard.is_file()]
            if missing:
                raise ConfigError(f"'model' is '{path}': {index.name} names {missing[0]}, which is not there.")
            return shards
    return [path / name for name in weight_files([file.name for file in path.iterdir() if file.is_file()])]


def _torch_file(file: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a PyTorch file, mapped into memory and not read; nothing in it is run."""
    import torch

    try:
        loaded: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise ConfigError(
            f"'model' is '{file}': it holds Python objects and not tensors alone, and loading them could run code; "
            "save its state_dict as safetensors."
        ) from None
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        loaded = torch.load(file, map_location="cpu", weights_only=True)  # of the format before PyTorch 1.6
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ConfigError(f"'model' is '{file}': it is no mapping from names to tensors.")
    return loaded


def read_json(file: Path) -> dict[str, Any]:
    """A file with one JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'model' is '{file.parent}': {file.name} cannot be read ({error}).") from None
    if not isinstance(value, dict):
        raise ConfigError(f"'model' is '{file.parent}': {file.name} holds no JSON object.")
    return value
