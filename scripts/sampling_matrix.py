"""Writes docs/sampling-parameters.md from tests/engine/matrix.py; with --check it only says whether the page is up to date.

Cost: none to speak of; nothing is run. Exit code 1 with --check where the page would change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the matrix is part of the tests, which no package holds
    sys.path.insert(0, str(ROOT))

from tests.engine.matrix import NOT_SAMPLING, ROWS, RUNNERS, VERIFIERS, Answer, Row  # noqa: E402

PAGE = ROOT / "docs" / "sampling-parameters.md"

HEAD = """# Sampling parameters with drafts

What a request gets that asks for a parameter, by vLLM's model runner (V1, V2) and by verifier. Written by
`scripts/sampling_matrix.py` from `tests/engine/matrix.py`, which names for each cell the tests that show it; do not edit.

| in a cell | means |
|---|---|
| {SAME} | plain decoding's answer, token by token |
| {DISTRIBUTION} | the same where the request is greedy or has a seed; else plain decoding's distribution |
| {LOSSY} | the same where the request is greedy; else it is applied at every verified row, and a lossy verifier judges by that |
| {EXACT} | what plain decoding makes of the same tokens: where the answer ends, what comes with it |
| {REFUSED} | an error that names the parameter, at once; nothing else is harmed |
| {NOT_APPLICABLE} | drafts do not come near it |

A verifier of your own stands where `token` does if it is lossless, else where `typical` does. What follows the *distribution* is
shown in three steps: each verified row has plain decoding's processed probabilities (`test_judged_rows.py`: to 1e-5, and 0 for
the same tokens), the verifier's rule is exact (`tests/quality`), and samples of the engine pass a chi-square
(`test_statistics.py`).
"""


def page() -> str:
    """The whole page."""
    head = HEAD.format(**{answer.name: answer.value for answer in Answer})
    return "\n".join([head, *table(), "", *notes(), "", *without_row(), "", *tests()]) + "\n"


def table() -> Iterator[str]:
    yield "| parameter | " + " | ".join(f"{runner.upper()} {verifier}" for runner in RUNNERS for verifier in VERIFIERS) + " |"
    yield "|---" * (1 + len(RUNNERS) * len(VERIFIERS)) + "|"
    number = 0
    for row in ROWS:
        number += bool(row.note)
        mark = f" <sup>{number}</sup>" if row.note else ""
        cells = [row.cells[runner, verifier].answer.value for runner in RUNNERS for verifier in VERIFIERS]
        yield f"| {row.name}{mark} | " + " | ".join(cells) + " |"


def notes() -> Iterator[str]:
    yield "## Notes"
    for number, row in enumerate((row for row in ROWS if row.note), start=1):
        yield f"{number}. **{row.name}**: {row.note}"


def without_row() -> Iterator[str]:
    yield "## Fields of `SamplingParams` that have no row"
    for name, reason in NOT_SAMPLING.items():
        yield f"- `{name}`: {reason}"


def tests() -> Iterator[str]:
    yield "## The tests"
    yield "In `tests/engine`; the cases of each cell are in `matrix.py`."
    yield ""
    yield "| parameters | tests |"
    yield "|---|---|"
    alike: dict[str, list[str]] = {}
    for row in ROWS:
        alike.setdefault(", ".join(functions(row)), []).append(row.name)
    for named, rows in alike.items():
        yield f"| {'; '.join(rows)} | {named} |"


def functions(row: Row) -> list[str]:
    """The tests of a row without their cases, by file: `file: one, two`."""
    names = [test.partition("[")[0].removeprefix("tests/engine/") for cell in row.cells.values() for test in cell.tests]
    files: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        file, _, function = name.partition("::")
        files.setdefault(file, []).append(function)
    return [f"`{file}`: {', '.join(each)}" for file, each in files.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    check = parser.parse_args(arguments).check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.relative_to(ROOT)} is not up to date: run {Path(__file__).relative_to(ROOT)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
