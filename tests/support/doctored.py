"""A vLLM with something missing: links to the installed one's files, but for those that were changed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path


def doctored_vllm(folder: Path, renamed: Mapping[str, tuple[str, str]]) -> Path:
    """Make `folder`/vllm; `folder`, put first on PYTHONPATH, hides the installed vLLM.

    Args:
        folder: exists, and is empty.
        renamed: source file, relative to the package -> (what to replace, by what).
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("vLLM is not installed in this environment")
    _link(Path(spec.origin).resolve().parent, folder / "vllm", "", renamed)
    return folder


def _link(source: Path, target: Path, inner: str, renamed: Mapping[str, tuple[str, str]]) -> None:
    target.mkdir()
    for entry in source.iterdir():
        name = f"{inner}{entry.name}"
        if name in renamed:
            old, new = renamed[name]
            text = entry.read_text(encoding="utf-8")
            if old not in text:
                raise ValueError(f"{old!r} does not occur in {entry}")
            (target / entry.name).write_text(text.replace(old, new), encoding="utf-8")
        elif any(file.startswith(f"{name}/") for file in renamed):
            _link(entry, target / entry.name, f"{name}/", renamed)
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
