"""Answers from and for other runs: a corpus to start warm with, and a file that keeps what was answered."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.proposers.suffix_answers import Answers, Piece, pieces_of
from vllm_specplugin.proposers.suffix_kernels import CHUNK, PIECE
from vllm_specplugin.proposers.suffix_tree import CLASSES, MEMORY, TRUST_CLASSES

logger = logging.getLogger("vllm.specplugin.suffix")

Encode = Callable[[str], list[int]]
Odds = NDArray[np.float64]

FORMAT = 1
SAVE_SECONDS = 60.0
"""So often is the file written while there are new answers."""

EXPECTED = (
    'expected is a UTF-8 text, or JSONL (.jsonl, .json) with {"text": string} or {"token_ids": [...]} per line, such as '
    "`vllm-specplugin distill` writes."
)


# -- a corpus ----------------------------------------------------------------------


def check_corpus(file: str) -> None:
    """Read its beginning, so that what is no corpus is said before a model is loaded. Raises ConfigError."""
    first = next(_lines(file), None)
    if first is None:
        raise ConfigError(f"'options.corpus' is {file!r}, which is empty; {EXPECTED}")
    if _is_json(file):
        _entry(file, *first)


def read_corpus(file: str, encode: Encode | None, vocab_size: int) -> Iterator[Piece]:
    """The texts of a corpus as tokens. Raises ConfigError naming the line that is at fault, and what is expected."""
    if not _is_json(file):
        text = "".join(line for _, line in _lines(file))
        yield Piece(_ids([], file, 0, vocab_size), _ids(_encoded(text, encode, file), file, 1, vocab_size))
        return
    for number, line in _lines(file):
        if not line.strip():
            continue
        context, tokens = _entry(file, number, line)
        ids = _encoded(tokens, encode, file) if isinstance(tokens, str) else tokens
        if ids:
            yield Piece(_ids(context, file, number, vocab_size), _ids(ids, file, number, vocab_size))


def _is_json(file: str) -> bool:
    return Path(file).suffix in (".jsonl", ".json")


def _lines(file: str) -> Iterator[tuple[int, str]]:
    try:
        with Path(file).open(encoding="utf-8") as opened:
            yield from enumerate(opened, 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'options.corpus' is {file!r}, which cannot be read ({error}); {EXPECTED}") from error


def _entry(file: str, number: int, line: str) -> tuple[list[int], list[int] | str]:
    """What came before the text of a line, as far as it says so, and the text: token ids, or a string that is to be encoded."""
    where = f"'options.corpus' is {file!r}, whose line {number}"
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error.msg}); {EXPECTED}") from error
    if isinstance(entry, dict) and ("distilled_with" in entry or "skipped" in entry):
        return [], []
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return [], entry["text"]
    if not isinstance(entry, dict) or "token_ids" not in entry:
        has = (
            f"has the keys {', '.join(map(str, entry)) or 'none'}" if isinstance(entry, dict) else f"is a {type(entry).__name__}"
        )
        raise ConfigError(f"{where} {has}; {EXPECTED}")
    prompt, answer = entry.get("prompt_token_ids", []), entry["token_ids"]
    for key, ids in (("prompt_token_ids", prompt), ("token_ids", answer)):
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ConfigError(f'{where} has a "{key}" that is no list of token ids; {EXPECTED}')
    return prompt, answer


def _encoded(text: str, encode: Encode | None, file: str) -> list[int]:
    if encode is None:
        raise ConfigError(f"'options.corpus' is {file!r}, which holds text, but the target has no tokenizer; give token ids.")
    return encode(text)


def _ids(ids: Sequence[int], file: str, number: int, vocab_size: int) -> NDArray[np.int32]:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"'options.corpus' is {file!r}, whose line {number} has the token id {wrong}; the target's are 0 to {vocab_size - 1}."
        )
    return np.array(ids, dtype=np.int32)


# -- a file of answers -------------------------------------------------------------


class AnswersFile:
    """Keeps the ring of answers, and how far to trust it, over the end of the engine.

    The file is numpy's `.npz`, without pickled objects. It is replaced as a whole (`os.replace`), so that a crash leaves the
    old one. A thread writes it, whether drafts are asked for or not: an engine may fall idle, or be killed where it stands.
    """

    def __init__(self, file: str, vocab_size: int, data_parallel_rank: int = 0) -> None:
        """Each data-parallel rank is an engine of its own, and all but the first write to files named after theirs."""
        path = Path(file)
        self.path = path.with_name(f"{path.stem}.dp{data_parallel_rank}{path.suffix}") if data_parallel_rank else path
        self.vocab_size = vocab_size
        self._saved = 0
        """What `Answers.taken_in` was when the file was written last."""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def check_place(self) -> None:
        """Raises ConfigError where the file could not be written."""
        folder = self.path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"'options.cache_file' is {str(self.path)!r}, but {str(folder)!r} is no folder that can be written to."
            )
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"'options.cache_file' is {str(self.path)!r}, which is no file; name one.")

    def load(self, answers: Answers, odds: Odds, trust: Odds) -> int:
        """Take in the file; returns how many tokens it held. Raises ConfigError where it is no such file."""
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                fields = {name: stored[name] for name in stored.files}
            version, vocab_size = int(fields["version"]), int(fields["vocab_size"])
        except Exception as error:  # numpy and zipfile have many names for what can be wrong with a file
            raise ConfigError(
                f"'options.cache_file' is {str(self.path)!r}, which is no file of answers ({error}); remove it, or name "
                "another one."
            ) from error
        if version != FORMAT or vocab_size != self.vocab_size:
            raise ConfigError(
                f"'options.cache_file' is {str(self.path)!r}, of format {version} and {vocab_size} token ids; this engine writes "
                f"format {FORMAT} and has {self.vocab_size}. Remove it, or name another one."
            )
        self._check_parts(fields)
        count = 0
        for piece in pieces_of(fields["tokens"], fields["origins"], int(fields["head"])):
            answers.add(piece, odds)
            count += len(piece.tokens)
        odds[:], trust[:] = fields["odds"], fields["trust"]
        return count

    def _check_parts(self, fields: dict[str, NDArray[Any]]) -> None:
        """Raises ConfigError where the parts of a file do not fit together."""
        kinds = {"head": (np.int64, ()), "odds": (np.float64, (2, CLASSES)), "trust": (np.float64, (2, TRUST_CLASSES))}
        sound = {"tokens", "origins", *kinds} <= set(fields) and all(
            (fields[name].dtype, fields[name].shape) == kind for name, kind in kinds.items()
        )
        for name in ("odds", "trust") if sound else ():  # how probable, and seen how often; a NaN is neither
            probable, seen = fields[name]
            sound &= bool(((probable >= 0) & (probable <= 1) & (seen >= 0) & (seen <= MEMORY)).all())
        if sound:
            tokens, origins = fields["tokens"], fields["origins"]
            sound = (
                (tokens.dtype, origins.dtype, tokens.ndim) == (np.int32, np.int64, 1)
                and len(tokens) >= CHUNK
                and len(tokens).bit_count() == 1
                and origins.shape == (len(tokens) // PIECE,)
                and int(origins.max()) < CHUNK
                and int(tokens.max()) < self.vocab_size
            )
        if not sound:
            raise ConfigError(
                f"'options.cache_file' is {str(self.path)!r}, whose parts do not fit together; remove it, or name another one."
            )

    def keep(self, answers: Answers, odds: Odds, trust: Odds) -> None:
        """Write every now and then from now on, off the steps' path."""
        self._thread = threading.Thread(
            target=self._keep, args=(answers, odds, trust), name="specplugin-suffix-file", daemon=True
        )
        self._thread.start()

    def _keep(self, answers: Answers, odds: Odds, trust: Odds) -> None:
        while not self._end.wait(SAVE_SECONDS):
            self._save(answers, odds, trust)

    def close(self, answers: Answers, odds: Odds, trust: Odds) -> None:
        """Write what is new for the last time."""
        self._end.set()
        if self._thread and self._thread is not threading.current_thread():  # whose garbage collection may have come here
            self._thread.join()
        self._save(answers, odds, trust)

    def _save(self, answers: Answers, odds: Odds, trust: Odds) -> None:
        latest = answers.taken_in
        if latest != self._saved and self._write(answers, odds.copy(), trust.copy()):
            self._saved = latest

    def _write(self, answers: Answers, odds: Odds, trust: Odds) -> bool:
        """False where that failed; the log says why."""
        tokens, origins, head = answers.snapshot()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                np.savez(
                    file,
                    version=FORMAT,
                    vocab_size=self.vocab_size,
                    tokens=tokens,
                    origins=origins,
                    head=head,
                    odds=odds,
                    trust=trust,
                )
            os.replace(temporary, self.path)
            return True
        except OSError as error:
            temporary.unlink(missing_ok=True)
            logger.warning("The answers could not be kept in %s (option cache_file): %s", self.path, error)
            return False
