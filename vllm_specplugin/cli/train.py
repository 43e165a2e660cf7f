"""`vllm-specplugin train ...`: a command per objective, its options read off the objective's pydantic model.

An objective's command is a function that takes its validated options, under `@objective`; the docstring is its help. What it
imports, it imports when it runs, so that help is instant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from vllm_specplugin.train.options import (
    Eagle3Options,
    EagleOptions,
    LoopOptions,
    MedusaOptions,
    MTPOptions,
    OptionsT,
    parse_options,
)

train_app = typer.Typer(
    help="Train drafting heads for a target: distil its answers, train, then serve the folder as 'model'.",
    no_args_is_help=True,
)


def objective(name: str, options: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], Callable[[OptionsT], None]]:
    """Make a command of a function from options: `vllm-specplugin train NAME`, an option for each field of the model."""

    def register(body: Callable[[OptionsT], None]) -> Callable[[OptionsT], None]:
        def command(**values: Any) -> None:
            body(parse_options(options, values))

        command.__doc__ = body.__doc__
        command.__signature__ = inspect.Signature([_parameter(key, field) for key, field in _ordered(options)])  # type: ignore[attr-defined]
        command.__annotations__ = {key: _annotation(key, field) for key, field in _ordered(options)}
        train_app.command(name)(command)
        return body

    return register


def _ordered(options: type[LoopOptions]) -> list[tuple[str, FieldInfo]]:
    """Required ones first, then the objective's own, then those that every objective has."""

    def rank(item: tuple[str, FieldInfo]) -> tuple[bool, int]:
        # The class that brings a field is the last one, going up, that still has it.
        owner = max(i for i, base in enumerate(options.__mro__) if item[0] in getattr(base, "model_fields", {}))
        return not item[1].is_required(), owner

    return sorted(options.model_fields.items(), key=rank)


def _parameter(key: str, field: FieldInfo) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.is_required() else field.get_default()
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_annotation(key, field))


def _annotation(key: str, field: FieldInfo) -> Any:
    kind, choices = _kind(field.annotation)
    metavar = "|".join(choices) if choices else None
    names = [f"--{key.replace('_', '-')}"]
    if kind is bool:
        names[0] += f"/--no-{key.replace('_', '-')}" if key != "fresh" else ""
    return Annotated[kind, typer.Option(*names, help=field.description, metavar=metavar)]


def _kind(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """What Typer is to read: the type, with choices as plain text, which pydantic checks with an error of one line."""
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        kind, choices = _kind(next(part for part in get_args(annotation) if part is not type(None)))
        return kind | None, choices
    return annotation, ()


@objective("medusa", MedusaOptions)
def medusa(options: MedusaOptions) -> None:
    """Train Medusa heads (arXiv 2401.10774) on a frozen target: each drafts one of the next tokens from its last hidden state.

    Ctrl-C writes the state of the run, and the same command goes on from there.
    """
    from vllm_specplugin.train.medusa import MedusaObjective
    from vllm_specplugin.train.run import train_heads

    train_heads(options, MedusaObjective.build)


@objective("eagle", EagleOptions)
def eagle(options: EagleOptions) -> None:
    """Train an EAGLE head (arXiv 2401.15077) on a frozen target: it extrapolates the target's last hidden state, token by token.

    Ctrl-C writes the state of the run, and the same command goes on from there.
    """
    from vllm_specplugin.train.eagle import EagleObjective
    from vllm_specplugin.train.run import train_heads

    train_heads(options, EagleObjective.build)


@objective("eagle3", Eagle3Options)
def eagle3(options: Eagle3Options) -> None:
    """Train an EAGLE-3 head (arXiv 2503.01840) on a frozen target: it fuses three layers and drafts over part of the vocabulary.

    Ctrl-C writes the state of the run, and the same command goes on from there.
    """
    from vllm_specplugin.train.eagle3 import Eagle3Objective
    from vllm_specplugin.train.run import train_heads

    train_heads(options, Eagle3Objective.build)


@objective("mtp", MTPOptions)
def mtp(options: MTPOptions) -> None:
    """Train heads for multi-token prediction: on a frozen target, or with the trunk as a pre-training objective (--trunk).

    Sequential modules (arXiv 2412.19437) are written together with the model, parallel heads (arXiv 2404.19737) as Medusa heads.
    Ctrl-C writes the state of the run, and the same command goes on from there.
    """
    from vllm_specplugin.train.pretrain import train_mtp

    train_mtp(options)
