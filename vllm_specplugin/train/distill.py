"""Lets the target answer prompts, for heads to learn from: they must foretell what the target says, not what is true.

Answers that the target writes itself make better drafters than texts by others (EAGLE, arXiv 2401.15077, section 4.4;
Medusa's self-distillation, arXiv 2401.10774, section 2.3).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from vllm_specplugin.engine_process import EngineProcess
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.heads.files import weights_identity
from vllm_specplugin.progress import progress_bars
from vllm_specplugin.prompt_files import Prompt

SLICE = 256
"""Prompts that are handed to the engine at a time, several times as many as it runs at once; the file grows by so much."""

DIGEST = "contents of --data"
"""The key of the header under which the prompts' hash stands."""
WEIGHTS, ENGINE_ARGS = "weights of --target", "--engine-args"
"""Likewise, what tells a model's weights from others of its name (None for one from the hub), and the engine's arguments."""
LATER_KEYS = (DIGEST, WEIGHTS, ENGINE_ARGS)
"""Which files of earlier releases lack: what is not said there is not compared."""


@dataclass(frozen=True)
class DistillPlan:
    """What is asked of the target."""

    target: str
    prompts: Sequence[Prompt]
    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    """Each prompt is answered once at each of them."""
    seed: int = 0
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """What an answer depends on beside its prompt; a file that was begun with other settings is not continued."""
        folder = Path(self.target).expanduser()
        return {
            "target": self.target,
            WEIGHTS: weights_identity(folder)[:24] if folder.exists() else None,
            "max_tokens": self.max_tokens,
            "temperatures": list(self.temperatures),
            "seed": self.seed,
            ENGINE_ARGS: dict(self.engine_args),
        }


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a run has written."""

    answers: int
    tokens: int
    """Written by the target, in all of the file."""
    skipped: int
    """Prompts that leave no room for an answer in the context."""


def distill(plan: DistillPlan, out: Path, progress: bool = True) -> Distilled:
    """Answer every prompt, and write a line for each answer: `{"prompt_token_ids", "token_ids", "kind", "temperature"}`.

    The first line says what the file was made with. A run that was interrupted goes on where it stopped.

    Raises:
        SpecPluginError: the file was made with other settings or prompts, or the engine failed.
    """
    jobs = [(prompt, temperature) for temperature in plan.temperatures for prompt in range(len(plan.prompts))]
    header = _header(plan)
    done = _done(out, header)
    todo = jobs[len(done) :]
    skipped = done.count(None)
    answers, tokens = len(done) - skipped, sum(count for count in done if count)
    if todo:
        with (
            contextlib.closing(_engine(plan, out)) as engine,
            out.open("a", encoding="utf-8") as file,
            progress_bars(progress) as bars,
        ):
            if not done:
                _write(file, header)
            task = bars.add_task(f"{plan.target} answers", total=len(jobs), completed=len(done))
            for line in _answers(engine, plan, todo):
                _write(file, line)
                bars.advance(task)
                answers += "token_ids" in line
                skipped += "skipped" in line
                tokens += len(line.get("token_ids", ()))
    return Distilled(answers, tokens, skipped)


def _engine(plan: DistillPlan, out: Path) -> EngineProcess:
    settings = {"model": plan.target, "engine_args": {"seed": plan.seed, **plan.engine_args}}
    return EngineProcess("target's", "vllm_specplugin.train.distill_engine", settings, out.with_suffix(".log"), every_core=True)


def _answers(engine: EngineProcess, plan: DistillPlan, jobs: Sequence[tuple[int, float]]) -> Iterator[dict[str, Any]]:
    """A line for each job, in order; those of a slice come together."""
    limit = engine.wait()["max_model_len"]
    for first in range(0, len(jobs), SLICE):
        part = jobs[first : first + SLICE]
        encoded = engine.call("encode", prompts=[asdict(plan.prompts[prompt]) for prompt, _ in part])["token_ids"]
        fits = [place for place, ids in enumerate(encoded) if len(ids) < limit]
        sampling = [{"max_tokens": plan.max_tokens, "temperature": part[place][1]} for place in fits]
        answer = engine.call("answer", prompts=[encoded[place] for place in fits], sampling=sampling) if fits else {}
        of_place = dict(zip(fits, answer.get("token_ids", ()), strict=True))
        for place, (prompt, temperature) in enumerate(part):
            line: dict[str, Any] = {"kind": plan.prompts[prompt].kind, "temperature": temperature}
            if place in of_place:
                line |= {"prompt_token_ids": encoded[place], "token_ids": of_place[place]}
            else:
                line["skipped"] = f"the prompt has {len(encoded[place])} tokens, and the context is {limit}"
            yield line


def _header(plan: DistillPlan) -> dict[str, Any]:
    prompts = json.dumps([asdict(prompt) for prompt in plan.prompts]).encode()
    of_prompts = {"prompts": len(plan.prompts), DIGEST: hashlib.sha256(prompts).hexdigest()[:24]}
    return {"distilled_with": {**plan.settings(), **of_prompts}}


def _done(out: Path, header: Mapping[str, Any]) -> list[int | None]:
    """The number of tokens of each answer that the file holds already, None for a prompt that was skipped.

    What an interrupted run left of a line is cut off, but only where the file is known to be this command's.
    """
    if not out.exists():
        return []
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done: list[int | None] = []
    if whole or not json.dumps(header).encode().startswith(content):  # else nothing is there yet but a part of the header
        try:
            first, *rest = whole.decode().split("\n")[:-1] or [""]
            _check_header(out, json.loads(first), json.loads(json.dumps(header)))
            done = [len(entry["token_ids"]) if "token_ids" in entry else None for entry in map(json.loads, rest)]
        except (ValueError, TypeError) as error:
            raise SpecPluginError(f"--out {out} exists and is no file of this command ({error}); name another one.") from error
    if len(whole) < len(content):
        os.truncate(out, len(whole))
    return done


def _check_header(out: Path, found: Any, header: Mapping[str, Any]) -> None:
    """Refuse a file that was made with something else, or by something else."""
    made_with, wanted = found.get("distilled_with") if isinstance(found, dict) else None, header["distilled_with"]
    if not isinstance(made_with, dict):
        raise ValueError("its first line does not say what it was made with")
    made_with = {**{key: wanted[key] for key in LATER_KEYS}, **made_with}
    differs = [key for key in {**wanted, **made_with} if made_with.get(key) != wanted.get(key)]
    if differs:
        raise SpecPluginError(
            f"--out {out} exists and was made with another {', '.join(differs)}; name another file, or remove this one."
        )


def _write(file: TextIO, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
