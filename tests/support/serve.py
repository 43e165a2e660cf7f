"""A real `vllm serve` in a process of its own, for tests that speak HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.support.engine import ENGINE_DEFAULTS, ROOT, worker_environment
from tests.support.hosts import dist_info_vllm

START_TIMEOUT = 240.0  # seconds: two processes import vLLM, one after the other; less than a test may take
_LOG_TAIL = 4000
_TAKEN = "address already in use"


def command(model: Path, *flags: str) -> list[str]:
    """`vllm serve` with the small, exact engine that the other tests use."""
    script = Path(sys.executable).with_name("vllm")
    start = [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    settings = []
    for name, value in ENGINE_DEFAULTS.items():
        flag = name.replace("_", "-")
        if value is True:
            settings.append(f"--{flag}")
        elif value is not False:
            settings += [f"--{flag}", str(value)]
        elif not name.startswith("disable"):
            settings.append(f"--no-{flag}")
    return [*start, "serve", str(model), *settings, "--host", "127.0.0.1", *flags]


def environment(folder: Path) -> dict[str, str]:
    """Of the server: a worker's, its engine core in a process of its own, and a distribution named vllm in `folder`."""
    return worker_environment("v1", "0.32", {"PYTHONPATH": str(dist_info_vllm(folder)), "VLLM_ENABLE_V1_MULTIPROCESSING": None})


class VllmServer:
    """Starts when entered, is killed with all its processes when left; what goes wrong is said with the end of its log."""

    def __init__(self, model: Path, flags: Sequence[str] = (), timeout: float = START_TIMEOUT) -> None:
        self._model, self._flags, self._timeout = model, flags, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-serve-")
        self.log_path = Path(self._folder.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> VllmServer:
        for _ in range(3):  # another process may take the port before the server does
            self._spawn()
            if self._wait():
                return self
        raise RuntimeError(self.explain("vllm serve found its port taken three times"))

    def __exit__(self, *unused: object) -> None:
        self._kill()
        self._folder.cleanup()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def explain(self, text: str) -> str:
        return f"{text}\n--- end of the server's log ---\n{self.log()[-_LOG_TAIL:]}"

    def _spawn(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command(self._model, "--port", str(self.port), *self._flags),
                cwd=ROOT,
                env=environment(Path(self._folder.name)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a kill takes its engine core along
            )

    def _wait(self) -> bool:
        """Whether it answers; False where its port was taken."""
        assert self._process is not None
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                self._kill()
                if _TAKEN in self.log().lower():
                    return False
                raise RuntimeError(self.explain(f"vllm serve ended with {code} before it answered"))
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.get("/health")
                return True
            time.sleep(0.5)
        self._kill()
        raise RuntimeError(self.explain(f"vllm serve did not answer within {self._timeout:g} s"))

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_to_its_end(model: Path, flags: Sequence[str], timeout: float = START_TIMEOUT) -> tuple[int, str]:
    """Run a `vllm serve` that is expected to refuse its flags: exit code and everything that it printed."""
    with tempfile.TemporaryDirectory(prefix="vllm-serve-") as folder:
        process = subprocess.Popen(
            command(model, "--port", "0", *flags),
            cwd=ROOT,
            env=environment(Path(folder)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            printed = (error.output or b"").decode(errors="replace")
            raise RuntimeError(f"vllm serve did not end within {timeout:g} s\n{printed[-_LOG_TAIL:]}") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output.decode(errors="replace")
