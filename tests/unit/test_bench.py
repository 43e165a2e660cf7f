"""`bench`: intervals, candidates, traffic, what is recommended, and whole runs over simulated engines."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from tests.support.simulated_engines import LOADING, SimulatedEngine, Simulation
from tests.support.tiny import BOS, EOS
from vllm_specplugin.bench import lineup
from vllm_specplugin.bench import traffic as traffics
from vllm_specplugin.bench.candidates import PLAIN_DECODING, Candidate, LeftOut, candidate, defaults, name_of, named, unique
from vllm_specplugin.bench.engine import LEAST_KV, Engine, kv_bytes
from vllm_specplugin.bench.lineup import Load, in_turn
from vllm_specplugin.bench.report import NOTHING_KNOWN, PLAIN_IS_FASTEST, Report, recommend
from vllm_specplugin.bench.run import Plan, bench
from vllm_specplugin.bench.samples import (
    CONFIDENCE,
    ROUNDS_FOR_CONFIDENCE,
    Sample,
    acceptance_length,
    interval,
    percentiles,
    total,
)
from vllm_specplugin.bench.table import COLUMNS, markdown, print_report
from vllm_specplugin.bench.traffic import (
    AT_FIRST,
    CHAT,
    KINDS,
    MAKERS,
    PER_KIND,
    RANDOM,
    RANDOM_ALPHABET,
    RANDOM_TOKENS,
    Request,
    Traffic,
    built_in,
    of_user,
)
from vllm_specplugin.cli.bench import concurrencies
from vllm_specplugin.cli.main import app
from vllm_specplugin.engine_process import as_loaded
from vllm_specplugin.errors import ConfigError, SpecPluginError
from vllm_specplugin.prompt_files import Prompt, ask

NGRAM, SLOW = {"proposer": "ngram"}, {"proposer": "ngram", "num_speculative_tokens": 5}


def sample(rate: float = 10.0, tokens: int = 100, **more: Any) -> Sample:
    values = {"requests": 1, "first_token": (0.5,), "per_token": (0.1,), "passes": 50, **more}
    return Sample(tokens=tokens, seconds=tokens / rate, **values)


# -- samples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "rank", "confidence"), [(1, 1, 0.0), (2, 1, 0.5), (5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609), (20, 6, 0.9586)]
)
def test_intervals_are_the_tabulated_order_statistics(rounds: int, rank: int, confidence: float) -> None:
    """Ranks and confidences as in any table of confidence intervals for a median."""
    values = [float(value) for value in range(1, rounds + 1)]
    random.Random(0).shuffle(values)
    found = interval(values)
    assert (found.low, found.high) == (rank, rounds + 1 - rank)
    assert found.value == statistics.median(values)
    assert found.confidence == pytest.approx(confidence, abs=1e-4)
    assert found.rounds == rounds


def test_intervals_cover_the_true_median_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    trials, rounds = 4000, 12
    found = [interval(row) for row in generator.lognormal(size=(trials, rounds)).tolist()]  # skewed; its median is 1
    share = np.mean([one.low <= 1 <= one.high for one in found])
    sigma = math.sqrt(found[0].confidence * (1 - found[0].confidence) / trials)
    assert found[0].confidence > CONFIDENCE
    assert abs(share - found[0].confidence) < 4 * sigma


def test_an_interval_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        interval([])


def test_samples_add_up() -> None:
    both = total([sample(10, 100), sample(20, 100, first_token=(0.3,), draft_tokens=7, accepted_tokens=3)])
    assert (both.requests, both.tokens, both.seconds, both.passes) == (2, 200, 15.0, 100)
    assert both.first_token == (0.5, 0.3)
    assert (both.draft_tokens, both.accepted_tokens) == (7, 3)
    assert both.rate == pytest.approx(200 / 15)
    assert acceptance_length([both, both]) == (400 - 4) / 200
    assert acceptance_length([sample(tokens=1, passes=0)]) == 1.0
    assert percentiles(range(101)) == (50.0, 95.0)
    assert all(math.isnan(value) for value in percentiles([]))


# -- candidates --------------------------------------------------------------------------------------------


def test_names_say_what_was_configured_and_are_unique() -> None:
    assert name_of({"proposer": "ngram", "num-speculative-tokens": 3, "options": {"min_n": 1}}) == "ngram k=3 min_n=1"
    assert name_of({"method": "eagle", "model": "/m"}) == "vllm:eagle model=/m"
    assert name_of({"model": "/m"}) == "vllm:draft_model model=/m"
    same = [Candidate("a", {"proposer": "x"}), Candidate("a", {"proposer": "x"}), Candidate("a", {"proposer": "y"})]
    assert [one.name for one in unique(same)] == ["a", "a #2"]
    assert Candidate("a", {"proposer": "it's"}).flag == """--speculative-config '{"proposer": "it'"'"'s"}'"""
    assert PLAIN_DECODING.flag == ""


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"proposer": "ngrm"}, "did you mean 'ngram'"),
        ({"proposer": "ngram", "options": {"min_m": 1}}, "'options.min_m'"),
        ({"proposer": "ngram", "num_speculative_tokens": 0}, "'num_speculative_tokens' is 0"),
        ({"num_speculative_tokens": 3}, "names no drafter"),
    ],
)
def test_a_configuration_is_checked_before_any_engine_starts(config: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecPluginError, match=says):
        candidate(config)


def test_dashes_and_underscores_make_the_same_candidate() -> None:
    dashes = candidate({"proposer": "ngram", "num-speculative-tokens": 4, "options": {"min-n": 1}})
    assert dashes == candidate({"proposer": "ngram", "num_speculative_tokens": 4, "options": {"min_n": 1}})
    assert dashes.config == {"proposer": "ngram", "num_speculative_tokens": 4, "options": {"min_n": 1}}
    assert candidate({"method": "ngram", "num-speculative-tokens": 4}).config == {"method": "ngram", "num_speculative_tokens": 4}


def test_methods_are_named_like_proposers() -> None:
    assert named("ngram") == Candidate("ngram", {"proposer": "ngram"})
    assert named("vllm:ngram").config == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    with pytest.raises(ConfigError, match="did you mean 'vllm:ngram'"):
        named("vllm:ngrm")
    with pytest.raises(ConfigError, match="'model' is missing"):
        named("medusa")


def test_the_defaults_need_no_more_than_their_names_and_say_what_is_left_out() -> None:
    chosen, left_out = defaults(0.0, cuda=False)
    why = {lost.name: lost.why for lost in left_out}
    assert {"vllm:ngram", "ngram"} <= {one.name for one in chosen}
    assert "'model' is missing" in why["medusa"]
    assert "--method" in why["mtp"]
    assert not {one.name for one in chosen} & set(why)
    sampled, left_out = defaults(0.7, cuda=False)
    assert "vllm:ngram" not in {one.name for one in sampled}
    assert "samples wrongly" in {lost.name: lost.why for lost in left_out}["vllm:ngram"]
    assert "vllm:ngram" in {one.name for one in defaults(0.7, cuda=True)[0]}


# -- traffic -----------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer of bytes."""

    chat_template = None
    all_special_ids = (BOS, EOS)

    def __len__(self) -> int:
        return EOS + 1

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())


