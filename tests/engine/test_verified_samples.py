"""Verifiers that judge by probabilities, where only many samples can tell: bars, distributions, how much is accepted.

The exact counterparts are in tests/quality (the rules) and test_judged_rows (what they are given).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import PROMPTS, Counters, SideBySide, script
from tests.engine.test_statistics import (
    ALPHA,
    NUM_TOKENS,
    PATIENCE,
    PROMPT,
    TEMPERATURE,
    VOCABULARY,
    opened,
    p_values,
)
from tests.support.tiny import tiny_model as make_tiny_model

SAMPLED: dict[str, Any] = {"proposer": "sampled", "draft_sampling": "probabilistic"}


@pytest.fixture(scope="module")
def narrow_model(pytestconfig: pytest.Config) -> Path:
    return make_tiny_model(pytestconfig.cache.mkdir("tiny"), vocab_size=VOCABULARY, logit_std=2.0)


def narrow(engines: SideBySide, model: Path, k: int, plugin: dict[str, Any]) -> None:
    """Open both engines on the model of 16 tokens, for many requests at a time."""
    size = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 64}
    engines.open(k, plugin=plugin, model=str(model), skip_tokenizer_init=True, **size)


# -- bars --------------------------------------------------------------------------------------------------

MIN_P = 0.3
DRAWS = 50_000
LONG = 50  # tokens per request
BANNED = 7
# of a ratio of probabilities, for float32's last bits
RATIO_TOLERANCE = 1e-3


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_what_is_barred_never_appears(engines: SideBySide, narrow_model: Path, verifier: str) -> None:
    """Case 5, in 50,000 draws with min_p and a bias of -100: never a token below the threshold, never the banned one.

    The drafts are drawn from laws that know nothing of either, so most of what they offer is barred.
    """
    narrow(engines, narrow_model, 4, {"verifier": verifier, **SAMPLED})
    # Raw log-probabilities of the two best tokens beside what was drawn: one of them is not banned.
    asked = {"temperature": TEMPERATURE, "max_tokens": LONG, "ignore_eos": True, "detokenize": False, "logprobs": 2}
    requests = DRAWS // LONG // 2

    def barred(more: dict[str, Any], requests: int) -> tuple[int, int, Counters]:
        """How many tokens lie below MIN_P of the best unbanned one, how often the banned one appears, and the metrics."""
        results, counters = engines.draft([PROMPT] * requests, asked | script("sampled") | more, timeout=PATIENCE)
        below = banned = 0
        for result in results:
            for token, entries in zip(result.token_ids, result.logprobs or (), strict=True):
                best = max(entry.logprob for each, entry in entries.items() if each != BANNED or "logit_bias" not in more)
                below += (best - entries[token].logprob) / TEMPERATURE > -math.log(MIN_P) + RATIO_TOLERANCE
                banned += token == BANNED
        assert sum(len(result.token_ids) for result in results) == requests * LONG
        return below, banned, counters

    below, banned, _ = barred({}, 40)
    assert below > 40 * LONG / 10, "min_p has nothing to do here"
    assert banned > 40 * LONG / 100, "the banned token would hardly come up anyhow"
    total = 0
    for more in ({"min_p": MIN_P}, {"min_p": MIN_P, "logit_bias": {BANNED: -100.0}}):
        below, banned, counters = barred(more, requests)
        assert below == 0
        assert (banned > 0) == ("logit_bias" not in more)
        assert 0 < counters.accepted < counters.draft_tokens / 2
        total += counters.generated
    assert total == DRAWS


# -- how much is accepted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_block_accepts_more_than_token(engines: SideBySide, narrow_model: Path) -> None:
    """On the same requests. Per pass it never accepts less in expectation; here the gain is far above the noise."""
    k, requests = 4, 2000
    accepted, spread = {}, {}
    for verifier in ("token", "block"):
        narrow(engines, narrow_model, k, {"verifier": verifier, **SAMPLED})
        asked = {"temperature": 2.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
        _, counters = engines.draft([PROMPT] * requests, asked | script("sampled", sharpness=0.3), timeout=PATIENCE)
        # The chance that a pass accepts i drafts or more, of passes that were given k; shorter ones do not occur.
        assert counters.draft_tokens == k * counters.drafts
        reached = [count / counters.drafts for count in counters.by_position]
        accepted[verifier] = sum(reached)
        square = sum((2 * place + 1) * chance for place, chance in enumerate(reached))
        spread[verifier] = (square - accepted[verifier] ** 2) / counters.drafts
    noise = math.sqrt(sum(spread.values()))  # passes are not quite independent, which five times it allows for
    assert accepted["block"] > accepted["token"] + 5 * noise, (accepted, noise)


# -- wrong probabilities -----------------------------------------------------------------------------------

FAULTS = {
    "nan": "bad_probabilities",
    "half": "bad_probabilities",  # they sum to 0.5
    "impossible": "bad_probabilities",  # 0 for the very token that was drafted
    "shape": "bad_shape",
}
"""What is wrong with them, and what is counted for it."""
ROUNDED = ["bfloat16", "float16", "scaled"]
"""Right but for their sums, which miss 1 by what a narrow type rounds away (`scaled`: 0.995)."""


@pytest.mark.parametrize("flaw", [*FAULTS, *ROUNDED])
def test_wrong_probabilities(engines: SideBySide, flaw: str) -> None:
    """Case 11: the fault is counted, nobody's answer changes; the row with it is not judged, the others are."""
    engines.open(4, plugin={"verifier": "token", **SAMPLED}, max_num_seqs=8)
    certain = {"temperature": 1.0, "top_k": 1, "ignore_eos": True, "max_tokens": 10}  # judged, but there is no choice
    prompts = PROMPTS[1:4]
    known = engines.baseline(prompts, certain)
    said = [
        script("sampled", prompt, result.token_ids, trust=0.8, flaw=flaw if place == 0 else None)
        for place, (prompt, result) in enumerate(zip(prompts, known, strict=True))
    ]
    before = engines.inside("guard")["faults"]
    start = len(engines.drafting.log())
    first = engines.inside("watch_the_judge")
    results, counters = engines.draft(prompts, [certain | each for each in said])
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    now = {kind: count - before.get(kind, 0) for kind, count in engines.inside("guard")["faults"].items()}
    assert {kind for kind, count in now.items() if count} == ({FAULTS[flaw]} if flaw in FAULTS else set())
    assert "ERROR" not in engines.drafting.log()[start:]
    judged = {int(name.partition("-")[0]) - first for name, _ in engines.inside("judged")}
    assert judged == ({1, 2} if flaw in FAULTS else {0, 1, 2})
    # Where a row has bad probabilities its drafts are verified by samples; a row whose shape is wrong has none.
    assert counters.accepted > (len(prompts) - (flaw == "shape")) * 10 / 4


