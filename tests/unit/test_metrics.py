"""Counting what becomes of drafts, the alarm, and what is said of both: no engine."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplugin.alarm import FIRST_DRAFTS, LATER_DRAFTS, LEAST_PASSES, Alarm
from vllm_specplugin.counts import (
    MOST_SURPLUS,
    STATES,
    Counts,
    SequenceCounts,
    SourceCounts,
    StepReport,
    Surplus,
    by_position,
    cut,
)
from vllm_specplugin.guard import Fallback, Fault

ROOT = Path(__file__).resolve().parents[2]
K = 5


def counts(totals: bool = True, **requests: int | None) -> Counts:
    """With some requests running, each with the most drafts that it wants."""
    made = Counts("ngram", K, Alarm(), totals)
    for request_id, limit in requests.items():
        made.admit(request_id, limit, 0.0)
    return made


def report(*drafts: tuple[str, int], sources: list[str] | None = None, **more: Any) -> StepReport:
    return StepReport([request_id for request_id, _ in drafts], [number for _, number in drafts], sources, **more)


def positions(taken: dict[str, Any], source: str = "ngram") -> dict[str, list[int]]:
    """Per state, up to the last position where something happened."""
    found = {state: by_position(taken["lengths"][source][state]) for state in STATES}
    return {
        state: numbers[: max((place + 1 for place, n in enumerate(numbers) if n), default=0)] for state, numbers in found.items()
    }


def one_pass(of: Counts, request_id: str, drafts: int, generated: int, emitted: int, valid: int | None = None) -> None:
    source, verified = of.scheduled(request_id, drafts, drafts if valid is None else valid)
    of.emitted(request_id, source, verified, generated, emitted)


# -- counts ------------------------------------------------------------------------------------------------


def test_an_end_of_sequence_among_accepted_drafts() -> None:
    """[t1, t2, EOS, t4, t5], all accepted: three tokens are emitted, whatever was verified."""
    made = counts(a=None)
    made.report(report(("a", 5)))
    one_pass(made, "a", 5, generated=6, emitted=3)
    assert positions(made.take()) == {
        "drafted": [1] * 5,
        "scheduled": [1] * 5,
        "trimmed": [],
        "verified": [1] * 5,
        "accepted": [1] * 5,
        "emitted": [1] * 3,
    }
    ended = SequenceCounts.load(made.dump("a"))
    assert ended == SequenceCounts(1, 3, [0, 0, 0, 0, 0, 1], {"ngram": SourceCounts(1, 5, 5, 5, 3)}, ("ngram", 3))


def test_the_grammar_trims_from_the_end() -> None:
    """Before scheduling (synchronous), or of what is scheduled (asynchronous): never counted as verified or refused."""
    made = counts(before=None, after=None)
    made.report(report(("before", 4), ("after", 4)))
    made.trimmed("before", 4, left=1)
    one_pass(made, "before", 1, generated=2, emitted=2)
    one_pass(made, "after", 4, generated=1, emitted=1, valid=1)
    found = positions(made.take())
    assert found["drafted"] == [2, 2, 2, 2]
    assert found["trimmed"] == [0, 2, 2, 2]
    assert found["scheduled"] == [2, 1, 1, 1]
    assert (found["verified"], found["accepted"], found["emitted"]) == ([2], [1], [2, 1])


def test_places_that_nobody_drafted_for_are_no_drafts() -> None:
    """Under asynchronous scheduling each request has k places."""
    made = counts(some=None, none=None, unknown_to_all=None)
    made.report(report(("some", 2), ("none", 0)))
    one_pass(made, "some", K, generated=3, emitted=3)
    one_pass(made, "none", K, generated=1, emitted=1)
    assert made.scheduled("stranger", K, K) == ("", 0)
    taken = made.take()
    assert positions(taken)["verified"] == [1, 1]
    assert taken["plain"] == 1
    assert SequenceCounts.load(made.dump("none")) == SequenceCounts(1, 1, [0] * 6, {}, ("", 1))


def test_where_only_the_device_knows_how_many_there_are() -> None:
    """As many as have a place, within what the request wants."""
    made = counts(all=None, two=2)
    made.report(StepReport(["all", "two"]))
    assert made.on_device
    assert made.scheduled("all", K, K) == ("ngram", K)
    assert made.scheduled("two", K, K) == ("ngram", 2)
    assert positions(made.take())["drafted"] == [2, 2, 1, 1, 1]
    made.report(StepReport(["all"]))
    made.drafted("all", "ngram", 3)  # the host has heard of it meanwhile
    assert made.scheduled("all", K, K) == ("ngram", 3)
    made.report(StepReport(["all", "two"], without=["two"]))  # two has lapsed
    assert made.scheduled("all", K, K) == ("ngram", K)
    assert made.scheduled("two", K, K)[1] == 0
    made.report(report(("all", 1)))
    assert not made.on_device


def test_each_part_of_a_hybrid_has_counts_of_its_own() -> None:
    made = counts(a=None, b=None)
    made.report(report(("a", 3), ("b", 1), sources=["suffix", "eagle"]))
    one_pass(made, "a", 3, generated=4, emitted=4)
    one_pass(made, "b", 1, generated=1, emitted=1)
    made.report(report(("a", 2), ("b", 0), sources=["eagle", ""]))
    one_pass(made, "a", 2, generated=2, emitted=2)
    taken = made.take()
    assert set(taken["lengths"]) == {"suffix", "eagle"}
    assert positions(taken, "suffix")["accepted"] == [1, 1, 1]
    assert positions(taken, "eagle")["emitted"] == [2, 1]
    assert SequenceCounts.load(made.dump("a")).by_source == {
        "suffix": SourceCounts(1, 3, 3, 3, 4),
        "eagle": SourceCounts(1, 2, 2, 1, 2),
    }


def test_drafts_of_a_request_that_is_gone_are_not_verified() -> None:
    made = counts(a=None)
    made.report(report(("a", 2)))
    source, verified = made.scheduled("a", 2, 2)
    made.forget(["a", "stranger"])
    made.emitted("a", source, verified, 3, 3)  # what a step in flight still brings
    made.trimmed("a", 2, 0)
    made.report(report(("a", 2)))
    found = positions(made.take())
    assert (found["drafted"], found["scheduled"], found["verified"]) == ([1, 1], [1, 1], [])
    assert "a" not in made


def test_nothing_is_counted_twice() -> None:
    made = counts(a=None)
    made.report(
        report(
            ("a", 2), drafting_seconds=[0.1], faults={"ngram": {"late": 1}}, fallbacks={"ngram": {"skipped": 2}}, draft_length=5.0
        )
    )
    made.report(report(("a", 1), drafting_seconds=[0.2], faults={"ngram": {"late": 2}}, draft_length=0.5, paused=True))
    first = made.take()
    assert (first["drafting_seconds"], first["faults"], first["fallbacks"]) == (
        [0.1, 0.2],
        {"ngram": {"late": 3}},
        {"ngram": {"skipped": 2}},
    )
    assert (first["draft_length"], first["paused"]) == (0.5, True)
    assert made.take() == {"lengths": {}, "plain": 0}
    made.admit("a", 0, 1.0)  # it was preempted, and runs again
    one_pass(made, "a", 1, generated=1, emitted=1)
    assert positions(made.take())["verified"] == [1]


def test_without_statistics_requests_are_counted_all_the_same() -> None:
    made = counts(totals=False, a=None)
    made.report(report(("a", 2), drafting_seconds=[0.1], draft_length=1.0))
    one_pass(made, "a", 2, generated=2, emitted=2)
    assert SequenceCounts.load(made.dump("a")).by_source == {"ngram": SourceCounts(1, 2, 2, 1, 2)}
    assert made.take()["lengths"] == {}


def test_a_stop_string_takes_tokens_back() -> None:
    made = counts(a=None)
    made.report(report(("a", 4)))
    one_pass(made, "a", 4, generated=5, emitted=5)
    ended = SequenceCounts.load(made.dump("a"))
    ended.cut(3)
    assert (ended.emitted, ended.by_source["ngram"].emitted, ended.last) == (2, 2, ("ngram", 2))
    assert SequenceCounts.load(made.dump("a")).emitted == 5  # a copy: the engine core goes on with its own
    dumped = made.dump("a")
    before = json.dumps(dumped)
    made.report(report(("a", 2)))
    one_pass(made, "a", 2, generated=1, emitted=1)
    assert json.dumps(dumped) == before  # it may be on its way to the front end
    taken = made.take()
    assert cut(taken, "ngram", 5, 3)
    assert positions(taken)["emitted"] == [2, 1]
    assert not cut(taken, "ngram", 5, 3)  # not there again
    assert not cut(taken, "eagle", 5, 3)


def test_what_waits_for_totals_that_never_come_is_bounded() -> None:
    waiting, made = Surplus(), counts(a=None)
    for _ in range(MOST_SURPLUS + 5):
        waiting.add("ngram", 5, 3)
    assert len(waiting) == MOST_SURPLUS
    made.report(report(("a", 4)))
    one_pass(made, "a", 4, generated=5, emitted=5)
    taken = made.take()
    waiting.take_out_of(taken)
    assert positions(taken)["emitted"] == [1, 1]
    assert len(waiting) == MOST_SURPLUS - 1
    waiting.take_out_of(taken)  # not there again
    assert len(waiting) == MOST_SURPLUS - 1


STEP = st.tuples(
    st.integers(0, K),  # drafted
    st.integers(0, K),  # places
    st.integers(0, K),  # of which the grammar lets through
    st.integers(0, K),  # accepted, as far as verified
    st.integers(1, K + 1),  # kept, as far as generated
)


@given(st.lists(STEP, max_size=12))
def test_each_state_is_part_of_the_one_before_it(steps: list[tuple[int, ...]]) -> None:
    made = counts(a=None)
    emitted_by_all, plain = 0, 0
    for drafted, places, valid, accepted, kept in steps:
        made.report(report(("a", drafted)))
        source, verified = made.scheduled("a", places, min(valid, places))
        generated = min(accepted, verified) + 1
        emitted = min(kept, generated)
        made.emitted("a", source, verified, generated, emitted)
        emitted_by_all += emitted
        plain += verified == 0
    taken = made.take()
    assert taken["plain"] == plain
    ended = SequenceCounts.load(json.loads(json.dumps(made.dump("a"))))
    assert (ended.passes, ended.emitted) == (len(steps), emitted_by_all)
    assert sum(ended.histogram) + plain == len(steps)
    if "ngram" not in taken["lengths"]:
        return
    of = {state: by_position(numbers) for state, numbers in taken["lengths"]["ngram"].items()}
    for place in range(K + 1):
        assert of["drafted"][place] >= of["scheduled"][place] == of["trimmed"][place] + of["verified"][place]
        assert of["verified"][place] >= of["accepted"][place] >= 0
    passes = len(steps) - plain
    assert of["verified"][0] == of["emitted"][0] == passes
    assert passes <= sum(of["emitted"]) <= sum(of["accepted"]) + passes
    part = ended.by_source.get("ngram", SourceCounts())
    sums = [sum(of[state]) for state in ("drafted", "verified", "accepted", "emitted")]
    assert sums == [part.drafted, part.verified, part.accepted, part.emitted]


# -- the alarm ---------------------------------------------------------------------------------------------


def said_after(
    alarm: Alarm, passes: int, drafts: int, accepted: int = 0, temperature: float = 0.0, source: str = "ngram"
) -> list[str]:
    lines = []
    for _ in range(passes):
        alarm.saw(source, drafts, accepted, temperature)
        lines += alarm.due()
    return lines


def test_drafting_in_vain_is_said_once() -> None:
    alarm = Alarm()
    (line,) = said_after(alarm, 10 * LATER_DRAFTS // K, K)
    assert "the target accepted 0 of 200 drafts by 'ngram' (0.0%), in 40 passes over them" in line
    assert "1.00 tokens" in line
    assert "answers that repeat neither the prompt nor themselves" in line
    assert "'control': 'adaptive'" in line
    assert "temperature" not in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("passes", "drafts", "accepted"),
    [
        (1000, 0, 0),  # it hardly ever drafts
        (LEAST_PASSES - 1, FIRST_DRAFTS, 0),  # many drafts, but few refusals
        (FIRST_DRAFTS // K - 1, K, 0),
        (10_000, K, 1),
    ],
)
def test_no_alarm_without_evidence(passes: int, drafts: int, accepted: int) -> None:
    assert said_after(Alarm(), passes, drafts, accepted) == []


def test_what_counts_is_what_a_pass_gains() -> None:
    """Two of a hundred drafts are accepted, but that is a token more in every tenth pass."""
    alarm = Alarm()
    for number in range(LATER_DRAFTS):
        alarm.saw("ngram", K, int(number % 10 == 0), 0.0)
        assert alarm.due() == []


def test_one_odd_request_is_no_alarm_but_a_change_of_traffic_is() -> None:
    alarm = Alarm()
    assert said_after(alarm, 100, K, 3) == []
    assert said_after(alarm, 60, K, 0) == []
    assert said_after(alarm, 900, K, 3) == []
    (line,) = said_after(alarm, 3 * LATER_DRAFTS // K, K, 0)
    assert f"0 of {LATER_DRAFTS} drafts" in line


def test_the_causes_fit_the_proposer_and_the_requests() -> None:
    alarm = Alarm(lambda source: source == "eagle", adaptive=True)
    (of_heads,) = said_after(alarm, 50, K, temperature=1.25, source="eagle")
    assert "Likely causes: a high temperature (1.2 on average here); heads or a draft model trained for another" in of_heads
    assert "Adaptive control leaves off drafting" in of_heads
    (of_history,) = said_after(alarm, 50, K, source="ngram")  # each proposer for itself
    assert "trained" not in of_history


def test_drafts_that_control_withholds_are_judged_too() -> None:
    """By what the answers were; and those that are verified as well are not counted twice."""
    made = counts(a=None)
    made.report(report(("a", K), judged={"ngram": (3, 4, 1)}))
    one_pass(made, "a", K, generated=1, emitted=1)
    assert made.alarm.due() == []
    for _ in range(FIRST_DRAFTS // 2):
        made.report(report(("a", 0), judged={"ngram": (2, 2, 0)}))
    (line,) = made.alarm.due()
    assert f"1 of {4 + FIRST_DRAFTS} drafts by 'ngram' agreed with the answers" in line
    assert "would have given 1.00 tokens" in line
    made.report(report(("stranger", 0), judged={}))
    assert made.alarm.due() == []


# -- what is exported, documented and plotted ------------------------------------------------------------------


def exported() -> dict[str, tuple[str, set[str]]]:
    """Metric -> its kind and its own labels, read from the source: importing it would need vLLM."""
    tree = ast.parse((ROOT / "vllm_specplugin/runtime/frontend_metrics.py").read_text(encoding="utf-8"))
    constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    families = constants["FAMILIES"]
    assert isinstance(families, ast.Tuple)
    found = {}
    for family in families.elts:
        assert isinstance(family, ast.Call)
        resolved = [constants[arg.id] if isinstance(arg, ast.Name) else arg for arg in family.args]
        name, kind, _, *labels = map(ast.literal_eval, resolved)
        suffix = "_total" if kind == "counter" else ""
        found[ast.literal_eval(constants["PREFIX"]) + name + suffix] = kind, set(*labels)
    return found


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"vllm:specplugin_\w+", page))
    assert len(exported()) > 10
    assert named == set(exported())
    rows = re.findall(r"^\| `(vllm:specplugin_\w+)` \|([^|]*)\|", page, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows} == {
        name: labels for name, (_, labels) in exported().items()
    }
    for kinds in (Fault, Fallback):
        assert all(f"`{kind}`" in page for kind in kinds)


def test_the_dashboard_asks_for_what_is_exported() -> None:
    dashboard = json.loads((ROOT / "docs/grafana/specplugin.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    known, asked = exported(), set()
    for query in queries:
        assert query.count("(") == query.count(")")
        labels = {"model_name", "engine"}
        for name, selector in re.findall(r"(vllm:specplugin_\w+)(?:\{([^}]*)\})?", query):
            family = name if name in known else re.sub(r"_(bucket|sum|count)$", "", name)
            kind, own = known[family]
            assert (kind == "histogram") == (family != name)
            asked.add(family)
            labels |= own | ({"le"} if name.endswith("_bucket") else set())
            assert set(re.findall(r"(\w+)\s*=~?", selector)) <= labels
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r",\s*", grouped)) <= labels
    assert asked == set(known)  # and nothing is exported that nobody looks at
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
