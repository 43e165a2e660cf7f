"""A training command from its options to the checkpoint: data, hidden states, objective, loop, export."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_specplugin.arithmetic import fast_type
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads import checkpoint
from vllm_specplugin.train.batch import Source, Subset
from vllm_specplugin.train.curves import write_csv, write_png
from vllm_specplugin.train.data import Example, read_examples
from vllm_specplugin.train.loop import PLACE_COLUMNS, Loop, device_of
from vllm_specplugin.train.objective import Objective
from vllm_specplugin.train.options import RUN_ONLY, LoopOptions, OptionsT, TrainOptions
from vllm_specplugin.train.progress import Screen
from vllm_specplugin.train.state import RESUME, open_run, split, write_run
from vllm_specplugin.train.states import cached_states, examples_digest, token_source
from vllm_specplugin.train.target import Setting, TargetModel

LIBRARIES = ("matplotlib", "rich", "safetensors", "transformers")
ANSWER_WEIGHT = 4
"""How often an answer's token counts where a prompt's counts once, for what can be drafted."""
DATA, WEIGHTS, COUNTS = "the contents of --data", "the weights of --target", "the counts of tokens in --data"


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a finished run came to."""

    folder: Path
    """The checkpoint."""
    rows: list[dict[str, Any]]
    """The curves, as in curves.csv."""
    results: Mapping[str, float]
    """The last figures: of the held-out examples, or of the last steps where there are none."""


def train_heads(options: TrainOptions, build: Callable[[Any, Setting], Objective], screen: Screen | None = None) -> Outcome:
    """Train heads for a frozen target.

    Args:
        options: the objective's own.
        build: makes the objective from its options and what is known of the target and the data.
        screen: where to show progress; stderr by default.

    Raises:
        SpecPluginError: something in the options, the data or the folder is not as it must be; or Ctrl-C, with the state kept.
    """
    require_libraries()
    screen, options = screen or Screen(), _settled(options)
    device, dtype = device_of(options.device), getattr(torch, options.dtype)
    target = TargetModel(options.target, dtype, device)
    examples = read_examples(options.data, target.tokenizer, options.max_length)
    check_tokens(examples, target.frozen.vocab_size, options)
    trained, held_out = split(examples, options.held_out, options.seed)
    torch.manual_seed(options.seed)
    setting = Setting(target.frozen, token_counts([examples[i] for i in trained], target.frozen.vocab_size), dtype)
    objective = build(options, setting)
    counted = f"{ANSWER_WEIGHT} in answers, 1 in prompts"  # which draft vocabularies go by
    about = _claim(objective, options, {DATA: examples_digest(examples), WEIGHTS: target.identity(), COUNTS: counted})
    tokens = token_source(learnt(examples, trained) if options.learn_prompts else examples)
    source: Source = tokens
    if objective.states != "none":
        with screen.states() as told:
            cached = cached_states(target, examples, dtype, objective.states == "aux", options.cache, told)
        source = replace(cached, tokens=tokens)
    del target  # its trunk has done its work
    made_from = {"target": options.target, "data": options.data, "tokens": int(source.lengths.sum())}
    parts = Subset(source, trained), Subset(source, held_out) if held_out else None
    return _train(objective, *parts, options, about, made_from, screen)


def train_objective(
    objective: Objective,
    train: Source,
    held_out: Source | None,
    options: LoopOptions,
    depends_on: Mapping[str, Any],
    made_from: Mapping[str, Any],
    screen: Screen | None = None,
) -> Outcome:
    """Train an objective that comes with data of its own, for example one that runs the trunk itself.

    Args:
        depends_on: what the run depends on besides its options (`DATA` and `WEIGHTS`: hashes of them), which a resumed run must
            have in common with the interrupted one.
        made_from: arguments of `heads.checkpoint.provenance`: target, data, tokens.
    """
    require_libraries()
    options = _settled(options)
    about = _claim(objective, options, depends_on)
    return _train(objective, train, held_out, options, about, made_from, screen or Screen())


def require_libraries() -> None:
    """Refuse to start a run that could not be finished."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`train` needs {', '.join(missing)}, not installed here: pip install 'vllm-specplugin[train]'")


def _settled(options: OptionsT) -> OptionsT:
    """With the type of the arithmetic that suits the device, so that a run which is resumed elsewhere goes on in the same."""
    if options.dtype != "auto":
        return options
    return options.model_copy(update={"dtype": fast_type(device_of(options.device).type)})


def _train(
    objective: Objective,
    train: Source,
    held_out: Source | None,
    options: LoopOptions,
    about: Mapping[str, Any],
    made_from: Mapping[str, Any],
    screen: Screen,
) -> Outcome:
    """The loop, and what is left of it in the run's folder."""
    loop = Loop(objective, train, held_out, options, device_of(options.device), screen)
    rows = loop.progress.rows
    try:
        progress = loop.run()
    finally:
        if rows:
            write_csv(options.out / "curves.csv", rows)
            write_png(options.out / "curves.png", rows, f"{objective.name}: {options.out.name}")
    results = {key: value for key, value in rows[-1].items() if key not in PLACE_COLUMNS}
    provenance = checkpoint.provenance(
        **made_from,
        seed=options.seed,
        losses=results,
        options=_plain(options, without=()),
        steps=progress.step,
        tokens_seen=progress.tokens,
        minutes=round(progress.seconds / 60, 2),
    )
    objective.to("cpu").export(options.out, provenance)
    write_run(options.out, about, finished=True, results=results)
    (options.out / RESUME).unlink(missing_ok=True)
    screen.say(f"{objective.name} checkpoint, curves.png and curves.csv: {options.out}")
    return Outcome(options.out, rows, results)


def _claim(objective: Objective, options: LoopOptions, depends_on: Mapping[str, Any]) -> dict[str, Any]:
    """Open the run's folder, and return what identifies the run."""
    about = {"objective": objective.name, **_plain(options, without=RUN_ONLY), **depends_on}
    open_run(options.out, about, options.fresh)
    return about


def _plain(options: LoopOptions, without: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in options.model_dump(mode="json").items() if key not in without}


def check_tokens(examples: Sequence[Example], vocab_size: int, options: TrainOptions) -> None:
    """Refuse data of a larger vocabulary."""
    largest = max(max(example.token_ids) for example in examples)
    if largest >= vocab_size:
        raise ConfigError(
            f"'--data' is '{options.data}', which has the token {largest}, but '{options.target}' has only {vocab_size} tokens: "
            "it was written by another model."
        )


def learnt(examples: Sequence[Example], trained: Collection[int]) -> list[Example]:
    """The examples as they are learnt from where prompts count, too; those held out stay as serving meets them."""
    chosen = set(trained)
    return [replace(example, answer_from=0) if i in chosen else example for i, example in enumerate(examples)]


def token_counts(examples: Sequence[Example], vocab_size: int) -> torch.Tensor:
    """`[vocab]`: how often each token stands in answers, and, less heavily, in prompts: of what is asked about, answers speak."""
    every = [token for example in examples for token in example.token_ids]
    answers = [token for example in examples for token in example.token_ids[example.answer_from :]]
    in_all, in_answers = (
        torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab_size) for tokens in (every, answers)
    )
    return in_all + (ANSWER_WEIGHT - 1) * in_answers
