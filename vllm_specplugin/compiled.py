"""Loops that are compiled to machine code: how the parts that run in every step of an engine use numba."""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

from numba import njit

logger = logging.getLogger("vllm.specplugin")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def kernel(function: FunctionT) -> FunctionT:
    """Compile at the first call, and keep the machine code on disk where numba finds a folder that it may write to."""
    try:
        return cast(FunctionT, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # "no locator available": neither NUMBA_CACHE_DIR, __pycache__ nor the user's cache is writable
        return cast(FunctionT, njit(nogil=True)(function))


def kernel_over(*modules: ModuleType) -> Callable[[FunctionT], FunctionT]:
    """`kernel`, for functions that call compiled parts of other modules.

    numba takes what it kept on disk for good while the function's own file is unchanged, whatever became of the parts. So the
    name that it is kept under tells of them.
    """
    digest = zlib.crc32("".join(map(inspect.getsource, modules)).encode())

    def compile_under_that_name(function: FunctionT) -> FunctionT:
        function.__qualname__ = f"{function.__qualname__}_{digest:08x}"
        return kernel(function)

    return compile_under_that_name


def part(function: FunctionT) -> FunctionT:
    """Compile as a part of the kernels that call it."""
    return cast(FunctionT, njit(nogil=True)(function))


def compile_all(run: Callable[[], None], kernels: int) -> None:
    """Have so many kernels compiled, or fetched from numba's cache, by running something that calls each of them."""
    for failures_left in reversed(range(kernels + 1)):
        try:
            return run()
        except OSError as error:  # numba has compiled a kernel, but could not save it: a full disk
            if failures_left == 0:
                raise
            logger.warning("What was compiled cannot be kept for the next start: %s", error)
    return None
