"""`vllm-specplugin list`: what is registered, by whom, and what it can do.

Whatever a third party's class does when it is imported or looked at, the others are listed all the same.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_specplugin.cli.output import console, one_line, parts_of, print_json
from vllm_specplugin.errors import RegistryError, suggestion
from vllm_specplugin.proposers.base import Proposer
from vllm_specplugin.registry import PROPOSERS, VERIFIERS, Entry, Registry, normalise
from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.types import Capabilities

DEFAULT_KEY = "default"

_FACTS = {
    "proposer": ("capabilities", "default_num_speculative_tokens", "adaptive_num_speculative_tokens"),
    "verifier": ("lossless", "needs_probabilities"),
}


@dataclass(frozen=True)
class Part:
    """One registered proposer or verifier, as far as it could be looked at."""

    kind: Literal["proposer", "verifier"]
    name: str
    package: str
    package_version: str
    target: str
    """`module:Class`"""
    broken: str = ""
    """Why it cannot be used; empty where it can."""
    summary: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the class declares: capabilities and default k, or what a verifier promises and needs."""
    options: list[dict[str, Any]] = field(default_factory=list)

    @property
    def class_name(self) -> str:
        return self.target.rpartition(":")[2]

    def dump(self) -> dict[str, Any]:
        """For JSON: the facts beside the rest, all of them null where the class could not be looked at."""
        known = {key: value for key, value in asdict(self).items() if key != "facts"}
        return {**known, "broken": self.broken or None, **dict.fromkeys(_FACTS[self.kind]), **self.facts}


def list_command(name: str | None, as_json: bool) -> None:
    """Print all parts, or the one of this name in detail; a name that nobody registered is a RegistryError."""
    parts = [part for part in _all_parts() if name is None or part.name == normalise(name)]
    if name is not None:
        _insist(name, parts)
    if as_json:
        dumped = {f"{kind}s": [part.dump() for part in parts if part.kind == kind] for kind in ("proposer", "verifier")}
        print_json(dumped)
        return
    out = console()
    if name is not None:
        for part in parts:
            _print_detail(out, part)
        return
    _print_tables(out, parts)


def _insist(name: str, parts: list[Part]) -> None:
    if not parts:
        known = [*PROPOSERS.names(), *VERIFIERS.names()]
        raise RegistryError(
            f"{name!r} is no proposer or verifier{suggestion(normalise(name), known)} Installed proposers: "
            f"{', '.join(PROPOSERS.names()) or 'none'}; verifiers: {', '.join(VERIFIERS.names()) or 'none'}."
        )
    if all(part.broken for part in parts):
        raise RegistryError(parts[0].broken)


# -- looking ---------------------------------------------------------------------


def _all_parts() -> list[Part]:
    proposers = [_look(PROPOSERS, entry, "proposer", _proposer_facts) for entry in PROPOSERS.entries()]
    return proposers + [_look(VERIFIERS, entry, "verifier", _verifier_facts) for entry in VERIFIERS.entries()]


def _look(
    registry: Registry[Any], entry: Entry, kind: Literal["proposer", "verifier"], facts: Callable[[Any], dict[str, Any]]
) -> Part:
    known: dict[str, Any] = {
        "kind": kind,
        "name": entry.name,
        "package": entry.distribution,
        "package_version": _version(entry.distribution),
        "target": entry.target,
    }
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # an import that prints would spoil what a machine reads
            part = registry.resolve(entry.name)
            options = _options(part.Options) if kind == "proposer" else []
            return Part(**known, summary=_summary(part), facts=facts(part), options=options)
    except RegistryError as error:
        return Part(**known, broken=one_line(error))
    except (Exception, SystemExit) as error:
        return Part(**known, broken=one_line(f"{entry.target} cannot be looked at: {type(error).__name__}: {error}"))


def _proposer_facts(proposer: type[Proposer]) -> dict[str, Any]:
    return {
        "capabilities": asdict(proposer.capabilities),
        "default_num_speculative_tokens": proposer.default_num_speculative_tokens,
        "adaptive_num_speculative_tokens": proposer.adaptive_num_speculative_tokens,
    }


def _verifier_facts(verifier: type[Verifier]) -> dict[str, Any]:
    return {"lossless": verifier.lossless, "needs_probabilities": verifier.needs_probabilities}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except (PackageNotFoundError, ValueError):
        return ""


def _summary(part: type) -> str:
    """The first paragraph of the docstring; one inherited from the contract says nothing of the class."""
    return one_line(inspect.cleandoc(part.__doc__ or "").split("\n\n")[0])


def _options(options: type[BaseModel]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "type": _type(info.annotation, info.metadata),
            "required": info.is_required(),
            DEFAULT_KEY: None
            if info.is_required()
            else to_jsonable_python(info.get_default(call_default_factory=True), fallback=str),
            "description": one_line(info.description or ""),
        }
        for name, info in options.model_fields.items()
    ]


_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _type(annotation: Any, constraints: list[Any]) -> str:
    """A type as a user would write it, with its bounds: `int ≥ 1`, `greedy | probabilistic`."""
    bounds = [f"{sign} {getattr(one, key)}" for one in constraints for key, sign in _BOUNDS.items() if hasattr(one, key)]
    return " ".join([_type_name(annotation), ", ".join(bounds)]).strip()


def _type_name(annotation: Any) -> str:
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("none" if argument is type(None) else _type_name(argument) for argument in arguments)
    if origin is None and isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


# -- printing ---------------------------------------------------------------------