def test_built_in_prompts_never_repeat_and_come_kind_by_kind() -> None:
    traffic = built_in(Bytes(), per_kind=64)
    assert traffic.kinds == list(KINDS)
    prompts = traffic.take(4 * 64)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert not traffic.repeated
    assert max(map(len, prompts)) == traffic.longest
    scrambled = prompts[KINDS.index(RANDOM) :: 4]
    assert {len(prompt) for prompt in scrambled} == {RANDOM_TOKENS}
    assert all(RANDOM_ALPHABET / 2 < len(set(prompt)) <= RANDOM_ALPHABET for prompt in scrambled)
    assert not {BOS, EOS} & {token for prompt in scrambled for token in prompt}
    assert prompts == built_in(Bytes(), per_kind=64).take(4 * 64), "another run asks something else"
    assert prompts != built_in(Bytes(), per_kind=64, seed=1).take(4 * 64)
    assert not traffic.lasts(1)
    traffic.take(1)
    assert traffic.repeated


def test_built_in_prompts_are_made_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Prompt] = []
    encode = traffics.encode

    def noted(prompt: Prompt, tokenizer: Any) -> list[int]:
        made.append(prompt)
        return encode(prompt, tokenizer)

    monkeypatch.setattr(traffics, "encode", noted)
    traffic = built_in(Bytes())
    assert 3 * AT_FIRST <= len(made) < 3.1 * AT_FIRST  # random text needs no encoding, and a few are made twice
    assert traffic.lasts(4 * PER_KIND // 2)
    assert not traffic.lasts(4 * PER_KIND + 4)
    prompts = traffic.take(4 * 2 * AT_FIRST)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert max(map(len, prompts)) <= traffic.longest


def test_prompts_that_chance_makes_twice_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKERS, CHAT, lambda generator: ask(CHAT, "short", f"question {generator.randint(1, 64)}"))
    traffic = built_in(Bytes(), [CHAT], per_kind=32)
    assert len({tuple(prompt) for prompt in traffic.take(32)}) == 32
    assert not traffic.lasts(1)


