"""`tune`: a search for the fastest configuration within a time budget.

First the proposers race each other, then neighbours of the winner that change one thing: its draft length, its verifier, its
options. Engines are slow to start, so each configuration's is started once: the best one so far stays alive beside plain decoding
and takes on challengers in groups, of which the worse half is dropped again and again (successive halving, arXiv 1502.07943). The
last part of the time measures the winner afresh, so that the figure it is reported with is not the luck that made it win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import Progress

from vllm_specplugin.bench.candidates import PLAIN, PLAIN_DECODING, Candidate, LeftOut, unique
from vllm_specplugin.bench.lineup import Lineup, Load
from vllm_specplugin.bench.report import Frozen, LeftOutEntry, Recommendation, Report, complete, described, unknown
from vllm_specplugin.bench.run import Clock, Plan, bench, require_plain
from vllm_specplugin.bench.samples import Interval, Sample, interval, overall
from vllm_specplugin.bench.space import Stage, halved, stages
from vllm_specplugin.bench.traffic import Traffic
from vllm_specplugin.errors import SpecPluginError

CONFIRMING = 0.3
"""Share of the time that measures the winner afresh, loading included."""
WORTH_IT = 1.01
"""How much faster a neighbour must be to be worth the longer line."""
BEST, SLOWER, DROPPED, CUT_OFF = "best so far", "slower", "dropped early", "interrupted"
"""What became of a configuration."""
INTERRUPTED = "interrupted before it was measured afresh, so part of that may be luck"
TOO_SHORT = "measured afresh in too few rounds, so part of that may be luck"


class Tried(Frozen):
    """One configuration of the search."""

    stage: str
    candidate: str
    flag: str
    speed: Interval
    """Over plain decoding, all concurrencies alike."""
    outcome: str


class TuneReport(Frozen):
    """What was tried, and how the winner did when measured afresh."""

    tried: list[Tried]
    left_out: list[LeftOutEntry]
    confirmed: Report | None
    """None where that was interrupted or failed, or the search found nothing that is faster than plain decoding."""
    recommendation: Recommendation
    interrupted: bool


@dataclass(frozen=True)
class TunePlan:
    """What is searched, and for how long: `minutes` of it all, loading included."""

    model: str
    bases: Sequence[Candidate]
    """Where the search starts: one configuration for each proposer."""
    traffic: Traffic
    prompts: str
    load: Load
    minutes: float
    engines_at_once: int = 5
    """Plain decoding and the best so far included: at least 3."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()


def tune(plan: TunePlan, logs: Path, bars: Progress) -> TuneReport:
    """Search. Ctrl-C ends it early, with what is known by then.

    Raises:
        SpecPluginError: plain decoding does not run, or nothing else does.
    """
    whole = Clock(60 * plan.minutes)
    interrupted = False
    with Lineup(plan.model, plan.load, plan.traffic, plan.engine_args, plan.engines_at_once, logs, bars) as lineup:
        search = _Search(plan, lineup)
        try:
            search.run()
        except KeyboardInterrupt:
            interrupted = True
    confirmed, why = None, INTERRUPTED if interrupted else "not measured afresh"
    if search.best is not None and search.speed_of(search.best).value > 1 and not interrupted:
        try:
            confirmed = bench(_confirmation(plan, search, whole), logs, bars)
        except SpecPluginError as error:  # the search was long, and its result stands
            why = f"measuring it afresh failed: {error}"
        except KeyboardInterrupt:  # while engines were being ended
            interrupted, why = True, INTERRUPTED
    if confirmed is not None and confirmed.interrupted:
        interrupted, why = True, INTERRUPTED
        if all(one.speed is None for one in confirmed.overall if one.candidate != PLAIN):
            confirmed = None
    recommendation = confirmed.recommendation if confirmed else _unconfirmed(search, why)
    if confirmed is not None and not recommendation.known and _faster(confirmed, search.best):
        recommendation = _unconfirmed(search, why if interrupted else TOO_SHORT)
        confirmed = confirmed.model_copy(update={"recommendation": recommendation})
    return TuneReport(
        tried=search.tried,
        left_out=[LeftOutEntry(candidate=lost.name, why=lost.why) for lost in [*plan.left_out, *lineup.failed]],
        confirmed=confirmed,
        recommendation=recommendation,
        interrupted=interrupted,
    )


