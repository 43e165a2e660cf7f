"""Drafts that vLLM's own drafters draw by chance: what they are verified against is what they were drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, SideBySide, assert_same
from tests.engine.test_statistics import ALPHA, NUM_TOKENS, PATIENCE, PROMPT, TEMPERATURE, VOCABULARY, K, p_value, p_values
from tests.support import natives
from tests.support.tiny import tiny_model

REQUESTS = {"v1": 8000, "v2": 400}  # V2's interpreter is slow
NARROW: dict[str, Any] = {"vocab_size": VOCABULARY, "logit_std": 2.0}


@pytest.fixture(scope="module")
def narrow(pytestconfig: pytest.Config) -> Path:
    """Where the narrow model and its drafters are made."""
    return pytestconfig.cache.mkdir("tiny")


def opened(engines: SideBySide, target: Path, **plugin: str) -> None:
    engines.open(
        K,
        plugin={"draft_sampling": "probabilistic", **plugin},
        model=str(target),
        skip_tokenizer_init=True,
        max_num_seqs=256,
        max_num_batched_tokens=1024,
        max_model_len=16,
    )


def draft_model(folder: Path) -> dict[str, Any]:
    return {"proposer": "draft_model", "model": str(tiny_model(folder, **NARROW, perturb=0.5))}


def eagle(folder: Path) -> dict[str, Any]:
    return {"proposer": "eagle", "model": str(natives.eagle(folder, **NARROW))}


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("drafter", [draft_model, eagle])
def test_the_distribution_is_the_targets(engines: SideBySide, narrow: Path, drafter: Any, verifier: str) -> None:
    """Case 4, over a vocabulary of 16: requests without a seed, every eighth of them greedy in the same batch."""
    if engines.runner == "v2" and (drafter, verifier) != (draft_model, "block"):
        pytest.skip("half a minute for each under the interpreter; the others differ from this one in nothing that V2 adds")
    opened(engines, tiny_model(narrow, **NARROW), verifier=verifier, **drafter(narrow))
    hot = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    asked = [hot | {"temperature": 0.0} if place % 8 == 7 else hot for place in range(REQUESTS[engines.runner])]
    results, counters = engines.draft([PROMPT] * len(asked), asked, timeout=PATIENCE)
    assert 0.02 < counters.accepted / counters.draft_tokens < 0.8, "drafts must be accepted as well as refused"
    outputs = [result.token_ids for result, each in zip(results, asked, strict=True) if each["temperature"]]
    found = p_values(engines, outputs)
    assert min(found.values()) > ALPHA, found


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_seeds_give_the_tokens_of_plain_decoding(engines: SideBySide, narrow: Path, verifier: str) -> None:
    """Beside requests that are judged; and those of which there is no choice take the whole way and arrive at it."""
    target = tiny_model(narrow)
    plugin = {"proposer": "draft_model", "model": str(tiny_model(narrow, perturb=0.1)), "draft_sampling": "probabilistic"}
    engines.open(K + 1, model=str(target), plugin=plugin | {"verifier": verifier})
    certain = {"temperature": 0.1, "top_k": 1, "ignore_eos": True}
    params = [each | {"max_tokens": 12} for each in (SEEDED, certain, SEEDED | {"min_p": 0.1}, GREEDY, certain, certain)]
    params[4] |= {"logit_bias": {65: 4.0}}
    prompts = PROMPTS[1:7]
    engines.inside("watch_the_judge")
    results, counters = engines.draft(prompts, params)
    assert_same(results, engines.baseline(prompts, params))
    assert counters.accepted > 12
    assert len({name for name, _ in engines.inside("judged")}) == 3


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_each_pass_draws_anew(engines: SideBySide, narrow: Path) -> None:
    """V2 keys a draft's noise by its place in the request: what was refused would come again, which `block` must not see."""
    target = tiny_model(narrow, **NARROW)
    opened(engines, target, proposer="draft_model", model=str(target), verifier="refuse_all")
    engines.inside("watch_native_seeds")
    hot = {"temperature": 2.0, "max_tokens": 10, "ignore_eos": True, "detokenize": False, "seed": 7}
    engines.draft([PROMPT], hot)
    seeds = engines.inside("native_seeds")
    assert len(seeds) >= 9
    assert len({7, *seeds}) == len(seeds) + 1


DRAWS = 40_000


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_what_v2_draws_from(engines: SideBySide, narrow: Path) -> None:
    """Logits in the model's own type and a request's temperature: the law that goes to the verifier is that of the drafts."""
    target = tiny_model(narrow, **NARROW)
    opened(engines, target, proposer="draft_model", model=str(target), verifier="refuse_all")
    for counts, law in zip(*engines.inside("native_draws", DRAWS), strict=True):
        assert p_value(counts, [probability * DRAWS for probability in law]) > ALPHA