def test_a_users_prompts_may_be_asked_again() -> None:
    traffic = of_user([ask("a", "1", "question")], Bytes())
    assert traffic.lasts(1000)
    assert traffic.take(2) == [[*b"question"]] * 2
    assert traffic.repeated


def test_code_and_records_can_be_copied_from_the_prompt() -> None:
    code, records = built_in(Bytes(), KINDS[:2], per_kind=1).take(2)
    text = bytes(code).decode()
    changed = text.rsplit("renamed to `")[1].split("_")[0]
    assert f"self.{changed} = {changed}" in text
    turns = bytes(records).decode().split("\n\n")
    assert list(json.loads(turns[2])) == ["order", "name", "city", "count", "product", "price"]
    assert turns[-1].startswith("Order ")  # the last one is still to be done


def test_a_users_prompts_are_shuffled_and_told_by_kind() -> None:
    prompts = [ask("a" if number % 3 else "b", str(number), f"question {number}") for number in range(30)]
    traffic = of_user(prompts, Bytes())
    assert set(traffic.kinds) == {"a", "b"}
    first = [bytes(prompt).decode() for prompt in traffic.take(20)]
    assert len(set(first)) == 20
    assert sum(int(text.split()[1]) % 3 == 0 for text in first) == 10  # the kinds by turns
    assert first != sorted(first, key=lambda text: int(text.split()[1]))


# -- what is recommended -----------------------------------------------------------------------------------


def rounds_of(**speeds: list[float]) -> list[dict[int, dict[str, Sample]]]:
    """One concurrency; plain decoding at 10 tokens/s."""
    count = max(map(len, speeds.values()))
    return [
        {1: {"plain": sample(10.0), **{name: sample(10 * found[n]) for name, found in speeds.items() if n < len(found)}}}
        for n in range(count)
    ]


def recommended(**speeds: list[float]) -> tuple[str, str]:
    known = [PLAIN_DECODING, *(Candidate(name, {"proposer": name}) for name in speeds)]
    found = recommend(rounds_of(**speeds), known, [1], [])
    return found.candidate, found.reason


def test_the_highest_lower_end_wins_not_the_highest_median() -> None:
    name, reason = recommended(steady=[1.2] * 6, wild=[0.8, 2, 2, 2, 2, 2])
    assert name == "steady"
    assert "1.20x (1.20 to 1.20 with 97% confidence, 6 rounds)" in reason
    assert "not surely ahead of wild" in reason


def test_a_lead_in_every_round_is_sure_however_much_the_machine_varied() -> None:
    noisy = [1.1, 1.5, 1.3, 1.9, 1.2, 1.7]
    name, reason = recommended(first=[1.05 * value for value in noisy], second=noisy)
    assert name == "first"
    assert "; surely ahead of second, 1.05x (1.05 to 1.05" in reason


def test_plain_decoding_is_recommended_where_nothing_is_surely_faster() -> None:
    assert recommended(doubtful=[0.99, 1.3, 1.3, 1.3, 1.3, 1.3])[0] == "plain"
    known = [PLAIN_DECODING, Candidate("slow", NGRAM)]
    found = recommend(rounds_of(slow=[0.9] * 6), known, [1], [])
    assert (found.flag, found.line) == ("", PLAIN_IS_FASTEST)
    assert "nearest is slow, 0.90x" in found.reason
    nothing = recommend([], known, [1], [])
    assert (nothing.flag, nothing.line, nothing.reason) == ("", NOTHING_KNOWN, "no round was completed")


@pytest.mark.parametrize("speed", [0.8, 1.5])
@pytest.mark.parametrize("rounds", [1, 5, 6])
def test_nothing_is_known_of_too_few_rounds(rounds: int, speed: float) -> None:
    known = [PLAIN_DECODING, Candidate("ngram", NGRAM), Candidate("slow", SLOW)]
    found = recommend(rounds_of(ngram=[speed] * rounds, slow=[0.7] * rounds), known, [1], [])
    assert found.known == (rounds >= ROUNDS_FOR_CONFIDENCE)
    if found.known:
        assert found.line == (known[1].flag if speed > 1 else PLAIN_IS_FASTEST)
    else:
        assert (found.candidate, found.line) == ("plain", NOTHING_KNOWN)
        assert f"so far ngram is {speed:.2f}x" in found.reason
    assert ("surely ahead of slow" in found.reason) == (found.known and speed > 1)


