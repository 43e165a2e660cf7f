"""`vllm-specplugin tune`: checks the command line, searches, prints and writes the report."""

from __future__ import annotations

from pathlib import Path

from vllm_specplugin.bench.table import print_tuning, tuning_markdown
from vllm_specplugin.bench.tune import TunePlan, tune
from vllm_specplugin.cli.bench import Inputs, with_logs
from vllm_specplugin.cli.output import console
from vllm_specplugin.demo.command import check_writable


def tune_command(inputs: Inputs, minutes: float, engines_at_once: int, as_json: bool, markdown_file: Path | None) -> None:
    """Search and report.

    Raises:
        SpecPluginError: the command line makes no sense, or plain decoding does not run.
    """
    if markdown_file is not None:
        check_writable(markdown_file, "--markdown")
    load, arguments = inputs.load(), inputs.arguments()
    bases, left_out = inputs.candidates()
    traffic, prompts = inputs.traffic()
    plan = TunePlan(
        model=inputs.model,
        bases=bases,
        traffic=traffic,
        prompts=prompts,
        load=load,
        minutes=minutes,
        engines_at_once=engines_at_once,
        engine_args=arguments,
        left_out=left_out,
    )
    report = with_logs(lambda logs, bars: tune(plan, logs, bars))
    if markdown_file is not None:
        markdown_file.write_text(tuning_markdown(report), encoding="utf-8")
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        print_tuning(report, console())
