"""The verifiers that judge by probabilities, in the real engine: whatever can be told exactly is what plain decoding gives.

Greedy requests and seeded ones are plain decoding's to the token. So are *certain* ones, which are sampled without a seed, but
with top_k=1, so that after everything else that they ask for one token has all of the probability: they take the whole way
through a verifier, and it must arrive at that token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.common import (
    GREEDY,
    LOGPROB_TOLERANCE,
    PROMPTS,
    SEED,
    SEEDED,
    Counters,
    SideBySide,
    assert_same,
    assert_same_logprobs,
    check_that_padding_is_refused,
    prompt_of,
    script,
)
from tests.engine.test_parameters import ASKED, REGEX, SCHEMA
from tests.support.engine import Result
from tests.support.tiny import EOS

K = 4
NUM_TOKENS = 12
BLOCK = 32  # tokens per block of the KV cache

CERTAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 1, "ignore_eos": True}
"""Sampled, but there is no choice."""
HOT: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}

PLUGINS: dict[str, dict[str, Any]] = {
    "token": {"verifier": "token", "proposer": "sampled", "draft_sampling": "probabilistic"},
    "block": {"verifier": "block", "proposer": "sampled", "draft_sampling": "probabilistic"},
    "typical": {"verifier": "typical"},
    "one_hot": {"verifier": "one_hot", "proposer": "sampled", "draft_sampling": "probabilistic"},
}
ROOMY: dict[str, Any] = {"max_num_seqs": 96, "max_num_batched_tokens": 2048}


def drafts(verifier: str, place: int, prompt: list[int], result: Result) -> dict[str, Any]:
    """What to draft for the request at some place of a batch: by chance and without, right and wrong, all in one batch."""
    tokens = result.token_ids
    if verifier == "typical":
        return script(("oracle", "half_oracle", "random")[place % 3], prompt, tokens)
    if place % 2:
        return script(("oracle", "half_oracle")[place // 2 % 2], prompt, tokens)
    return script("sampled", prompt, tokens, trust=(0.9, 0.5)[place // 2 % 2])


# -- every parameter ---------------------------------------------------------------------------------------

NAMED: dict[str, dict[str, Any]] = {
    **ASKED,
    "regex": REGEX | {"ignore_eos": False, "max_tokens": 40},
    "json": SCHEMA | {"ignore_eos": False, "max_tokens": 40},
}
HOW: dict[str, dict[str, Any]] = {"greedy": GREEDY, "seeded": SEEDED, "certain": CERTAIN}


def asking(name: str, how: str) -> dict[str, Any]:
    asked = HOW[how] | {"max_tokens": NUM_TOKENS} | NAMED[name]
    if how == "greedy":
        asked["temperature"] = 0.0
    return asked | {"top_k": 1} if how == "certain" else asked


@dataclass(frozen=True)
class Outcome:
    """One request of a batch."""

    result: Result
    known: Result
    """Of plain decoding."""
    judged: bool
    accepted: int


def outcomes(
    engines: SideBySide, prompts: list[list[int]], params: list[dict[str, Any]], said: list[dict[str, Any]]
) -> list[Outcome]:
    """A batch through both engines."""
    known = engines.baseline(prompts, params)
    first = engines.inside("watch_the_judge")
    results, _ = engines.draft(prompts, [each | more for each, more in zip(params, said, strict=True)])
    judged = {int(name.partition("-")[0]) - first for name, _ in engines.inside("judged")}
    accepted = [0] * len(prompts)
    for names, _, counts in engines.inside("seen")["verdicts"]:
        for name, count in zip(names, counts, strict=True):
            if (place := int(name.partition("-")[0]) - first) >= 0:
                accepted[place] += count
    return [
        Outcome(result, wish, place in judged, accepted[place])
        for place, (result, wish) in enumerate(zip(results, known, strict=True))
    ]


Mixed = dict[tuple[str, str], Outcome]


@pytest.fixture(scope="module", params=["token", "block", "typical"])
def mixed(request: pytest.FixtureRequest, engines: SideBySide) -> Mixed:
    """Everything at once: each parameter greedily, with a seed and certain, in one batch of both engines."""
    verifier = request.param
    engines.open(K, plugin=PLUGINS[verifier], **ROOMY)
    # A lossy verifier judges what has a seed, too.
    cases = [(name, how) for name in NAMED for how in HOW if not (verifier == "typical" and how == "seeded")]
    prompts = [PROMPTS[1 + place % (len(PROMPTS) - 1)] for place in range(len(cases))]
    params = [asking(*case) for case in cases]
    known = engines.baseline(prompts, params)
    said = [drafts(verifier, place, *row) for place, row in enumerate(zip(prompts, known, strict=True))]
    return dict(zip(cases, outcomes(engines, prompts, params, said), strict=True))


@pytest.mark.parametrize("name", NAMED)
def test_as_plain_decoding(mixed: Mixed, name: str) -> None:
    """Tokens, reasons and log-probabilities."""
    for how in HOW:
        if (name, how) in mixed:
            assert_same([mixed[name, how].result], [mixed[name, how].known])


def test_who_is_judged(mixed: Mixed) -> None:
    """The certain ones, of whose drafts a good part was accepted; all others are walked.

    So are those with a grammar, unless the verifier is lossy: but for passes in which all of their drafts were cut off.
    """
    judged = {case for case, outcome in mixed.items() if outcome.judged}
    certain, grammars = ({(name, "certain") for name in names} for names in (NAMED, ("regex", "json")))
    lossy = ("regex", "seeded") not in mixed
    assert judged == certain if lossy else certain - grammars <= judged <= certain
    accepted = sum(outcome.accepted for outcome in mixed.values() if outcome.judged)
    assert accepted > len(certain - grammars) * NUM_TOKENS / 4


# -- grammars ----------------------------------------------------------------------------------------------

SAMPLES = {"v1": 600, "v2": 200}  # V2's interpreter is slow
LETTERS = HOT | {"structured_outputs": {"regex": "[ab]{4}"}, "ignore_eos": False, "max_tokens": 4}


def apart(engines: SideBySide) -> float:
    """By how many standard errors the letters of answers under a grammar differ from plain decoding's, at most over the places.

    Half of the drafts are an a, and nearly all others what the grammar forbids and cuts off.
    """
    prompts = [PROMPTS[2]] * SAMPLES[engines.runner]
    plain = engines.baseline(prompts, LETTERS)
    asked = LETTERS | script("sampled", PROMPTS[2], list(b"aaaa"), trust=0.5)
    drafted, counters = engines.draft(prompts, asked)
    assert 0 < counters.accepted < counters.draft_tokens
    found = []
    for place in range(4):
        shares = [sum(result.token_ids[place] == ord("a") for result in results) / len(results) for results in (plain, drafted)]
        mean = sum(shares) / 2
        found.append(abs(shares[0] - shares[1]) / (2 * max(mean * (1 - mean), 0.01) / len(prompts)) ** 0.5)
    return max(found)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_what_a_grammar_cuts_off_tilts_nothing(engines: SideBySide, verifier: str) -> None:
    engines.open(K, plugin=PLUGINS[verifier], **ROOMY)
    assert apart(engines) < 4.5


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_a_judge_who_does_not_know_what_was_cut_off_is_found(engines: SideBySide) -> None:
    """Negative control."""
    engines.open(K, plugin=PLUGINS["token"], **ROOMY)
    engines.inside("judge_grammars")
    found = apart(engines)
    engines.replaced()
    assert found > 6


# -- seeds, in every situation -----------------------------------------------------------------------------

SITUATIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "in_a_batch": {},
    "preempted": {"num_gpu_blocks_override": 9, "block_size": BLOCK, "max_model_len": 128},
    "cached": {"enable_prefix_caching": True, "block_size": BLOCK},
    "chunked": {"max_num_batched_tokens": 64},
}
LONG = 36  # tokens: enough for another block

SAME: list[dict[str, Any]] = [
    SEEDED,
    CERTAIN,
    SEEDED | {"seed": SEED + 1, "top_k": 40, "min_p": 0.02},
    GREEDY,
    CERTAIN,
    SEEDED,
    CERTAIN,
]
"""What must not depend on the situation; one hot request without a seed goes beside them."""


@pytest.fixture(scope="module")
def undisturbed(engines: SideBySide) -> list[Result]:
    """Plain decoding of SAME, each request alone."""
    engines.open(K, plugin=PLUGINS["token"])
    return [engines.plain.generate([prompt], params)[0] for prompt, params in zip(*same(), strict=True)]


def same() -> tuple[list[list[int]], list[dict[str, Any]]]:
    prompts = [prompt_of(length, length) for length in (40, 33, 70, 20, 65, 34, 5)]
    return prompts, [each | {"max_tokens": LONG} for each in SAME]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("verifier", ["token", "block", "one_hot"])
def test_the_situation_does_not_matter(engines: SideBySide, undisturbed: list[Result], verifier: str, situation: str) -> None:
    """A seed gives plain decoding's tokens, alone and in a batch, preempted, from cached prefixes, beside chunks of others."""
    prompts, params = same()
    known = undisturbed
    if (engines.runner, situation) == ("v1", "chunked"):
        # Stock V1 on the CPU dies of a seed beside chunks (see test_scheduling).
        kept = [place for place, each in enumerate(params) if each.get("seed") is None or each["temperature"] == 0.0]
        prompts, params, known = ([each[place] for place in kept] for each in (prompts, params, known))
    engines.open(K, plugin=PLUGINS[verifier], **SITUATIONS[situation])
    hot = HOT | {"max_tokens": LONG} | script("sampled")
    asked = [
        each | script("sampled", prompt, result.token_ids, trust=0.7)
        for each, prompt, result in zip(params, prompts, known, strict=True)
    ]
    before = Counters.read(engines.drafting.metrics())
    engines.inside("watch_the_judge")
    if situation == "alone":
        results = [engines.draft([prompt], each)[0][0] for prompt, each in zip(prompts, asked, strict=True)]
    else:
        results = engines.draft([*prompts, prompt_of(30)], [*asked, hot])[0][:-1]
        if situation == "cached":
            results = engines.draft([*prompts, prompt_of(30)], [*asked, hot])[0][:-1]
    counters = Counters.read(engines.drafting.metrics()).since(before)
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    assert counters.accepted > len(prompts) * LONG / 4
    # The certain ones; by `one_hot` only on V1 on a CPU, where the host's noise is slow.
    assert bool(engines.inside("judged")) == (verifier != "one_hot" or engines.runner == "v1")
    assert (counters.preemptions > 0) == (situation == "preempted")
    assert (counters.cache_hits > 0) == (situation == "cached")


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_fresh_engine_with_the_same_seed_repeats_itself(engines: SideBySide, verifier: str) -> None:
    """Requests without seeds draw from the engine's: the same again, and others with another one."""
    prompts = PROMPTS[1:5]
    asked = HOT | {"max_tokens": NUM_TOKENS} | script("sampled", sharpness=2.0)

    def outputs(seed: int) -> list[tuple[int, ...]]:
        engines.open(K, plugin=PLUGINS[verifier], seed=seed, again=True)
        return [result.token_ids for result in engines.draft(prompts, asked)[0]]

    first = outputs(0)
    assert outputs(0) == first
    assert all(here != there for here, there in zip(outputs(1), first, strict=True))


