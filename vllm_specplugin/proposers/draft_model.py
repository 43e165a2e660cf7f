"""Drafts by a small language model of the target's vocabulary."""

from __future__ import annotations

from vllm_specplugin.proposers.native import NativeProposer
from vllm_specplugin.types import Capabilities


class DraftModelProposer(NativeProposer):
    """A smaller model that decodes ahead of the target (arXiv 2211.17192, arXiv 2302.01318); the host runs it.

    `model` is any causal language model that the host can run and that has the target's vocabulary.
    """

    capabilities = Capabilities(tokens="none", probabilities=True, own_kv_cache=True, checkpoint=True, native="draft_model")
    default_num_speculative_tokens = 5
