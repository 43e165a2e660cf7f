"""The scripts of examples/learned_drafters, with stand-ins for the commands that they call: what is made where, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "learned_drafters"
STAND_IN = """\
#!/bin/bash
# Notes how it was called, and leaves something where the real one would.
echo "${0##*/} $*" >> "$CALLS"
verb=$1
until [ "$1" = --out ]; do shift; done
if [ "$verb" = train ]; then mkdir -p "$2" && touch "$2/model.safetensors"; else echo half > "$2"; fi
exit "${FAILS:-0}"
"""


class Scripts:
    """The scripts in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.work, self._calls, self._commands = folder / "work", folder / "calls", folder / "bin"
        self._commands.mkdir()
        for name in ("python", "vllm-specplugin"):
            (self._commands / name).write_text(STAND_IN)
            (self._commands / name).chmod(0o755)

    def run(self, family: str, **settings: str) -> subprocess.CompletedProcess[str]:
        known = {key: value for key, value in os.environ.items() if key not in ("PROMPTS", "MINUTES", "SERVE", "FAILS")}
        path = f"{self._commands}:{os.environ['PATH']}"
        said = {"PATH": path, "CALLS": str(self._calls), "TARGET": "target", "WORK": str(self.work), **settings}
        command = ["bash", str(EXAMPLES / f"{family}.sh")]
        return subprocess.run(command, env=known | said, capture_output=True, text=True, timeout=60, check=False)

    def calls(self, of: str) -> list[str]:
        """How the commands were called whose line begins so."""
        return [line for line in self._calls.read_text().splitlines() if line.startswith(of)]


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


@pytest.mark.parametrize("family", ["medusa", "eagle", "eagle3", "mtp"])
def test_heads_are_served_that_were_trained_as_asked(scripts: Scripts, family: str) -> None:
    """Other prompts, or another time, are other heads; the same are not trained again."""
    sizes = [("5", "1"), ("5", "2.5"), ("6", "1"), ("5", "1")]
    runs = [scripts.run(family, PROMPTS=prompts, MINUTES=minutes) for prompts, minutes in sizes]
    folders = [scripts.work / f"{family}-{prompts}-{minutes}" for prompts, minutes in sizes]
    for run, folder in zip(runs, folders, strict=True):
        assert run.returncode == 0, run.stderr
        (line,) = [line for line in run.stdout.splitlines() if line.startswith("Serve it:")]
        assert f"{folder}" in line.replace('"', " ").split()
    trained = scripts.calls(f"vllm-specplugin train {family} ")
    assert len(trained) == 3
    for call, folder in zip(trained, folders, strict=False):
        assert f" --out {folder} " in call


def test_prompts_that_were_cut_short_are_made_again(scripts: Scripts) -> None:
    assert scripts.run("medusa", FAILS="1").returncode == 1
    assert not list(scripts.work.glob("prompts-*.jsonl"))
    assert not scripts.calls("vllm-specplugin")
    for _ in range(2):
        assert scripts.run("medusa").returncode == 0
        assert len(list(scripts.work.glob("prompts-*"))) == 1
    assert len(scripts.calls("python")) == 2
    (prompts,) = scripts.work.glob("prompts-*.jsonl")
    assert all(f" --data {prompts} " in call for call in scripts.calls("vllm-specplugin distill"))


def test_prompts_end_where_a_kind_is_used_up(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "prompts.py"), "--count", "9000", "--out", str(tmp_path / "prompts.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "There are not many more prompts of the kind 'chat'" in done.stderr
