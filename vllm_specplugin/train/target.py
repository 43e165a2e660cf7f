"""The target in training: a frozen trunk that is run once over the data, and the matrices that heads share with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.files import locate, weights_identity

OUTPUT_TOLERANCE = 0.02
"""Relative difference that rounding to bfloat16 may make between the target's own logits and those from its output matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class FrozenTarget:
    """What objectives know of the target."""

    model: str
    """As the user named it."""
    folder: Path
    """Where its files lie."""
    config: Mapping[str, Any]
    """Its config.json; of a model with several parts, the language model's."""
    output: torch.Tensor
    """`[vocab, hidden]`: logits are `states @ output.T`."""
    embedding: torch.Tensor
    """`[vocab, hidden]`"""
    num_layers: int
    """Of the language model. Its config.json may have another name for it, as GPT-2's has."""

    @property
    def vocab_size(self) -> int:
        return self.output.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.output.shape[1]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers whose *inputs* EAGLE-3 reads; the host takes the same ones by default, without repetition and in order."""
        return tuple(sorted({2, self.num_layers // 2, self.num_layers - 3}))


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What an objective is built from, its options aside."""

    target: FrozenTarget
    counts: torch.Tensor
    """`[vocab]` int64: how much each token counts in the examples that are trained on: answers, and with less weight prompts."""
    dtype: torch.dtype
    """Of the arithmetic, and of the states in batches."""


def most_frequent(counts: torch.Tensor, size: int) -> torch.Tensor:
    """A draft vocabulary: the `size` most frequent tokens, `[size]` int64 in ascending order; ties go to the lower id.

    Raises:
        ConfigError: the vocabulary has fewer.
    """
    if size > len(counts):
        raise ConfigError(f"'--draft-vocab-size' is {size}, but the target's vocabulary has only {len(counts)} tokens.")
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


class TargetModel:
    """The target itself, loaded by transformers, for the one pass over the data."""

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device) -> None:
        """Load it.

        Raises:
            ConfigError: there is no such model, transformers does not know it, or its logits are more than a matrix product.
        """
        self.folder = model_folder(model)
        self.device = device
        with quiet_transformers():
            self.tokenizer = load_tokenizer(self.folder)
            self.module = _load(model, self.folder, dtype).to(device).eval().requires_grad_(False)
        config = self.module.config.get_text_config()  # type: ignore[operator, union-attr]
        self.frozen = FrozenTarget(
            model=model,
            folder=self.folder,
            config=config.to_dict(),
            output=self._output() * self._scale(model),
            embedding=self.module.get_input_embeddings().weight.detach(),  # type: ignore[operator, union-attr]
            num_layers=config.num_hidden_layers,
        )

    @torch.no_grad()
    def states(self, token_ids: torch.Tensor, aux_layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Last hidden states `[rows, length, hidden]` and, if layers are named, their inputs `[rows, length, layers * hidden]`.

        Padding on the right needs no mask, since attention is causal.
        """
        out = self.module.base_model(  # type: ignore[operator, union-attr]
            input_ids=token_ids.to(self.device), use_cache=False, output_hidden_states=bool(aux_layers)
        )
        aux = torch.cat([out.hidden_states[layer] for layer in aux_layers], dim=-1) if aux_layers else None
        return out.last_hidden_state, aux

    def identity(self) -> str:
        """See `weights_identity`."""
        return weights_identity(self.folder)

    def _output(self) -> torch.Tensor:
        return self.module.get_output_embeddings().weight.detach()  # type: ignore[operator, union-attr, no-any-return]

    def _scale(self, model: str) -> float:
        """The constant that some models multiply their logits by; found by comparing, so no model needs to be known here."""
        ids = torch.arange(8)[None]
        with torch.no_grad():
            theirs = self.module(input_ids=ids.to(self.device), use_cache=False).logits.float()
            plain = self.states(ids)[0].float() @ self._output().float().T
        return logit_scale(theirs, plain, model)


def logit_scale(logits: torch.Tensor, plain: torch.Tensor, model: str) -> float:
    """The constant by which a model multiplies what its output matrix gives, 1 for most; both are `[places, vocab]`.

    Raises:
        ConfigError: it does something else to them.
    """
    scale = float((logits * plain).sum() / (plain * plain).sum())
    apart = float((logits - scale * plain).norm() / logits.norm())
    if not apart < OUTPUT_TOLERANCE:
        raise ConfigError(
            f"'--target' is '{model}', whose logits are more than its output matrix times its last hidden state (they differ "
            f"by {apart:.0%}: a cap or a bias); heads that share its output layer cannot be trained."
        )
    return scale if abs(scale - 1) > OUTPUT_TOLERANCE else 1.0


def model_folder(model: str) -> Path:
    """Where a model that --target names lies; it has a config.json."""
    try:
        folder = locate(model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("'model'", "'--target'", 1)) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"'--target' is '{model}', which is no model folder: it has no config.json.")
    return folder


def _load(model: str, folder: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"'--target' is '{model}', which transformers cannot load as a language model: {first}") from error


def load_tokenizer(folder: Path) -> Any:
    """The target's tokenizer; None where it has none, which is enough for data of token ids."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers draws a bar of its own for each model, and warns of what is none of the user's business here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
