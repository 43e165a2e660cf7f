"""What a run has measured so far, in a file, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.validate.report import write_whole


class Plain(BaseModel):
    """From the engine that decodes plainly."""

    greedy: list[dict[str, Any]]
    """Per prompt: token_ids, and logprobs (token -> log-probability) of each."""
    prefixes: list[tuple[int, tuple[int, ...]]]
    """The places of the chi-square; their logits lie in a file of their own."""


class Tested(BaseModel):
    """From the engine under test, before it samples."""

    facts: dict[str, Any]
    greedy: list[dict[str, Any]]
    texts: dict[int, str]
    """How the tokens at which greedy outputs part are spelled."""


class State(BaseModel):
    """Everything; written after each round."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    """Of the plan (see `Plan.fingerprint`)."""
    plain: Plain | None = None
    tested: Tested | None = None
    rounds: int = 0
    tokens: int = 0
    unclear: int = 0
    """Tokens at places that could not be tested."""
    first: list[list[int]] = Field(default_factory=list)
    """`[prompt's index, token, token, ..., how often]`."""
    martingale: dict[str, Any] | None = None
    seconds: float = 0.0

    def write(self, file: Path) -> None:
        """Replace the file whole or not at all."""
        write_whole(file, self.model_dump_json())

    @classmethod
    def read(cls, file: Path) -> State:
        """A state written before."""
        try:
            return cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            first = str(error).splitlines()[0]
            raise SpecPluginError(f"{file} cannot be read ({first}); start anew with --fresh.") from error


def open_state(file: Path, fingerprint: str, fresh: bool) -> State:
    """The state to go on from: the one in the file, or a new one.

    Raises:
        SpecPluginError: the file holds a run with other settings, weights or code, and `fresh` does not say to drop it.
    """
    if fresh or not file.exists():
        return State(fingerprint=fingerprint)
    state = State.read(file)
    if state.fingerprint != fingerprint:
        raise SpecPluginError(
            f"{file.parent} holds a run with other settings, weights or code, whose samples cannot be mixed with these; "
            "drop it with --fresh, or choose another folder with --out."
        )
    return state
