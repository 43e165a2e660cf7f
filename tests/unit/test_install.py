"""The seams are put in place without vLLM, twice, and where vLLM lacks them."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from vllm_specplugin.request_args import Rules
from vllm_specplugin.runtime import install

HOOKS = [
    install._on_arg_utils,
    install._on_vllm_config,
    install._on_sampling_params,
    install._on_v1_runner,
    install._on_v2_runner,
    install._on_llvmlite,
]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def engine_args() -> tuple[types.ModuleType, type]:
    """A stand-in for `vllm.engine.arg_utils`."""

    class EngineArgs:
        def __init__(self, speculative_config: object) -> None:
            self.speculative_config = speculative_config

        def create_speculative_config(self, target_model_config: object, target_parallel_config: object) -> str:
            """Stock."""
            return f"stock made {self.speculative_config}"

    module = types.ModuleType("arg_utils")
    module.EngineArgs = EngineArgs  # type: ignore[attr-defined]
    return module, EngineArgs


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_module_without_the_seam_imports_as_ever_and_it_is_said(hook: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.specplugin"):
        install._stepping_aside(hook)(types.ModuleType("other"))  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "A seam into vLLM is missing" in record.getMessage()
    assert "doctor" in record.getMessage()


@pytest.mark.parametrize("config", [None, {"method": "ngram"}, {"model": "eagle"}, "a string"])
def test_a_replacement_hands_on_what_is_not_ours(config: object) -> None:
    module, cls = engine_args()
    install._on_arg_utils(module)
    assert cls(config).create_speculative_config(1, target_parallel_config=2) == f"stock made {config}"
    assert cls.create_speculative_config.__doc__ == "Stock."


def test_a_replacement_is_made_once() -> None:
    module, cls = engine_args()
    install._on_arg_utils(module)
    once = cls.create_speculative_config
    install._on_arg_utils(module)
    assert cls.create_speculative_config is once


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm_specplugin.plugin import register

    def fail() -> None:
        raise RuntimeError("no hooks today")

    monkeypatch.setattr(install, "install", fail)
    with caplog.at_level(logging.ERROR, logger="vllm.specplugin"):
        register()
    assert "could not attach" in caplog.text
    assert "no hooks today" in caplog.text


def test_hooks_wait_for_the_import_and_are_registered_once() -> None:
    code = """
import sys, types
from vllm_specplugin.plugin import register
register(); register()
from wrapt import importer
hooks = [hook for hooks in importer._post_import_hooks.values() for hook in hooks]
print(len(hooks), len(set(importer._post_import_hooks)), 'vllm' in sys.modules)
"""
    hooks, modules, vllm_is_loaded = run(code).split()
    assert int(hooks) == int(modules) > 6
    assert vllm_is_loaded == "False"


@pytest.mark.parametrize("first", ["register", "numba"])
def test_numba_does_not_stop_the_cpu_worker(first: str) -> None:
    """vLLM asks everything that any module holds for its `__dict__`; llvmlite's library used to answer with a C function."""
    steps = ["from vllm_specplugin.plugin import register; register()", "import numba"]
    steps = steps if first == "register" else steps[::-1]
    code = (
        "; ".join(steps) + "; from llvmlite.binding import ffi; print(vars(ffi.lib).get('kernel')); ffi.lib.LLVMPY_GetVersionInfo"
    )
    assert run(code).split() == ["None"]


# -- requests ----------------------------------------------------------------------------------------------


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], object]:
    """What a request's `extra_args` are once the front end has looked at it; refusals are a ValueError."""
    stub = types.ModuleType("vllm.exceptions")
    stub.VLLMValidationError = ValueError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", stub)
    rules = Rules("predicted", keys=("prediction",), vocab_size=100, max_model_len=10)
    config = types.SimpleNamespace(plugin={}, runner="v2", request_rules=lambda: rules)

    def validate(extra_args: object) -> object:
        params = types.SimpleNamespace(extra_args=extra_args)
        install._validate_spec_decode(lambda *_: None, params, config)
        return params.extra_args

    return validate


def test_requests_are_read_once_and_sent_on_in_a_form_that_is_quick_to_read(validated: Callable[[object], object]) -> None:
    mine = {"specplugin": '{"prediction": [5, 6], "enabled": true}', "other": 1}
    expected = {"specplugin": {"prediction": np.array([5, 6], np.int32).tobytes(), "enabled": True}, "other": 1}
    assert validated(mine) == expected
    assert validated(validated(mine)) == expected  # the same parameters serve many requests
    assert isinstance(mine["specplugin"], str)
    assert validated(None) is None
    assert validated({"other": 1}) == {"other": 1}
    with pytest.raises(ValueError, match="of 11 token ids; at most 10"):
        validated({"specplugin": {"prediction": [1] * 11}})


# -- start-up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", [True, False])
def test_timing_at_start_is_no_load_of_experts(controller: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 says on V2 how to keep passes out of what it balances experts by; other runners have no such place."""
    suppressed, seen = [False], []

    @contextlib.contextmanager
    def suppress() -> Iterator[None]:
        suppressed[0] = True
        yield
        suppressed[0] = False

    runner = types.SimpleNamespace(eplb=types.SimpleNamespace(suppress=suppress)) if controller else types.SimpleNamespace()
    quiet: list[bool] = []

    @contextlib.contextmanager
    def warming_up(_: Any) -> Iterator[None]:
        quiet.append(True)
        yield
        quiet.append(False)

    control = types.SimpleNamespace(calibrate=lambda *_: seen.append(suppressed[0]), warming_up=warming_up)
    monkeypatch.setattr(sys.modules["vllm_specplugin.runtime"], "control", control, raising=False)
    config = types.SimpleNamespace(speculative_config=types.SimpleNamespace(plugin={}))
    worker = types.SimpleNamespace(model_runner=runner, vllm_config=config)
    assert install._warm_up(lambda _: str(quiet), worker) == "[True]"  # vLLM's own requests are drafted for by nobody
    assert quiet == [True, False]
    assert seen == [controller]
    assert suppressed == [False]
