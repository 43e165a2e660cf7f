"""Kernels over the trie of the n-gram index, with a hash so weak that everything collides."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest

from vllm_specplugin import compiled
from vllm_specplugin.proposers import ngram_kernels, suffix_tree

WEAK_BITS = 2
PARTS = (ngram_kernels, suffix_tree)


def with_weak_hash(kernels: ModuleType) -> ModuleType:
    """A copy of a module of kernels, and of the modules of `vllm_specplugin.proposers` that it takes compiled parts from.

    Compiled anew, since what numba keeps on disk is bound to the true hash.
    """
    copies: dict[str, ModuleType] = {}

    def copy(module: ModuleType) -> ModuleType:
        name = f"weak_{module.__name__.rsplit('.', 1)[1]}"
        if name in copies:
            return copies[name]
        source = inspect.getsource(module)
        for other in PARTS:
            if (taken := f"from {other.__name__} import") in source:
                source = source.replace(taken, f"from {copy(other).__name__} import")
        if module is ngram_kernels:
            assert "END_BITS = 25," in source
            source = source.replace("END_BITS = 25,", f"END_BITS = {WEAK_BITS},")
        made = copies[name] = sys.modules[name] = ModuleType(name)
        exec(compile(source, str(module.__file__), "exec"), made.__dict__)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "kernel", compiled.part)
        patch.setattr(compiled, "kernel_over", lambda *modules: compiled.part)
        return copy(kernels)
