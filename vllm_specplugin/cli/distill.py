"""`vllm-specplugin distill`: the target answers prompts, for heads to learn from."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_specplugin.cli.options import parse_object
from vllm_specplugin.cli.output import console
from vllm_specplugin.demo.command import check_writable
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.prompt_files import load_prompts
from vllm_specplugin.train.distill import DistillPlan, distill


def distill_command(
    target: str, data: Path, out: Path, max_tokens: int, temperatures: list[float], seed: int, engine_args: str | None
) -> None:
    """Answer the prompts of a file, or go on with a file of answers that was begun.

    Raises:
        SpecPluginError: the command line makes no sense, the files cannot be read or written, or the engine failed.
    """
    wrong = [temperature for temperature in temperatures if not 0 <= temperature <= 10]
    if wrong:
        raise SpecPluginError(f"--temperature is {wrong[0]}; from 0 (greedy) to 10 is allowed.")
    if out.suffix not in (".jsonl", ".json"):
        raise SpecPluginError(f"--out {out} is to hold JSON lines; give it a name that ends in .jsonl.")
    check_writable(out, "--out")
    plan = DistillPlan(
        target=target,
        prompts=load_prompts(data),
        max_tokens=max_tokens,
        temperatures=tuple(temperatures),
        seed=seed,
        engine_args=parse_object("--engine-args", engine_args, '{"max_model_len": 2048}') or {},
    )
    result = distill(plan, out, progress=sys.stderr.isatty())
    left_out = f" {result.skipped} prompts were longer than the context and are left out." if result.skipped else ""
    console().print(f"{result.answers} answers of {result.tokens} tokens in {out}.{left_out}")
