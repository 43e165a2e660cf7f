"""What becomes of drafts, counted: per proposer, per position of a pass, and per request. Knows no vLLM.

The life of a draft, each state a part of the one before it:

* **drafted**: a proposer made it, and the guard and control let it through;
* **scheduled**: a pass of the target was planned for it;
* **trimmed**: the request's grammar refused it, so that it was not verified: before it was scheduled, or after, where scheduling
  is asynchronous;
* **verified**: the target judged it;
* **accepted**: it stood;
* **emitted**: tokens that a pass with drafts gave its request: accepted drafts and the token after them, up to the end of the
  request (EOS, stop token, stop string, most tokens).

Counting a row is a few additions to lists: a pass is filed under how many tokens it had in each state, and only who reads the
counts works out positions (`by_position`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_specplugin.alarm import Alarm

STATES = ("drafted", "scheduled", "trimmed", "verified", "accepted", "emitted")

MOST_SURPLUS = 1024
"""Passes that wait for the totals that they are counted in; these come with the next step, or never, if they go elsewhere."""

ON_DEVICE = -1
"""In the place of a row's number of drafts, where only the device knows it."""


@dataclass(slots=True)
class StepReport:
    """What one step of a worker says about drafting; it travels to the engine core with what was sampled."""

    request_ids: list[str] = field(default_factory=list)
    """`[rows]`: the requests that were drafted for."""
    lengths: list[int] | None = None
    """`[rows]`: how many drafts each was given; None where only the device knows."""
    sources: list[str] | None = None
    """`[rows]`: which part of the proposer drafted; None for a proposer of one part."""
    without: list[str] = field(default_factory=list)
    """Requests that were given none, of those whose numbers only the device knows."""
    draft_length: float | None = None
    """How many drafts a request is given as things are: k, or what control lets through on average; None where nobody drafted."""
    paused: bool = False
    """Control has left off drafting, but for a try now and then."""
    drafting_seconds: list[float] = field(default_factory=list)
    """How long steps took to draft, of those that are measured by now."""
    first_passes: list[tuple[int, float]] = field(default_factory=list)
    """Requests and seconds of those of these steps without a prompt in which the host's drafter only made the pass that it makes
    anyhow, and drafted nothing."""
    verification_seconds: list[float] = field(default_factory=list)
    """How long passes over drafts took, likewise."""
    judged: dict[str, tuple[int, int, int]] | None = None
    """What control held against the answers, verified or not, by source (see `Acceptance.take`); None where it does not."""
    pass_seconds: dict[int, float] | None = None
    """What passes of the target took at start-up, by rows; in the first report, where control is not the worker's."""
    faults: dict[str, dict[str, int]] = field(default_factory=dict)
    """New faults, by proposer (the configured one, and the parts of a hybrid) and kind."""
    fallbacks: dict[str, dict[str, int]] = field(default_factory=dict)
    """New rows that have no drafts for want of an answer, by proposer and reason."""


@dataclass(slots=True)
class SourceCounts:
    """What became of one proposer's drafts for one request."""

    passes: int = 0
    """Passes of the target that verified some."""
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    """Tokens that these passes gave the request."""


@dataclass(slots=True)
class SequenceCounts:
    """What became of one request (of one of its sequences, where it asked for several)."""

    passes: int = 0
    """Passes of the target that gave it tokens, with drafts or without."""
    emitted: int = 0
    """Tokens that they gave it."""
    histogram: list[int] = field(default_factory=list)
    """`[k + 1]`: passes with drafts, by how many of them were accepted."""
    by_source: dict[str, SourceCounts] = field(default_factory=dict)
    last: tuple[str, int] = ("", 0)
    """Who drafted for the last pass ('' for a pass without drafts), and how many tokens it gave."""

    def dump(self) -> list[Any]:
        """A copy of plain lists and numbers, for `load`; without names, since some requests send it with every token."""
        parts = {name: [c.passes, c.drafted, c.verified, c.accepted, c.emitted] for name, c in self.by_source.items()}
        return [self.passes, self.emitted, self.histogram.copy(), parts, *self.last]

    @classmethod
    def load(cls, dumped: Sequence[Any]) -> SequenceCounts:
        passes, emitted, histogram, parts, *last = dumped
        by_source = {name: SourceCounts(*numbers) for name, numbers in parts.items()}
        return cls(passes, emitted, list(histogram), by_source, (last[0], last[1]))

    def cut(self, surplus: int) -> None:
        """The last tokens were not for the request after all: a stop string ended before them."""
        self.emitted -= surplus
        source, tokens = self.last
        if source:
            self.by_source[source].emitted -= surplus
        self.last = (source, tokens - surplus)


