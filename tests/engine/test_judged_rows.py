"""Every sampling parameter is applied at every row that a verifier judges: the target's probabilities there are plain decoding's.

Plain decoding with a seed says what is drawn, and with `logprobs_mode="processed_logprobs"` what from, at each position. The
engine with drafts is given the same tokens as drafts and a verifier that stays on their path (`recording`), so that it
judges the very same positions, whichever passes they fall into; each row that it is asked about must be what plain decoding
drew from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.common import GREEDY, PROMPTS, SEEDED, SideBySide, script
from tests.engine.test_parameters import ASKED, REGEX, SCHEMA
from tests.support.engine import Result
from tests.support.scripted.scripted_parts import law_after
from tests.support.tiny import VOCAB_SIZE

K = 5
NUM_TOKENS = 12

# fp32 sums in another order, as for LOGPROB_TOLERANCE; measured: at most 2e-7
PROBABILITY_TOLERANCE = 1e-5
# a smaller probability may come out as 0 on one side and not on the other: float32 ends at 1e-38, and logits of -100 make 1e-44
TINIEST = 1e-30

NAMED: dict[str, dict[str, Any]] = {**ASKED, "regex": REGEX | {"ignore_eos": False}, "json": SCHEMA | {"ignore_eos": False}}
"""Everything that a request may ask for. What it says of temperatures above 0 counts here."""

OPEN: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1, "max_num_seqs": 64}


def asking(name: str) -> dict[str, Any]:
    return SEEDED | {"max_tokens": NUM_TOKENS} | NAMED[name]


@dataclass(frozen=True)
class Case:
    """One request: what plain decoding drew from, and what was judged instead."""

    drawn_from: NDArray[np.float64]
    """`[output, vocab]`"""
    rows: list[tuple[int, NDArray[np.float32]]]
    """Position in the output and `[vocab]` probabilities of each row that was judged, in order."""

    def wrong(self, shift: int = 0) -> list[int]:
        """The positions at which a judged row is not what plain decoding drew from (`shift` positions further on)."""
        found = []
        for position, probs in self.rows:
            wanted = self.drawn_from[position + shift]
            apart = np.abs(probs - wanted) > PROBABILITY_TOLERANCE
            support = ((probs > 0) != (wanted > 0)) & (np.maximum(probs, wanted) > TINIEST)
            if (apart | support).any():
                found.append(position)
        return found

    def check(self) -> None:
        """All positions but the first, which the prompt's pass decides, were judged, and rightly."""
        assert {position for position, _ in self.rows} == set(range(1, len(self.drawn_from)))
        assert self.wrong() == []


def drawn_from(result: Result) -> NDArray[np.float64]:
    """`[output, vocab]`: what each token was drawn from, of a request with all of the processed log-probabilities."""
    assert result.logprobs is not None
    assert all(len(entries) == VOCAB_SIZE for entries in result.logprobs)
    return np.exp([[entries[token].logprob for token in range(VOCAB_SIZE)] for entries in result.logprobs])


def judge(engines: SideBySide, prompts: list[list[int]], params: list[dict[str, Any]], said: list[dict[str, Any]]) -> list[Case]:
    """Requests through both engines, with drafts that are plain decoding's tokens; `said` goes into their scripts."""
    known = engines.baseline(prompts, [each | {"logprobs": VOCAB_SIZE} for each in params])
    asked = []
    for each, prompt, result, more in zip(params, prompts, known, said, strict=True):
        asked.append(each | script("oracle", prompt, result.token_ids))
        asked[-1]["extra_args"]["specplugin"] |= more
    first = engines.inside("watch_the_judge")
    results, _ = engines.draft(prompts, asked)
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    cases = [Case(drawn_from(result), []) for result in known]
    for row in engines.inside("judged_rows"):
        place = int(row["request"].partition("-")[0]) - first
        position = row["known"] - len(prompts[place])
        for probs in row["target_probs"]:
            if position < len(cases[place].drawn_from):  # beyond it plain decoding did not go
                cases[place].rows.append((position, probs))
            position += 1
    return cases


@pytest.fixture
def recording(engines: SideBySide) -> SideBySide:
    engines.open(K, plugin={"verifier": "recording"}, **OPEN)
    return engines