def test_completions_of_one_request_differ(engines: SideBySide) -> None:
    """n=4 without a seed: each completion has noise of its own, and follows the best tokens where there is no choice."""
    engines.open(K, plugin=PLUGINS["token"], **ROOMY)
    prompts = PROMPTS[1:3]
    known = engines.baseline(prompts, CERTAIN | {"max_tokens": NUM_TOKENS})
    said = [script("sampled", prompt, result.token_ids, trust=0.8) for prompt, result in zip(prompts, known, strict=True)]
    for each in (CERTAIN, HOT):
        results, counters = engines.draft(prompts, [each | {"n": 4, "max_tokens": NUM_TOKENS} | more for more in said])
        assert counters.draft_tokens > 0
        for result, wish in zip(results, known, strict=True):
            outputs = {completion.token_ids for completion in result.completions}
            assert outputs == {wish.token_ids} if each is CERTAIN else len(outputs) == 4


# -- where a request ends ----------------------------------------------------------------------------------

PROMPT = list(b"tell me")


@pytest.mark.parametrize("verifier", ["token", "block", "typical"])
def test_the_end_inside_the_drafts(engines: SideBySide, verifier: str) -> None:
    """Case 7: what is drafted and accepted beyond EOS, a stop token or max_tokens is neither said nor counted."""
    engines.open(K, plugin=PLUGINS[verifier], **ROOMY)
    mode = "oracle" if verifier == "typical" else "sampled"
    for asked, length, reason in (
        ({"ignore_eos": False, "min_tokens": 2, "logit_bias": {EOS: 100.0}}, 3, "stop"),
        ({"ignore_eos": False, "min_tokens": 10, "logit_bias": {EOS: 100.0}}, 11, "stop"),
        ({"max_tokens": 2}, 2, "length"),
        ({"max_tokens": 4}, 4, "length"),
    ):
        params = CERTAIN | {"max_tokens": NUM_TOKENS} | asked
        known = engines.baseline([PROMPT], params)
        longer = (*known[0].token_ids, EOS, 5, 6, 7)
        results, counters = engines.draft([PROMPT], params | script(mode, PROMPT, longer, trust=1.0))
        assert_same(results, known)
        assert (len(results[0].token_ids), results[0].finish_reason) == (length, reason)
        assert counters.generated == length
        assert counters.draft_tokens >= counters.accepted >= length // 2


