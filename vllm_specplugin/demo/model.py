"""The demo's model: SmolLM2-135M-Instruct as a Hugging Face folder, made once and kept in a cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shutil
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_specplugin.cache import CACHE_VARIABLE, cache_root
from vllm_specplugin.demo.convert import convert, write_json
from vllm_specplugin.demo.source import GgufSource, gguf_source
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.progress import progress_bars

MODEL_NAME = "SmolLM2-135M-Instruct"
LAYOUT = 1  # part of the folder's name from 2 on: raise it whenever the conversion changes, and old folders are left alone
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
PROVENANCE = "provenance.json"


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a whole conversion. It appears by a rename, so this only guards against deleted files."""
    return all((folder / name).is_file() for name in (*FILES, PROVENANCE))


def provenance(source: GgufSource) -> dict[str, Any]:
    """What this model was made from and by what: the first thing to look at when two machines disagree."""
    digest = hashlib.sha256(source.path.read_bytes()).hexdigest()  # 98 MB
    versions = {}
    for package in ("vllm-specplugin", "gguf", "torch", "safetensors", "tokenizers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "model": MODEL_NAME,
        "layout": LAYOUT,
        "source": {
            "package": source.package,
            "version": source.version,
            "obtained": source.how,
            "file": source.path.name,
            "sha256": digest,
        },
        "note": "weights were quantized in the source file; they are that file's values rounded to bfloat16",
        "license": "Apache-2.0 (Hugging Face, SmolLM2)",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions,
    }


def demo_model(cache: Path | None = None, progress: bool = True) -> Path:
    """The folder of the converted demo model, converting it first where that has not been done (about 10 s).

    `cache` is the folder to keep it in (default: see `cache_root`). With `progress`, a bar is drawn on stderr.
    Several processes may call this at once: each converts into a folder of its own and the first to finish wins.
    Raises SpecPluginError where the source package is neither installed nor downloadable, or the cache is not writable.
    """
    root = cache_root(cache)
    folder = root / (MODEL_NAME if LAYOUT == 1 else f"{MODEL_NAME}-{LAYOUT}")
    if is_complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=root))
    except OSError as error:
        raise SpecPluginError(f"cannot write the model cache {root} ({error.strerror}); set {CACHE_VARIABLE}") from error
    try:
        _fill(temporary, progress)
        temporary.chmod(0o755)  # mkdtemp makes it private, but a cache may be shared
        return _publish(temporary, folder)
    except OSError as error:
        raise SpecPluginError(
            f"cannot write the demo model to {root} ({error}); set {CACHE_VARIABLE} to a roomier place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already where it was published


def _fill(folder: Path, progress: bool) -> None:
    """Find the source and convert it into `folder`, with a progress bar if asked for."""
    with progress_bars(progress) as bars:
        task = bars.add_task("finding the demo model", total=None)
        with gguf_source() as source:
            bars.update(task, description=f"converting {MODEL_NAME} from {source.package} {source.version}", total=100)
            convert(source.path, folder, lambda percent: bars.update(task, completed=percent))
            write_json(folder / PROVENANCE, provenance(source))


def _publish(temporary: Path, folder: Path) -> Path:
    """Rename the finished conversion into place, or use the one that another process put there meanwhile."""
    if folder.exists() and not is_complete(folder):
        shutil.rmtree(folder)
    try:
        temporary.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise
    return folder
