"""What one request may say to the plugin, as Python objects or as the JSON text that HTTP carries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplugin import ConfigError
from vllm_specplugin.request_args import draft_limit, read


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
    ],
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
