"""EAGLE: a head that extrapolates the target's last hidden state, and drafts through the target's own output layer.

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077, section 4.2: the
loss is smooth L1 between the head's state and the target's, plus 0.1 times the cross-entropy with the target's own
distribution; uniform noise on the states that are read makes up for the head's own errors in serving. Unrolling the head
over several drafts, as EAGLE-3 does, shows it these errors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_specplugin.heads.checkpoint import save
from vllm_specplugin.heads.decoder import DecoderConfig
from vllm_specplugin.heads.eagle import EagleHead
from vllm_specplugin.train.batch import Batch
from vllm_specplugin.train.losses import CrossEntropy
from vllm_specplugin.train.options import EagleOptions
from vllm_specplugin.train.target import Setting, most_frequent
from vllm_specplugin.train.unrolled import Judged, UnrolledObjective


class EagleObjective(UnrolledObjective):
    """An `EagleHead` in training."""

    name = "eagle"
    states = "last"
    head: EagleHead
    target_output: Tensor
    """`[vocab, hidden]`: the target's output matrix, which the head drafts with."""
    frequent: Tensor
    """`[loss_vocab]` int64: the tokens that the loss compares while training; all of them unless `loss_vocab_size` says so."""

    @classmethod
    def build(cls, options: EagleOptions, setting: Setting) -> EagleObjective:
        """A new head for a target.

        Raises:
            ConfigError: the target's layers are such as a head cannot be sized by.
        """
        return cls(EagleHead(DecoderConfig.from_hf(setting.target.config)), setting, options)

    def __init__(self, head: EagleHead, setting: Setting, options: EagleOptions) -> None:
        target = setting.target
        super().__init__(head, target, options)
        self.feature_weight, self.token_weight = options.feature_weight, options.token_weight
        self.noise = options.noise
        self.vocab_size = target.vocab_size
        self.register_buffer("target_output", target.output, persistent=False)
        size = min(options.loss_vocab_size or target.vocab_size, target.vocab_size)
        frequent = most_frequent(setting.counts, size)
        self.register_buffer("frequent", frequent, persistent=False)
        self.register_buffer("frequent_output", target.output[frequent], persistent=False)
        self.label_of.fill_(-1)[frequent] = torch.arange(size)

    @property
    def compares_all(self) -> bool:
        """Whether the loss runs over the whole vocabulary now; what is shown of held-out text always does."""
        return not self.training or len(self.frequent) == self.vocab_size

    def states_of(self, batch: Batch) -> Tensor:
        states = batch.last
        if not (self.training and self.noise):
            return states
        return states + torch.empty_like(states).uniform_(-self.noise, self.noise)

    def labels(self, tokens: Tensor) -> Tensor:
        return tokens if self.compares_all else super().labels(tokens)

    def judge(self, judged: Judged, weights: Tensor) -> tuple[CrossEntropy, Mapping[str, Tensor]]:
        output = self.target_output if self.compares_all else self.frequent_output
        entropy = self.cross_entropy(judged.hidden, output, judged, weights, output)
        # Over the channels the mean, as in the paper's own code: its weights are made for that.
        distance = nn.functional.smooth_l1_loss(judged.hidden.float(), judged.target.float(), reduction="none").mean(dim=-1)
        features = (distance * weights).sum()
        total = self.token_weight * entropy.total + self.feature_weight * features
        return replace(entropy, total=total), {"features": features}

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write it in SafeAILab's layout, which `"proposer": "eagle"` and vLLM's own `"method": "eagle"` load.

        The target's embedding and output layer are not in it: both hosts share them.
        """
        about = {"vocab_size": self.vocab_size, "max_position_embeddings": self.max_position_embeddings}
        save(folder, self.head.state_dict(), self.head.to_hf(about), provenance)