EDGE = 100


@pytest.mark.parametrize("verifier", ["token", "block", "typical"])
def test_the_edge_of_max_model_len(engines: SideBySide, verifier: str) -> None:
    """Case 8: no token at or beyond the edge; a short neighbour keeps its drafts."""
    engines.open(K, plugin=PLUGINS[verifier], max_model_len=EDGE)
    lengths = list(range(EDGE - 1, EDGE - K - 3, -1))
    prompts = [*(prompt_of(length, length) for length in lengths), prompt_of(5)]
    params = [CERTAIN | {"max_tokens": 20}] * len(prompts)
    known = engines.baseline(prompts, params)
    said = [drafts(verifier, 2 * place, *row) for place, row in enumerate(zip(prompts, known, strict=True))]
    found = outcomes(engines, prompts, params, said)
    assert_same([outcome.result for outcome in found], known)
    assert [len(outcome.result.token_ids) for outcome in found] == [*(EDGE - length for length in lengths), 20]
    assert found[-1].judged
    assert found[-1].accepted > 20 / 4


@pytest.mark.parametrize("verifier", ["token", "block", "typical"])
def test_a_request_of_one_new_token_joins_a_batch(engines: SideBySide, verifier: str) -> None:
    """vLLM fills its first pass up with k drafts that nobody made, and that are no tokens."""
    engines.open(K, plugin=PLUGINS[verifier])
    mode = "oracle" if verifier == "typical" else "sampled"
    always = CERTAIN | {"allowed_token_ids": [0]}
    engines.inside("add", "long", [3, 4, 5], always | script(mode, [3, 4, 5], [0] * 40, trust=1.0) | {"max_tokens": 40})
    for _ in range(3):
        engines.inside("step_once")
    check_that_padding_is_refused(engines, always | {"max_tokens": 3})
    ended = engines.inside("run_to_the_end")
    assert sorted(ended.values()) == [((0,) * 3, "length"), ((0,) * 40, "length")]


