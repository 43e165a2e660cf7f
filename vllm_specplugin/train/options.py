"""What a user may say to `vllm-specplugin train`: one field per option. Light to import: the command line is made from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_specplugin.errors import ConfigError

OptionsT = TypeVar("OptionsT", bound="LoopOptions")
"""One objective's options."""


class LoopOptions(BaseModel):
    """Options of the loop, which every objective has: how long, how fast, on what."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    out: Path = Field(description="Folder for the checkpoint, its curves, and what an interrupted run goes on with.")
    epochs: int | None = Field(None, ge=1, description="Times through the data; 1 unless --steps or --minutes is given.")
    steps: int | None = Field(None, ge=1, description="Optimiser steps, instead of --epochs.")
    minutes: float | None = Field(None, gt=0, description="Time for training, instead of --epochs; the schedule follows it.")
    batch_tokens: int = Field(4096, ge=1, description="Most tokens side by side, padding included.")
    accumulate: int = Field(1, ge=1, description="Batches per optimiser step.")
    lr: float = Field(1e-3, gt=0, description="Highest learning rate.")
    warmup: float = Field(0.03, ge=0, lt=1, description="Share of the run in which the learning rate rises.")
    final_lr: float = Field(0.05, ge=0, le=1, description="What the cosine ends at, as a share of --lr.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean gradient.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the mean square.")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's, on matrices only.")
    clip: float = Field(1.0, ge=0, description="Largest norm of the gradient; 0 to leave it as it is.")
    evaluations: int = Field(10, ge=0, description="How often the held-out examples are looked at during the run.")
    checkpoint_minutes: float = Field(5.0, gt=0, description="How often the state of the run is written.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="Type of the arithmetic; parameters stay in float32. auto: bfloat16, but float32 on a CPU without "
        "instructions for bfloat16.",
    )
    device: str = Field("auto", description="As PyTorch names it; auto takes a GPU where there is one.")
    seed: int = Field(0, ge=0, description="Of the run: order of the data, held-out examples, initialisation.")
    fresh: bool = Field(False, description="Drop what --out holds instead of going on with it.")

    @model_validator(mode="after")
    def _one_length(self) -> LoopOptions:
        given = [name for name in ("epochs", "steps", "minutes") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join('--' + name for name in given)} exclude each other; give one of them")
        return self


class TrainOptions(LoopOptions):
    """Options of every objective that trains heads for an existing target."""

    target: str = Field(description="The target model: a folder or hub name.")
    data: Path = Field(description="Text that the target wrote: JSON lines as `distill` writes them, or plain text.")
    max_length: int = Field(1024, ge=8, description="Tokens at which a longer example is cut.")
    learn_prompts: bool = Field(
        False, description="Learn from the prompts' tokens, too: more to learn from, though not the target's own words."
    )
    held_out: float = Field(0.05, ge=0, lt=1, description="Share of the examples that is kept for evaluation.")
    cache: Path | None = Field(
        None, description="Where hidden states are kept; without it, $VLLM_SPECPLUGIN_CACHE or ~/.cache/vllm-specplugin."
    )


class MedusaOptions(TrainOptions):
    """Options of `train medusa`."""

    num_heads: int = Field(4, ge=1, description="Heads: how many tokens are drafted per step.")
    num_layers: int = Field(1, ge=1, description="Residual blocks per head.")
    output: Literal["own", "shared", "target"] = Field(
        "shared", description="Output layer: each head its own, one for all heads, or the target's."
    )
    draft_vocab_size: int | None = Field(
        None, ge=1, description="Draft only the so many most frequent tokens of the data; without it, every token."
    )
    freeze_output: bool = Field(
        False, description="Leave the output layer as it starts, a copy of the target's: faster, and less to overfit with."
    )
    gated: bool = Field(False, description="A learnable gate on each residual branch, closed at the start.")
    norm: Literal["none", "pre", "post"] = Field("none", description="RMSNorm before or behind a block, or nowhere.")
    output_scale: bool = Field(False, description="A learnable factor on what the output layer reads.")
    decay: float = Field(0.8, gt=0, le=1, description="Head k's loss counts decay to the power k.")
    distill_soft: bool = Field(False, description="Learn the target's distribution at each place instead of the token written.")

    @model_validator(mode="after")
    def _goes_together(self) -> MedusaOptions:
        if self.freeze_output and self.output == "own":
            raise ValueError("--freeze-output makes the output layers of all heads the same; use it with --output shared")
        return self


class UnrolledOptions(TrainOptions):
    """Options of heads that are trained as they draft: several tokens on from each place."""

    batch_tokens: int = Field(1024, ge=1, description="Most tokens side by side, padding included.")
    ttt_steps: int = Field(4, ge=1, description="Drafts that training unrolls from every place: the k to be served.")
    step_decay: float = Field(0.8, gt=0, le=1, description="Draft j's loss counts step-decay to the power j.")
    labels: Literal["soft", "text"] = Field(
        "soft", description="Learn the target's distribution at each place, or only the token that it wrote."
    )
    chains: Literal["all", "accepted"] = Field(
        "accepted",
        description="Learn later drafts where those before them are right, as in serving, or everywhere, at more cost.",
    )


class EagleOptions(UnrolledOptions):
    """Options of `train eagle`."""

    feature_weight: float = Field(1.0, ge=0, description="Weight of the smooth L1 distance to the target's hidden state.")
    token_weight: float = Field(0.1, gt=0, description="Weight of the cross-entropy with the target's tokens.")
    noise: float = Field(0.0, ge=0, description="Uniform noise of this size on the states that the head reads, in training.")
    loss_vocab_size: int | None = Field(
        None,
        ge=1,
        description="Compare only the so many most frequent tokens in the loss, which is faster; drafts still range over all.",
    )


class Eagle3Options(UnrolledOptions):
    """Options of `train eagle3`."""

    draft_vocab_size: int | None = Field(
        8192, ge=1, description="Draft only the so many most frequent tokens of the data, where the target has more."
    )
    init: Literal["target", "random"] = Field("target", description="Start as the target's last layer, or from random weights.")
    freeze_output: bool = Field(
        False, description="Leave the output layer as the target's: half the parameters, so less is learnt by heart, and faster."
    )


class MTPOptions(TrainOptions):
    """Options of `train mtp`."""

    trunk: Literal["frozen", "joint", "scratch"] = Field(
        "frozen",
        description="The target as it is, or trained with the heads; scratch takes only its configuration and tokenizer.",
    )
    variant: Literal["sequential", "parallel"] = Field(
        "sequential", description="Modules that also read the tokens in between, or heads on the hidden state alone."
    )
    depth: int = Field(4, ge=2, description="D: tokens predicted from each place, the main head's included; D - 1 are drafts.")
    modules: Literal["shared", "separate"] = Field(
        "shared", description="Sequential: one module fed its own state, as engines serve it, or one for each depth."
    )
    lambdas: str = Field(
        "0.3", description="Weights of the depths: one for all but the main head, D - 1 by commas, or D with the main head's."
    )
    lambda_schedule: str = Field(
        "constant", description="Factor on them over the run: constant, ramp, or points share:factor by commas."
    )
    labels: Literal["soft", "text"] | None = Field(
        None, description="Learn the target's distribution at each place (without it, on a frozen trunk), or the token written."
    )
    loss_vocab_size: int | None = Field(
        None, ge=1, description="Frozen trunk: compare only the so many most frequent tokens in the loss, which is faster."
    )
    num_layers: int = Field(1, ge=1, description="Parallel: residual blocks per head.")
    gated: bool = Field(False, description="A learnable gate on each residual branch, closed at the start.")
    norm: Literal["none", "pre", "post"] = Field("none", description="Parallel: RMSNorm before or behind a block, or nowhere.")
    output_scale: bool = Field(False, description="A learnable factor on what the output layer reads.")

    @model_validator(mode="after")
    def _goes_together(self) -> MTPOptions:
        """No option that would do nothing."""
        if self.variant == "parallel" and self.modules == "separate":
            raise ValueError("--modules separate is for --variant sequential; parallel heads are separate anyhow")
        if self.variant == "sequential" and self.norm != "none":
            raise ValueError("--norm is for --variant parallel; the layout of sequential modules has its norms fixed")
        if self.variant == "sequential" and self.num_layers != 1:
            raise ValueError("--num-layers is for --variant parallel; a sequential module is one decoder layer")
        if self.trunk != "frozen" and (self.labels == "soft" or self.loss_vocab_size is not None):
            raise ValueError("--labels soft and --loss-vocab-size need --trunk frozen; a trunk that learns learns the text")
        return self


RUN_ONLY = frozenset({"out", "fresh", "cache", "checkpoint_minutes", "target", "data"})
"""Options that do not change what comes out, so that a resumed run may have others (of target and data the contents count)."""


def parse_options(model: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """The options as a user gave them, validated.

    Raises:
        ConfigError: one line that names the option, its value and what is allowed.
    """
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise ConfigError(f"{first['msg'].removeprefix('Value error, ')}.") from error
        name = f"--{str(first['loc'][0]).replace('_', '-')}"
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"'{name}' is {first['input']!r}: {message[0].lower()}{message[1:]}.") from error
