"""`train mtp`: heads for multi-token prediction on a frozen model, or together with it, from its weights or from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.checkpoint import tensors
from vllm_specplugin.heads.decoder import DecoderConfig
from vllm_specplugin.heads.files import read_json, weights_identity
from vllm_specplugin.heads.medusa import MedusaConfig, MedusaHeads
from vllm_specplugin.heads.mtp import MTPConfig, SequentialMTP
from vllm_specplugin.train.batch import Subset
from vllm_specplugin.train.data import read_examples
from vllm_specplugin.train.export_mtp import (
    HEADS_FOLDER,
    check_fits_mimo,
    export_heads,
    export_model,
    export_with_modules,
    stored_type,
)
from vllm_specplugin.train.mtp import DepthWeights, FrozenMTP, FrozenParts, JointMTP, MTPObjective
from vllm_specplugin.train.options import MTPOptions
from vllm_specplugin.train.progress import Screen
from vllm_specplugin.train.run import (
    DATA,
    WEIGHTS,
    Outcome,
    check_tokens,
    learnt,
    require_libraries,
    train_heads,
    train_objective,
)
from vllm_specplugin.train.state import split
from vllm_specplugin.train.states import examples_digest, token_source
from vllm_specplugin.train.target import Setting, load_tokenizer, model_folder, most_frequent
from vllm_specplugin.train.trunk import Trunk, load_trunk

FINAL_NORM = "model.norm.weight"


def train_mtp(options: MTPOptions, screen: Screen | None = None) -> Outcome:
    """Train as the options say.

    Raises:
        SpecPluginError: something in the options, the data or the folder is not as it must be; or Ctrl-C, with the state kept.
    """
    weights_of(options)  # a mistake in them is said before the target is run
    return train_heads(options, build_frozen, screen) if options.trunk == "frozen" else train_joint(options, screen)


def make_heads(options: MTPOptions, config: Mapping[str, Any], output: Tensor, final_norm: Tensor) -> SequentialMTP | MedusaHeads:
    """The heads that the options ask for, at their start.

    Args:
        options: of the run.
        config: the target's config.json.
        output: `[vocab, hidden]`, the target's.
        final_norm: `[hidden]`, the weight of the target's final norm.

    Raises:
        ConfigError: the target does not fit the layout in which modules are served.
    """
    if options.variant == "parallel":
        vocab, hidden = output.shape
        parallel = MedusaHeads(
            MedusaConfig(
                num_heads=options.depth - 1,
                hidden_size=hidden,
                vocab_size=vocab,
                num_layers=options.num_layers,
                output="target",
                gated=options.gated,
                norm=options.norm,
                output_scale=options.output_scale,
            )
        )
        parallel.initialise(output)
        return parallel
    check_fits_mimo(config)
    modules = SequentialMTP(
        MTPConfig(
            DecoderConfig.from_hf(config),
            options.depth - 1,
            modules=options.modules,
            gated=options.gated,
            output_scale=options.output_scale,
        )
    )
    modules.initialise(final_norm)
    return modules


def weights_of(options: MTPOptions) -> DepthWeights:
    return DepthWeights.parse(options.lambdas, options.lambda_schedule, options.depth)


# -- a frozen trunk ----------------------------------------------------------------------------------------


def build_frozen(options: MTPOptions, setting: Setting) -> FrozenMTP:
    """Heads for the target as it is.

    Raises:
        ConfigError: the target has no final norm where Llama-like models have it, or does not fit the layout of modules.
    """
    target = setting.target
    stored = tensors(target.folder)
    if FINAL_NORM not in stored:
        raise ConfigError(f"--target is {target.model!r}, which has no {FINAL_NORM!r}; MTP needs a Llama-like model.")
    final_norm = stored[FINAL_NORM].float()
    heads = make_heads(options, target.config, target.output, final_norm)
    compared = None
    if options.loss_vocab_size is not None and options.loss_vocab_size < target.vocab_size:
        compared = most_frequent(setting.counts, options.loss_vocab_size)
    return FrozenMTP(
        FrozenParts(target.embedding, target.output, final_norm),
        heads,
        weights_of(options),
        partial(_export_frozen, stored, read_json(target.folder / "config.json"), target.folder),
        soft=options.labels != "text",
        compared=compared,
    )


def _export_frozen(
    model: Mapping[str, Tensor],
    config: Mapping[str, Any],
    source: Path,
    objective: MTPObjective,
    folder: Path,
    provenance: Mapping[str, Any],
) -> None:
    """Modules with the model, heads alone: as each is served."""
    if isinstance(objective.heads, MedusaHeads):
        export_heads(objective.heads, folder, provenance)
    else:
        export_with_modules(objective.heads, model, config, source, folder, provenance)


# -- a trunk that learns -----------------------------------------------------------------------------------


def train_joint(options: MTPOptions, screen: Screen | None = None) -> Outcome:
    """Train the model together with its heads, from its weights or from scratch."""
    require_libraries()
    folder = model_folder(options.target)
    config = read_json(folder / "config.json")
    if "vocab_size" not in config:  # a model of several parts has it one level down
        raise ConfigError(
            f"'--target' is '{options.target}', whose config.json has no 'vocab_size'; --trunk {options.trunk} needs a "
            "Llama-like language model by itself."
        )
    examples = read_examples(options.data, load_tokenizer(folder), options.max_length)
    check_tokens(examples, int(config["vocab_size"]), options)
    torch.manual_seed(options.seed)  # trunk first, heads after it: with other heads the trunk starts the same
    objective = build_joint(options, load_trunk(folder, options.trunk == "scratch"), config, folder)
    trained, held_out = split(examples, options.held_out, options.seed)
    source = token_source(learnt(examples, trained) if options.learn_prompts else examples)
    return train_objective(
        objective,
        Subset(source, trained),
        Subset(source, held_out) if held_out else None,
        options,
        {DATA: examples_digest(examples), WEIGHTS: weights_identity(folder)},
        {"target": options.target, "data": options.data, "tokens": int(source.lengths.sum())},
        screen,
    )


def build_joint(options: MTPOptions, trunk: Trunk, config: Mapping[str, Any], tokenizer: Path) -> JointMTP:
    """A trunk with heads.

    Args:
        options: of the run.
        trunk: the model, whose parameters are all trained.
        config: its config.json.
        tokenizer: a folder with the tokenizer's files, which the export takes over.
    """
    heads = make_heads(options, config, trunk.output.detach(), trunk.final_norm.detach())
    return JointMTP(trunk, heads, weights_of(options), partial(_export_joint, config, tokenizer))


def _export_joint(
    config: Mapping[str, Any], tokenizer: Path, objective: MTPObjective, folder: Path, provenance: Mapping[str, Any]
) -> None:
    """The whole model, with its modules in it or its heads beside it."""
    assert isinstance(objective, JointMTP)
    dtype = stored_type(config)
    model = {name: tensor.to(dtype) for name, tensor in objective.trunk.model.state_dict().items()}
    if isinstance(objective.heads, MedusaHeads):
        export_model(model, config, tokenizer, folder, provenance)
        export_heads(objective.heads, folder / HEADS_FOLDER, provenance)
    else:
        export_with_modules(objective.heads, model, config, tokenizer, folder, provenance)
