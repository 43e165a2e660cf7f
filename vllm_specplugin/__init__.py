"""Speculative decoding for vLLM as a plugin: proposers and verifiers by name, in vLLM's own scheduler and KV cache."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vllm_specplugin.errors import ConfigError, DraftError, RegistryError, SeamError, SpecPluginError
from vllm_specplugin.proposers.base import Proposer, ProposerOptions
from vllm_specplugin.scorers.base import SampleVerifier, Verifier
from vllm_specplugin.types import Capabilities, Depth, Drafts, History, Host, NativeDrafter, Request, Step, Target, Verdict

try:
    __version__ = version("vllm-specplugin")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0"

__all__ = [
    "Capabilities",
    "ConfigError",
    "Depth",
    "DraftError",
    "Drafts",
    "History",
    "Host",
    "NativeDrafter",
    "Proposer",
    "ProposerOptions",
    "RegistryError",
    "Request",
    "SampleVerifier",
    "SeamError",
    "SpecPluginError",
    "Step",
    "Target",
    "Verdict",
    "Verifier",
    "__version__",
]