# -- log-probabilities -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["token", "block", "typical"])
def test_log_probabilities_are_the_models(engines: SideBySide, verifier: str) -> None:
    """Case 10: what comes with judged tokens, drafted or not, is what the model says after the tokens before them."""
    engines.open(K, plugin=PLUGINS[verifier], **ROOMY)
    prompts = PROMPTS[1:6]
    greedy = engines.baseline(prompts, GREEDY | {"max_tokens": NUM_TOKENS})
    said = [drafts(verifier, 2 * place, *row) for place, row in enumerate(zip(prompts, greedy, strict=True))]
    asked = HOT | {"max_tokens": NUM_TOKENS, "logprobs": 5, "prompt_logprobs": 3}
    results, counters = engines.draft(prompts, [asked | more for more in said])
    assert 0 < counters.accepted < counters.draft_tokens
    whole = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]
    read = engines.baseline(whole, GREEDY | {"max_tokens": 1, "prompt_logprobs": 5})
    for prompt, result, wish in zip(prompts, results, read, strict=True):
        assert result.logprobs is not None
        assert wish.prompt_logprobs is not None
        assert len(result.logprobs) == len(result.token_ids) == NUM_TOKENS
        assert_same_logprobs(result.logprobs, wish.prompt_logprobs[len(prompt) :])
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(prompt)