def _confirmation(plan: TunePlan, search: _Search, whole: Clock) -> Plan:
    """The winner beside plain decoding and, where it is another, the base that it came from."""
    assert search.best is not None
    assert search.base is not None
    chosen = [search.best] if search.best.config == search.base.config else [search.base, search.best]
    return Plan(
        model=plan.model,
        candidates=chosen,
        traffic=plan.traffic,
        prompts=plan.prompts,
        load=plan.load,
        engine_args=plan.engine_args,
        minutes=(whole.left or 0.0) / 60,
    )


def _faster(confirmed: Report, best: Candidate | None) -> bool:
    """Whether the winner was, in the rounds that measured it afresh."""
    speeds = [one.speed for one in confirmed.overall if best is not None and one.candidate == best.name]
    return any(speed is not None and speed.value > 1 for speed in speeds)


def _unconfirmed(search: _Search, why: str) -> Recommendation:
    """What can be said from the search alone; `why` there is no more."""
    if search.best is None:
        return unknown("nothing was measured")
    speed = search.speed_of(search.best)
    standing = f"the best of the search is {search.best.name}, {described(speed)} over plain decoding"
    if not speed.sure:
        return unknown(standing)
    if speed.low <= 1:
        doubt = "surely " if speed.value > 1 else ""
        return Recommendation(candidate=PLAIN, flag="", reason=f"nothing was {doubt}faster than plain decoding: {standing}")
    return Recommendation(candidate=search.best.name, flag=search.best.flag, reason=f"{standing}; {why}")


class _Search:
    """The best so far, and everything that it was compared with."""

    def __init__(self, plan: TunePlan, lineup: Lineup) -> None:
        self.plan, self.lineup = plan, lineup
        self.clock = Clock(60 * plan.minutes * (1 - CONFIRMING))
        self.rounds: list[dict[int, dict[str, Sample]]] = []
        self.best: Candidate | None = None
        self.base: Candidate | None = None
        self.tried: list[Tried] = []

    def run(self) -> None:
        """The bases, then stage by stage what is near the best."""
        left = [Stage("proposer", lambda _: list(self.plan.bases)), *stages(self.plan.load.temperature)]
        self.lineup.start([PLAIN_DECODING])
        require_plain(self.lineup)
        while left:
            stage = left.pop(0)
            challengers = self._new(stage.neighbours(self.best or PLAIN_DECODING))
            seconds = (self.clock.left or 0.0) / (1 + len(left))
            if not challengers or (self.best and not seconds):
                continue
            self._stage(stage.title, challengers, seconds)
            if self.best is None:
                reasons = "; ".join(f"{lost.name}: {lost.why}" for lost in self.lineup.failed)
                raise SpecPluginError(f"none of the configurations ran: {reasons}")
            self.base = self.base or self.best

    def _new(self, challengers: Sequence[Candidate]) -> list[Candidate]:
        """Those that were not tried before, under names that no engine has."""
        seen = {tried.flag for tried in self.tried}
        return [one for one in unique([*([self.best] if self.best else []), *challengers]) if one.flag not in seen]

    def _stage(self, title: str, challengers: Sequence[Candidate], seconds: float) -> None:
        """All challengers of a stage, in groups that fit beside plain decoding and the best."""
        clock, waiting = Clock(seconds), list(challengers)
        while waiting:
            size = self.plan.engines_at_once - len(self.lineup.engines)
            group, waiting = waiting[:size], waiting[size:]
            groups = 1 + -(-len(waiting) // max(self.plan.engines_at_once - 2, 1))
            self._group(title, group, Clock((clock.left or 0.0) / groups))
            if waiting and not clock.left:
                break  # the time is over; what has had no turn is not tried

    def _group(self, title: str, group: Sequence[Candidate], clock: Clock) -> None:
        """Let a group race the best so far; the winner stays alive, the others are ended."""
        by_name = {one.name: one for one in [*group, *([self.best] if self.best else [])]}
        self.lineup.start(group)
        first, next_cut = len(self.rounds), 1
        dropped: set[str] = set()
        whole = False
        try:
            while len(self.lineup.engines) > 1:
                if (len(self.rounds) > first and not self.lineup.has_prompts()) or not clock.another():
                    break
                self._round()
                if len(self.rounds) - first == next_cut:  # after 1, 3, 7, ... rounds: as much time for half of them as for all
                    next_cut = 2 * next_cut + 1
                    dropped |= self._cut(by_name, self.rounds[first:])
            whole = True
        finally:  # after an interrupt, too: what was measured by then is reported
            self._settle(title, by_name, dropped, self.rounds[first:], whole)

    def _round(self) -> None:
        measured: dict[int, dict[str, Sample]] = {}
        for concurrency in self.plan.load.concurrencies:
            measured[concurrency] = self.lineup.race(concurrency)
            require_plain(self.lineup)
        self.rounds.append(measured)

    def _standing(self, names: Sequence[str], rounds: Sequence[Mapping[int, Mapping[str, Sample]]]) -> dict[str, float]:
        """Median speed over plain decoding, of those that were in every round."""
        whole = {name: complete(rounds, self.plan.load.concurrencies, name, PLAIN) for name in names}
        return {name: median(overall(r, name, PLAIN) for r in found) for name, found in whole.items() if found}

    def _cut(self, by_name: Mapping[str, Candidate], rounds: Sequence[Mapping[int, Mapping[str, Sample]]]) -> set[str]:
        """End the worse half of the challengers; the names of those that went."""
        alive = [name for name in self.lineup.engines if name in by_name]
        standing = self._standing(alive, rounds)
        kept = halved(standing, [self.best.name] if self.best else [])
        gone = {name for name in alive if name not in kept}
        for name in gone:
            self.lineup.drop(name)
        return gone

    def _settle(
        self,
        title: str,
        by_name: Mapping[str, Candidate],
        dropped: set[str],
        rounds: Sequence[Mapping[int, Mapping[str, Sample]]],
        whole: bool,
    ) -> None:
        """Note what was tried, and make the fastest of the survivors the best; an interrupted race changes no best."""
        alive = [name for name in self.lineup.engines if name in by_name]
        standing = self._standing(alive, rounds)
        held = standing.get(self.best.name, 0.0) * WORTH_IT if self.best else 0.0
        ahead = [name for name in standing if standing[name] > held]
        if ahead and (whole or self.best is None):
            self.best = by_name[max(ahead, key=lambda name: standing[name])]
        for name in self._standing(list(by_name), rounds):
            rest = DROPPED if name in dropped else SLOWER if whole else CUT_OFF
            outcome = BEST if self.best and name == self.best.name else rest
            self._note(title, by_name[name], outcome)
        for name in alive:
            if self.best is None or name != self.best.name:
                self.lineup.drop(name)

    def _note(self, title: str, one: Candidate, outcome: str) -> None:
        entry = Tried(stage=title, candidate=one.name, flag=one.flag, speed=self.speed_of(one), outcome=outcome)
        known = [number for number, tried in enumerate(self.tried) if tried.flag == one.flag]
        if known:  # the best of before: its stage stays the one that it came in by
            self.tried[known[0]] = entry.model_copy(update={"stage": self.tried[known[0]].stage})
        else:
            self.tried.append(entry)

    def speed_of(self, one: Candidate) -> Interval:
        """Over plain decoding, in all rounds of the search that it was in."""
        played = complete(self.rounds, self.plan.load.concurrencies, one.name, PLAIN)
        return interval(overall(measured, one.name, PLAIN) for measured in played)