def _print_tables(out: Console, parts: list[Part]) -> None:
    _print_table(out, "Proposers", [part for part in parts if part.kind == "proposer"], ("Needs", "Gives", "Options"))
    _print_table(out, "Verifiers", [part for part in parts if part.kind == "verifier"], ("Lossless", "Needs probabilities"))
    out.print(Text("`vllm-specplugin list NAME` shows one in detail.", style="dim"))


def _print_table(out: Console, title: str, parts: list[Part], columns: tuple[str, ...]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Name", style="cyan", no_wrap=True)
    for column in ("Package and class", *columns):
        table.add_column(column, overflow="fold")
    for part in parts:
        origin = Text.assemble(_package(part), "\n", (part.class_name, "dim"))
        table.add_row(part.name, origin, *([Text("broken: see below", style="red")] if part.broken else _cells(part)))
    if parts:
        out.print(table)
    for part in parts:
        if part.broken:
            out.print(Padding(Text.assemble((part.name, "red"), ": ", part.broken), (0, 1, 1, 1)))


def _cells(part: Part) -> tuple[str, ...]:
    if part.kind == "verifier":
        return "yes" if part.facts["lossless"] else "no: lossy", _yes(part.facts["needs_probabilities"])
    capabilities = part.facts["capabilities"]
    return "\n".join(needs(capabilities)), "\n".join(gives(capabilities)), _defaults(part)


def _package(part: Part) -> str:
    return f"{part.package} {part.package_version}".strip()


def needs(capabilities: Mapping[str, Any]) -> list[str]:
    """What a proposer needs, in words."""
    words: dict[str, dict[Any, str]] = {
        "tokens": {"none": "", "host": "tokens on the host", "device": "tokens on the device"},
        "hidden_states": {"none": "", "last": "last hidden states", "aux": "last and auxiliary hidden states"},
        "own_kv_cache": {True: "room in the KV cache" if capabilities["native"] else "a KV cache of its own"},
        "native": {
            "eagle": "vLLM's own drafter for EAGLE",
            "eagle3": "vLLM's own drafter for EAGLE-3",
            "mtp": "a target with MTP layers, which vLLM's own drafter runs",
            "draft_model": "vLLM's own drafter for draft models",
        },
        "checkpoint": {True: "a checkpoint ('model')"},
    }
    found = [known.get(capabilities[key], "") for key, known in words.items()]
    return [word for word in found if word] or ["nothing"]


def gives(capabilities: Mapping[str, Any]) -> list[str]:
    """What a proposer can return, in words."""
    return [
        "drafts",
        *(["their probabilities"] if capabilities["probabilities"] else []),
        *(["trees"] if capabilities["trees"] else []),
    ]


def _defaults(part: Part) -> str:
    return "\n".join(f"{option['name']}={_default(option)}" for option in part.options) or "none"


def _default(option: Mapping[str, Any]) -> str:
    value = option[DEFAULT_KEY]
    if option["required"]:
        return "(required)"
    return value if isinstance(value, str) else json.dumps(value)


def _lossless(part: Part) -> str:
    return "yes" if part.facts["lossless"] else "no: it changes the answers of requests with a temperature above 0"


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _print_detail(out: Console, part: Part) -> None:
    out.print(Text.assemble((part.name, "bold cyan"), f", a {part.kind}"))
    if part.broken:
        out.print(Text(part.broken, style="red"))
        return
    if part.summary:
        out.print(part.summary, markup=False)
    out.print()
    items: list[tuple[str, RenderableType]] = [
        ("Package", _package(part)),
        ("Class", Text(part.target)),
    ]
    if part.kind == "verifier":
        items.append(("Lossless", _lossless(part)))
        items.append(("Needs probabilities", _yes(part.facts["needs_probabilities"])))
        out.print(parts_of(items, 12))
        return
    capabilities = part.facts["capabilities"]
    items += [
        ("Needs", "; ".join(needs(capabilities))),
        ("Gives", "; ".join(gives(capabilities))),
        ("Drafts", f"{_default_k(part)}, unless 'num_speculative_tokens' says else"),
    ]
    out.print(parts_of(items, 12))
    if part.options:
        out.print(_option_table(part))
    out.print()
    out.print(Text(f"vllm serve MODEL --speculative-config '{_example(part)}'"), soft_wrap=True)


def _option_table(part: Part) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Option", style="cyan", no_wrap=True)
    for column in ("Type", "Default", "Meaning"):
        table.add_column(column, overflow="fold")
    for option in part.options:
        table.add_row(option["name"], Text(option["type"]), Text(_default(option)), Text(option["description"]))
    return table


def _default_k(part: Part) -> str:
    """As far as the class says it; the rest is known once checkpoint, target and parts are."""
    capabilities = part.facts["capabilities"]
    if capabilities["parts"]:
        return "as many tokens per step as its parts do"
    if capabilities["native"] == "mtp":
        return "a token per step for each MTP layer of the target"
    fixed, adaptive = (part.facts[f"{control}_num_speculative_tokens"] for control in ("default", "adaptive"))
    if capabilities["checkpoint"]:
        return f"as many tokens per step as its checkpoint is made for (up to {fixed} where that does not say)"
    if adaptive is None or adaptive == fixed:
        return f"up to {fixed} tokens per step"
    return f"up to {adaptive} tokens per step ({fixed} with 'control': 'fixed')"


def _example(part: Part) -> str:
    capabilities = Capabilities(**part.facts["capabilities"])
    keys: dict[str, Any] = {"proposer": part.name}
    if capabilities.checkpoint:
        keys["model"] = "PATH"
    return json.dumps(keys)
