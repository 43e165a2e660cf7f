"""What a request can ask for beyond test_parameters: forms of output, rarer ways to bound it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.common import GREEDY, LOGPROB_TOLERANCE, PROMPTS, SEEDED, SideBySide, assert_same, script
from tests.engine.test_verifiers import CERTAIN, HOW, PLUGINS, ROOMY, Mixed, drafts, outcomes
from tests.support.engine import EngineError
from tests.support.tiny import BOS

K = 4
NUM_TOKENS = 12

LETTERS: dict[str, Any] = {"allowed_token_ids": list(b"ABCD")}  # so that the text of an output is not in want of characters
OF_TOKEN_IDS = ("logprob_token_ids", "logprob_token_ids_and_logprobs")
OTHERS: dict[str, dict[str, Any]] = {
    "flat_logprobs": {"flat_logprobs": True, "logprobs": 2, "prompt_logprobs": 2},
    "logprob_token_ids": {"logprob_token_ids": [65, 3, 210]},
    "logprob_token_ids_and_logprobs": {"logprob_token_ids": [65, 3, 210], "logprobs": 3},
    "stop": LETTERS | {"stop": ["AB", "BA", "CD", "DDD"]},
    "include_stop_str_in_output": LETTERS | {"stop": ["AB", "BA", "CD", "DDD"], "include_stop_str_in_output": True},
    "detokenize": {"detokenize": False},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {BOS: 6.0}},
    "spaces_between_special_tokens": {
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {BOS: 6.0},
    },
    "stream_interval": {"stream_interval": 3},
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "watermarking": {"watermarking": True},  # which needs an engine that marks
    "choice": {"structured_outputs": {"choice": ["foo", "barbaz", "fooling"]}, "ignore_eos": False},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "ab" | "cd" root'}, "ignore_eos": False},
    "json_object": {"structured_outputs": {"json_object": True}, "ignore_eos": False},
}


def opened(engines: SideBySide, verifier: str = "token", **engine: Any) -> SideBySide:
    engines.open(K, plugin=PLUGINS[verifier], **engine)
    return engines


@pytest.fixture(scope="module", params=PLUGINS)
def mixed(request: pytest.FixtureRequest, engines: SideBySide) -> Mixed:
    """All of them with one verifier in one batch: greedily, with a seed, and certain (which are judged)."""
    verifier = request.param
    opened(engines, verifier, **ROOMY)
    groups = [list(OTHERS)]
    if engines.runner == "v1":
        # Stock V1 gives the columns of logprob_token_ids to everybody in the batch.
        groups = [[name for name in OTHERS if name not in OF_TOKEN_IDS], *([name] for name in OF_TOKEN_IDS)]
    found: Mixed = {}
    for names in groups:
        cases = [(name, how) for name in names for how in HOW if not (verifier == "typical" and how == "seeded")]
        params = [HOW[how] | {"max_tokens": NUM_TOKENS} | OTHERS[name] for name, how in cases]
        prompts = [PROMPTS[1 + place % (len(PROMPTS) - 1)] for place in range(len(cases))]
        known = engines.baseline(prompts, params)
        said = [drafts(verifier, place, *row) for place, row in enumerate(zip(prompts, known, strict=True))]
        found |= dict(zip(cases, outcomes(engines, prompts, params, said), strict=True))
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_as_plain_decoding(mixed: Mixed, name: str) -> None:
    found = [mixed[name, how] for how in HOW if (name, how) in mixed]
    assert_same([outcome.result for outcome in found], [outcome.known for outcome in found])
    assert any(outcome.accepted for outcome in found)


def test_who_is_judged(mixed: Mixed, request: pytest.FixtureRequest, engines: SideBySide) -> None:
    """The certain ones, but where a grammar has cut all drafts off; with `one_hot` on V1 on a CPU alone."""
    certain = {(name, "certain") for name in OTHERS}
    judged = {case for case, outcome in mixed.items() if outcome.judged}
    walks = "one_hot" in request.node.callspec.id and engines.runner == "v2"
    grammars = {(name, how) for name, how in certain if "structured_outputs" in OTHERS[name]}
    assert judged == set() if walks else certain - grammars <= judged <= certain


REPETITIVE: dict[str, Any] = {"logit_bias": {65: 50.0}}


@pytest.mark.parametrize("verifier", PLUGINS)
def test_repetition_detection(engines: SideBySide, verifier: str) -> None:
    """The request ends at the same repetition, though it may be in the middle of a pass."""
    opened(engines, verifier)
    mode = "oracle" if verifier == "typical" else "sampled"
    params = [each | REPETITIVE | {"max_tokens": NUM_TOKENS} for each in (GREEDY, SEEDED, CERTAIN)]
    prompts = PROMPTS[1:4]
    asked = [each | script(mode, prompt, [65] * NUM_TOKENS, trust=0.9) for each, prompt in zip(params, prompts, strict=True)]
    for count in range(4, 8):
        detection = {"max_pattern_size": 2, "min_count": count}
        known = engines.plain.call("tests.engine.inside:until_it_repeats_itself", prompts, params, detection)
        assert {(len(tokens), reason) for tokens, reason, _ in known} == {(count, "repetition")}
        assert engines.inside("until_it_repeats_itself", prompts, asked, detection) == known


SCORED: dict[str, Any] = GREEDY | {"max_tokens": 3, "prompt_logprob_token_ids": [[5, 6, 7]] * 6}


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_prompt_logprob_token_ids(engines: SideBySide) -> None:
    """They are read while the prompt is, where nothing is drafted."""
    opened(engines)
    prompt = PROMPTS[2]
    known = engines.plain.call("tests.engine.inside:scores_of_prompt", prompt, SCORED)
    scores = engines.inside("scores_of_prompt", prompt, SCORED | script("constant", token=5))
    assert len(scores) == len(known) == len(prompt) - 1
    for row, wish in zip(scores, known, strict=True):
        assert row == pytest.approx(wish, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
@pytest.mark.parametrize("verifier", PLUGINS)
def test_thinking_token_budget(engines: SideBySide, verifier: str) -> None:
    """V2 forces the end of thinking ('>') at the token that exceeds the budget, wherever in a pass it lies."""
    opened(engines, verifier, reasoning_config={"reasoning_start_str": "<", "reasoning_end_str": ">"})
    start, end = b"<>"
    asked = {"max_tokens": NUM_TOKENS, "logit_bias": {end: -100.0}, "logprobs": 2}
    places, budgets = (0, 3, 6), (0, 3, 6, 6)
    params = [
        (CERTAIN if place % 2 or verifier == "typical" else SEEDED) | asked | {"thinking_token_budget": budget}
        for place, budget in enumerate(budgets)
    ]
    prompts = [[1, 2, start], [1, 2, start], [1, 2, start], [start, 5, 7, 9]]
    known = engines.baseline(prompts, params)
    assert [result.token_ids.index(end) for result in known] == [*places, 3]  # the last prompt has thought for three already
    said = [drafts(verifier, 2 * place, *row) for place, row in enumerate(zip(prompts, known, strict=True))]
    results, counters = engines.draft(prompts, [each | more for each, more in zip(params, said, strict=True)])
    assert_same(results, known)
    assert counters.accepted > NUM_TOKENS


# -- what is refused ---------------------------------------------------------------------------------------


def test_what_is_refused(engines: SideBySide) -> None:
    """One request is refused with a message that names what it asked for; the engine goes on."""
    opened(engines)
    refused = {"trace_decode_token_ids": GREEDY | {"trace_decode_token_ids": [1, 2, 3]}}
    if engines.runner == "v1":
        refused["prompt_logprob_token_ids"] = SCORED
    for name, params in refused.items():
        with pytest.raises(EngineError, match=name):
            engines.draft([PROMPTS[2]], params)
    params = CERTAIN | {"max_tokens": 4}
    assert_same(engines.draft([PROMPTS[2]], params | script("sampled"))[0], engines.baseline([PROMPTS[2]], params))


def test_an_engine_that_marks_its_text(engines: SideBySide) -> None:
    """vLLM's watermarking goes with its own drafters only: refused at start."""
    with pytest.raises(EngineError, match=r"[Ww]atermark"):
        engines.open(K, plugin=PLUGINS["token"], watermark_config={"key": 7}, again=True)
