"""`scripts/setup.sh` over a Python that only pretends: nothing is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup.sh"

PYTHON = """#!/usr/bin/env bash
[ "$1 $2" = "-m venv" ] || exit 0
echo made >>"$CALLS"
mkdir -p "$3/bin"
printf '#!/usr/bin/env bash\\n[ -e "%s/pip" ] || { echo "No module named pip" >&2; exit 1; }\\n' "$3" >"$3/bin/python"
chmod +x "$3/bin/python"
[ -n "$BREAKS_OFF" ] && exit 1
touch "$3/pip"
"""
"""Makes a Python, and then pip, as the module `venv` does."""


def test_a_venv_that_broke_off_is_made_again(tmp_path: Path) -> None:
    python, venv, calls = tmp_path / "python3.11", tmp_path / "venv", tmp_path / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    venv.mkdir()
    (venv / "notes.txt").write_text("not ours")

    def setup(breaks_off: str = "") -> int:
        variables = {"PYTHON": str(python), "VENV": str(venv), "CALLS": str(calls), "BREAKS_OFF": breaks_off}
        command = ["bash", str(SCRIPT)]
        return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, timeout=60, check=False).returncode

    assert setup(breaks_off="no ensurepip") != 0
    assert (venv / "bin" / "python").exists()
    assert setup() == 0
    assert calls.read_text().split() == ["made", "made"]
    assert setup() == 0
    assert calls.read_text().split() == ["made", "made"], "a whole one is kept"
    assert (venv / "notes.txt").read_text() == "not ours"
