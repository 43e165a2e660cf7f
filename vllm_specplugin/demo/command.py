"""The bodies of `vllm-specplugin demo` and `vllm-specplugin demo-model`, free of any command-line library.

User errors are SpecPluginError with a one-line text; the command line prints it and exits with 2.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_specplugin.demo.measure import DemoResult
from vllm_specplugin.demo.model import demo_model
from vllm_specplugin.demo.run import DEFAULT_CONFIG, DEFAULT_MAX_TOKENS, run_demo
from vllm_specplugin.demo.table import markdown as render_markdown
from vllm_specplugin.demo.table import print_result
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.prompt_files import load_prompts


def check_writable(file: Path, option: str) -> None:
    """Fail before the minutes of measuring, not after them."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise SpecPluginError(
            f"{option} {file} cannot be written: {'it is a folder' if file.is_dir() else 'its folder does not exist'}"
        )


def demo_model_command(cache: Path | None = None) -> Path:
    """Make the demo's model where needed and print the path of its folder, which is returned, on stdout."""
    folder = demo_model(cache)
    print(folder)
    return folder


def demo_command(
    model: str | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    prompts: Path | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    json: Path | None = None,
    markdown: Path | None = None,
    repeat: int = 1,
) -> DemoResult:
    """Run the demo and print its table; also write it to the files `json` and `markdown` where given.

    model: folder or hub name (default: the demo's model, converted on first use). max_tokens: per answer.
    prompts: a file for `load_prompts` (default: the demo's own prompts). speculative_config: as for `vllm serve`
    (default: n-gram drafting through the plugin). repeat: times that each prompt is answered; the median time counts.
    """
    config = DEFAULT_CONFIG if speculative_config is None else dict(speculative_config)
    if not config:
        raise SpecPluginError(f"--speculative-config is empty; expected e.g. {jsonlib.dumps(DEFAULT_CONFIG)}")
    chosen = None if prompts is None else load_prompts(prompts)
    for file, option in ((json, "--json"), (markdown, "--markdown")):
        if file is not None:
            check_writable(file, option)
    result = run_demo(model or demo_model(), config, prompts=chosen, max_tokens=max_tokens, repeat=repeat)
    print_result(result, Console())
    if json is not None:
        json.write_text(jsonlib.dumps(result.dump(), indent=2) + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(render_markdown(result), encoding="utf-8")
    return result
