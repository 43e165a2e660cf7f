"""`vllm serve` with a proposer, driven by the OpenAI client: what a user of the README's first minute does, and more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.common import LOGPROB_TOLERANCE
from tests.support.engine import EngineWorker, Result
from tests.support.serve import VllmServer, run_to_its_end

CONFIG: dict[str, Any] = {
    "proposer": "hybrid",
    "num_speculative_tokens": 5,
    "options": {"proposers": ["predicted", {"proposer": "ngram", "options": {"min_n": 1}}]},
}
NUM_TOKENS = 40
TEXT = "the cat sat on the mat, the cat sat on the mat, the cat"
MESSAGES: Any = [{"role": "user", "content": "round and round and round and round it goes"}]
IDS = {"return_token_ids": True}  # vLLM's own: bytes at random are poor text


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[VllmServer]:
    flags = ["--served-model-name", "tiny", "--speculative-config", json.dumps(CONFIG)]
    with VllmServer(tiny_model, flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: VllmServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60.0, max_retries=0) as connected:
        yield connected


@pytest.fixture(scope="module")
def plain(v1: EngineWorker, tiny_model: Path) -> EngineWorker:
    """Plain decoding in this test's own engine, which saves a second server."""
    v1.open(tiny_model)
    return v1


def counters(server: VllmServer) -> dict[str, float]:
    """vLLM's totals of speculation, as Prometheus reads them."""
    found = re.findall(r"^vllm:spec_decode_num_(\w+)_total{(.*)} (\S+)$", server.get("/metrics"), re.MULTILINE)
    return {name: float(value) for name, labels, value in found if "position" not in labels}


def plugin_counters(server: VllmServer) -> dict[str, float]:
    """The plugin's totals over positions and proposers; `plain` are the passes without drafts."""
    totals: dict[str, float] = {}
    pattern = r'^vllm:specplugin_(\w+)_total{engine="0",model_name="tiny"(.*)} (\S+)$'
    for name, labels, value in re.findall(pattern, server.get("/metrics"), re.MULTILINE):
        of = "plain" if 'proposer="none"' in labels else name
        totals[of] = totals.get(of, 0.0) + float(value)
    return totals


def complete(client: openai.OpenAI, extra: dict[str, Any] | None = None, **asked: Any) -> Any:
    fields = {"model": "tiny", "prompt": TEXT, "max_tokens": NUM_TOKENS, "temperature": 0.0} | asked
    return client.completions.create(**fields, extra_body=IDS | {"ignore_eos": True} | (extra or {}))


def chat(client: openai.OpenAI, extra: dict[str, Any] | None = None, **asked: Any) -> Any:
    fields = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": NUM_TOKENS, "temperature": 0.0} | asked
    return client.chat.completions.create(**fields, extra_body=IDS | {"ignore_eos": True} | (extra or {}))


def decode(plain: EngineWorker, prompt: list[int], **params: Any) -> Result:
    """What plain decoding answers."""
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True} | params
    (result,) = plain.generate([prompt], fields)
    return result


SEEDED = {"temperature": 0.6, "seed": 11}


@contextlib.contextmanager
def some_drafts(server: VllmServer) -> Iterator[None]:
    """Equal answers show nothing where nothing was drafted."""
    before = counters(server)
    yield
    after = counters(server)
    assert after["draft_tokens"] > before.get("draft_tokens", 0)


# -- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_chat(server: VllmServer, client: openai.OpenAI, plain: EngineWorker, sampling: dict[str, Any]) -> None:
    with some_drafts(server):
        answer = chat(client, logprobs=True, top_logprobs=2, **sampling)
    (choice,) = answer.choices
    expected = decode(plain, answer.prompt_token_ids, logprobs=2, **sampling)
    assert tuple(choice.token_ids) == expected.token_ids
    assert (choice.message.content, choice.finish_reason) == (expected.text, "length")
    assert answer.usage.completion_tokens == len(choice.logprobs.content) == NUM_TOKENS
    for entry, token, wanted in zip(choice.logprobs.content, expected.token_ids, expected.logprobs or (), strict=True):
        assert abs(entry.logprob - wanted[token].logprob) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        SEEDED,
        SEEDED | {"frequency_penalty": 1.0, "top_p": 0.9},
        {"logit_bias": {"32": -100}},
        SEEDED | {"min_p": 0.05, "logit_bias": {"101": 3}},
    ],
    ids=["greedy", "seeded", "penalty", "logit_bias", "min_p"],
)
def test_completions(server: VllmServer, client: openai.OpenAI, plain: EngineWorker, sampling: dict[str, Any]) -> None:
    beyond_openai = {key: sampling[key] for key in sampling if key == "min_p"}
    of_openai = {key: sampling[key] for key in sampling if key != "min_p"}
    with some_drafts(server):
        answer = complete(client, beyond_openai, logprobs=1, **of_openai)
    (choice,) = answer.choices
    asked = dict(sampling)
    if "logit_bias" in asked:
        asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
        assert 32 not in choice.token_ids
    expected = decode(plain, choice.prompt_token_ids, logprobs=1, **asked)
    assert tuple(choice.token_ids) == expected.token_ids
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    for logprob, token, wanted in zip(choice.logprobs.token_logprobs, expected.token_ids, expected.logprobs or (), strict=True):
        assert abs(logprob - wanted[token].logprob) < LOGPROB_TOLERANCE