def test_a_few_lucky_rounds_beat_nobody() -> None:
    name, reason = recommended(steady=[1.2] * 6, lucky=[3.0] * 2)
    assert name == "steady"
    assert "not surely ahead of lucky" in reason
    name, reason = recommended(steady=[1.2] * 6, late=[1.1] * 2)
    assert name == "steady"
    assert "not surely ahead of late, 1.09x" in reason, "two rounds are too few for that, too"


def test_candidates_of_different_blocks_are_not_compared_round_by_round() -> None:
    rounds = rounds_of(one=[1.5] * 6) + rounds_of(two=[1.4] * 6)
    known = [PLAIN_DECODING, Candidate("one", NGRAM), Candidate("two", SLOW)]
    assert "measured at other times" in recommend(rounds, known, [1], []).reason


# -- whole runs over simulated engines ---------------------------------------------------------------------


def speed(config: dict[str, Any] | None, concurrency: int) -> float:
    """n-gram is faster than plain decoding, and slower at 4 at once; with a pinned k it is slow."""
    return 1.0 if config is None else 0.7 if config == SLOW else 1.5 if concurrency < 4 else 0.9


def plan(candidates: list[Candidate], **more: Any) -> Plan:
    traffic = more.pop("traffic", None) or Traffic([Request("only", [number]) for number in range(1000)])
    arguments = {"load": Load((1, 4), max_tokens=20), "minutes": None, "repeat": 6, **more}
    return Plan("folder/model", candidates, traffic, "some prompts", **arguments)


def run_bench(tmp_path: Path, wanted: Plan) -> Report:
    return bench(wanted, tmp_path, Progress(disable=True))


BOTH = [Candidate("ngram", NGRAM), Candidate("slow", SLOW)]


def test_ratios_are_right_on_a_machine_that_slows_down_and_recovers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed, slowdown=lambda now: 2 + math.sin(now / 7)).install(monkeypatch)
    report = run_bench(tmp_path, plan(BOTH, repeat=20))
    assert machine.alive == []
    assert list(tmp_path.iterdir()) == [], "logs of engines that did well are not kept"
    found = {(cell.candidate, cell.concurrency): cell for cell in report.cells}
    assert found["ngram", 1].speed.value == pytest.approx(1.5, rel=0.03)
    assert found["ngram", 4].speed.value == pytest.approx(0.9, rel=0.03)
    assert found["slow", 4].speed.low < 0.7 < found["slow", 4].speed.high
    assert found["plain", 1].speed.value == found["plain", 1].speed.low == 1
    assert {cell.speed.rounds for cell in report.cells} == {20}
    overall = {one.candidate: one.speed for one in report.overall}
    assert overall["ngram"] is not None
    assert overall["ngram"].value == pytest.approx(math.sqrt(1.5 * 0.9), rel=0.02)
    assert report.recommendation.candidate == "ngram"
    assert report.recommendation.line == """--speculative-config '{"proposer": "ngram"}'"""
    assert "slower than it at 4 at once" in report.recommendation.reason


def erratic(now: float) -> float:
    """How slow the machine is: anew every 1.3 seconds, by up to a factor of two."""
    return 1 + random.Random(int(now / 1.3)).random()


@pytest.mark.parametrize("pausable", [True, False])
def test_turns_within_a_batch_cancel_what_changes_faster_than_a_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pausable: bool
) -> None:
    machine = Simulation(speed, slowdown=erratic).install(monkeypatch)
    machine.facts["pausable"] = pausable
    report = run_bench(tmp_path, plan(BOTH[:1], repeat=10, load=Load((1,), 500)))  # 5 seconds of plain decoding
    found = next(cell.speed for cell in report.cells if cell.candidate == "ngram")
    spread = found.high / found.low
    assert (spread < 1.1) == pausable
    assert (abs(found.value / 1.5 - 1) < 0.02) or not pausable
    assert (len(machine.slices) > 10 * len(machine.batches)) == pausable


def test_engines_come_to_their_end_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed).install(monkeypatch)
    run_bench(tmp_path, plan(BOTH, repeat=1, load=Load((1,), 500)))
    first, last = {}, {}
    for place, name in enumerate(machine.slices):
        first.setdefault(name, place)
        last[name] = place
    assert max(last.values()) - min(last.values()) <= 3
    counts = Counter(machine.slices)
    assert counts["plain"] / counts["ngram"] == pytest.approx(1.5, rel=0.15), "each is given the time that it needs"