def test_a_verifier_that_needs_no_probabilities(engines: SideBySide) -> None:
    """Somebody's own: it judges drafts without any, but not those drawn from what nobody knows; walked ones may be accepted."""
    engines.open(4, plugin=SAMPLED | {"verifier": "with_or_without"}, max_num_seqs=8)
    certain = {"temperature": 1.0, "top_k": 1, "ignore_eos": True, "max_tokens": 10}
    prompts = PROMPTS[1:4]
    known = engines.baseline(prompts, certain)
    tokens = [result.token_ids for result in known]
    said = [
        script("sampled", prompts[0], tokens[0], trust=1.0, flaw="nan"),
        script("oracle", prompts[1], tokens[1]),
        script("sampled", prompts[2], tokens[2], trust=1.0),
    ]
    first = engines.inside("watch_the_judge")
    results, counters = engines.draft(prompts, [certain | each for each in said])
    assert [result.token_ids for result in results] == tokens
    assert {int(name.partition("-")[0]) - first for name, _ in engines.inside("judged")} == {1, 2}
    assert counters.accepted == 8  # of the one that was walked: two passes of four drafts


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
@pytest.mark.parametrize("flaw", [*FAULTS, *ROUNDED])
def test_wrong_probabilities_leave_the_distribution_alone(engines: SideBySide, narrow_model: Path, flaw: str) -> None:
    """Half of the requests have them, all are answered as the target would."""
    opened(engines, narrow_model, "block", **SAMPLED)
    kinds = [script("sampled", sharpness=1.5, flaw=each) for each in (flaw, None)]
    asked = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    requests = 4000
    results, counters = engines.draft(
        [PROMPT] * requests, [asked | kinds[place % 2] for place in range(requests)], timeout=PATIENCE
    )
    assert counters.accepted > requests / 20
    found = p_values(engines, [result.token_ids for result in results])
    assert min(found.values()) > ALPHA, found