@pytest.mark.parametrize("name", NAMED)
def test_alone(recording: SideBySide, name: str) -> None:
    """Nobody but this request in the step, in passes of k drafts and a last one of fewer."""
    (case,) = judge(recording, PROMPTS[2:3], [asking(name)], [{}])
    case.check()


WALKED: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy_with_logprobs": GREEDY | {"logprobs": 2, "repetition_penalty": 1.3},
}


UNDRAFTED: dict[str, dict[str, Any]] = {
    "undrafted": SEEDED | {"min_p": 0.1},
    # Without a seed, but top_k=1 leaves no choice, so that plain decoding's tokens are known.
    "undrafted_and_free": {"temperature": 1.0, "top_k": 1, "ignore_eos": True},
}


def judge_a_batch(engines: SideBySide) -> dict[str, Case]:
    """All of them in one batch, drafted for from 1 to k tokens a pass, beside requests that are walked or not drafted for."""
    engines.open(K, plugin={"verifier": "recording"}, **OPEN)
    names = [*NAMED, *WALKED, *UNDRAFTED]
    params = [*map(asking, NAMED), *({"max_tokens": NUM_TOKENS} | each for each in (WALKED | UNDRAFTED).values())]
    said: list[dict[str, Any]] = [{"max_draft_tokens": 1 + place % K} for place in range(len(names))]
    said[-len(UNDRAFTED) :] = [{"enabled": False} for _ in UNDRAFTED]
    # Not the prompt of one token: vLLM fills its first pass up with drafts when it joins others (see test_scheduling).
    prompts = [PROMPTS[1 + place % (len(PROMPTS) - 1)] for place in range(len(names))]
    return dict(zip(names, judge(engines, prompts, params, said), strict=True))


@pytest.fixture(scope="module")
def batch(engines: SideBySide) -> dict[str, Case]:
    return judge_a_batch(engines)


@pytest.mark.parametrize("name", NAMED)
def test_in_a_batch(batch: dict[str, Case], name: str) -> None:
    batch[name].check()


def test_who_is_not_judged(batch: dict[str, Case]) -> None:
    """Greedy requests are walked, one without drafts is neither. (`judge` has compared their tokens.)"""
    assert {name for name, case in batch.items() if not case.rows} == {*WALKED, "undrafted"}


def test_without_drafts(batch: dict[str, Case]) -> None:
    """A request without a seed may be judged beside others though it has no drafts: by the row that it has."""
    assert batch["undrafted_and_free"].rows
    assert batch["undrafted_and_free"].wrong() == []


@pytest.mark.parametrize("engines", ["v2"], indirect=True)
def test_in_parts(engines: SideBySide) -> None:
    """V2 verifies a batch in parts where the vocabulary is large."""
    engines.open(K, plugin={"verifier": "recording"}, **OPEN)
    engines.inside("verify_in_chunks", 20)
    try:
        for name, case in judge_a_batch(engines).items():
            if name in NAMED:
                case.check()
    finally:
        engines.inside("verify_in_chunks", None)


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_other_rows_would_be_noticed(recording: SideBySide) -> None:
    """A negative control: no row is what the position before it was drawn from."""
    names = [name for name in NAMED if name != "max_tokens"]
    cases = judge(recording, [PROMPTS[2]] * len(names), [asking(name) for name in names], [{}] * len(names))
    for name, case in zip(names, cases, strict=True):
        assert len(case.wrong(shift=-1)) > len(case.rows) / 2, f"{name}: one row may stand for another"


WITHOUT_EFFECT = {"logprobs", "logprobs_of_the_token_alone", "prompt_logprobs", "max_tokens"}
"""What is no matter of distributions."""


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_rows_without_the_parameters_would_be_noticed(recording: SideBySide) -> None:
    """Another one: what a request asks for makes its rows differ from the model's own probabilities after the same tokens."""
    prompt = PROMPTS[2]
    plainly = GREEDY | {"temperature": 1.0, "max_tokens": 1, "logprobs": VOCAB_SIZE}
    for name in NAMED:
        (known,) = recording.baseline([prompt], asking(name) | {"logprobs": VOCAB_SIZE})
        prefixes = [[*prompt, *known.token_ids[:place]] for place in range(1, len(known.token_ids))]
        own = np.concatenate([drawn_from(result) for result in recording.baseline(prefixes, plainly)])
        differing = Case(drawn_from(known), [(place + 1, probs) for place, probs in enumerate(own)]).wrong()
        assert bool(differing) != (name in WITHOUT_EFFECT), name


