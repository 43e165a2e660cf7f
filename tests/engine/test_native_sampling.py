"""Drafts that vLLM's own drafters draw by chance: what they are verified against is what they were drawn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import GREEDY, PROMPTS, SEEDED, Counters, SideBySide, assert_same
from tests.engine.test_statistics import ALPHA, NUM_TOKENS, PATIENCE, PROMPT, TEMPERATURE, VOCABULARY, K, p_value, p_values
from tests.support import natives
from tests.support.tiny import tiny_model

REQUESTS = {"v1": 8000, "v2": 400}  # V2's interpreter is slow
NARROW: dict[str, Any] = {"vocab_size": VOCABULARY, "logit_std": 2.0}


@pytest.fixture(scope="module")
def narrow(pytestconfig: pytest.Config) -> Path:
    """Where the narrow model and its drafters are made."""
    return pytestconfig.cache.mkdir("tiny")


def sample(
    engines: SideBySide, requests: int | None = None, max_tokens: int = NUM_TOKENS
) -> tuple[list[tuple[int, ...]], Counters]:
    """The first tokens of many requests, and the metrics; every eighth request is greedy, and its tokens are left out."""
    hot = {"temperature": TEMPERATURE, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
    asked = [hot | {"temperature": 0.0} if place % 8 == 7 else hot for place in range(requests or REQUESTS[engines.runner])]
    results, counters = engines.draft([PROMPT] * len(asked), asked, timeout=PATIENCE)
    return [result.token_ids[:NUM_TOKENS] for result, each in zip(results, asked, strict=True) if each["temperature"]], counters


def opened(engines: SideBySide, target: Path, *, seqs: int = 256, force_async: bool = False, **plugin: str) -> None:
    engines.open(
        K,
        plugin={"draft_sampling": "probabilistic", **plugin},
        model=str(target),
        skip_tokenizer_init=True,
        max_num_seqs=seqs,
        max_num_batched_tokens=1024,
        max_model_len=16,
        force_async=force_async,
    )


Drafter = Callable[[Path], tuple[Path, dict[str, str]]]
"""Makes a target and a drafter for it."""


def draft_model(folder: Path) -> tuple[Path, dict[str, str]]:
    return tiny_model(folder, **NARROW), {"proposer": "draft_model", "model": str(tiny_model(folder, **NARROW, perturb=0.5))}


def better(folder: Path) -> tuple[Path, dict[str, str]]:
    """Right often enough that second drafts pay, too."""
    return tiny_model(folder, **NARROW), {"proposer": "draft_model", "model": str(tiny_model(folder, **NARROW, perturb=0.2))}


def eagle(folder: Path) -> tuple[Path, dict[str, str]]:
    return tiny_model(folder, **NARROW), {"proposer": "eagle", "model": str(natives.eagle(folder, **NARROW))}


def eagle3(folder: Path) -> tuple[Path, dict[str, str]]:
    """Over every second token; the others have a probability of 0 in what its drafts are drawn from."""
    head = natives.eagle3(folder, seed=2, draft_vocabulary=8, **NARROW)
    return tiny_model(folder, **NARROW), {"proposer": "eagle3", "model": str(head)}


def mtp(folder: Path) -> tuple[Path, dict[str, str]]:
    return natives.mimo(folder, **NARROW), {"proposer": "mtp"}


def open_with(engines: SideBySide, folder: Path, drafter: Drafter, **options: Any) -> None:
    target, keys = drafter(folder)
    opened(engines, target, **keys, **options)


CASES = [(draft_model, "token"), (draft_model, "block"), (eagle, "token"), (eagle, "block")]
CASES += [(eagle3, "token"), (eagle3, "block"), (mtp, "token")]
ON_V2 = [(draft_model, "block"), (eagle3, "token")]


@pytest.mark.parametrize(("drafter", "verifier"), CASES)
def test_the_distribution_is_the_targets(engines: SideBySide, narrow: Path, drafter: Drafter, verifier: str) -> None:
    """Case 4, over a vocabulary of 16: requests without a seed, every eighth of them greedy in the same batch."""
    if engines.runner == "v2" and (drafter, verifier) not in ON_V2:
        pytest.skip("half a minute for each under the interpreter; the others differ from those in nothing that V2 adds")
    open_with(engines, narrow, drafter, verifier=verifier)
    outputs, counters = sample(engines)
    assert 0.02 < counters.accepted / counters.draft_tokens < 0.8, "drafts must be accepted as well as refused"
    found = p_values(engines, outputs)
    assert min(found.values()) > ALPHA, found


def check_biased(engines: SideBySide, requests: int) -> None:
    """An engine that was spoilt is found out, and left to nobody else."""
    outputs, _ = sample(engines, requests)
    engines.replaced()
    found = p_values(engines, outputs)
    assert found["first"] > ALPHA  # which no draft precedes
    assert found["second"] < ALPHA / 1000, found


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_other_probabilities_than_the_drafters_are_found(engines: SideBySide, narrow: Path) -> None:
    """Negative control."""
    open_with(engines, narrow, eagle3, verifier="token")
    engines.inside("take_drafts_for_uniform")
    check_biased(engines, REQUESTS["v1"] // 4)


COSTS = [([1, 512], [0.010, seconds]) for seconds in (0.0105, 0.025, 0.040, 0.063, 1.0)]
"""Rows, and seconds of a pass: as many drafts as there can be pay, or some, or none."""
PLANNED_COSTS = [([1, 512], [0.010, seconds]) for seconds in (0.0105, 0.063, 0.0105, 10.0)]
"""The same for 64 requests that all get as many: two, one, or none."""


def open_varying(engines: SideBySide, folder: Path) -> None:
    """An engine that drafts now more, now less, by costs that change every other step."""
    open_with(engines, folder, better, verifier="block", control="adaptive")
    engines.inside("costs_in_turns", COSTS, 1e-5, 2)


def check_varied(engines: SideBySide, outputs: list[tuple[int, ...]], counters: Counters) -> None:
    requests = REQUESTS[engines.runner]
    one_or_two, two = engines.counted.tokens["verified"]
    none = engines.counted.plain - requests  # but for each request's first pass
    assert min(none, one_or_two - two, two) > requests / 20, "passes over 0, 1 and 2 drafts"
    assert 0.1 < counters.accepted / counters.draft_tokens < 0.8
    found = p_values(engines, outputs)
    assert min(found.values()) > ALPHA, found


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_lengths_that_vary(engines: SideBySide, narrow: Path) -> None:
    """Control chooses them by what it knows before the drafts are drawn, so that the distribution stays the target's."""
    open_varying(engines, narrow)
    outputs, counters = sample(engines, max_tokens=K + 2)  # with fewer nobody ever has room for K drafts
    engines.replaced()
    check_varied(engines, outputs, counters)


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_lengths_that_are_planned_ahead(engines: SideBySide, narrow: Path) -> None:
    """The same where all requests of a step get as many, under asynchronous scheduling."""
    open_with(engines, narrow, better, seqs=64, force_async=True, verifier="token", control="adaptive")
    engines.inside("plan_in_turns", PLANNED_COSTS, 2)
    outputs, counters = sample(engines)
    engines.replaced()
    check_varied(engines, outputs, counters)


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_lengths_that_are_planned_for_a_batch_that_stays_the_same(engines: SideBySide, narrow: Path, verifier: str) -> None:
    """Nobody joins a step for which one draft was planned where two may be, and what is known of its drafts is as narrow."""
    open_with(engines, narrow, better, force_async=True, verifier=verifier, control="adaptive")
    engines.inside("plan_lengths", [2, 1, 1])
    hot = {"temperature": TEMPERATURE, "max_tokens": 12, "ignore_eos": True, "detokenize": False}
    outputs = []
    for requests in (1, 3):
        results, counters = engines.draft([PROMPT] * requests, hot)
        outputs += [len(result.token_ids) for result in results]
        first, second = engines.counted.tokens["verified"]
        assert 0 < second < first
        assert counters.accepted > 0
    assert outputs == [12] * 4


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_lengths_by_what_was_drawn_are_found(engines: SideBySide, narrow: Path) -> None:
    """Negative control."""
    open_varying(engines, narrow)
    engines.inside("choose_by_what_was_drawn")
    check_biased(engines, REQUESTS["v1"] // 2)


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
