"""The `vllm.general_plugins` entry point: vLLM calls `register` in every one of its processes."""

from __future__ import annotations

import logging


def register() -> None:
    """Attach to vLLM: idempotent, cheap, never raises. Without a configuration of ours nothing changes."""
    try:
        from vllm_specplugin.runtime.install import install

        install()
    except Exception:
        logging.getLogger("vllm.specplugin").exception("vllm-specplugin could not attach to vLLM, which runs on without it.")
