"""vLLM's V2 model runner on a CPU, its Triton kernels run by Triton's interpreter. For tests only.

Nothing is imported early: each change waits until the module that it concerns has been imported.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Fully qualified module -> what to do to it right after its import.
_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {}


def after_import(name: str) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
    """Register the decorated function to run on module `name` once that is imported."""

    def register(change: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        _AFTER_IMPORT[name] = change
        return change

    return register


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the other finders answer, and wraps their loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = _AFTER_IMPORT.pop(name, None)  # popped first: the search below comes past here again
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    sys.meta_path.insert(0, _Finder())


@after_import("triton.backends")
def _add_cpu_backend(module: ModuleType) -> None:
    """vLLM for CPUs uses Triton only where Triton knows a backend of the name `cpu`, which PyPI's does not have.

    The interpreter needs no backend; an entry that reports an active driver is all that vLLM looks at.
    """

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    module.backends["cpu"] = module.Backend(compiler=None, driver=Driver)


@after_import("vllm.triton_utils")
def _give_the_interpreter_log1p(module: ModuleType) -> None:
    """libdevice functions are empty stubs outside a compiled kernel; the rejection sampler calls this one."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    def log1p(x: Any, _semantic: Any = None) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0) is meant
            data = np.log1p(x.handle.data)
        return module.tl.core.tensor(TensorHandle(data, x.handle.dtype), x.type)

    module.tldevice.log1p = log1p


@after_import("triton.runtime.interpreter")
def _mend_the_interpreter(module: ModuleType) -> None:
    _type_comparisons(module)
    _hurry(module)


def _type_comparisons(module: ModuleType) -> None:
    """A comparison gives truth values (int1); the interpreter labels them with the type of what was compared.

    The label is believed when a single truth value is spread over a block: the block becomes int32, and is then
    refused as a mask ("mask has unsupported dtype"). The kernel that applies grammar bitmasks does just that.
    """
    builder = module.InterpreterBuilder

    def typed(compare: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        return lambda self, lhs, rhs: module.TensorHandle(compare(self, lhs, rhs).data, module.tl.int1)

    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, typed(getattr(builder, name)))


def _hurry(module: Any) -> None:
    """Speed only: half the time of a step, and nothing that a kernel can tell.

    - At each launch and each call of a device function the interpreter walks all of triton.language to swap in
      its own operations, and swaps them out afterwards. Nothing is compiled here, so they may stay in.
    - For each addition it computes an overflow check, whose result it drops unless it is debugging.
    - For each load it builds a table of numpy types anew.
    """
    patch_lang = module._patch_lang
    done: set[Any] = set()  # functions, and the sets of language modules that they see
    languages = (id(module.tl), id(module.tl.core))

    class Kept:
        @staticmethod
        def restore() -> None:
            pass

    def patch_lang_once(fn: Any) -> Any:
        if fn not in done:
            seen = frozenset(id(value) for value in fn.__globals__.values()).intersection(languages)
            if seen not in done:
                patch_lang(fn)
            done.update((fn, seen))
        return Kept

    get_np_dtype = module._get_np_dtype
    answers: dict[str, Any] = {}  # by name: pointer and block types do not hash

    def get_np_dtype_once(type_: Any) -> Any:
        if type_.name not in answers:
            answers[type_.name] = get_np_dtype(type_)
        return answers[type_.name]

    builder = module.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    module._patch_lang = patch_lang_once
    module._get_np_dtype = get_np_dtype_once


@after_import("vllm.v1.sample.ops.topk_topp_triton")
def _replace_top_k_top_p(module: Any) -> None:
    """Its kernel calls `.to()` on a loop variable, which the interpreter makes a plain int."""
    module.apply_top_k_top_p_triton = apply_top_k_top_p


def apply_top_k_top_p(logits: Any, k: Any | None, p: Any | None, mask_value: float = float("-inf"), **hints: Any) -> Any:
    """What the kernel computes: exactly k tokens stay, then the fewest of those whose mass reaches p.

    logits [batch, vocab], changed in place; k, p [batch]. Of equal logits the lower token ids stay.
    `hints` (0.33) choose between kernels that give the same.
    """
    import torch

    order = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = logits.gather(-1, order)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if k is not None:
        keep &= torch.arange(ranked.shape[-1], device=ranked.device) < k.unsqueeze(-1)
    if p is not None:
        probabilities = ranked.masked_fill(~keep, float("-inf")).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        keep &= (before < p.unsqueeze(-1)) | (p >= 1.0).unsqueeze(-1)
        keep[:, 0] = True
    return logits.scatter_(-1, order, ranked.masked_fill(~keep, mask_value))