@pytest.mark.parametrize("gpu", [True, False])
def test_engines_on_a_cpu_load_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool) -> None:
    machine = Simulation(speed).install(monkeypatch)
    monkeypatch.setattr(lineup.torch.cuda, "is_available", lambda: gpu)
    alive: list[int] = []
    wait = SimulatedEngine.wait

    def noted(engine: SimulatedEngine) -> dict[str, Any]:
        alive.append(len(machine.alive))
        return wait(engine)

    monkeypatch.setattr(SimulatedEngine, "wait", noted)
    run_bench(tmp_path, plan(BOTH, repeat=1))
    assert alive == ([3, 3, 3] if gpu else [1, 2, 3])


def test_no_engine_works_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose core is a process of its own begins as soon as a request is handed over, beside the others."""
    handed: list[str] = []

    def step() -> list[Any]:
        name = handed.pop(0)
        return [SimpleNamespace(request_id=name, finished=True, outputs=[SimpleNamespace(token_ids=[1, 2])])]

    inner = SimpleNamespace(
        add_request=lambda name, prompt, params: handed.append(name), has_unfinished_requests=lambda: bool(handed), step=step
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.inputs", SimpleNamespace(TokensPrompt=dict))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1)))
    engine = Engine.__new__(Engine)
    engine.llm, engine.served = SimpleNamespace(llm_engine=inner, get_metrics=list), 0  # type: ignore[assignment]
    engine.begin([[1], [2], [3]], 2, 0.0, True, at_once=2)
    assert handed == []
    time.sleep(0.05)
    first = engine.go_on(seconds=0.0)
    assert (handed, first["sample"], first["tokens"]) == (["2", "3"], None, 2)
    time.sleep(0.05)
    answer = engine.go_on(seconds=None)
    assert handed == []
    assert (answer["sample"]["requests"], answer["tokens"]) == (3, 6)
    assert answer["seconds"] < 0.04, "neither wait counts"


def test_everybody_answers_the_same_requests_and_takes_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed).install(monkeypatch)
    run_bench(tmp_path, plan(BOTH, repeat=4))
    assert machine.prompts["plain"] == machine.prompts["ngram"] == machine.prompts["slow"]
    turns = [tuple(name for name, _, _ in machine.batches[at : at + 3]) for at in range(0, len(machine.batches), 3)]
    assert all(sorted(turn) == ["ngram", "plain", "slow"] for turn in turns)
    assert {turn[0] for turn in turns} == {"ngram", "plain", "slow"}
    assert {requests for _, requests, _ in machine.batches} == {1, 4}
    measured = [tokens for _, _, tokens in machine.batches[6:]]  # the first six are warming up
    assert set(measured) == {20}
    assert len(measured) == 4 * 2 * 3


def test_every_kind_is_asked_in_each_round_however_few_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed).install(monkeypatch)
    kinds = Traffic([Request(str(number % 3), [number % 3, number]) for number in range(300)])
    run_bench(tmp_path, plan(BOTH[:1], traffic=kinds, repeat=1, load=Load((1, 2), 20)))
    asked = machine.prompts["plain"][3 + 4 :]  # warming up: 3 alone, then 4, two at once
    assert sorted(prompt[0] for prompt in asked[:3]) == [0, 1, 2]
    assert [prompt[1] for prompt in machine.prompts["plain"]] == list(range(3 + 4 + 3 + 4)), "no prompt is passed over"
    assert len(asked) == 3 + 4


@pytest.mark.parametrize("engines", range(1, 6))
def test_each_is_first_and_last_as_often_as_any_other(engines: int) -> None:
    names = [str(number) for number in range(engines)]
    orders = [in_turn(names, batch) for batch in range(2 * engines)]
    assert all(sorted(order) == names for order in orders)
    assert Counter(order[0] for order in orders) == Counter(order[-1] for order in orders) == dict.fromkeys(names, 2)
    assert all(after == before[::-1] for before, after in zip(orders[::2], orders[1::2], strict=True))


def orders_of(machine: Simulation, engines: int, requests: int) -> list[tuple[str, ...]]:
    """In which order the engines began each batch of so many requests."""
    begun = [name for name, number, _ in machine.batches if number == requests]
    return [tuple(begun[at : at + engines]) for at in range(0, len(begun), engines)]


def test_two_engines_take_turns_in_both_orders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed).install(monkeypatch)
    run_bench(tmp_path, plan(BOTH[:1], repeat=8))
    for requests in (1, 4):
        assert Counter(orders_of(machine, 2, requests)[1:]) == {("plain", "ngram"): 4, ("ngram", "plain"): 4}


def test_orders_change_at_every_concurrency(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With three engines and four kinds a round has six batches: as many as there are orders."""
    machine = Simulation(speed).install(monkeypatch)
    kinds = Traffic([Request(str(number % 4), [number % 4, number]) for number in range(1000)])
    run_bench(tmp_path, plan(BOTH, traffic=kinds, repeat=6, load=Load((1, 8, 32), 4)))
    for requests in (1, 8, 32):
        assert len(set(orders_of(machine, 3, requests))) == 6


