"""A head that was trained here drafts the same tokens in the engine: counted draft by draft, in vLLM's own EAGLE and in ours.

Training and serving share no code on vLLM's side, so this is what shows that they mean the same: which token goes with which
state, which layers are fused, what is fed back, where a token is looked up in the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.common import Counters
from tests.support.chains import Acceptance, speculate
from tests.support.eagles import AUX_LAYERS, PROMPT, Tiny, fit
from tests.support.engine import EngineWorker

K = 3
NUM_TOKENS = 40
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
OPTIONS = {"eagle": {}, "eagle3": {"draft_vocab_size": 24}}


@dataclass(frozen=True)
class Trained:
    """A head's checkpoint, and what drafting with it must come to."""

    family: str
    checkpoint: Path
    texts: Sequence[Sequence[int]]
    """Prompts and the target's greedy answers, K tokens longer than they are asked for."""
    wanted: Acceptance


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny.make()


@pytest.fixture(scope="module", params=OPTIONS)
def trained(request: pytest.FixtureRequest, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Fitted a little, so that it is right often and wrong often, at every draft."""
    family = request.param
    texts = tiny.target.greedy(tiny.prompts(5, seed=3), NUM_TOKENS + K)
    batch = tiny.batch(texts)
    objective = tiny.objective(family, batch, **OPTIONS[family])
    fit(objective, batch, steps=25)
    folder = tmp_path_factory.mktemp(family)
    objective.export(folder, {"command": "test"})
    wanted = Acceptance(accepted=[0] * K)
    for text in texts:
        wanted += speculate(objective.head, tiny.target, text, PROMPT, NUM_TOKENS, K, AUX_LAYERS)
    return Trained(family, folder, texts, wanted)


@pytest.mark.parametrize("key", ["method", "proposer"], ids=["stock", "plugin"])
def test_the_engine_accepts_what_training_expects(v1: EngineWorker, tiny: Tiny, trained: Trained, key: str) -> None:
    speculative = {key: trained.family, "model": str(trained.checkpoint), "num_speculative_tokens": K}
    v1.open(tiny.folder, speculative, skip_tokenizer_init=True)
    results = v1.generate([text[:PROMPT] for text in trained.texts], GREEDY)
    assert [[*result.prompt_token_ids, *result.token_ids] for result in results] == [text[:-K] for text in trained.texts]
    counters = Counters.read(v1.metrics())
    assert counters.drafts == trained.wanted.passes
    assert counters.by_position == tuple(trained.wanted.accepted)
    # Every draft was accepted often and refused often, so that a wrong one could not go unnoticed.
    chances = (counters.drafts, *counters.by_position)
    assert all(0.2 * before < accepted < before for before, accepted in zip(chances, counters.by_position, strict=False))
