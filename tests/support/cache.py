"""Test artefacts that live between runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_root() -> Path:
    """SPECPLUGIN_TEST_CACHE, or ~/.cache/vllm-specplugin."""
    return Path(os.environ.get("SPECPLUGIN_TEST_CACHE") or Path.home() / ".cache" / "vllm-specplugin")


def make_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, filled by `fill` if it is not there yet; concurrent callers are fine, half-made folders are not seen."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    fresh.chmod(0o755)
    try:
        fill(fresh)
        try:
            fresh.rename(folder)
        except OSError:  # another process was quicker
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder
