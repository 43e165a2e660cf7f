"""`tune`: what it tries, and whole searches over simulated engines."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from tests.support.simulated_engines import SimulatedEngine, Simulation
from vllm_specplugin.bench import tune as tuning
from vllm_specplugin.bench.candidates import Candidate, candidate
from vllm_specplugin.bench.lineup import Load
from vllm_specplugin.bench.report import NOTHING_KNOWN, PLAIN_IS_FASTEST, Report
from vllm_specplugin.bench.run import Plan, bench
from vllm_specplugin.bench.space import LENGTHS, halved, lengths, options, stages, verifiers
from vllm_specplugin.bench.table import print_tuning, tuning_markdown
from vllm_specplugin.bench.traffic import Request, Traffic
from vllm_specplugin.bench.tune import BEST, CUT_OFF, DROPPED, TOO_SHORT, TunePlan, TuneReport, tune
from vllm_specplugin.config import SpecConfig, resolve
from vllm_specplugin.errors import SpecPluginError

NGRAM, OTHER = Candidate("ngram", {"proposer": "ngram"}), Candidate("vllm:ngram", {"method": "ngram"})
SHORTEST_SUFFIX = 3
"""The `min_n` that the simulated engines like best."""


def speed(config: dict[str, Any] | None, concurrency: int) -> float:
    """n-gram at k=3 and a shortest suffix of 3 is the fastest; vLLM's own is slower than plain decoding."""
    if config is None:
        return 1.0
    if "method" in config:
        return 0.95
    k = config.get("num_speculative_tokens", 5)
    shortest = config.get("options", {}).get("min_n", 2)
    return 1.6 - 0.1 * abs(k - 3) - 0.05 * abs(shortest - SHORTEST_SUFFIX)


def noise(now: float) -> float:
    return 1.5 + 0.5 * math.sin(now / 11)


def plan(*bases: Candidate, **more: Any) -> TunePlan:
    traffic = Traffic([Request("only", [number]) for number in range(100_000)])
    arguments = {"load": Load((1, 4), max_tokens=20), "minutes": 20.0, **more}
    return TunePlan("model", bases, traffic, "some prompts", **arguments)


def run_tune(tmp_path: Path, wanted: TunePlan) -> TuneReport:
    return tune(wanted, tmp_path, Progress(disable=True))


# -- what is tried -----------------------------------------------------------------------------------------


def test_lengths_are_fixed_ones_and_the_adaptive_one() -> None:
    found = lengths(
        Candidate("x", {"proposer": "ngram", "num_speculative_tokens": 3, "control": "fixed", "options": {"min_n": 1}})
    )
    ks = [one.config.get("num_speculative_tokens") for one in found if one.config is not None]
    assert ks == [None, *(k for k in LENGTHS if k != 3)]
    assert all(one.config is not None and one.config["options"] == {"min_n": 1} for one in found)
    assert found[0].config == {"proposer": "ngram", "options": {"min_n": 1}}
    assert [one.config for one in lengths(OTHER)] == [{"method": "ngram", "num_speculative_tokens": k} for k in LENGTHS]


def test_keys_with_dashes_are_searched_like_those_with_underscores() -> None:
    dashes = candidate({"proposer": "ngram", "num-speculative-tokens": 4, "options": {"max-n": 4}})
    underscores = candidate({"proposer": "ngram", "num_speculative_tokens": 4, "options": {"max_n": 4}})
    assert len(lengths(dashes)) > len(LENGTHS)
    assert lengths(dashes) == lengths(underscores)
    assert options(dashes) == options(underscores) != []


def test_lengths_that_the_heads_do_not_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_specplugin.proposers.medusa import MedusaProposer
    from vllm_specplugin.types import Depth

    monkeypatch.setattr(MedusaProposer, "depth", classmethod(lambda *_: Depth(4, most=4, why="4 heads")))
    found = lengths(Candidate("medusa", {"proposer": "medusa", "model": "x"}))
    assert [one.config["num_speculative_tokens"] for one in found if one.config is not None] == [k for k in LENGTHS if k <= 4]


def test_only_drafts_with_probabilities_have_a_choice_of_verifiers() -> None:
    assert verifiers(NGRAM) == verifiers(OTHER) == []
    found = verifiers(Candidate("mtp", {"proposer": "mtp"}))
    assert {one.config["verifier"] for one in found if one.config is not None} == {"one_hot", "token", "block"}  # no liar
    assert all(resolve(SpecConfig.parse(one.config or {})).verifier.lossless for one in found)
    assert [stage.title for stage in stages(0.0)] == ["draft length", "options"]
    assert [stage.title for stage in stages(0.5)] == ["draft length", "verifier", "options"]


def test_options_are_changed_one_at_a_time() -> None:
    start = Candidate("x", {"proposer": "ngram", "options": {"max_n": 4}})
    found = [one.config["options"] for one in options(start) if one.config is not None]
    assert {"max_n": 4, "min_n": 1} in found
    assert {"max_n": 8} in found
    assert {"max_n": 4, "min_n": 2} not in found  # as it is
    assert all(len(set(changed.items()) ^ {("max_n", 4)}) in (1, 2) for changed in found)
    assert options(OTHER) == []


def test_the_better_half_stays_beside_those_that_are_kept_anyway() -> None:
    standing = {"a": 1.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 0.5}
    assert halved(standing, []) == ["b", "c", "d"]
    assert halved(standing, ["e"]) == ["e", "b", "c"]
    assert halved({"a": 1.0}, []) == ["a"]


# -- searches ----------------------------------------------------------------------------------------------


def test_the_search_finds_the_best_and_measures_it_afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed, noise).install(monkeypatch)
    report = run_tune(tmp_path, plan(OTHER, NGRAM))
    best = {"proposer": "ngram", "num_speculative_tokens": 3, "control": "fixed", "options": {"min_n": SHORTEST_SUFFIX}}
    assert report.confirmed is not None
    assert [one.config for one in report.confirmed.overall] == [None, NGRAM.config, best]
    found = report.confirmed.overall[2].speed
    assert found is not None
    assert found.value == pytest.approx(1.6, rel=0.03)
    assert found.rounds > 6
    assert report.recommendation.flag.startswith('--speculative-config \'{"proposer": "ngram", "num_speculative_tokens": 3')
    assert machine.alive == []
    assert machine.most_alive <= 5
    assert machine.now <= 20 * 60
    searched = machine.started[: -len(report.confirmed.overall)]
    assert len(set(searched)) == len(searched) == 1 + len(report.tried), "an engine was started twice in the search"
    assert {tried.stage for tried in report.tried} == {"proposer", "draft length", "options"}
    assert [tried.candidate for tried in report.tried if tried.outcome == BEST][-1] == report.confirmed.overall[2].candidate
    dropped = [tried for tried in report.tried if tried.outcome == DROPPED]
    assert {tried.speed.rounds for tried in dropped} == {1, 3}
    assert all(tried.speed.rounds > 3 for tried in report.tried if tried.outcome != DROPPED)


def test_a_small_gain_is_not_worth_a_longer_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Simulation(lambda config, concurrency: 1.0 if config is None else 1.2 + 0.005 * len(config)).install(monkeypatch)
    report = run_tune(tmp_path, plan(NGRAM))
    assert report.recommendation.flag == NGRAM.flag


def test_where_nothing_is_faster_plain_decoding_is_recommended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Simulation(lambda config, concurrency: 1.0 if config is None else 0.8).install(monkeypatch)
    report = run_tune(tmp_path, plan(NGRAM, OTHER))
    assert report.confirmed is None
    assert report.recommendation.line == PLAIN_IS_FASTEST
    assert "nothing was faster than plain decoding: the best of the search is" in report.recommendation.reason
    assert not report.interrupted


def test_an_interrupt_and_a_failing_configuration_leave_what_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(
        lambda config, concurrency: 0.0 if config and config.get("method") else speed(config, concurrency)
    ).install(monkeypatch)

    def interrupt(number: int) -> None:
        if len(set(machine.started)) > 3:  # lengths are being tried
            raise KeyboardInterrupt

    machine.before_batch = interrupt
    report = run_tune(tmp_path, plan(OTHER, NGRAM))
    assert report.interrupted
    assert machine.alive == []
    assert [tried.candidate for tried in report.tried] == ["ngram"]
    assert report.recommendation.flag == NGRAM.flag
    assert "part of that may be luck" in report.recommendation.reason
    assert [lost.candidate for lost in report.left_out] == ["vllm:ngram"]


@pytest.mark.parametrize("rounds", [0, 2, 8])
def test_an_interrupt_of_the_first_race_reports_what_was_measured(
    rounds: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Simulation(speed).install(monkeypatch)

    def interrupt(number: int) -> None:
        # Warming up; three engines at two concurrencies, of which one is dropped after the first round.
        if number == 6 + (6 + 4 * (rounds - 1) if rounds else 0) + 1:
            raise KeyboardInterrupt

    machine.before_batch = interrupt
    report = run_tune(tmp_path, plan(OTHER, NGRAM))
    assert report.interrupted
    assert machine.alive == []
    tried = {one.candidate: (one.speed.rounds, one.outcome) for one in report.tried}
    assert tried == ({"ngram": (rounds, BEST), "vllm:ngram": (1, DROPPED)} if rounds else {})
    assert report.recommendation.line == (NGRAM.flag if rounds == 8 else NOTHING_KNOWN)
    assert ("the best of the search is ngram, 1.35x" in report.recommendation.reason) == bool(rounds)


def test_an_interrupted_race_changes_no_best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A round or two may be luck."""
    machine = Simulation(speed).install(monkeypatch)

    def interrupt(number: int) -> None:
        raced = [name for name, _, tokens in machine.batches if tokens == 20 and name.startswith("ngram k=")]
        if len(raced) > 3 * 2:  # a round of three challengers
            raise KeyboardInterrupt

    machine.before_batch = interrupt
    report = run_tune(tmp_path, plan(NGRAM))
    outcomes = {one.candidate.removesuffix(" control=fixed"): one.outcome for one in report.tried}
    assert outcomes == {"ngram": BEST, "ngram k=1": DROPPED, "ngram k=2": CUT_OFF, "ngram k=3": CUT_OFF}
    assert report.recommendation.flag == NGRAM.flag


@pytest.mark.parametrize("afresh", [1.2, 0.9])
def test_too_few_rounds_afresh_leave_the_search_if_they_agree(
    afresh: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Simulation(speed).install(monkeypatch)

    def short(wanted: Plan, *arguments: Any) -> Report:
        machine.speed = lambda config, concurrency: afresh if config else 1.0
        return bench(replace(wanted, repeat=3), *arguments)

    monkeypatch.setattr(tuning, "bench", short)
    report = run_tune(tmp_path, plan(NGRAM))
    assert report.confirmed is not None
    assert report.confirmed.recommendation == report.recommendation
    assert report.recommendation.known == (afresh > 1)
    if report.recommendation.known:
        assert '"num_speculative_tokens": 3' in report.recommendation.flag
        assert TOO_SHORT in report.recommendation.reason
    else:
        assert report.recommendation.line == NOTHING_KNOWN


@pytest.mark.parametrize(
    ("error", "interrupted", "why"),
    [
        (KeyboardInterrupt(), True, "part of that may be luck"),
        (
            SpecPluginError("the plain engine failed (start): no memory"),
            False,
            "afresh failed: the plain engine failed (start): no",
        ),
    ],
    ids=["Ctrl-C", "no engine"],
)
@pytest.mark.parametrize("caught_by_bench", [True, False])
def test_the_search_stands_where_measuring_it_afresh_ends_early(
    error: BaseException, interrupted: bool, why: str, caught_by_bench: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Simulation(speed, noise).install(monkeypatch)
    searched = []

    def fail(*_: object) -> None:
        searched.append(True)
        raise error

    def bench_that_fails(*arguments: Any) -> Any:
        if caught_by_bench:  # while engines load
            monkeypatch.setattr(SimulatedEngine, "wait", fail)
            return bench(*arguments)
        return fail()

    monkeypatch.setattr(tuning, "bench", bench_that_fails)
    report = run_tune(tmp_path, plan(NGRAM))
    assert searched
    assert report.confirmed is None
    assert report.interrupted is interrupted
    assert '"num_speculative_tokens": 3' in report.recommendation.flag
    assert why in report.recommendation.reason


def test_a_search_without_anything_that_runs_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Simulation(lambda config, concurrency: 0.0 if config else 1.0).install(monkeypatch)
    with pytest.raises(SpecPluginError, match=r"none of the configurations ran: vllm:ngram: .*does not want to"):
        run_tune(tmp_path, plan(OTHER))


def test_the_report_ends_with_what_to_paste(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Simulation(speed).install(monkeypatch)
    report = run_tune(tmp_path, plan(NGRAM))
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    print_tuning(report, console)
    printed = console.export_text().rstrip().splitlines()
    assert printed[-1] == report.recommendation.line
    page = tuning_markdown(report)
    assert page.rstrip().splitlines()[-1].strip() == printed[-1]
    assert page.count("\n## ") + page.startswith("## ") == 2
    assert "| draft length | ngram k=3 control=fixed | 1.55x" in page
    assert TuneReport.model_validate_json(report.model_dump_json()) == report
