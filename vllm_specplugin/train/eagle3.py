"""EAGLE-3: a head over three fused layers of the target, trained by a training-time test.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv
2503.01840. The loss is the cross-entropy with the target's own distribution over the tokens that can be drafted; there is
none on the states, which are free to carry whatever helps the drafts to come.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.checkpoint import save, tensors
from vllm_specplugin.heads.decoder import DecoderConfig
from vllm_specplugin.heads.eagle import AUX_LAYERS, Eagle3Head
from vllm_specplugin.heads.files import Tensors
from vllm_specplugin.train.batch import Batch
from vllm_specplugin.train.losses import CrossEntropy
from vllm_specplugin.train.options import Eagle3Options
from vllm_specplugin.train.target import FrozenTarget, Setting, most_frequent
from vllm_specplugin.train.unrolled import Judged, UnrolledObjective

logger = logging.getLogger("vllm.specplugin")

PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What weights say by themselves; narrower ones need scales that lie beside them."""


class Eagle3Objective(UnrolledObjective):
    """An `Eagle3Head` in training."""

    name = "eagle3"
    states = "aux"
    head: Eagle3Head
    target_output: Tensor
    """`[draft_vocab, hidden]`: the target's output matrix, for the tokens that can be drafted."""

    @classmethod
    def build(cls, options: Eagle3Options, setting: Setting) -> Eagle3Objective:
        """A new head for a target.

        Raises:
            ConfigError: the target has too few layers, or such as a head cannot be sized by.
        """
        target = setting.target
        if len(target.aux_layers) != AUX_LAYERS or target.aux_layers[0] < 0:
            raise ConfigError(
                f"'--target' is {target.model!r}, which has {target.num_layers} layers; EAGLE-3 reads three different ones, "
                "which takes 7 at least: use `train eagle` or `train medusa`."
            )
        size = options.draft_vocab_size
        part = size is not None and size < target.vocab_size
        head = Eagle3Head(DecoderConfig.from_hf(target.config), target.vocab_size, size if part else None)
        if part:
            head.set_draft_tokens(most_frequent(setting.counts, head.draft_vocab_size))
        last = _last_layer(target, head) if options.init == "target" else None
        if last is not None:
            head.initialise(*last)
        if options.init == "target" or options.freeze_output:
            head.lm_head.weight.data.copy_(target.output[head.draft_tokens])
        head.lm_head.requires_grad_(not options.freeze_output)
        return cls(head, setting, options)

    def __init__(self, head: Eagle3Head, setting: Setting, options: Eagle3Options) -> None:
        target = setting.target
        super().__init__(head, target, options)
        self.aux_layers = target.aux_layers
        drafted = head.draft_tokens
        self.register_buffer("target_output", target.output[drafted], persistent=False)
        self.label_of.fill_(-1)[drafted] = torch.arange(len(drafted))

    def states_of(self, batch: Batch) -> Tensor:
        return batch.aux

    def judge(self, judged: Judged, weights: Tensor) -> tuple[CrossEntropy, Mapping[str, Tensor]]:
        states = self.head.norm(judged.hidden)
        return self.cross_entropy(states, self.head.lm_head.weight, judged, weights, self.target_output), {}

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write it in SafeAILab's layout, which `"proposer": "eagle3"` and vLLM's own `"method": "eagle3"` load."""
        about = {"vocab_size": self.head.vocab_size, "max_position_embeddings": self.max_position_embeddings}
        save(folder, self.head.state_dict(), self.head.to_hf(about, self.aux_layers), provenance)


def _last_layer(target: FrozenTarget, head: Eagle3Head) -> tuple[dict[str, Tensor], Tensor] | None:
    """The weights of the target's last decoder layer, by their names in it, and of its final norm, in float32.

    None, with a warning, where that layer is of another make than the head's: other names (as with fused projections or norms
    behind the blocks), other shapes, or types that need scales beside them.

    Raises:
        ConfigError: the target's weights cannot be read.
    """
    stored = tensors(target.folder)
    marker = f"layers.{target.num_layers - 1}."
    # In a model of several parts the language model's names have something in front; its layers are the ones that count here.
    prefixes = {name[: name.index(marker)] for name in stored if name.partition(marker)[2] == "input_layernorm.weight"}
    for prefix in sorted(prefixes, key=len):
        layer = {name.removeprefix(prefix + marker): name for name in stored if name.startswith(prefix + marker)}
        wanted = head.last_layer_shapes()
        fits = all(_fits(stored, layer.get(name), shape) for name, shape in wanted.items())
        fits = fits and not any(map(_changes_a_layer, layer.keys() - wanted.keys()))
        if fits and (norm := f"{prefix}norm.weight") in stored:
            return {name: stored[there].float() for name, there in layer.items()}, stored[norm].float()
    logger.warning(
        "The head starts at random, as with --init random: the last layer of %r is of another make than the head's.", target.model
    )
    return None


def _changes_a_layer(name: str) -> bool:
    """A tensor of a decoder layer without which the others do something else: a bias, or a norm that the head has not."""
    return name.endswith((".bias", "q_norm.weight", "k_norm.weight", "feedforward_layernorm.weight"))


def _fits(stored: Tensors, name: str | None, shape: tuple[int, ...]) -> bool:
    return name is not None and stored.shapes[name] == shape and stored[name].dtype in PLAIN_TYPES
