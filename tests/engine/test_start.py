"""From what a user types to the engine's configuration: every spelling, every way to travel, every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import SideBySide
from tests.support.engine import EngineError, EngineWorker

NGRAM = {"proposer": "ngram", "num_speculative_tokens": 3, "options": {"min_n": 2, "max_n": 4}}


@pytest.fixture(scope="module")
def worker(drafting_v1: EngineWorker, tiny_model: Path) -> EngineWorker:
    return drafting_v1


def inside(worker: EngineWorker, name: str, *args: Any) -> Any:
    return worker.call(f"tests.engine.starting:{name}", *args)


# -- spellings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-config", json.dumps(NGRAM)],
        ["--speculative_config", json.dumps(NGRAM)],
        ["-sc", '{"proposer": "ngram", "num-speculative-tokens": 3, "options": {"min-n": 2, "max-n": 4}}'],
        [
            "--speculative-config.proposer=ngram",
            "--speculative-config.num-speculative-tokens=3",
            "--speculative-config.options.min_n=2",
            "--speculative-config.options.max-n=4",
        ],
        [
            *("--speculative-config.proposer", "ngram", "--speculative-config.num_speculative_tokens", "3"),
            *("--speculative-config.options", '{"min_n": 2, "max_n": 4}'),
        ],
        ["--spec-tokens", "3", "--speculative-config", '{"proposer": "ngram", "options": {"min_n": 2, "max_n": 4}}'],
    ],
    ids=["json", "underscores", "dashes-in-json", "dotted", "dotted-and-json", "spec-tokens"],
)
def test_every_spelling_means_the_same(worker: EngineWorker, tiny_model: Path, flags: list[str]) -> None:
    found = inside(worker, "from_command_line", ["--model", str(tiny_model), "--max-model-len", "256", *flags])
    assert found == {
        "class": "PluginSpeculativeConfig",
        "plugin": NGRAM,
        "k": 3,
        "method": "custom_class",
        "runner": "v1",
    }


def test_a_dictionary_without_anything_but_a_name(worker: EngineWorker, tiny_model: Path) -> None:
    found = inside(worker, "round_trips", str(tiny_model), {"proposer": "ngram"})["as made"]
    assert (found["plugin"], found["k"]) == ({"proposer": "ngram"}, 10)


@pytest.mark.parametrize(
    ("written", "ks"), [({}, [10, 5]), ({"control": "adaptive"}, [10, 5]), ({"num_speculative_tokens": 7}, [7, 7])]
)
def test_k_where_asynchronous_scheduling_is_insisted_on(
    worker: EngineWorker, tiny_model: Path, written: dict[str, Any], ks: list[int]
) -> None:
    """It fixes draft lengths, so that nothing would shorten the longer drafts of adaptive control."""
    plugin = {"proposer": "ngram", **written}
    found = [inside(worker, "k_of", str(tiny_model), plugin, flags) for flags in ({}, {"async_scheduling": True})]
    assert found == ks


def test_k_of_the_proposers_own(worker: EngineWorker, tiny_model: Path) -> None:
    found = inside(worker, "round_trips", str(tiny_model), {"proposer": "copycat"})["as made"]
    assert found["k"] == 6


def test_configurations_without_a_proposer_are_vllms(worker: EngineWorker, tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    found = inside(worker, "from_command_line", flags)
    assert (found["class"], found["method"], found["k"]) == ("SpeculativeConfig", "ngram", 3)


# -- travel ------------------------------------------------------------------------------------------------


def test_the_keys_survive_every_way_to_travel(worker: EngineWorker, tiny_model: Path) -> None:
    given = {**NGRAM, "draft_budget_ms": 40.0, "revision": "main"}
    trips = inside(worker, "round_trips", str(tiny_model), given)
    assert trips["as made"]["plugin"] == given
    assert trips["as made"]["runner"] == "v1"
    assert [trip for trip, found in trips.items() if found != trips["as made"]] == []


def test_hashes_tell_configurations_apart(worker: EngineWorker, tiny_model: Path) -> None:
    variants = [
        {},
        {"num_speculative_tokens": 4},
        {"options": {"min_n": 3}},
        {"verifier": "refuse_all"},
        {"draft_budget_ms": 1.0},
    ]
    first = inside(worker, "hashes", str(tiny_model), [NGRAM | variant for variant in variants])
    assert len(set(first)) == len(variants)
    assert inside(worker, "hashes", str(tiny_model), [NGRAM]) == first[:1]


# -- refusals ----------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"proposer": "ngrm"}, "RegistryError", ["'ngrm' is no proposer", "did you mean 'ngram'?", "Installed:", "copycat"]),
    ({"proposer": "n/a"}, "RegistryError", ["'n/a' is no proposer", "Installed:"]),
    ({"proposer": "ngram", "verifier": "onehot"}, "RegistryError", ["'onehot' is no verifier", "did you mean 'one_hot'?"]),
    ({"proposer": "broken"}, "RegistryError", ["'broken' of scripted-parts", "scripted_parts:DoesNotExist", "AttributeError"]),
    ({"proposer": 7}, "ConfigError", ["'proposer' is 7", "string"]),
    ({"proposer": "ngram", "num_spec_tokens": 3}, "ConfigError", ["'num_spec_tokens'", "did you mean 'num_speculative_tokens'?"]),
    ({"proposer": "ngram", "prompt_lookup_max": 3}, "ConfigError", ["'prompt_lookup_max' is no key", "Valid:"]),
    ({"proposer": "ngram", "num_speculative_tokens": "3"}, "ConfigError", ["'num_speculative_tokens' is '3'", "integer"]),
    ({"proposer": "ngram", "num_speculative_tokens": 0}, "ConfigError", ["'num_speculative_tokens' is 0", "greater than"]),
    ({"proposer": "ngram", "method": "ngram"}, "ConfigError", ["'proposer' and 'method' exclude each other"]),
    ({"proposer": "ngram", "model": "heads"}, "ConfigError", ["'model' is 'heads'", "'ngram' loads no checkpoint"]),
    ({"proposer": "ngram", "options": {"min-m": 2}}, "ConfigError", ["'options.min_m'", "did you mean 'min_n'?"]),
    ({"proposer": "ngram", "options": {"min_n": 5, "max_n": 2}}, "ConfigError", ["min_n", "max_n"]),
    ({"proposer": "ngram", "draft_sampling": "probabilistic"}, "ConfigError", ["'draft_sampling'", "gives no probabilities"]),
    ({"proposer": "ngram", "control": "auto"}, "ConfigError", ["'control' is 'auto'", "'fixed' or 'adaptive'"]),
]


@pytest.mark.parametrize(("config", "kind", "parts"), REFUSED, ids=[json.dumps(config) for config, *_ in REFUSED])
def test_an_engine_is_refused_with_one_line(
    worker: EngineWorker, tiny_model: Path, config: dict[str, Any], kind: str, parts: list[str]
) -> None:
    with pytest.raises(EngineError) as caught:
        worker.open(tiny_model, config)
    assert caught.value.kind == kind, caught.value.message
    assert all(part in caught.value.message for part in parts), caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--spec-tokens", "3", "--speculative-config", json.dumps(NGRAM)], ["'num_speculative_tokens'", "(3)", "flag"]),
        (["--spec-model", "x", "--speculative-config.proposer", "ngram"], ["'model' is 'x'", "loads no checkpoint"]),
        (["--spec-method", "ngram", "--speculative-config.proposer", "ngram"], ["'proposer' and 'method' exclude"]),
    ],
    ids=["spec-tokens", "spec-model", "spec-method"],
)
def test_flags_that_do_not_go_together(worker: EngineWorker, tiny_model: Path, flags: list[str], parts: list[str]) -> None:
    with pytest.raises(EngineError) as caught:
        inside(worker, "from_command_line", ["--model", str(tiny_model), "--max-model-len", "256", *flags])
    assert caught.value.kind == "ConfigError"
    assert all(part in caught.value.message for part in parts), caught.value.message


# -- per request -------------------------------------------------------------------------------------------


def test_a_request_may_ask_for_fewer_drafts_or_none(engines: SideBySide) -> None:
    """In one batch: as many as there are, two per step, none; as objects and as the text that HTTP carries."""
    from tests.engine.common import GREEDY, PROMPTS, Forecast, forecast, script

    engines.open(4)
    prompts, asked = PROMPTS[:6], GREEDY | {"max_tokens": 12}
    known = engines.baseline(prompts, asked | {"max_tokens": 20})
    limits: list[tuple[int, dict[str, Any], bool]] = [
        (4, {}, False),
        (4, {"enabled": True, "max_draft_tokens": 2**70}, True),
        (2, {"max_draft_tokens": 2}, False),
        (0, {"enabled": False}, False),
        (2, {"max_draft_tokens": 2}, True),
        (0, {"enabled": 0}, True),
    ]
    params, expected = [], Forecast(by_position=(0,) * 4)
    for prompt, result, (limit, said, as_text) in zip(prompts, known, limits, strict=True):
        ours = script("oracle", prompt, result.token_ids)["extra_args"]["specplugin"] | said
        params.append(asked | {"extra_args": {"specplugin": json.dumps(ours) if as_text else ours}})
        told = asked | {"extra_args": {"specplugin": ours}}
        if limit:
            counted = forecast(prompt, result.token_ids, told, limit, emitted=12)
            by_position = (*counted.by_position, *[0] * (4 - limit))
            expected += Forecast(counted.drafts, counted.draft_tokens, counted.accepted, by_position, counted.unknown)

    results, counters = engines.draft(prompts, params)
    assert [result.token_ids for result in results] == [result.token_ids[:12] for result in known]
    expected.check(counters)


@pytest.mark.parametrize("said", ["no JSON", 5, {"enabled": "maybe"}, {"max_draft_tokens": -2}, '{"max_draft_tokens": "2"}'])
def test_a_request_that_says_nonsense_is_refused_and_no_other(engines: SideBySide, said: Any) -> None:
    engines.open(4)
    with pytest.raises(EngineError, match="'specplugin") as caught:
        engines.drafting.generate([[1, 2, 3]], {"max_tokens": 2, "extra_args": {"specplugin": said}})
    assert caught.value.kind == "VLLMValidationError"
    assert len(engines.drafting.generate([[1, 2, 3]], {"max_tokens": 2})[0].token_ids) == 2
