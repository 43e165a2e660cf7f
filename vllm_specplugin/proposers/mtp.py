"""Drafts by the layers that a target was trained with to predict several tokens ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.proposers.base import ProposerOptions
from vllm_specplugin.proposers.native import NativeProposer
from vllm_specplugin.types import Capabilities, Depth, Target

if TYPE_CHECKING:
    from vllm_specplugin.config import SpecConfig


class MTPProposer(NativeProposer):
    """Multi-token prediction (arXiv 2412.19437, section 2.2): the target's own MTP layers, from its own checkpoint.

    The host runs them, for the families that it knows (DeepSeek-V3, Qwen3-Next, MiMo, GLM-4 and others). By default each layer
    is used once per step; a larger k runs them again on their own output, which they are seldom trained for.
    """

    capabilities = Capabilities(tokens="none", probabilities=True, own_kv_cache=True, native="mtp")
    default_num_speculative_tokens = 1

    @classmethod
    def depth(cls, config: SpecConfig, options: ProposerOptions, target: Target | None) -> Depth:
        """As many tokens as the target has MTP layers, or a multiple of that."""
        if target is None:
            return Depth(cls.default_num_speculative_tokens)
        layers, wanted = target.num_mtp_layers, config.num_speculative_tokens
        if layers == 0:
            raise ConfigError(
                f"'proposer' is 'mtp', but the target {target.model!r} ({target.model_type}) has no layers for multi-token "
                "prediction that vLLM knows of; use a target with such layers, or another proposer."
            )
        if wanted is not None and wanted > layers and wanted % layers:
            raise ConfigError(
                f"'num_speculative_tokens' is {wanted}, but {target.model!r} has {layers} MTP layers, which run in turn; use at "
                f"most {layers}, or a multiple of {layers}."
            )
        return Depth(layers)
