"""`vllm-specplugin doctor`: prints the diagnosis. The last line is the verdict, and so is the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_specplugin.cli.diagnosis import Diagnosis, MemoryItem, diagnose
from vllm_specplugin.cli.options import parse_object
from vllm_specplugin.cli.output import console, marks, parts_of, print_json
from vllm_specplugin.runtime.seams import Finding

DEFAULT_CONFIG = {"proposer": "ngram"}
"""What is looked at where the user names nothing."""

LABEL_WIDTH = 12

Rows = list[tuple[str, RenderableType]]


def doctor_command(model: str | None, config_text: str | None, flags: Mapping[str, Any], verbose: bool, as_json: bool) -> int:
    """Print the diagnosis and return the exit code: 0 where speculation will run, else 1.

    Raises:
        SpecPluginError: the command line itself makes no sense (no JSON, no such model).
    """
    config = DEFAULT_CONFIG
    if config_text is not None:
        config = parse_object("--speculative-config", config_text, json.dumps(DEFAULT_CONFIG))
    progress = Console(file=sys.stderr)  # the stream of now: while vLLM is asked, sys.stderr is another
    with progress.status("asking vLLM what it would do ...") if progress.is_terminal else progress:
        found = diagnose(model, config, flags)
    if config_text is None:
        found.notes.append(f"--speculative-config was not given; this is about {json.dumps(DEFAULT_CONFIG)}")
    if as_json:
        print_json(found.dump())
    else:
        _print(console(), found, verbose)
    return 1 if found.reasons else 0


# -- printing ----------------------------------------------------------------------


def _print(out: Console, found: Diagnosis, verbose: bool) -> None:
    yes, no = marks(out)
    installed = [f"{name} {number}" for name, number in found.versions.items() if number is not None]
    mark = Text(f"{yes} ", "green") if found.plugin_visible else Text(f"{no} ", "red")
    visible = "visible to vLLM: " if found.plugin_visible else "not visible to vLLM: "
    rows: Rows = [
        ("Versions", Text(", ".join(installed))),
        ("Plugin", mark + Text(visible + found.plugin_why)),
    ]
    if found.engine is not None:
        rows.append(("Platform", Text(found.engine.platform)))
        rows.append(("Model runner", Text(f"{found.engine.runner.upper()}: {found.engine.runner_why}")))
    rows += _seam_rows(found.findings, yes, no)
    out.print(parts_of(rows, LABEL_WIDTH))
    if verbose:
        out.print(_seam_table(found.findings, yes, no))
    for finding in found.missing:
        out.print(Padding(_missing_seam(finding, no), (0, 0, 0, LABEL_WIDTH + 2)))
    out.print()
    if rows := _method_rows(found):
        out.print(parts_of(rows, LABEL_WIDTH))
        out.print()
    _print_verdict(out, found, yes, no)


_GROUPS = ((("v1", "v2"), "  both"), (("v1",), "  V1"), (("v2",), "  V2"))


def _seam_rows(findings: Sequence[Finding], yes: str, no: str) -> Rows:
    """A summary, and for each group of runners the names of its seams with a mark; one name can stand for several places."""
    if not findings:
        return []
    there = sum(not finding.missing for finding in findings)
    count = Text(f"{there} of {len(findings)} places found", "green" if there == len(findings) else "red")
    rows: Rows = [("Seams", count)]
    for runners, label in _GROUPS:
        good: dict[str, bool] = {}
        for finding in findings:
            if finding.seam.runners == runners:
                name = finding.seam.name.removeprefix(f"{label.strip()} ")
                good[name] = good.get(name, True) and not finding.missing
        names = [
            Text.assemble((f"{yes} ", "green"), name) if found else Text(f"{no} {name}", "bold red")
            for name, found in good.items()
        ]
        rows.append((label, Columns(names, padding=(0, 2))))
    return rows


def _missing_seam(finding: Finding, no: str) -> Text:
    seam = finding.seam
    return Text.assemble(
        (f"{no} {seam.name}: ", "bold red"), finding.missing, (f"\n  needed to {seam.purpose}; without it {seam.without}", "dim")
    )


def _seam_table(findings: Sequence[Finding], yes: str, no: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("Seam", no_wrap=True)
    table.add_column("The plugin ...", overflow="fold")
    table.add_column("in", overflow="fold", style="dim")
    table.add_column("to", overflow="fold")
    for finding in findings:
        seam = finding.seam
        mark = Text(no, "bold red") if finding.missing else Text(yes, "green")
        table.add_row(mark, seam.name, f"{seam.how} {seam.symbol}", seam.path, seam.purpose)
    return table


def _method_rows(found: Diagnosis) -> Rows:
    resolved, engine = found.resolved, found.engine
    if resolved is None:
        return []
    config = resolved.config
    where = "" if config.num_speculative_tokens else " (the proposer's own default)"
    options = ", ".join(f"{key}={json.dumps(value)}" for key, value in resolved.options.model_dump(mode="json").items())
    rows: Rows = [
        ("Proposer", Text(f"{config.proposer}, {resolved.proposer.__module__}:{resolved.proposer.__qualname__}")),
        ("Drafts", Text(f"up to {resolved.num_speculative_tokens} tokens per step{where}, {config.draft_sampling}")),
        ("Control", Text(config.control_in_words(found.adaptive))),
        *([("Options", Text(options))] if options else []),
        ("Verifier", Text(f"{resolved.verifier_name}, {resolved.verifier_why()}")),
    ]
    if engine is not None and engine.async_scheduling is not None:
        kind = "synchronous, drafts may be shorter"
        if engine.async_scheduling:
            length = "one draft length for all requests of a step" if engine.plans_ahead else "drafts of fixed length"
            kind = f"asynchronous, {length}"
        rows.append(("Scheduling", Text(f"{kind}: {engine.scheduling_why}")))
    if engine is not None and engine.host is not None:
        host = engine.host
        limits = (
            f"{host.max_num_seqs:,} requests of up to {host.max_model_len:,} tokens, vocabulary {host.vocab_size:,}, {host.dtype}"
        )
        rows.append(("Engine", Text(limits)))
    rows.append(("Ignored", Text("; ".join(found.ignored) or "nothing")))
    rows.append(("Memory", _memory_table(found.memory)))
    return rows


def _memory_table(bill: Sequence[MemoryItem]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=34)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    for item in bill:
        table.add_row(item.what, _size(item.bytes), item.how)
    return table


def _size(number: int | None) -> str:
    if number is None:
        return "unknown"
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return "0" if number == 0 else f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def _print_verdict(out: Console, found: Diagnosis, yes: str, no: str) -> None:
    for note in found.notes:
        out.print(Text(f"Note: {note}.", style="yellow"))
    if found.reasons:
        out.print(Text.assemble((f"{no} Speculation will not run: ", "bold red"), f"{'; '.join(found.reasons)}."), soft_wrap=True)
    else:
        told = "" if found.model is not None else ", as far as can be told without a MODEL"
        out.print(Text(f"{yes} Speculation will run{told}.", style="bold green"))