@dataclass(slots=True)
class _Request:
    """A running request: what is known of it, and of its next drafts."""

    counts: SequenceCounts
    limit: int
    """The most drafts per step that it wants."""
    temperature: float
    drafts: int = 0
    source: str = ""


class Counts:
    """Counts for one engine; the verbs in the order in which a step calls them."""

    def __init__(self, proposer: str, k: int, alarm: Alarm, totals: bool = True) -> None:
        self.proposer, self.k, self.alarm = proposer, k, alarm
        self._totals = totals
        """Somebody asks for totals (`take`), and not only for the counts of requests."""
        self.on_device = False
        """Only the device knows how many drafts there are for the next pass."""
        self._judged_by_control = False
        """Control judges drafts that are not verified, too: the alarm hears of those, and not of the verified ones again."""
        self._requests: dict[str, _Request] = {}
        self._lengths: dict[str, dict[str, list[int]]] = {}
        """Source -> state -> `[k + 2]`: how many passes had so many tokens in that state."""
        self._plain = 0
        self._steps: dict[str, Any] = {}

    def admit(self, request_id: str, limit: int | None, temperature: float) -> None:
        """A request runs for the first time, or again."""
        if request_id not in self._requests:
            counts = SequenceCounts(histogram=[0] * (self.k + 1))
            self._requests[request_id] = _Request(counts, self.k if limit is None else min(limit, self.k), temperature)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def scheduled(self, request_id: str, drafts: int, valid: int) -> tuple[str, int]:
        """A pass is planned for some drafts.

        Args:
            request_id: whose.
            drafts: how many places for drafts it has.
            valid: how many of them, from the first on, the grammar lets through.

        Returns:
            Who drafted, and how many drafts are verified: places may hold something that nobody drafted.
        """
        request = self._requests.get(request_id)
        if request is None:
            return "", 0
        if request.drafts == ON_DEVICE:
            self.drafted(request_id, self.proposer, min(drafts, request.limit))
        drafts = min(drafts, request.drafts)
        verified = min(drafts, valid)
        if drafts and self._totals:
            self._of(request.source)["scheduled"][drafts] += 1
            if verified < drafts:
                self.trimmed(request_id, drafts, verified)
        return request.source, verified

    def trimmed(self, request_id: str, drafts: int, left: int) -> None:
        """The grammar lets only the first `left` of a request's drafts through."""
        request = self._requests.get(request_id)
        if request is not None and left < drafts and self._totals:
            trimmed = self._of(request.source)["trimmed"]
            trimmed[drafts] += 1
            trimmed[left] -= 1

    def emitted(self, request_id: str, source: str, verified: int, generated: int, emitted: int) -> None:
        """A pass gave a request tokens.

        Args:
            request_id: whose.
            source: who drafted.
            verified: how many drafts the target judged; 0 for a pass without drafts.
            generated: how many tokens came of it: the accepted drafts and one more.
            emitted: how many of these the request was given.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        counts = request.counts
        counts.passes += 1
        counts.emitted += emitted
        if not verified:
            counts.last = ("", emitted)
            self._plain += 1
            return
        accepted = generated - 1
        counts.last = (source, emitted)
        counts.histogram[accepted] += 1
        part = counts.by_source[source]
        part.passes += 1
        part.verified += verified
        part.accepted += accepted
        part.emitted += emitted
        if not self._judged_by_control:
            self.alarm.saw(source, verified, accepted, request.temperature)
        if self._totals:
            lengths = self._of(source)
            lengths["verified"][verified] += 1
            lengths["accepted"][accepted] += 1
            lengths["emitted"][emitted] += 1

    def report(self, report: StepReport) -> None:
        """What the worker says of the step: drafts for the next pass, and how the last ones fared."""
        self.on_device = bool(report.request_ids) and report.lengths is None
        if report.lengths is None or not any(report.lengths):
            without = frozenset(report.without)
            for request_id in report.request_ids:
                request = self._requests.get(request_id)
                if request is not None:
                    request.drafts = ON_DEVICE if self.on_device and request_id not in without else 0
        else:
            sources = report.sources or [self.proposer] * len(report.lengths)
            for request_id, source, drafts in zip(report.request_ids, sources, report.lengths, strict=True):
                self.drafted(request_id, source, drafts)
        if report.judged is not None:
            self._hear(report.request_ids, report.judged)
        if self._totals:
            for name in ("drafting_seconds", "verification_seconds"):
                self._steps.setdefault(name, []).extend(getattr(report, name))
            for name in ("faults", "fallbacks"):
                for proposer, numbers in getattr(report, name).items():
                    known = self._steps.setdefault(name, {}).setdefault(proposer, {})
                    for kind, number in numbers.items():
                        known[kind] = known.get(kind, 0) + number
            if report.draft_length is not None:
                self._steps |= {"draft_length": report.draft_length, "paused": report.paused}

    def _hear(self, request_ids: Sequence[str], judged: Mapping[str, tuple[int, int, int]]) -> None:
        """Tell the alarm what control has judged in a step with these requests."""
        self._judged_by_control = True
        if not judged:
            return
        known = [request.temperature for name in request_ids if (request := self._requests.get(name)) is not None]
        temperature = sum(known) / len(known) if known else 0.0
        for source, (chains, drafts, right) in judged.items():
            self.alarm.heard(source, chains, drafts, right, temperature)

    def drafted(self, request_id: str, source: str, drafts: int) -> None:
        """A request was given drafts for its next pass."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.drafts, request.source = drafts, source
        if drafts:
            parts = request.counts.by_source
            if source not in parts:
                parts[source] = SourceCounts()
            parts[source].drafted += drafts
            if self._totals:
                self._of(source)["drafted"][drafts] += 1

    def dump(self, request_id: str) -> list[Any]:
        """The counts of a running request, to be read by `SequenceCounts.load`."""
        return self._requests[request_id].counts.dump()

    def take(self) -> dict[str, Any]:
        """What was counted since the last call, as plain data: lists, dictionaries, numbers."""
        taken = {"lengths": self._lengths, "plain": self._plain, **self._steps}
        self._lengths, self._plain, self._steps = {}, 0, {}
        return taken

    def _of(self, source: str) -> dict[str, list[int]]:
        lengths = self._lengths.get(source)
        if lengths is None:
            lengths = self._lengths[source] = {state: [0] * (self.k + 2) for state in STATES}
        return lengths