def test_an_engine_that_fails_is_reported_and_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(config: dict[str, Any] | None, concurrency: int) -> float:
        if config == SLOW:
            return 0.0
        return math.inf if config == {"method": "dies"} and concurrency == 4 else speed(config, concurrency)

    machine = Simulation(failing).install(monkeypatch)
    wanted = plan([*BOTH, Candidate("dies", {"method": "dies"})], left_out=[LeftOut("medusa", "no model")])
    report = run_bench(tmp_path, wanted)
    assert machine.alive == []
    why = {lost.candidate: lost.why for lost in report.left_out}
    assert why["medusa"] == "no model"
    assert "does not want to" in why["slow"]
    assert "ended with -9" in why["dies"]
    assert all(str(tmp_path) in why[name] for name in ("slow", "dies"))
    assert len(list(tmp_path.iterdir())) == 2, "the logs of those that failed are kept"
    assert {cell.candidate for cell in report.cells} == {"plain", "ngram"}
    assert report.recommendation.candidate == "ngram"


def test_without_plain_decoding_or_without_anything_else_there_is_no_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Simulation(lambda config, concurrency: 0.0 if config is None else 1.0).install(monkeypatch)
    with pytest.raises(SpecPluginError, match="the plain engine failed"):
        run_bench(tmp_path, plan(BOTH))
    assert machine.alive == []
    Simulation(lambda config, concurrency: 1.0 if config is None else 0.0).install(monkeypatch)
    with pytest.raises(SpecPluginError, match=r"nothing to compare plain decoding with; ngram: .*does not want to"):
        run_bench(tmp_path, plan(BOTH))


def test_it_stops_where_the_next_round_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed).install(monkeypatch)
    report = run_bench(tmp_path, plan(BOTH, minutes=2.0, repeat=None))
    rounds = {cell.speed.rounds for cell in report.cells}
    assert machine.now <= 120
    assert len(rounds) == 1
    assert rounds.pop() > 20
    # A round that is longer than all the time there is: it is run once.
    machine = Simulation(speed, slowdown=lambda now: 1000.0).install(monkeypatch)
    report = run_bench(tmp_path, plan(BOTH, minutes=0.1, repeat=None))
    assert {cell.speed.rounds for cell in report.cells} == {1}
    assert any("fewer than 6 rounds" in note for note in report.notes)


def test_engines_that_do_not_fit_at_once_come_in_blocks_beside_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Simulation(speed).install(monkeypatch)
    report = run_bench(tmp_path, plan(BOTH, engines_at_once=2, minutes=2.0, repeat=None))
    assert machine.started == ["plain", "ngram", "slow"]
    assert machine.most_alive == 2
    rounds = {cell.candidate: cell.speed.rounds for cell in report.cells}
    assert rounds["ngram"] + rounds["slow"] == rounds["plain"]
    assert 0.7 < rounds["ngram"] / rounds["slow"] < 1.6  # equal times; a round of the slow one takes longer
    assert machine.now <= 120 + 3 * LOADING


def test_ctrl_c_reports_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed).install(monkeypatch)

    def interrupt(number: int) -> None:
        if number == 6 + 6 + 3 + 1:  # warm-up, one round, one concurrency of the next, and a turn
            raise KeyboardInterrupt

    machine.before_batch = interrupt
    report = run_bench(tmp_path, plan(BOTH))
    assert report.interrupted
    assert machine.alive == []
    assert {(cell.concurrency, cell.speed.rounds) for cell in report.cells} == {(1, 2), (4, 1)}
    assert [one.speed and one.speed.rounds for one in report.overall] == [1, 1, 1]
    assert "so far ngram is 1.16x in the only round" in report.recommendation.reason
    assert report.recommendation.line == NOTHING_KNOWN


