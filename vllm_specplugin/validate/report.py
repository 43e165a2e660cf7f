"""All that one run of `validate` found: one value that reads and writes JSON, and that the table and the page show."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specplugin.errors import ConfigError, SpecPluginError
from vllm_specplugin.validate.chisquare import ChiSquare
from vllm_specplugin.validate.evidence import Evidence
from vllm_specplugin.validate.greedy import Greedy
from vllm_specplugin.validate.verdict import Verdict

VERSION: Literal[1] = 1
"""Raised whenever an old report would not load any more."""

LIBRARIES = ("matplotlib", "scipy", "jinja2")


class Settings(BaseModel):
    """What was run, as it took effect."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    speculative_config: dict[str, Any]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    """Of the martingale's and the chi-square's requests; the greedy ones have temperature 0."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Facts: vllm, torch, model_runner, dtype, ..., shown in this order under these names (underscores as spaces)."""
    verifier: str = ""
    lossy: bool = False
    """By the verifier's own account."""
    alpha: float
    """Of the whole run; the statistical tests carry their own shares."""
    bias: float
    """The bias that must not go unseen, as a share of probability."""
    seed: int = 0
    prompts: int = 0
    tokens_asked: int = 0


class Report(BaseModel):
    """The whole. `greedy` and `chi_square` are None where that test was not made; `not_tested` then says why."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = VERSION
    settings: Settings
    verdict: Verdict
    reason: str
    martingale: Evidence
    greedy: Greedy | None = None
    chi_square: ChiSquare | None = None
    not_tested: list[str] = Field(default_factory=list)
    """One sentence each."""
    interrupted: bool = False
    seconds: float = 0.0

    def write_json(self, path: Path) -> None:
        """Write the report; a file already there is replaced whole or not at all."""
        write_whole(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read_json(cls, path: Path) -> Report:
        """A report written before."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            first = str(error).splitlines()[0]
            raise SpecPluginError(f"{path} is no report of `validate` (version {VERSION}): {first}; write it anew.") from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that an interrupt leaves the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def require_report_libraries() -> None:
    """Refuse to start a long run whose statistics or report could not be made in the end."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`validate` needs {', '.join(missing)}, not installed here: pip install 'vllm-specplugin[validate]'")
