"""`vllm-specplugin validate`: checks the command line, runs, prints the report. The exit code is the verdict."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_specplugin.cli.options import parse_object
from vllm_specplugin.cli.output import console
from vllm_specplugin.validate.plan import make_plan
from vllm_specplugin.validate.prompts import load_prompts
from vllm_specplugin.validate.report import require_report_libraries


def validate_command(
    model: str,
    speculative_config: str | None,
    prompts: Path | None,
    sampling_params: str | None,
    engine_args: str | None,
    tokens: int,
    alpha: float,
    bias: float,
    seed: int,
    out: Path,
    fresh: bool,
    as_json: bool,
) -> int:
    """Run or go on with a run, print its report and return the exit code: 0 LOSSLESS, 1 BIASED, 2 INCONCLUSIVE.

    Raises:
        SpecPluginError: the command line makes no sense, or an engine failed.
    """
    plan = make_plan(
        model,
        parse_object("--speculative-config", speculative_config, '{"proposer": "ngram"}'),
        sampling_params=parse_object("--sampling-params", sampling_params, '{"temperature": 0.7, "top_p": 0.9}'),
        engine_args=parse_object("--engine-args", engine_args, '{"max_model_len": 2048}'),
        prompts=None if prompts is None else load_prompts(prompts),
        tokens=tokens,
        alpha=alpha,
        bias=bias,
        seed=seed,
    )
    require_report_libraries()
    from vllm_specplugin.validate.run import run
    from vllm_specplugin.validate.table import print_report

    report = run(plan, out, fresh=fresh, progress=sys.stderr.isatty())
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        screen = console()
        print_report(report, screen)
        screen.print(f"Report: {out / 'report.html'} and {out / 'report.json'}", style="dim")
    return report.verdict.exit_code
