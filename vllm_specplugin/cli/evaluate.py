"""`vllm-specplugin evaluate`: checks the command line, runs the engines, prints and writes the report."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_specplugin.cli.options import parse_object, tokenizer_of
from vllm_specplugin.cli.output import console
from vllm_specplugin.config import SpecConfig, names_a_proposer, resolve
from vllm_specplugin.errors import ConfigError, SpecPluginError
from vllm_specplugin.heads.checkpoint import NAMES, inspect
from vllm_specplugin.progress import progress_bars
from vllm_specplugin.train.data import read_examples
from vllm_specplugin.train.evaluate import Excerpt, Plan, evaluate
from vllm_specplugin.train.evaluate_questions import read_questions
from vllm_specplugin.train.evaluate_report import Evaluation, markdown, print_evaluation


def evaluate_command(
    target: str,
    heads: str | None,
    speculative_config: str | None,
    against: str | None,
    data: Path,
    questions: Path | None,
    texts: int,
    prompts: int,
    max_tokens: int,
    max_length: int,
    temperatures: Sequence[float],
    engine_args: str | None,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure and report.

    Raises:
        SpecPluginError: the command line makes no sense, or an engine failed.
    """
    config = drafting_config(target, heads, speculative_config)
    if config is not None and names_a_proposer(config):
        resolve(SpecConfig.parse(config))
    tokenizer = tokenizer_of("--target", target)
    found = [Excerpt(example.token_ids, example.answer_from) for example in read_examples(data, tokenizer, max_length)]
    plan = Plan(
        target=target,
        speculative_config=config,
        against=against,
        data=str(data),
        excerpts=found[:texts],
        questions=read_questions(questions, tokenizer, max_length) if questions else [],
        questions_file=str(questions) if questions else None,
        prompts=prompts,
        max_tokens=max_tokens,
        temperatures=temperatures or (0.0, 1.0),
        engine_args=parse_object("--engine-args", engine_args, '{"dtype": "float32"}'),
        seed=seed,
    )
    if out is not None:
        _make(out)  # before the minutes of measuring, not after them
    if config is None:
        print(nothing_drafts(target), file=sys.stderr)
    report = _run(plan, progress=sys.stderr.isatty())
    if out is not None:
        _write(report, out)
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        print_evaluation(report, console())


def drafting_config(target: str, heads: str | None, speculative_config: str | None) -> dict[str, Any] | None:
    """What drafts: the configuration as given, the heads by their family, or the target's own MTP layers; None for nothing.

    Raises:
        ConfigError: both are given, or the heads are of a family that this command cannot name by itself.
    """
    if heads is not None and speculative_config is not None:
        raise ConfigError("--heads and --speculative-config exclude each other; give the heads as its 'model'.")
    if speculative_config is not None:
        return parse_object("--speculative-config", speculative_config, '{"proposer": "mtp"}')
    if heads is not None:
        family = inspect(heads).family
        if family == "mtp":
            raise ConfigError(f"--heads is {heads!r}, {NAMES[family]}, which is a target of its own: give it as --target.")
        return {"proposer": family, "model": heads, "control": "fixed"}  # every draft is to be judged
    return {"proposer": "mtp", "control": "fixed"} if _has_mtp_layers(target) else None


def _has_mtp_layers(target: str) -> bool:
    """Of a target that only the engine can read, nothing is known."""
    try:
        return inspect(target).family == "mtp"
    except ConfigError:
        return False


def nothing_drafts(target: str) -> str:
    """One line for who may have expected drafts."""
    return (
        f"vllm-specplugin: nothing drafts, as no MTP layers were found in {target!r}: acceptance is not measured. "
        """Name heads with --heads DIR, or any drafter with --speculative-config '{"proposer": "ngram"}'."""
    )


def _run(plan: Plan, progress: bool) -> Evaluation:
    """With bars on stderr; the engines' logs are kept where one failed, since the error names its log."""
    logs = Path(tempfile.mkdtemp(prefix="vllm-specplugin-evaluate-"))
    with progress_bars(progress) as bars:
        report = evaluate(plan, logs, bars)
    shutil.rmtree(logs, ignore_errors=True)
    return report


def _make(out: Path) -> None:
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass


def _write(report: Evaluation, out: Path) -> None:
    with _writing(out):
        report.write_json(out / "evaluation.json")
        (out / "evaluation.md").write_text(markdown(report), encoding="utf-8")


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpecPluginError(f"--out {out} cannot be written: {error.strerror}; choose another folder.") from error
