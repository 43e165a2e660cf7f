"""Drafts by one decoder layer that goes on from the target's hidden states."""

from __future__ import annotations

from vllm_specplugin.proposers.native import NativeProposer
from vllm_specplugin.types import Capabilities


class EagleProposer(NativeProposer):
    """EAGLE (arXiv 2401.15077): a decoder layer that predicts the target's next hidden state from its last one and the token.

    The host runs it. `model` is a checkpoint in the layout of SafeAILab's; embedding and output layer are the target's where the
    checkpoint has none.
    """

    capabilities = Capabilities(tokens="none", probabilities=True, own_kv_cache=True, checkpoint=True, native="eagle")
    default_num_speculative_tokens = 3


class Eagle3Proposer(NativeProposer):
    """EAGLE-3 (arXiv 2503.01840): a decoder layer over three of the target's layers, with a smaller output vocabulary.

    The host runs it. `model` is a checkpoint in the layout of SafeAILab's, or in that of `speculators`, which says itself how
    many tokens it is meant to draft.
    """

    capabilities = Capabilities(tokens="none", probabilities=True, own_kv_cache=True, checkpoint=True, native="eagle3")
    default_num_speculative_tokens = 3
