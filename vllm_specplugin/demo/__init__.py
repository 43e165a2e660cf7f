"""The demo: a small real model, plain decoding and speculative decoding side by side.

`demo_model()` gives the model's folder, `run_demo(...)` the measurements, `print_result(...)` the table;
`demo_command(...)` and `demo_model_command(...)` are what the command line calls.
"""

from __future__ import annotations

from vllm_specplugin.demo.command import demo_command, demo_model_command
from vllm_specplugin.demo.measure import DemoResult
from vllm_specplugin.demo.model import demo_model
from vllm_specplugin.demo.prompts import demo_prompts
from vllm_specplugin.demo.run import run_demo
from vllm_specplugin.demo.table import print_result

__all__ = [
    "DemoResult",
    "demo_command",
    "demo_model",
    "demo_model_command",
    "demo_prompts",
    "print_result",
    "run_demo",
]
