"""Several proposers in the real engine: the same tokens, whoever drafts, and a drafter with a KV cache that misses nothing.

What single requests say is tested along the way: requests of one batch each have their own drafter, or none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.common import GREEDY, SEEDED, SideBySide, assert_same, prompt_of
from tests.engine.test_native_sampling import NARROW, opened
from tests.engine.test_statistics import (
    ALPHA,
    NUM_TOKENS,
    PATIENCE,
    PROMPT,
    TEMPERATURE,
    VOCABULARY,
    next_token_distributions,
    p_values,
)
from tests.support import natives
from tests.support.engine import EngineError
from tests.support.heads import fitted_medusa
from tests.support.tiny import tiny_model as make_tiny_model

K = 3
LENGTH = {"v1": 40, "v2": 14}  # tokens per request; V2's interpreter is slow
REPEATED = [[5, 6, 7, 8, 9] * 4, [40, 41] * 8, [9, 9, 9, 9]]
"""Prompts that n-grams find something in from the first."""
NGRAM = {"proposer": "ngram", "options": {"min_n": 1}}


@pytest.fixture(scope="module")
def tiny(pytestconfig: pytest.Config) -> Path:
    """Where models and their drafters are made."""
    return pytestconfig.cache.mkdir("tiny")


def hybrid(*proposers: Any, model: Path | None = None, **keys: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": str(model)}
    return {"proposer": "hybrid", "options": {"proposers": list(proposers)}, **named, **keys}


def says(**said: Any) -> dict[str, Any]:
    return {"extra_args": {"specplugin": said}}


def test_ngram_and_eagle(engines: SideBySide, tiny: Path) -> None:
    """Greedy, seeded and judged requests, each with its own choice of drafter; EAGLE's drafts are drawn by chance."""
    head = natives.eagle(tiny, fitted=True, layers=1)
    plugin = hybrid(NGRAM, "eagle", model=head, draft_sampling="probabilistic")
    engines.open(K, model=str(natives.shallow(tiny)), plugin=plugin)
    assert engines.inside("guard")["faults"] == {}
    certain = {"temperature": 0.1, "top_k": 1, "ignore_eos": True}
    params = [
        GREEDY,
        GREEDY | says(proposer="eagle"),
        GREEDY | says(proposer="ngram"),
        SEEDED,
        certain | says(proposer="eagle"),
        certain | says(proposer="ngram"),
        GREEDY | says(enabled=False),
        GREEDY | says(max_draft_tokens=1),
    ]
    params = [each | {"max_tokens": LENGTH[engines.runner]} for each in params]
    prompts = [*REPEATED, prompt_of(20), REPEATED[0], REPEATED[1], prompt_of(7), prompt_of(5)]
    known = engines.baseline(prompts, [{key: each[key] for key in each if key != "extra_args"} for each in params])
    engines.inside("watch_sources")
    engines.inside("watch_the_judge")
    results, counters = engines.draft(prompts, params)
    assert_same(results, known)
    judged = {name for name, _ in engines.inside("judged")}
    assert len(judged) > (engines.runner == "v1"), "beside drafts that were drawn n-grams are one-hot"
    found = engines.inside("by_source")
    assert set(found) == {"ngram", "eagle"}
    assert sum(tested for tested, _ in found.values()) == counters.draft_tokens
    assert sum(accepted for _, accepted in found.values()) >= counters.accepted  # some lie beyond a request's last token
    assert found["ngram"][1] > 0
    assert found["eagle"][1] >= 0.4 * found["eagle"][0]  # half as by itself for greedy requests, fewer of those that sample
    assert engines.inside("guard")["faults"] == {}


def test_ngram_and_medusa(engines: SideBySide, tiny_model: Path) -> None:
    """Heads that know some texts, beside texts that they do not know; k is larger than the number of heads."""
    length = LENGTH[engines.runner]
    prompts = [prompt_of(size, size) for size in (5, 33)]
    heads = fitted_medusa(tiny_model, [prompt_of(size, size) for size in (5, 33, 65, 20, 70, 3)], 40, 4, None)
    engines.open(6, plugin=hybrid(NGRAM, "medusa", model=heads), force_async=engines.runner == "v2")
    engines.inside("watch_sources")
    params = GREEDY | {"max_tokens": length}
    prompts += REPEATED
    results, _ = engines.draft(prompts, params)
    assert_same(results, engines.baseline(prompts, params))
    found = engines.inside("by_source")
    assert set(found) == {"ngram", "medusa"}
    assert found["medusa"][1] > 0.5 * length / 5
    assert found["ngram"][1] > 0
    assert engines.inside("guard")["faults"] == {}


