"""The keys of --speculative-config: what is accepted, what is refused, in which words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplugin import ConfigError, RegistryError, SpecPluginError
from vllm_specplugin.config import HOST_KEYS, SpecConfig, names_a_proposer, resolve


def test_defaults() -> None:
    config = SpecConfig.parse({"proposer": "ngram"})
    resolved = resolve(config)
    assert config.dump() == {"proposer": "ngram"}
    assert resolved.num_speculative_tokens == 10
    assert resolved.verifier_name == "one_hot"
    assert config.adaptive


@pytest.mark.parametrize(
    ("said", "adaptive", "k"),
    [
        ({}, True, 10),
        ({"num_speculative_tokens": 3}, False, 3),
        ({"control": "fixed"}, False, 5),
        ({"control": "adaptive", "num_speculative_tokens": 3}, True, 3),
    ],
)
def test_draft_lengths_are_adaptive_where_nobody_says_otherwise(said: dict[str, Any], adaptive: bool, k: int) -> None:
    config = SpecConfig.parse({"proposer": "ngram", **said})
    assert (config.adaptive, resolve(config).num_speculative_tokens) == (adaptive, k)
    assert SpecConfig.parse(config.dump()) == config


def test_dashes_and_underscores_are_equal() -> None:
    dashed = SpecConfig.parse({"proposer": "ngram", "num-speculative-tokens": 3, "verifier": "one-hot", "options": {"min-n": 2}})
    scored = SpecConfig.parse({"proposer": "ngram", "num_speculative_tokens": 3, "verifier": "one_hot", "options": {"min_n": 2}})
    assert dashed.verifier == scored.verifier
    assert resolve(dashed).options == resolve(scored).options
    assert resolve(dashed).num_speculative_tokens == 3


@given(
    st.fixed_dictionaries(
        {"proposer": st.just("ngram")},
        optional={
            "num_speculative_tokens": st.integers(1, 128),
            "verifier": st.sampled_from(["auto", "one_hot"]),
            "draft_budget_ms": st.floats(0.1, 1000) | st.integers(1, 1000),
            "options": st.just({"max_n": 4}),
            "model": st.just("x"),
            "quantization": st.just("fp8"),
            "revision": st.text(max_size=4),
        },
    )
)
def test_load_of_dump_is_equal(raw: dict[str, Any]) -> None:
    config = SpecConfig.parse(raw)
    assert SpecConfig.parse(config.dump()) == config


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"proposer": "ngrm"}, ["'ngrm' is no proposer", "did you mean 'ngram'?", "Installed:"]),
        ({"proposer": "ngram", "verifier": "one_hat"}, ["'one_hat' is no verifier", "did you mean 'one_hot'?"]),
        (
            {"proposer": "ngram", "num_speculative_token": 3},
            ["'num_speculative_token'", "did you mean 'num_speculative_tokens'?", "Valid:"],
        ),
        ({"proposer": "ngram", "num_speculative_tokens": 0}, ["'num_speculative_tokens' is 0", "greater than or equal to 1"]),
        ({"proposer": "ngram", "num_speculative_tokens": 129}, ["129", "less than or equal to 128"]),
        ({"proposer": "ngram", "num_speculative_tokens": "5"}, ["is '5'", "integer"]),
        ({"proposer": "ngram", "num_speculative_tokens": True}, ["True", "integer"]),
        ({"proposer": "ngram", "method": "eagle"}, ["'proposer' and 'method' exclude each other", "'eagle'"]),
        ({"proposer": "ngram", "model": "x"}, ["'model' is 'x'", "loads no checkpoint"]),
        ({"proposer": "ngram", "draft_sampling": "probabilistic"}, ["'draft_sampling'", "no probabilities"]),
        ({"proposer": "ngram", "draft_sampling": "beam"}, ["'draft_sampling' is 'beam'", "'greedy' or 'probabilistic'"]),
        ({"proposer": "ngram", "control": "auto"}, ["'control' is 'auto'", "'fixed' or 'adaptive'"]),
        ({"proposer": "ngram", "draft_budget_ms": 0}, ["'draft_budget_ms' is 0", "greater than 0"]),
        ({"proposer": "ngram", "draft_budget_ms": True}, ["'draft_budget_ms' is True", "valid number"]),
        ({"proposer": "ngram", "draft_budget_ms": 10**400}, ["'draft_budget_ms' is 1000", "number"]),
        ({"proposer": "ngram", "options": {"minn": 2}}, ["'options.minn'", "did you mean 'min_n'?"]),
        ({"proposer": "ngram", "options": {"min_n": 0}}, ["'options.min_n' is 0"]),
        ({"proposer": "ngram", "options": {"min_n": True}}, ["'options.min_n' is True", "valid integer"]),
        ({"proposer": "ngram", "options": {"min_n": "2"}}, ["'options.min_n' is '2'", "valid integer"]),
        ({"proposer": "suffix", "options": {"min_token_prob": True}}, ["'options.min_token_prob' is True", "valid number"]),
        ({"proposer": "ngram", "options": {"min_n": 5, "max_n": 2}}, ["min_n", "max_n"]),
        ({"proposer": "ngram", "options": 3}, ["'options' is 3", "dictionary"]),
        ({"proposer": "ngram", "options": {"min-n": 2, "min_n": 3}}, ["'options.min_n' is given twice, as 2 and as 3"]),
        ({"proposer": "ngram", "draft-budget-ms": 2, "draft_budget_ms": 3}, ["'draft_budget_ms' is given twice"]),
        ({"proposer": 3}, ["'proposer' is 3", "string"]),
        ({"num_speculative_tokens": 3}, ["'proposer' is missing"]),
    ],
    ids=str,
)
def test_one_line_names_key_value_and_what_is_allowed(raw: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SpecPluginError) as caught:
        resolve(SpecConfig.parse(raw))
    text = str(caught.value)
    assert isinstance(caught.value, ConfigError | RegistryError)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_host_keys_are_kept_and_said_to_be_ignored() -> None:
    config = SpecConfig.parse({"proposer": "ngram", "quantization": "fp8", "draft-tensor-parallel-size": 2})
    assert config.host == {"quantization": "fp8", "draft_tensor_parallel_size": 2}
    assert set(config.host) <= HOST_KEYS
    ignored = " ".join(resolve(config).ignored())
    assert "'quantization'" in ignored
    assert "'draft_tensor_parallel_size'" in ignored
    assert not resolve(SpecConfig.parse({"proposer": "ngram"})).ignored()


@pytest.mark.parametrize(
    ("raw", "ours"),
    [
        ({"proposer": "x"}, True),
        ({"pro-poser": "x"}, False),
        ({"method": "ngram"}, False),
        ({}, False),
        (None, False),
        ("proposer", False),
    ],
)
def test_only_the_key_proposer_makes_a_configuration_ours(raw: Any, ours: bool) -> None:
    assert names_a_proposer(raw) is ours