def by_position(lengths: Sequence[int]) -> list[int]:
    """`[width - 1]`: at each position, how many passes had a token there; given `[width]`: how many passes had so many tokens."""
    counts, reaching = [0] * (len(lengths) - 1), 0
    for position in reversed(range(len(counts))):
        reaching += lengths[position + 1]
        counts[position] = reaching
    return counts


def cut(taken: Mapping[str, Any], source: str, emitted: int, surplus: int) -> bool:
    """Take a pass's last `surplus` tokens out of what `Counts.take` gave; False where that pass is not in it."""
    lengths = taken["lengths"].get(source)
    if lengths is None or lengths["emitted"][emitted] < 1:
        return False
    lengths["emitted"][emitted] -= 1
    lengths["emitted"][emitted - surplus] += 1
    return True


class Surplus:
    """Tokens that passes gave requests after a stop string: the engine core counts them, the front end drops them."""

    def __init__(self) -> None:
        self._passes: deque[tuple[str, int, int]] = deque(maxlen=MOST_SURPLUS)

    def __len__(self) -> int:
        return len(self._passes)

    def add(self, source: str, emitted: int, surplus: int) -> None:
        """A pass with drafts of `source` gave `emitted` tokens, the last `surplus` of them for nothing."""
        self._passes.append((source, emitted, surplus))

    def take_out_of(self, taken: Mapping[str, Any]) -> None:
        """Correct what the engine core counted; what is not in there yet stays here."""
        self._passes = deque((each for each in self._passes if not cut(taken, *each)), maxlen=MOST_SURPLUS)