@pytest.fixture
def predicting(engines: SideBySide, tiny: Path) -> SideBySide:
    """Predictions before the target as its own draft model, which is an oracle as long as it has seen every token."""
    engines.open(K, model=str(make_tiny_model(tiny)), plugin=hybrid("predicted", "draft_model", model=make_tiny_model(tiny)))
    return engines


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_predictions_and_a_draft_model_that_misses_nothing(predicting: SideBySide) -> None:
    prompts = [prompt_of(size, size) for size in (3, 20, 64, 7)]
    params = GREEDY | {"max_tokens": 48}
    known = predicting.baseline(prompts, params)
    answers = [list(result.token_ids) for result in known]
    edited = [answer[:20] + [250] * 6 + answer[24:] for answer in answers]
    requests = [
        params | says(prediction=edited[0]),
        params | says(prediction=edited[1], proposer="predicted"),
        params | says(prediction=answers[0]),  # another request's
        params | says(prediction=edited[3], proposer="draft_model"),
    ]
    predicting.inside("watch_sources")
    results, counters = predicting.draft(prompts, requests)
    assert_same(results, known)
    found = predicting.inside("by_source")
    assert found["draft_model"][0] == found["draft_model"][1] > 48 / 2
    assert 40 < found["predicted"][1] < found["predicted"][0]
    assert counters.accepted > 100


SENTENCE = "The quick brown fox (jumps|walks|runs) over the lazy (dog|cat|bird), and no other animal is seen[.]"


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_a_text_is_a_prediction_too(predicting: SideBySide) -> None:
    """Held against an answer that a grammar makes a sentence of; the prediction begins otherwise and errs in two words."""
    asked = GREEDY | {"max_tokens": 90, "ignore_eos": False, "structured_outputs": {"regex": SENTENCE}}
    text = "\nThe quick brown fox sits over the lazy frog, and no other animal is seen."
    known = predicting.baseline([prompt_of(4)], asked)
    predicting.inside("watch_sources")
    results, counters = predicting.draft([prompt_of(4)], asked | says(prediction=text, proposer="predicted"))
    assert_same(results, known)
    assert len(known[0].text) > 60
    assert counters.accepted > 0.5 * len(known[0].token_ids)
    # Without a prediction there is nothing to draft, and no harm in asking for it.
    results, counters = predicting.draft([prompt_of(4)], asked | says(proposer="predicted"))
    assert_same(results, known)
    assert counters.draft_tokens == 0


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"proposer": "draft_modle"}, r"did you mean 'draft_model'\? This engine offers 'hybrid', 'predicted', 'draft_model'"),
        ({"predictoin": "x"}, "'specplugin.predictoin' .* did you mean 'prediction'?"),
        ({"prediction": [3, 251, 100_000]}, "holds the token id 100000; .* from 0 to "),
        ({"prediction": 5}, "'specplugin.prediction' is 5; expected a text, or a list"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_and_others_are_served(predicting: SideBySide, said: dict[str, Any], told: str) -> None:
    params = GREEDY | {"max_tokens": 4}
    with pytest.raises(EngineError, match=told) as caught:
        predicting.drafting.generate([prompt_of(4)], params | says(**said))
    assert "\n" not in caught.value.message.strip()
    (result,) = predicting.drafting.generate([prompt_of(4)], params | says(proposer="hybrid"))
    assert len(result.token_ids) == 4


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_the_distribution_is_the_targets(engines: SideBySide, tiny: Path) -> None:
    """Case 4 with drafts of which some are drawn by chance and some predicted, in every batch; a vocabulary of 16."""
    opened(
        engines,
        make_tiny_model(tiny, **NARROW),
        **hybrid({"proposer": "predicted", "options": {"min_probability": 0}}, "eagle", model=natives.eagle(tiny, **NARROW)),
        verifier="block",
    )
    hot = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    laws = next_token_distributions(engines, [(token,) for token in range(VOCABULARY)])
    frequent = np.argsort(-sum(laws.values()))[: VOCABULARY // 2].tolist()
    likely = [after for token in frequent for after in (token, int(laws[(token,)].argmax()))]
    kinds = [says(prediction=likely), {}, says(prediction=likely[::-1], proposer="predicted"), says(proposer="eagle")]
    asked = [hot | kinds[place % len(kinds)] for place in range(6000)]
    engines.inside("watch_sources")
    results, _ = engines.draft([PROMPT] * len(asked), asked, timeout=PATIENCE)
    found = engines.inside("by_source")
    assert set(found) == {"predicted", "eagle"}
    for tested, accepted in found.values():
        assert 0.02 < accepted / tested < 0.8, "drafts must be accepted as well as refused"
    values = p_values(engines, [result.token_ids for result in results])
    assert min(values.values()) > ALPHA, values
