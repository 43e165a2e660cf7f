"""What one request may say to the plugin, as Python objects or as the JSON text that HTTP carries."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplugin import ConfigError
from vllm_specplugin.request_args import MAX_PREDICTION, Rules, draft_limit, pack, read, read_draft_limit


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"specplugin": None}, {"specplugin": {}}, {"specplugin": "{}"}])
def test_nothing_said(extra_args: Any) -> None:
    assert read(extra_args) == {}
    assert draft_limit(read(extra_args)) is None


def test_objects_and_json_text_say_the_same() -> None:
    said = {"enabled": True, "max_draft_tokens": 2, "of the proposer": {"its": ["own"]}}
    text = '{"enabled": true, "max_draft_tokens": 2, "of the proposer": {"its": ["own"]}}'
    assert read({"specplugin": said}) == read({"specplugin": text}) == said
    assert draft_limit(said) == 2


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ({"enabled": False}, 0),
        ({"enabled": 0}, 0),
        ({"enabled": 1}, None),
        ({"enabled": False, "max_draft_tokens": 3}, 0),
        ({"max_draft_tokens": 0}, 0),
        ({"max_draft_tokens": 7}, 7),
    ],
)
def test_draft_limit(said: dict[str, Any], limit: int | None) -> None:
    assert draft_limit(read({"specplugin": said})) == limit


@pytest.mark.parametrize("said", [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.int32).tobytes(), "JSON"], ids=repr)
def test_token_ids_are_an_array_however_they_were_written(said: Any) -> None:
    found = read({"specplugin": '{"prediction": [3, 1, 2]}' if said == "JSON" else {"prediction": said}})["prediction"]
    assert found.dtype == np.int32
    assert found.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    "text", ['{"prediction": [3, 70000], "enabled": true}', '{"prediction": "text"}', "{}", '{"max_draft_tokens": 1}']
)
def test_what_is_packed_says_the_same_without_a_list(text: str) -> None:
    said = read({"specplugin": text})
    packed = pack(said)
    assert all(isinstance(value, bytes | str | bool | int) for value in packed.values())
    again = read({"specplugin": packed})
    assert again.keys() == said.keys()
    assert all(np.array_equal(again[key], said[key]) for key in said)


def test_draft_limits_are_read_without_a_look_at_predictions() -> None:
    class Untouched(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("nobody asked for it")

        __len__ = __iter__  # type: ignore[assignment]

    assert read_draft_limit({"specplugin": {"enabled": False, "prediction": Untouched()}}) == 0
    assert read_draft_limit({"specplugin": '{"max_draft_tokens": 2, "prediction": [1]}'}) == 2
    assert read_draft_limit(None) is None
    with pytest.raises(ConfigError, match=r"'specplugin\.enabled' is 5"):
        read_draft_limit({"specplugin": {"enabled": 5}})


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ("yes", ["'specplugin' is 'yes'", "not JSON", '{"enabled": false}']),
        ("[" * 100_000, ["not JSON"]),
        ("[1]", ["'specplugin' is [1]", "an object"]),
        (5, ["'specplugin' is 5", "an object"]),
        ({"enabled": "no"}, ["'specplugin.enabled' is 'no'", "true or false"]),
        ({"enabled": 2}, ["'specplugin.enabled' is 2"]),
        ({"max_draft_tokens": -1}, ["'specplugin.max_draft_tokens' is -1", "from 0 on"]),
        ({"max_draft_tokens": True}, ["is True"]),
        ({"max_draft_tokens": 1.5}, ["is 1.5"]),
        ({"max_draft_tokens": None}, ["is None"]),
        ({"proposer": 3}, ["'specplugin.proposer' is 3", "a proposer's name"]),
        ({"prediction": None}, ["'specplugin.prediction' is None", "a text, or a list of token ids"]),
        ({"prediction": [1, -1]}, ["'specplugin.prediction' is [1, -1]", "from 0 on"]),
        ({"prediction": [1, True]}, ["is [1, True]"]),
        ({"prediction": [1.0]}, ["is [1.0]"]),
        ({"prediction": {"type": "content"}}, ["'specplugin.prediction'"]),
        ({"prediction": "x" * (MAX_PREDICTION + 1)}, [f"of {MAX_PREDICTION + 1} characters; at most {MAX_PREDICTION}"]),
        ({"prediction": [7] * (MAX_PREDICTION + 1)}, ["token ids; at most"]),
        ({"prediction": bytes(4 * MAX_PREDICTION + 4)}, [f"of {MAX_PREDICTION + 1} token ids; at most"]),
        ({"prediction": b"12345"}, ["a text, or a list of token ids"]),
        ({"prediction": b"\xff\xff\xff\xff"}, ["a text, or a list of token ids from 0 on"]),
        ({"prediction": [1 << 31]}, ["holds the token id 2147483648", "at most 2147483647"]),
    ],
    ids=lambda case: repr(case)[:60],
)
def test_one_line_names_key_value_and_what_is_allowed(said: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"specplugin": said})
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text
    assert len(text) < 200  # a client may send anything


@given(st.text() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_whatever_is_sent_is_read_or_refused(said: Any) -> None:
    try:
        assert isinstance(read({"specplugin": said}), dict)
    except ConfigError as error:
        assert str(error).startswith("'specplugin")  # noqa: PT017 - either way is fine


# -- what the configured proposer makes of it ----------------------------------------------------------------

PLAIN = Rules("ngram", vocab_size=100)
HYBRID = Rules("hybrid", parts=("predicted", "draft_model"), keys=("prediction",), vocab_size=100)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"enabled": False, "max_draft_tokens": 3},
        {"proposer": "hybrid"},
        {"proposer": "draft-model"},  # dashes and underscores are equal
        {"proposer": ""},
        {"prediction": "text", "proposer": "predicted"},
        {"prediction": [0, 99]},
        {"prediction": ""},
        {"prediction": []},
    ],
    ids=str,
)
def test_what_a_proposer_reads_may_be_said(said: dict[str, Any]) -> None:
    HYBRID.check(read({"specplugin": said}))


HALF = "\ud83d"
"""Of an emoji: what is left where a client cuts a text in the middle of one."""
THIRD_PARTY = Rules("copycat", keys=("hint", "prediction"))


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ({"prediction": f"cut {HALF}"}, [r"'specplugin.prediction' is 'cut \ud83d', which cannot be sent", "surrogates"]),
        ({"hint": HALF}, [r"'specplugin.hint' is '\ud83d'", "Expected whole characters"]),
        ({"hint": [{"deep": [HALF]}]}, ["'specplugin.hint'"]),
        ({"hint": {HALF: 1}}, ["'specplugin.hint'"]),
        ({"hint": 2**64}, ["'specplugin.hint' is 18446744073709551616", "integers of 64 bits"]),
        ({"hint": {"deep": -(2**63) - 1}}, ["'specplugin.hint'"]),
    ],
    ids=ascii,
)
def test_what_the_engine_cannot_be_sent_is_refused(said: dict[str, Any], parts: list[str], as_text: bool) -> None:
    """vLLM would fail after it has registered the request."""
    pytest.importorskip("msgspec", reason="what encodes vLLM's messages comes with it")
    with pytest.raises(ConfigError) as caught:
        THIRD_PARTY.read({"specplugin": json.dumps(said) if as_text else said})
    text = str(caught.value)
    assert all(part in text for part in parts), text
    text.encode()  # it is sent to the client
    assert len(text) < 300


@pytest.mark.parametrize("value", [object(), np.int64(3), {1, HALF}], ids=["object", "number of numpy", "set"])
def test_objects_that_messages_cannot_carry_are_refused(value: Any) -> None:
    pytest.importorskip("msgspec", reason="what encodes vLLM's messages comes with it")
    with pytest.raises(ConfigError, match=r"'specplugin\.hint' is .* cannot be sent to the engine"):
        THIRD_PARTY.read({"specplugin": {"hint": value}})


def test_what_is_nested_too_deeply_for_the_engine_is_refused() -> None:
    """Wherever json gets through with it: the engine encodes it further down the stack than it is looked at."""
    encode = pytest.importorskip("msgspec", reason="what encodes vLLM's messages comes with it").msgpack.encode
    passed = 0
    for depth in range(50, 1200, 10):
        try:
            said = THIRD_PARTY.read({"specplugin": f'{{"hint": {"[" * depth}{"]" * depth}}}'})
        except ConfigError:
            continue
        passed = depth

        def deeper(levels: int, said: dict[str, Any]) -> bytes:
            return deeper(levels - 1, said) if levels else encode([[[said]]])

        deeper(40, said)
    assert passed > 100


@pytest.mark.parametrize(
    "said",
    [
        {"prediction": "\U0001f600 whole", "max_draft_tokens": 2**70},
        {"prediction": [1, 2]},
        {"hint": [2**64 - 1, -(2**63), None, 0.5, {"x": "ä"}]},
        {"hint": np.arange(3)},
        {"hint": b"bytes"},
    ],
    ids=ascii,
)
def test_what_the_engine_can_be_sent_is_not_refused(said: dict[str, Any]) -> None:
    THIRD_PARTY.read({"specplugin": said})


def test_a_key_that_cannot_be_sent_back_is_named_all_the_same() -> None:
    with pytest.raises(ConfigError) as caught:
        PLAIN.read({"specplugin": {f"{HALF}\nä": 1}})
    assert str(caught.value).startswith(r"'specplugin.\ud83d\nä' is nothing that")
    str(caught.value).encode()


SHORT = Rules("predicted", keys=("prediction",), vocab_size=100, max_model_len=10)


@pytest.mark.parametrize(
    "said", [{"prediction": [1] * 10}, {"prediction": "x" * 160}, '{"prediction": "%s"}' % ("x" * 160)], ids=repr
)
def test_a_prediction_may_be_as_long_as_an_answer(said: Any) -> None:
    assert len(SHORT.read({"specplugin": said})["prediction"]) in (10, 160)


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ({"prediction": [1] * 11}, ["of 11 token ids; at most 10 (as max_model_len)"]),
        ({"prediction": bytes(44)}, ["of 11 token ids; at most 10"]),
        ({"prediction": "x" * 161}, ["of 161 characters; at most 160 (16 for each of max_model_len)"]),
        ("[" * 1185, ["of 1185 characters; at most 1184 (16 per token of max_model_len)", "Shorten 'prediction'"]),  # unparsed
        ({"prediction": [100]}, ["holds the token id 100", "from 0 to 99"]),
        ({"predicted": []}, ["'specplugin.predicted' is nothing that"]),
    ],
    ids=lambda case: repr(case)[:60],
)
def test_what_is_longer_than_any_answer_is_refused(said: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        SHORT.read({"specplugin": said})
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("rules", "said", "parts"),
    [
        (PLAIN, {"enabeld": False}, ["'specplugin.enabeld'", "'ngram'", "did you mean 'enabled'?", "Valid: enabled, max_draft"]),
        (PLAIN, {"x" * 1000: 1}, ["Valid: enabled, max_draft_tokens, proposer."]),
        (PLAIN, {"proposer": "eagle"}, ["'specplugin.proposer' is 'eagle'", "This engine offers 'ngram'."]),
        (PLAIN, {"prediction": "x"}, ["'specplugin.prediction'", "no use", "'ngram'", "'predicted'", "'hybrid'"]),
        (HYBRID, {"proposer": "predicte"}, ["did you mean 'predicted'?", "'hybrid', 'predicted', 'draft_model'"]),
        (HYBRID, {"proposer": "y" * 1000}, ["This engine offers"]),
        (HYBRID, {"prediction": [3, 100]}, ["holds the token id 100", "from 0 to 99"]),
        (HYBRID, {"prediction": [10**1000]}, ["holds the token id 1000"]),
        (HYBRID, {"predictions": "x"}, ["did you mean 'prediction'?", "Valid: enabled, max_draft_tokens, prediction, proposer."]),
        (Rules("predicted", keys=("prediction",), tokenizer=False), {"prediction": "x"}, ["'x', a text", "send token ids"]),
    ],
    ids=lambda case: repr(case)[:60],
)
def test_one_line_names_what_the_engine_has_no_use_for(rules: Rules, said: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        rules.check(read({"specplugin": said}))
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text
    assert len(text) < 300


def test_a_limit_beyond_any_is_packed_as_one_that_messages_can_carry() -> None:
    assert pack({"max_draft_tokens": 2**70}) == {"max_draft_tokens": 2**31 - 1}
    assert pack({"max_draft_tokens": 3}) == {"max_draft_tokens": 3}
