"""The target model as a part of what is trained: for objectives whose gradients reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.train.target import logit_scale, quiet_transformers


@dataclass(frozen=True, slots=True, eq=False)
class TrunkStates:
    """What heads read of one pass over a batch of texts."""

    before_norm: Tensor
    """`[rows, length, hidden]`: the last layer's residual stream."""
    after_norm: Tensor
    """`[rows, length, hidden]`: the same behind the final norm, what the output layer reads."""
    embeddings: Tensor
    """`[rows, length, hidden]`: of the texts' own tokens."""
    output: Tensor
    """`[vocab, hidden]`: the output matrix."""


class Trunk(nn.Module):
    """A causal language model of transformers, all of whose parameters are trained."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap it.

        Raises:
            ConfigError: the model has no final norm where Llama-like models have it.
        """
        super().__init__()
        self.model = model
        norm = getattr(_decoder(model), "norm", None)
        if norm is None or getattr(norm, "weight", None) is None:
            raise ConfigError(f"{type(model).__name__} has no final norm that heads could be joined to; use a Llama-like model.")
        self.scale = self._scale()
        """What the model multiplies its logits by."""

    @torch.no_grad()
    def _scale(self) -> float:
        ids = torch.arange(8)[None]
        training = self.model.training
        self.model.eval()
        logits = self.model(input_ids=ids, use_cache=False).logits[0]
        plain = _decoder(self.model)(input_ids=ids, use_cache=False).last_hidden_state[0] @ self._matrix.T
        self.model.train(training)
        return logit_scale(logits, plain, str(self.config.name_or_path or type(self.model).__name__))

    @property
    def _matrix(self) -> Tensor:
        return self.model.get_output_embeddings().weight  # type: ignore[operator, union-attr]

    @property
    def config(self) -> Any:
        """transformers' configuration."""
        return self.model.config

    @property
    def output(self) -> Tensor:
        """`[vocab, hidden]`: the output matrix, times what the model multiplies its logits by."""
        return self._matrix if self.scale == 1 else self._matrix * self.scale

    @property
    def layers(self) -> nn.ModuleList:
        return _decoder(self.model).layers  # type: ignore[return-value]

    @property
    def final_norm(self) -> Tensor:
        """`[hidden]`: the weight of the final norm."""
        return _decoder(self.model).norm.weight  # type: ignore[union-attr, return-value]

    def forward(self, token_ids: Tensor) -> TrunkStates:
        """Run texts `[rows, length]`. Padding on the right needs no mask: attention is causal."""
        decoder = _decoder(self.model)
        seen: list[Tensor] = []
        embeddings = self.model.get_input_embeddings()(token_ids)  # type: ignore[operator]
        hook = decoder.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))  # type: ignore[operator, union-attr]
        try:
            after = decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        finally:
            hook.remove()
        return TrunkStates(before_norm=seen[0], after_norm=after, embeddings=embeddings, output=self.output)


def _decoder(model: nn.Module) -> nn.Module:
    """The layers without the output layer: `base_model` is transformers' name for it."""
    return model.base_model  # type: ignore[return-value]


def load_trunk(folder: Path, scratch: bool = False) -> Trunk:
    """A model in float32: its weights, or with `scratch` fresh ones, drawn by its configuration.

    Raises:
        ConfigError: it is no causal language model that transformers knows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with quiet_transformers():
            if scratch:
                config = AutoConfig.from_pretrained(folder)
                return Trunk(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
            return Trunk(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"'--target' is '{folder}', which transformers cannot load as a language model: {first}") from error


def trunk_of(config: Mapping[str, Any]) -> Trunk:
    """A fresh model of a configuration, as config.json has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    said = dict(config)
    return Trunk(AutoModelForCausalLM.from_config(AutoConfig.for_model(said.pop("model_type"), **said), dtype=torch.float32))