# -- what else a verifier is told --------------------------------------------------------------------------

UNSEEDED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
SHARPNESS = 1.3
KINDS: list[dict[str, Any]] = [
    UNSEEDED | script("sampled", sharpness=SHARPNESS),
    UNSEEDED | script("constant", token=7),
    GREEDY | {"max_tokens": NUM_TOKENS} | script("sampled", sharpness=SHARPNESS),
    UNSEEDED | script("empty"),
    UNSEEDED | script("sampled", sharpness=SHARPNESS),
    UNSEEDED | script("constant", token=9),
    UNSEEDED | script("sampled", sharpness=SHARPNESS) | {"max_tokens": 2 * NUM_TOKENS},
    UNSEEDED | script("sampled", sharpness=SHARPNESS, flaw="impossible"),
]
"""Drafts by chance, drafts without, rows that are not judged, and one whose probabilities are good for nothing, in one batch."""
BY_CHANCE = (0, 4, 6)
UNDRAFTED_KIND = 3


@pytest.fixture(scope="module")
def told(engines: SideBySide) -> tuple[int, list[Result], list[dict[str, Any]]]:
    """The first request's number, the results of KINDS, and each judged row with what the verifier was told of it."""
    plugin = {"verifier": "recording", "proposer": "sampled", "draft_sampling": "probabilistic"}
    engines.open(K, plugin=plugin, **OPEN)
    asked = []
    for place, kind in enumerate(KINDS):
        said = kind["extra_args"]["specplugin"] | {"max_draft_tokens": K - place % 3}
        asked.append(kind | {"extra_args": {"specplugin": said}})
    first = engines.inside("watch_the_judge")
    results, _ = engines.draft([*PROMPTS[1:], PROMPTS[3]], asked)
    return first, results, engines.inside("judged_rows")


def test_draft_probabilities(told: tuple[int, list[Result], list[dict[str, Any]]]) -> None:
    """Row by row what each draft was drawn from, and one-hot where it was not drawn."""
    first, results, rows = told
    judged = set()
    for row in rows:
        place = int(row["request"].partition("-")[0]) - first
        judged.add(place)
        tokens = [*results[place].prompt_token_ids, *results[place].token_ids]
        drafts = row["draft_ids"]
        assert tokens[row["known"] : row["known"] + len(drafts)] == drafts[: len(tokens) - row["known"]]
        if place in BY_CHANCE:
            before = [tokens[row["known"] - 1], *drafts[:-1]]
            expected = np.stack([law_after(token, VOCAB_SIZE, SHARPNESS).numpy() for token in before])
            np.testing.assert_array_equal(row["draft_probs"], expected)
        elif row["draft_probs"] is not None:  # None: nobody in this step had any
            np.testing.assert_array_equal(row["draft_probs"], np.eye(VOCAB_SIZE, dtype=np.float32)[drafts])
    assert judged >= {0, 1, 4, 5, 6, 7}
    assert not any(row["draft_ids"] for row in rows if row["request"].startswith(f"{first + UNDRAFTED_KIND}-"))
    beside = [row["draft_probs"] is not None for row in rows if len(set(row["draft_ids"])) == 1]
    assert any(beside), "no row without probabilities was judged beside one with them"


def test_uniform_numbers_occur_once(told: tuple[int, list[Result], list[dict[str, Any]]]) -> None:
    """Every pass, request, position and use has a number of its own."""
    _, _, rows = told
    numbers = np.concatenate([row["uniforms"].ravel() for row in rows])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(numbers) > 200
    assert len(np.unique(numbers)) == len(numbers)


@pytest.mark.parametrize("engines", ["v1"], indirect=True)
def test_uniform_numbers_belong_to_the_engines_seed(engines: SideBySide) -> None:
    """The same again where it is the same, and no common number where it is another."""

    def numbers(seed: int) -> set[float]:
        engines.open(K, plugin={"verifier": "recording"}, seed=seed, again=True)
        engines.inside("watch_the_judge")
        engines.draft([PROMPTS[1]], UNSEEDED | script("constant", token=7))
        return set(np.concatenate([row["uniforms"].ravel() for row in engines.inside("judged_rows")]).tolist())

    first = numbers(0)
    assert len(first) > 20
    assert numbers(0) == first
    assert not numbers(1) & first