def test_ctrl_c_in_the_first_round_does_not_call_plain_decoding_the_fastest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Simulation(speed).install(monkeypatch)

    def interrupt(number: int) -> None:
        if number == 6 + 3 + 1:  # warm-up, one concurrency, and a turn
            raise KeyboardInterrupt

    machine.before_batch = interrupt
    report = run_bench(tmp_path, plan(BOTH))
    assert report.interrupted
    assert {cell.concurrency for cell in report.cells} == {1}
    assert report.recommendation.line == NOTHING_KNOWN


def test_ctrl_c_while_engines_load_reports_that_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed).install(monkeypatch)

    def interrupt(engine: SimulatedEngine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SimulatedEngine, "wait", interrupt)
    report = run_bench(tmp_path, plan(BOTH))
    assert report.interrupted
    assert machine.alive == []
    page = markdown(report)
    assert "no engine had loaded" in page
    assert "no round was completed" in page
    assert page.rstrip().splitlines()[-1].strip() == NOTHING_KNOWN


def test_prompts_that_repeat_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Simulation(speed).install(monkeypatch)
    few = Traffic([Request("only", [number]) for number in range(8)])
    assert any("asked again" in note for note in run_bench(tmp_path, plan(BOTH, traffic=few)).notes)
    assert not any("asked again" in note for note in run_bench(tmp_path, plan(BOTH)).notes)


def test_built_in_prompts_last_for_forty_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Simulation(speed).install(monkeypatch)
    traffic = built_in(Bytes())
    report = run_bench(tmp_path, plan(BOTH[:1], traffic=traffic, load=Load((1, 8, 32), 4), repeat=40))
    assert {cell.speed.rounds for cell in report.cells} == {40}
    assert not traffic.repeated
    asked = [tuple(prompt) for prompt in machine.prompts["plain"]]
    assert max(map(len, asked)) <= traffic.longest
    assert len(set(asked)) > 40 * (4 + 8 + 32), "warming up asks with beginnings of prompts, which may be equal"


def test_rounds_end_with_the_built_in_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Simulation(speed).install(monkeypatch)
    traffic = built_in(Bytes(), per_kind=16)  # a round takes two of each kind, and so does warming up
    report = run_bench(tmp_path, plan(BOTH, traffic=traffic, repeat=None))
    assert {cell.speed.rounds for cell in report.cells} == {7}
    assert not any("asked again" in note for note in report.notes)
    report = run_bench(tmp_path, plan(BOTH, traffic=built_in(Bytes(), per_kind=1), repeat=None))
    assert {cell.speed.rounds for cell in report.cells} == {1}, "the first is always run"
    assert any("asked again" in note for note in report.notes)


def test_a_kv_cache_that_is_too_small_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Simulation(speed).install(monkeypatch)
    wanted = plan(BOTH, load=Load((1, 48), max_tokens=20))
    assert any("holds 1,000 tokens, fewer than the 1,008" in note for note in run_bench(tmp_path, wanted).notes)


def test_the_smallest_kv_cache_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whose drafter has layers of its own holds fewer tokens in the same memory."""
    Simulation(speed).install(monkeypatch)
    wait = SimulatedEngine.wait
    holds = {"plain": 2000, "ngram": 900, "slow": 1500}
    monkeypatch.setattr(SimulatedEngine, "wait", lambda engine: {**wait(engine), "kv_cache_tokens": holds[engine.title]})
    wanted = plan(BOTH, load=Load((1, 48), max_tokens=20))
    assert any("holds 900 tokens, fewer than the 1,008" in note for note in run_bench(tmp_path, wanted).notes)


class ModelConfig:
    """What is asked of vLLM's class of that name."""

    dtype = SimpleNamespace(itemsize=2)
    use_mla = False

    def __init__(self, layers: int, **hf_config: int) -> None:
        self.layers, self.hf_config = layers, SimpleNamespace(**hf_config)

    def get_num_layers(self, parallel: None) -> int:
        return self.layers

    def get_total_num_hidden_layers(self) -> int:
        return self.layers

    def get_num_kv_heads(self, parallel: None) -> int:
        return 2

    def get_head_size(self) -> int:
        return 64