def test_a_stop_string_cuts_accepted_drafts(client: openai.OpenAI) -> None:
    whole = complete(client).choices[0].text
    stop = next(letter for letter in whole[8:] if letter.isascii() and letter.isprintable())
    choice = complete(client, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_several_choices(server: VllmServer, client: openai.OpenAI, plain: EngineWorker) -> None:
    with some_drafts(server):
        answer = complete(client, n=2, **SEEDED)
    expected = decode(plain, answer.choices[0].prompt_token_ids, n=2, **SEEDED).completions
    assert [tuple(choice.token_ids) for choice in answer.choices] == [completion.token_ids for completion in expected]
    assert answer.choices[0].token_ids != answer.choices[1].token_ids


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_streams_say_the_same(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    at_once = complete(client, **sampling).choices[0]
    parts = [part.choices[0] for part in complete(client, stream=True, **sampling)]
    assert "".join(part.text for part in parts) == at_once.text
    assert [token for part in parts for token in part.token_ids or ()] == at_once.token_ids
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    assert len(parts) > 1

    said = chat(client, **sampling).choices[0]
    deltas = [part.choices[0] for part in chat(client, stream=True, **sampling) if part.choices]
    assert "".join(part.delta.content or "" for part in deltas) == said.message.content
    assert [part.finish_reason for part in deltas if part.finish_reason] == ["length"]


def test_requests_side_by_side_do_not_disturb_each_other(server: VllmServer, client: openai.OpenAI) -> None:
    """Ten at once, of all sorts, answered as they are one by one."""
    prompts = [list(range(40, 50 + number)) * 2 for number in range(10)]
    sampling: list[dict[str, Any]] = [{}, SEEDED] * 5
    alone = [complete(client, prompt=prompt, **asked) for prompt, asked in zip(prompts, sampling, strict=True)]

    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60.0, max_retries=0) as several:
            asking = [complete(several, prompt=prompt, **asked) for prompt, asked in zip(prompts, sampling, strict=True)]  # type: ignore[arg-type]
            return list(await asyncio.gather(*asking))

    with some_drafts(server):
        answers = asyncio.run(together())
    assert [one.choices[0].token_ids for one in answers] == [one.choices[0].token_ids for one in alone]


# -- speculation -------------------------------------------------------------------------------------------


def test_metrics_count_what_was_drafted_and_accepted(server: VllmServer, client: openai.OpenAI) -> None:
    before = counters(server)
    complete(client, max_tokens=64)
    after = counters(server)
    new = {name: after[name] - before.get(name, 0.0) for name in ("drafts", "draft_tokens", "accepted_tokens")}
    assert new["drafts"] > 0
    assert 0 < new["accepted_tokens"] <= new["draft_tokens"] <= CONFIG["num_speculative_tokens"] * new["drafts"]
    assert "proposer=hybrid, k=5, verifier=one_hot, model runner V1, control fixed, since" in server.log()


def test_the_plugins_metrics_and_what_an_answer_says(server: VllmServer, client: openai.OpenAI) -> None:
    """Prometheus shows them with vLLM's labels; an answer carries what vLLM's API has a field for, and nothing else of ours."""
    before = plugin_counters(server)
    answer = complete(client, max_tokens=64)
    after = plugin_counters(server)
    new = {name: after[name] - before.get(name, 0.0) for name in after}
    assert new["emitted_tokens"] + new["plain"] == 64
    said = answer.metrics["speculative_decoding"]
    assert said["num_spec_steps"] == new["passes"] > 0
    assert said["num_draft_tokens"] == new["verified_tokens"]
    assert said["num_accepted_draft_tokens"] == new["accepted_tokens"] > 0
    assert answer.kv_transfer_params is None
    # A stop string is found in the API server, another process than the one that counts.
    cut = complete(client, max_tokens=64, stop=[answer.choices[0].text[20]])
    later = plugin_counters(server)
    given = [counters["emitted_tokens"] + counters["plain"] for counters in (after, later)]
    assert given[1] - given[0] == cut.usage.completion_tokens < 64
    assert cut.metrics["speculative_decoding"]["num_spec_steps"] == later["passes"] - after["passes"]


def test_a_request_may_do_without_drafts(server: VllmServer, client: openai.OpenAI) -> None:
    """`vllm_xargs` carries text and numbers, so the plugin's object goes as JSON text."""
    before = counters(server)
    without = complete(client, {"vllm_xargs": {"specplugin": '{"enabled": false}'}}, max_tokens=64)
    assert counters(server) == before
    with_drafts = complete(client, {"vllm_xargs": {"specplugin": '{"max_draft_tokens": 1}'}}, max_tokens=64)
    after = counters(server)
    assert 0 < after["draft_tokens"] - before["draft_tokens"] == after["drafts"] - before["drafts"]
    assert with_drafts.choices[0].token_ids == without.choices[0].token_ids


def test_a_request_may_choose_its_drafter_and_bring_a_prediction(server: VllmServer, client: openai.OpenAI) -> None:
    """Of several requests at once, each as it likes; a prediction is most of the answer, so that few passes are left."""
    fields: dict[str, Any] = {"prompt": list(range(40, 60)), "max_tokens": 64}
    plain = complete(client, {"vllm_xargs": {"specplugin": '{"enabled": false}'}}, **fields).choices[0]
    expected = [*plain.token_ids[:30], 7, *plain.token_ids[31:]]
    says = [
        {"proposer": "predicted", "prediction": expected},
        {"proposer": "predicted"},
        {"proposer": "ngram", "max_draft_tokens": 2},
        {"prediction": "some text"},
    ]

    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60.0, max_retries=0) as several:
            bodies = [{"vllm_xargs": {"specplugin": json.dumps(said)}, "ignore_eos": True} | IDS for said in says]
            asking = [several.completions.create(model="tiny", temperature=0.0, **fields, extra_body=body) for body in bodies]
            return list(await asyncio.gather(*asking))

    for answer in asyncio.run(together()):
        assert answer.choices[0].token_ids == plain.token_ids
    before = counters(server)
    complete(client, {"vllm_xargs": {"specplugin": json.dumps(says[1])}}, **fields)
    assert counters(server) == before
    complete(client, {"vllm_xargs": {"specplugin": json.dumps(says[0])}}, **fields)
    after = counters(server)
    assert after["accepted_tokens"] - before["accepted_tokens"] >= 45
    assert after["drafts"] - before["drafts"] <= 15


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"proposer": "eagle"}', "'specplugin.proposer' is 'eagle'. This engine offers 'hybrid', 'predicted', 'ngram'."),
        ('{"max_draft_token": 1}', "did you mean 'max_draft_tokens'? Valid: enabled, max_draft_tokens, prediction, proposer."),
        ('{"prediction": [1, 100000]}', "'specplugin.prediction' holds the token id 100000"),
        ('{"enabled": "maybe"}', "'specplugin.enabled' is 'maybe'; expected true or false."),
        ("enabled=false", "'specplugin' is 'enabled=false', which is not JSON"),
        ({"enabled": False}, "vllm_xargs"),  # an object: vLLM's own refusal
    ],
)
def test_nonsense_in_a_request_is_its_own_fault(client: openai.OpenAI, said: Any, told: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, {"vllm_xargs": {"specplugin": said}})
    assert told in str(caught.value)
    assert complete(client, max_tokens=2).usage.completion_tokens == 2


# -- a start that is refused -------------------------------------------------------------------------------


def test_a_misspelt_proposer_ends_the_start_with_one_line(tiny_model: Path) -> None:
    code, output = run_to_its_end(tiny_model, ["--speculative-config", '{"proposer": "ngrm"}'])
    assert code != 0
    lines = [line for line in output.splitlines() if "'ngrm' is no proposer; did you mean 'ngram'? Installed: " in line]
    assert lines, output[-4000:]
