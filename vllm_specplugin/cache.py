"""Where the plugin keeps what takes long to make: converted models, hidden states."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "VLLM_SPECPLUGIN_CACHE"


def cache_root(cache: Path | None = None) -> Path:
    """The folder: the argument, else VLLM_SPECPLUGIN_CACHE, else ~/.cache/vllm-specplugin."""
    if cache is not None:
        return Path(cache).expanduser()
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "vllm-specplugin"