def test_the_kv_cache_has_room_for_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a configuration that is made up; `tests/engine/test_bench.py` asks vLLM."""

    def engine_args(target: ModelConfig, speculative_config: dict[str, Any] | None = None, kept: str = "auto", **_: int) -> Any:
        spec = None
        if speculative_config is not None:
            speculative_config["target_model_config"] = target  # as vLLM does
            method, draft = speculative_config["method"], speculative_config["draft"]
            spec = SimpleNamespace(method=method, draft_model_config=draft, draft_parallel_config=None)
            spec.kv_cache_dtype, spec.uses_draft_kv_cache = None, lambda: method != "ngram"
        cache = SimpleNamespace(block_size=16, cache_dtype=kept)
        config = SimpleNamespace(model_config=target, parallel_config=None, cache_config=cache, speculative_config=spec)
        return SimpleNamespace(create_engine_config=lambda: config)

    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=engine_args))
    alone = {"target": ModelConfig(30), "max_model_len": 2000, "max_num_seqs": 64}
    plain = kv_bytes(alone)
    assert plain > LEAST_KV
    assert kv_bytes({**alone, "kept": "fp8"}) == plain / 2, "one byte for a number instead of two"
    compressed = ModelConfig(30)
    compressed.use_mla = True
    assert kv_bytes({**alone, "target": compressed}) == pytest.approx(plain / 4), "one vector, not two of two heads"

    def beside(method: str, draft: ModelConfig) -> float:
        given = {"method": method, "draft": draft}
        found = kv_bytes({**alone, "speculative_config": given}) / plain
        assert set(given) == {"method", "draft"}, "the engine is given the same afterwards"
        return found

    assert beside("draft_model", ModelConfig(10)) == pytest.approx(40 / 30)
    assert beside("mtp", ModelConfig(30, n_predict=2)) == pytest.approx(32 / 30), "the target's own, of which two layers draft"
    assert beside("ngram", ModelConfig(30)) == 1, "vLLM names the target there, which keeps nothing twice"


def test_the_last_line_is_what_to_paste(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Simulation(speed).install(monkeypatch)
    report = run_bench(tmp_path, plan(BOTH))
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    print_report(report, console)
    printed = console.export_text().rstrip().splitlines()
    assert printed[-1] == """--speculative-config '{"proposer": "ngram"}'"""
    page = markdown(report)
    assert page.rstrip().splitlines()[-1].strip() == printed[-1]
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(COLUMNS) + 1}
    assert "| 1 | ngram | 150.0 | 1.50x (1.50 to 1.50) |" in page
    report.write_json(tmp_path / "report.json")
    assert Report.model_validate_json((tmp_path / "report.json").read_text()) == report


# -- the command line --------------------------------------------------------------------------------------


def test_concurrencies_are_a_list() -> None:
    assert concurrencies("8, 1 32,8") == (1, 8, 32)


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--concurrency", "1,many"], "--concurrency is '1,many'; numbers from 1 to 4096"),
        (["--concurrency", "0"], "--concurrency is '0'"),
        (["--temperature", "-1"], "--temperature is -1.0; from 0 (greedy) to 10"),
        (["--config", "{"], "--config is no JSON"),
        (["--config", '{"proposer": "ngrm"}'], "did you mean 'ngram'"),
        (["--method", "vllm:eagle"], "name any other with --config"),
        (["--engine-args", "[]"], "--engine-args is [], no JSON object"),
        (["--method", "ngram", "--prompts", "nowhere.txt"], "cannot read the prompts in nowhere.txt"),
        (["--markdown", "nowhere/report.md"], "--markdown nowhere/report.md cannot be written"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    command: str, arguments: list[str], says: str, tiny_model: Path
) -> None:
    done = CliRunner().invoke(app, [command, "--model", str(tiny_model), *arguments])
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_is_not_there_is_named() -> None:
    done = CliRunner().invoke(app, ["bench", "--model", "./nowhere", "--method", "ngram"])
    assert done.exit_code == 2
    assert "./nowhere" in done.stderr


# -- engines that load at the same time ---------------------------------------------------------------------


def test_engines_are_taken_as_they_load() -> None:
    pipes = [os.pipe() for _ in range(3)]
    engines = [SimpleNamespace(answers=os.fdopen(read, "r"), number=number) for number, (read, _) in enumerate(pipes)]
    taken = []
    waiting = as_loaded(engines)  # type: ignore[arg-type]
    for number in (2, 0, 1):
        os.write(pipes[number][1], b"{}\n")
        engine = next(waiting)
        engine.answers.readline()
        taken.append(engine.number)  # type: ignore[attr-defined]
    assert taken == [2, 0, 1]
    assert next(waiting, None) is None
    for engine, (_, write) in zip(engines, pipes, strict=True):
        os.close(write)
        engine.answers.close()