@pytest.mark.parametrize("verifier", PLUGINS)
def test_processed_log_probabilities(engines: SideBySide, verifier: str) -> None:
    """With logprobs_mode="processed_logprobs": what plain decoding would say after the same tokens, given the same wishes."""
    engines.open(K, plugin=PLUGINS[verifier], logprobs_mode="processed_logprobs", **ROOMY)
    prompts = PROMPTS[1:5]
    asked = HOT | {"top_k": 7, "temperature": 0.8, "logit_bias": {65: 3.0}, "logprobs": 3}
    greedy = engines.baseline(prompts, GREEDY | {"max_tokens": NUM_TOKENS})
    said = [drafts(verifier, 2 * place, *row) for place, row in enumerate(zip(prompts, greedy, strict=True))]
    results, counters = engines.draft(prompts, [asked | {"max_tokens": NUM_TOKENS} | more for more in said])
    assert 0 < counters.accepted < counters.draft_tokens
    prefixes = [
        [*prompt, *result.token_ids[:place]]
        for prompt, result in zip(prompts, results, strict=True)
        for place in range(NUM_TOKENS)
    ]
    known = iter(engines.baseline(prefixes, asked | {"max_tokens": 1, "logprobs": 7}))
    for result in results:
        assert result.logprobs is not None
        for token, entries in zip(result.token_ids, result.logprobs, strict=True):
            (wish,) = next(known).logprobs or ()
            assert token in wish, "a token that top-k leaves out"
            for each, entry in entries.items():
                assert abs(entry.logprob - wish[each].logprob) < LOGPROB_TOLERANCE
                assert entry.rank == wish[each].rank


# -- scheduling ahead --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
@pytest.mark.parametrize("verifier", ["token", "block", "typical"])
def test_asynchronous_scheduling(engines: SideBySide, verifier: str) -> None:
    """Every pass is k drafts long, of which those that only fill it up are neither accepted nor weighed."""
    engines.open(K, plugin=PLUGINS[verifier], force_async=True)
    assert engines.inside("scheduler") == "AsyncScheduler"
    params = [each | {"max_tokens": NUM_TOKENS} for each in (CERTAIN, GREEDY, CERTAIN, CERTAIN, CERTAIN, CERTAIN, CERTAIN)]
    if verifier != "typical":
        params[3] = SEEDED | {"max_tokens": NUM_TOKENS}
    params[5] |= {"allowed_token_ids": [0]}  # rows are filled up with this token: a filler taken for a draft would be right
    prompts = PROMPTS[1 : 1 + len(params)]
    known = engines.baseline(prompts, params)
    said = [drafts(verifier, place, *row) for place, row in enumerate(zip(prompts, known, strict=True))]
    said[5] = script("constant", token=0)
    said[5]["extra_args"]["specplugin"]["max_draft_tokens"] = 1
    found = outcomes(engines, prompts, params, said)
    assert_same([outcome.result for outcome in found], known)
    assert {place for place, outcome in enumerate(found) if outcome.judged} >= {0, 2, 4, 5, 6}
    assert found[0].accepted > NUM_TOKENS / 4
    assert found[5].accepted == NUM_TOKENS // 2
