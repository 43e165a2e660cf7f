"""The state of a run in its folder: what an interrupted run goes on with, so that it ends as if it had never stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.train.data import Example
from vllm_specplugin.train.objective import Objective
from vllm_specplugin.train.tally import Tally

RUN, RESUME = "run.json", "resume.pt"
MADE = (RESUME, "config.json", "model.safetensors", "curves.csv", "curves.png")
"""What a run before may have left, and must not be taken for this one's."""


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    step: int = 0
    """Optimiser steps done."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    tokens: int = 0
    """Tokens seen, padding aside."""
    seconds: float = 0.0
    """Spent in the loop, over all its starts."""
    rows_due: int = 0
    """Places for a row of the training curve that were passed; `evaluations` likewise."""
    evaluations: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The curves so far."""
    window: Tally = field(default_factory=Tally)
    """Of the steps since the last row."""


def open_run(folder: Path, about: Mapping[str, Any], fresh: bool) -> None:
    """Claim a folder for the run that `about` describes, or find that this very run was begun in it.

    Raises:
        SpecPluginError: another run, a finished one or foreign files lie there, and `fresh` does not say to drop them.
    """
    described: dict[str, Any] = json.loads(json.dumps(about, default=str))
    try:
        _claim(folder, described, fresh)
    except OSError as error:
        reason = error.strerror
        raise SpecPluginError(f"'--out' is '{folder}', which cannot be written ({reason}); name another folder.") from error


def _claim(folder: Path, described: Mapping[str, Any], fresh: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise SpecPluginError(f"'--out' is '{folder}', which is a file; name a folder.")
    if (folder / RUN).is_file() and not fresh:
        before = _read(folder / RUN)
        for key, value in described.items():
            if before.get("about", {}).get(key) != value:
                raise SpecPluginError(
                    f"'--out' is '{folder}', which holds a run with {_name(key)} {before.get('about', {}).get(key)!r} instead of "
                    f"{value!r}; drop it with --fresh, or name another folder."
                )
        if before.get("finished"):
            raise SpecPluginError(f"'--out' is '{folder}', which holds this run, finished; drop it with --fresh to run it again.")
        return
    folder.mkdir(parents=True, exist_ok=True)
    foreign = [path.name for path in folder.iterdir()] if not (folder / RUN).is_file() else []
    if foreign:
        raise SpecPluginError(f"'--out' is '{folder}', which holds other files ({foreign[0]}); name a new folder.")
    for name in MADE:
        (folder / name).unlink(missing_ok=True)
    write_run(folder, described, finished=False)


def write_run(folder: Path, about: Mapping[str, Any], finished: bool, results: Mapping[str, Any] | None = None) -> None:
    """Replace the description of the run, whole or not at all."""
    described = {"about": about, "finished": finished, **({} if results is None else {"results": results})}
    partial = folder / f"{RUN}.partial"
    partial.write_text(json.dumps(described, indent=1, default=str) + "\n", encoding="utf-8")
    partial.replace(folder / RUN)


def save_state(folder: Path, progress: Progress, objective: Objective, optimizer: torch.optim.Optimizer) -> None:
    """Write everything that the rest of the run depends on; an interruption leaves the state before."""
    state = {
        "progress": {**asdict(progress), "window": progress.window.dump()},
        "parameters": {name: tensor for name, tensor in objective.named_parameters() if tensor.requires_grad},
        "optimizer": optimizer.state_dict(),
        "torch_random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state(device) if (device := _device(objective)).type == "cuda" else None,
    }
    partial = folder / f"{RESUME}.partial"
    torch.save(state, partial)
    partial.replace(folder / RESUME)


def _device(objective: Objective) -> torch.device:
    """Where a run takes place."""
    return next(objective.parameters()).device


def load_state(folder: Path, objective: Objective, optimizer: torch.optim.Optimizer) -> Progress:
    """Bring everything back; a run without a state begins.

    Raises:
        SpecPluginError: the file is damaged.
    """
    file = folder / RESUME
    if not file.is_file():
        return Progress()
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler met
        raise SpecPluginError(f"{file} cannot be read ({type(error).__name__}); start anew with --fresh.") from error
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(state["parameters"][name])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_random"])
    if state["cuda_random"] is not None and (device := _device(objective)).type == "cuda":
        torch.cuda.set_rng_state(state["cuda_random"], device)
    return Progress(**{**state["progress"], "window": Tally(**state["progress"]["window"])})


def split(examples: Sequence[Example], held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Which examples are trained on, and which are held out for evaluation: at least one of each where there are two prompts.

    Answers to one prompt stay together: they begin alike, so that one which was trained on would vouch for the other.
    """
    together: dict[Any, list[int]] = {}
    for place, example in enumerate(examples):
        together.setdefault(example.token_ids[: example.answer_from] or place, []).append(place)
    groups = list(together.values())
    random.Random(seed).shuffle(groups)
    wanted = max(1, round(held_out * len(examples))) if held_out else 0
    held: list[int] = []
    while len(held) < wanted and len(groups) > 1:
        held += groups.pop(0)
    return sorted(place for group in groups for place in group), sorted(held)


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecPluginError(f"{file} cannot be read ({error}); start anew with --fresh.") from error
    return value if isinstance(value, dict) else {}


def _name(key: str) -> str:
    """An option as users write it; what is no option is named in words."""
    return key if "-" in key else f"--{key.replace('_', '-')}"
