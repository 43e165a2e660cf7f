"""`vllm-specplugin bench`: checks the command line, runs the engines, prints and writes the report."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

from vllm_specplugin.bench.candidates import Candidate, LeftOut, candidate, defaults, named, unique
from vllm_specplugin.bench.lineup import Load
from vllm_specplugin.bench.run import Plan, bench
from vllm_specplugin.bench.table import markdown, print_report
from vllm_specplugin.bench.traffic import Traffic, built_in, of_user
from vllm_specplugin.cli.options import parse_object, tokenizer_of
from vllm_specplugin.cli.output import console
from vllm_specplugin.demo.command import check_writable
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.progress import progress_bars
from vllm_specplugin.prompt_files import load_prompts

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What `bench` and `tune` read from the command line alike."""

    model: str
    prompts: Path | None
    configs: Sequence[str]
    methods: Sequence[str]
    concurrency: str
    max_tokens: int
    temperature: float
    engine_args: str | None

    def load(self) -> Load:
        """Raises ConfigError for a number that makes no sense."""
        if not 0 <= self.temperature <= 10:
            raise ConfigError(f"--temperature is {self.temperature}; from 0 (greedy) to 10 is allowed.")
        return Load(concurrencies(self.concurrency), self.max_tokens, self.temperature)

    def arguments(self) -> dict[str, Any]:
        """Of the engines."""
        return parse_object("--engine-args", self.engine_args, '{"dtype": "bfloat16"}')

    def candidates(self) -> tuple[list[Candidate], list[LeftOut]]:
        """What was named; where nothing was, all that needs nothing but its name, and what does need more, with the reason.

        Raises:
            SpecPluginError: a configuration that the plugin would refuse, or nothing that could be measured.
        """
        chosen = [named(name) for name in self.methods]
        chosen += [candidate(parse_object("--config", text, '{"proposer": "ngram"}')) for text in self.configs]
        left_out: list[LeftOut] = []
        if not chosen:
            chosen, left_out = defaults(self.temperature, _cuda())
        if not chosen:
            raise ConfigError("no installed drafter runs on its name alone; name a configuration with --config.")
        return unique(chosen), left_out

    def traffic(self) -> tuple[Traffic, str]:
        """The requests, and what a report calls them."""
        prompts = None if self.prompts is None else load_prompts(self.prompts)
        tokenizer = tokenizer_of("--model", self.model)
        if prompts is None or self.prompts is None:
            return built_in(tokenizer), "built-in prompts"
        return of_user(prompts, tokenizer), f"{len(prompts)} prompts of {self.prompts.name}"


def concurrencies(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers, ascending, each once.

    Raises:
        ConfigError: something else.
    """
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= 4096 for part in parts):
        raise ConfigError(f"--concurrency is {text!r}; numbers from 1 to 4096 are expected, such as 1,8,32.")
    return tuple(sorted({int(part) for part in parts}))


def bench_command(
    inputs: Inputs,
    minutes: float,
    repeat: int | None,
    engines_at_once: int | None,
    as_json: bool,
    markdown_file: Path | None,
) -> None:
    """Measure and report.

    Raises:
        SpecPluginError: the command line makes no sense, or plain decoding does not run.
    """
    if markdown_file is not None:
        check_writable(markdown_file, "--markdown")
    load, arguments = inputs.load(), inputs.arguments()
    candidates, left_out = inputs.candidates()
    traffic, prompts = inputs.traffic()
    plan = Plan(
        model=inputs.model,
        candidates=candidates,
        traffic=traffic,
        prompts=prompts,
        load=load,
        engine_args=arguments,
        minutes=minutes,
        repeat=repeat,
        engines_at_once=engines_at_once,
        left_out=left_out,
    )
    report = with_logs(lambda logs, bars: bench(plan, logs, bars))
    if markdown_file is not None:
        markdown_file.write_text(markdown(report), encoding="utf-8")
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        print_report(report, console())


def with_logs(run: Callable[[Path, Progress], ResultT]) -> ResultT:
    """Run with bars on stderr and a folder for the engines' logs, in which those of engines that failed are kept."""
    logs = Path(tempfile.mkdtemp(prefix="vllm-specplugin-bench-"))
    with progress_bars(sys.stderr.isatty()) as bars:
        result = run(logs, bars)
    with suppress(OSError):  # not empty
        logs.rmdir()
    return result


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())
