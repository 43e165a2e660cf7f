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


@after_import("vllm.v1.worker.gpu.sample.gumbel")
def _hurry_the_sampler(module: Any) -> None:
    """Speed only: half the time of a step with sampled rows went into the hash behind their noise, row by row.

    The same numbers for all rows at once, bit by bit those of vLLM's kernel (test_harness compares the two), for the target and
    for drafting, which keeps the logits that it draws from.
    """
    stock = module.gumbel_sample

    def sample(
        logits: Any,
        expanded_idx_mapping: Any,
        temperature: Any,
        seed: Any,
        pos: Any,
        apply_temperature: bool,
        is_drafting: bool,
        logits_cache: Any | None = None,
        logits_cache_col: Any | None = None,
        **options: Any,
    ) -> Any:
        if any(value is not None and value is not False for value in options.values()):
            cache = {"logits_cache": logits_cache, "logits_cache_col": logits_cache_col}
            return stock(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, **cache, **options)
        if logits_cache is not None:
            used = expanded_idx_mapping >= 0
            column = logits_cache_col.expand(len(logits))[used]
            logits_cache[expanded_idx_mapping[used], column, : logits.shape[1]] = logits[used]
        if is_drafting:
            pos = pos + int(module._DRAFT_NOISE_SALT.value)
        return gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature)

    module.gumbel_sample, module.interpreted_gumbel_sample = sample, stock
    module.apply_temperature, module.interpreted_apply_temperature = apply_temperature, module.apply_temperature


def apply_temperature(logits: Any, expanded_idx_mapping: Any, temperature: Any) -> None:
    """Divide each row by its request's temperature, in place, unless that is 0: in one go instead of row by row.

    logits [rows, vocab] float; expanded_idx_mapping [rows], a row's request slot; temperature [slots].
    """
    heat = temperature[expanded_idx_mapping.long()].float()
    logits.div_(heat.where(heat != 0, 1.0)[:, None])


@after_import("vllm.v1.worker.gpu.block_table")
def _hurry_the_slot_mappings(module: Any) -> None:
    """Speed only: a quarter of a step with many requests went into where their keys and values go, request by request."""
    stock = module.BlockTables.compute_slot_mappings

    def compute(
        self: Any, idx_mapping: Any, query_start_loc: Any, positions: Any, num_tokens_padded: int, out: Any | None = None
    ) -> Any:
        if self.cp_size != 1 or not self.num_kv_cache_groups:
            return stock(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out)
        mappings = self.slot_mappings if out is None else out
        for group, table in enumerate(self.block_tables):
            enabled, size = bool(self.slot_mapping_enabled[group]), int(self.block_sizes_tensor[group])
            slots = slot_mapping(idx_mapping, query_start_loc, positions, table.gpu, size) if enabled else None
            mappings[group].fill_(module.PAD_SLOT_ID)
            if slots is not None:
                mappings[group, : len(slots)] = slots.where(slots >= 0, module.PAD_SLOT_ID)
        return mappings[:, :num_tokens_padded]

    module.BlockTables.compute_slot_mappings, module.BlockTables.interpreted_slot_mappings = compute, stock


def slot_mapping(idx_mapping: Any, query_start_loc: Any, positions: Any, block_table: Any, block_size: int) -> Any:
    """Where the keys and values of tokens go, `[tokens]`; -1 for those of no request.

    idx_mapping [requests], slots, -1 for no request; query_start_loc [requests + 1]; positions [tokens or more]; block_table
    [slots, blocks].
    """
    requests = len(idx_mapping)
    slots = idx_mapping.long().repeat_interleave(query_start_loc[: requests + 1].long().diff())
    places = positions[: len(slots)].long()
    cells = (slots * block_table.stride(0) + places // block_size).where(slots >= 0, 0)
    return (block_table.flatten()[cells].long() * block_size + places % block_size).where(slots >= 0, -1)


def gumbel_sample(logits: Any, expanded_idx_mapping: Any, temperature: Any, seed: Any, pos: Any, apply_temperature: bool) -> Any:
    """One token per row, by argmax of logits plus Gumbel noise keyed by (seed, position, token); argmax where T is 0.

    logits [rows, vocab]; expanded_idx_mapping [rows], a row's request slot, negative for none; temperature, seed
    [slots]; pos [rows].
    """
    import numpy as np
    import torch

    one = np.float32

    def rotated(value: Any, shift: int) -> Any:
        return (value << np.uint32(shift)) | (value >> np.uint32(32 - shift))

    def mixed(state: Any, key: Any) -> Any:
        state = state ^ (rotated(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593))
        return rotated(state, 13) * np.uint32(5) + np.uint32(0xE6546B64)

    slots = expanded_idx_mapping.numpy()
    used = slots >= 0
    heat = np.where(used, temperature.numpy()[slots], 0).astype(np.float32)[:, None]
    seeds = np.where(used, seed.numpy()[slots], 0).astype(np.int64).astype(np.uint64)
    state = np.zeros(len(slots), dtype=np.uint32)
    for word in (seeds, seeds >> np.uint64(32), pos.numpy().astype(np.int64).astype(np.uint64)):
        state = mixed(state, word.astype(np.uint32))
    values = logits.float().numpy()
    state = mixed(state[:, None], np.arange(values.shape[1], dtype=np.uint32)) ^ np.uint32(16)
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    state = state ^ (state >> np.uint32(16))
    high, low = (state >> np.uint32(16)).astype(np.float32), (state & np.uint32(0xFFFF)).astype(np.float32)
    uniform = high * one(2.0**-16) + (low + one(0.5)) * one(2.0**-32)
    series = one(1 / 8)
    for divisor in range(7, 0, -1):
        series = one(1 / divisor) + uniform * series
    logs = np.where(uniform < one(0.25), -uniform * series, np.log(np.maximum(one(1) - uniform, one(2.0**-24))))
    if apply_temperature:
        values = values / np.where(heat == 0, one(1), heat)
    return torch.from_numpy((values + np.where(heat == 0, one(0), -np.log(-logs))).argmax(axis=1))
