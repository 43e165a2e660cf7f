"""The target's hidden states over the training examples: computed once, kept on disk, read by memory map.

A folder per (target, examples, type), named by their hash; in it a file per kind of state, with the rows of all examples one
after the other, so that objectives share what they have in common. A file gets its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_specplugin.cache import cache_root
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.train.batch import Batch, TokenSource, in_order
from vllm_specplugin.train.data import Example
from vllm_specplugin.train.target import TargetModel

FORMAT = 1
"""Part of every hash: raise it whenever the same target and examples should give other files."""
PASS_TOKENS = 4096
"""Tokens that go through the trunk at once."""

Told = Callable[[int], None]
"""Called with the number of tokens that have been run."""


@dataclass(frozen=True, slots=True, eq=False)
class StateFile:
    """Rows of one kind of state: `[tokens of all examples, width]`."""

    path: Path
    width: int
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Some of them, copied: `[stop - start, width]`."""
        item = self.dtype.itemsize
        size = (stop - start) * self.width * item
        stored = np.memmap(self.path, dtype=np.uint8, mode="r", offset=start * self.width * item, shape=(size,))
        return torch.from_numpy(np.array(stored)).view(self.dtype).view(stop - start, self.width)

    def is_whole(self, tokens: int) -> bool:
        return self.path.is_file() and self.path.stat().st_size == tokens * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StatesSource:
    """Examples with their hidden states."""

    tokens: TokenSource
    starts: NDArray[np.int64]
    """`[examples]`: the row of each example's first token."""
    hidden: StateFile
    aux: StateFile | None

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.tokens.lengths

    def read(self, examples: Sequence[int]) -> Batch:
        batch = self.tokens.read(examples)
        return replace(
            batch,
            hidden_states=self._padded(self.hidden, examples, batch.token_ids.shape[1]),
            aux_hidden_states=None if self.aux is None else self._padded(self.aux, examples, batch.token_ids.shape[1]),
        )

    def _padded(self, file: StateFile, examples: Sequence[int], length: int) -> torch.Tensor:
        states = torch.zeros(len(examples), length, file.width, dtype=file.dtype)
        for row, example in enumerate(examples):
            start, count = int(self.starts[example]), len(self.tokens.token_ids[example])
            states[row, :count] = file.rows(start, start + count)
        return states


def token_source(examples: Sequence[Example]) -> TokenSource:
    """The examples' tokens."""
    return TokenSource([np.array(e.token_ids, dtype=np.int32) for e in examples], [e.answer_from for e in examples])


def cached_states(
    target: TargetModel,
    examples: Sequence[Example],
    dtype: torch.dtype,
    aux: bool,
    root: Path | None = None,
    told: Callable[[int, str], Told] | None = None,
) -> StatesSource:
    """The examples with their hidden states, from the cache where they are in it.

    Args:
        aux: with the auxiliary layers' states, too.
        root: of the cache; without it, `$VLLM_SPECPLUGIN_CACHE` or `~/.cache/vllm-specplugin`.
        told: called before a pass over the data with the number of tokens and a description of it.

    Raises:
        SpecPluginError: the disk is too small, or the cache cannot be written.
    """
    frozen, tokens = target.frozen, token_source(examples)
    folder = cache_root(root) / "states" / _key(target, examples, dtype)
    layers = frozen.aux_layers if aux else ()
    name = f"inputs-of-{'-'.join(map(str, layers))}.bin"
    hidden = StateFile(folder / "last.bin", frozen.hidden_size, dtype)
    fused = StateFile(folder / name, len(layers) * frozen.hidden_size, dtype) if aux else None
    total = int(tokens.lengths.sum())
    missing = [file for file in (hidden, fused) if file is not None and not file.is_whole(total)]
    if missing:
        size = sum(total * file.width * dtype.itemsize for file in missing)
        try:
            _make_room(folder, size)
            _about(folder, target, total, dtype)
            description = f"hidden states of {total:,} tokens ({size / 1e6:,.0f} MB in {folder})"
            _compute(target, tokens, missing, aux, told(total, description) if told else lambda done: None)
        except OSError as error:
            raise SpecPluginError(f"cannot write hidden states to {folder} ({error.strerror}); name another --cache.") from error
    return StatesSource(tokens, _starts(tokens), hidden, fused)


def _key(target: TargetModel, examples: Sequence[Example], dtype: torch.dtype) -> str:
    digest = hashlib.sha256(f"{FORMAT} {dtype} {target.identity()}\n".encode())
    digest.update(examples_digest(examples).encode())
    return digest.hexdigest()[:24]


def examples_digest(examples: Sequence[Example]) -> str:
    """A hash of what is learnt from: the tokens, after all cutting, and which of them count."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.array([example.answer_from, len(example.token_ids), *example.token_ids], dtype=np.int64).tobytes())
    return digest.hexdigest()


def _compute(target: TargetModel, tokens: TokenSource, files: Sequence[StateFile], aux: bool, told: Told) -> None:
    """One pass of the trunk over all examples, into files that are renamed when they are whole."""
    lengths, starts = tokens.lengths, _starts(tokens)
    total = int(lengths.sum())
    partial = {file: file.path.with_name(f"{file.path.name}.{os.getpid()}.partial") for file in files}
    try:
        maps = {file: _room_for(path, total, file.width * file.dtype.itemsize) for file, path in partial.items()}
        done = 0
        for examples in in_order(lengths, PASS_TOKENS):
            last, fused = target.states(tokens.read(examples).token_ids, target.frozen.aux_layers if aux else ())
            for row, example in enumerate(examples):
                start, length = int(starts[example]), int(lengths[example])
                for file, stored in maps.items():
                    states = last if file.path.name == "last.bin" else fused
                    assert states is not None
                    kept = states[row, :length].to("cpu", file.dtype).contiguous()
                    stored[start : start + length] = kept.view(torch.uint8).numpy()
                done += length
            told(done)
        for stored in maps.values():
            stored.flush()
        for file, path in partial.items():
            path.replace(file.path)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def _room_for(path: Path, rows: int, width: int) -> np.memmap[Any, np.dtype[np.uint8]]:
    """`[rows, width]`: a new file in memory, all of which the disk has. A hole that it cannot fill would end the process.

    Raises:
        OSError: it has not, or may not have.
    """
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, rows * width)
        else:
            file.truncate(rows * width)
    return np.memmap(path, dtype=np.uint8, mode="r+", shape=(rows, width))


def _starts(tokens: TokenSource) -> NDArray[np.int64]:
    return np.cumsum(tokens.lengths) - tokens.lengths


def _make_room(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise SpecPluginError(
            f"hidden states take {size / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free; name another --cache, "
            "or use less data."
        )


def _about(folder: Path, target: TargetModel, tokens: int, dtype: torch.dtype) -> None:
    """For people who wonder what a folder of the cache is."""
    about: dict[str, Any] = {"target": target.frozen.model, "tokens": tokens, "dtype": str(dtype), "format": FORMAT}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
