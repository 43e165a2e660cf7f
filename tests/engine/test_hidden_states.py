"""The hidden state that a proposer is given is the one that its row's last committed token was chosen from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.common import GREEDY, PROMPTS, SideBySide, absent_token, prompt_of, script
from tests.support.tiny import tiny_model as make_tiny_model

K = 3
NUM_TOKENS = 14

# fp32 sums in another order, over eight layers of states of size 10
STATE_TOLERANCE = 1e-3


@pytest.mark.parametrize("chunk", [pytest.param(512, id="whole_prompts"), pytest.param(64, id="chunks")])
@pytest.mark.parametrize(
    "modes", [["oracle"], ["half_oracle"], ["constant"], ["empty"], ["half_oracle", "oracle", "constant", "empty"]]
)
def test_the_targets_head_gives_the_committed_token(engines: SideBySide, modes: list[str], chunk: int) -> None:
    """The target's own head over the given states says what greedy decoding said, in every row of every step.

    An oracle that is refused now and then makes the place of the last committed token vary from row to row.
    """
    engines.open(K, plugin={"proposer": "probe"}, max_num_batched_tokens=chunk)
    prompts = [*PROMPTS[1:6], prompt_of(150), prompt_of(65)]
    params = GREEDY | {"max_tokens": NUM_TOKENS}
    known = engines.baseline(prompts, params)
    wrong = absent_token(*(result.token_ids for result in known))
    asked = [
        params | script(modes[place % len(modes)], prompt, result.token_ids, token=wrong)
        for place, (prompt, result) in enumerate(zip(prompts, known, strict=True))
    ]
    engines.inside("forget_seen")
    results, counters = engines.draft(prompts, asked)
    assert [result.token_ids for result in results] == [result.token_ids for result in known]
    hidden = engines.inside("seen")["hidden"]
    assert [committed for _, committed, _ in hidden] == [predicted for *_, predicted in hidden]
    committed = {number for number, *_ in hidden}
    assert sum(number for number, *_ in hidden) >= NUM_TOKENS * len(prompts)  # every token was in a step
    if "half_oracle" in modes:
        assert 0 < counters.accepted < counters.draft_tokens
        assert committed == set(range(1, K + 2)), "not every length of acceptance occurred"
    if modes == ["oracle"]:
        assert counters.accepted == counters.draft_tokens > 0
    if modes == ["constant"]:
        assert counters.accepted == 0 < counters.draft_tokens


@pytest.fixture(scope="module")
def deep_model(pytestconfig: pytest.Config) -> Path:
    """Deep enough for three auxiliary layers."""
    return make_tiny_model(pytestconfig.cache.mkdir("tiny"), layers=8)


def test_auxiliary_states_do_not_depend_on_drafts(engines: SideBySide, deep_model: Path) -> None:
    """With drafts accepted and refused each token has the states that it has where nothing is drafted at all."""
    engines.open(K, plugin={"proposer": "aux_probe"}, model=str(deep_model))
    params = GREEDY | {"max_tokens": NUM_TOKENS}
    prompts = PROMPTS[1:5]
    known = engines.baseline(prompts, params)
    runs = []
    for mode in ("empty", "half_oracle"):
        engines.inside("forget_seen")
        asked = [params | script(mode, prompt, result.token_ids) for prompt, result in zip(prompts, known, strict=True)]
        _, counters = engines.draft(prompts, asked)
        seen = engines.inside("seen")
        assert [committed for _, committed, _ in seen["hidden"]] == [predicted for *_, predicted in seen["hidden"]]
        first = min(int(name.partition("-")[0]) for name, *_ in seen["aux"])
        runs.append({(int(name.partition("-")[0]) - first, length): state for name, length, state in seen["aux"]})
    plain, drafted = runs
    assert 0 < counters.accepted < counters.draft_tokens
    places = plain.keys() & drafted.keys()
    assert len(places) >= len(drafted) - len(prompts)  # the last pass may go past the end
    for place in places:
        assert drafted[place] == pytest.approx(plain[place], abs=STATE_TOLERANCE), place
    assert len(plain[0, len(prompts[0]) + 1]) == 3 * 64
