"""Which types of numbers a CPU multiplies matrices in."""

from __future__ import annotations

from typing import Literal

DType = Literal["bfloat16", "float32"]

_CHECKS = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
"""oneDNN's own answers, by type; it multiplies for PyTorch on CPUs."""


def cpu_has_instructions(dtype: str) -> bool:
    """Whether this CPU has vector instructions for matrix products in a type, as oneDNN sees it.

    Where it has none (bfloat16 on x86 without AVX-512), a product takes several times as long as in float32, and a pass over
    several tokens as many times as long as over one: no draft pays.

    Args:
        dtype: as vLLM and PyTorch name it, "bfloat16" for example. True for every type but bfloat16 and float16, and where
            PyTorch cannot tell.
    """
    import torch

    check = getattr(torch.ops.mkldnn, _CHECKS[dtype], None) if dtype in _CHECKS else None
    return check is None or bool(check())


def fast_type(device_type: str) -> DType:
    """bfloat16, but float32 on a CPU that has no instructions for it."""
    return "bfloat16" if device_type != "cpu" or cpu_has_instructions("bfloat16") else "float32"


def slow_on_cpu(device_type: str, dtype: str) -> str:
    """What to tell somebody who speculates in a type that the CPU has no instructions for; empty where all is well."""
    if device_type != "cpu" or cpu_has_instructions(dtype):
        return ""
    return (
        f"this CPU has no instructions for {dtype}: verifying a draft takes as long as decoding a token, so that hardly any "
        "draft pays; with --dtype float32 many do"
    )
