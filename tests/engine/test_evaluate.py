"""`vllm-specplugin evaluate` on the real engine, with Medusa heads: its figures are the ones that plain PyTorch has for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.engine.common import PATIENCE_MS
from tests.engine.test_medusa import LENGTH, PROMPTS, K, Known, expected_acceptance, medusa
from tests.support.engine import worker_environment
from tests.support.heads import fitted_medusa, greedy_states, load_target
from tests.support.tiny import EOS, forgetful_model
from vllm_specplugin.cli.main import app
from vllm_specplugin.train.evaluate_report import Evaluation, MainHead

# A target that is sure of its words and comes back to them, so that heads which know its greedy texts are right at temperature 1,
# too; with this seed none of the texts ends early.
SURE = {"logit_std": 16.0, "seed": 3}
SAME_LOSS = 1e-4  # nats per token, relative: float32, summed in another order


@torch.no_grad()
def loss(model: Any, texts: Sequence[Sequence[int]]) -> float:
    """Nats per token of the answers."""
    losses = [
        torch.nn.functional.cross_entropy(model(torch.tensor([text])).logits[0, len(prompt) - 1 : -1], torch.tensor(answer))
        for prompt, text in zip(PROMPTS, texts, strict=True)
        for answer in [text[len(prompt) :]]
    ]
    return float(torch.stack(losses).mean())  # answers are equally long


def test_heads_at_two_temperatures_against_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment("v1", "0.32").items():
        monkeypatch.setenv(name, value)
    target, other = forgetful_model(**SURE), forgetful_model(**SURE, perturb=0.1)
    model = load_target(target)
    found = [greedy_states(model, prompt, LENGTH + K) for prompt in PROMPTS]
    known = Known([ids.tolist() for ids, _ in found], [states for _, states in found], model.lm_head.weight.detach())
    texts = [text[: len(prompt) + LENGTH] for prompt, text in zip(PROMPTS, known.texts, strict=True)]
    assert not any(EOS in text for text in texts)
    data = tmp_path / "data.jsonl"
    lines = [{"prompt_token_ids": t[: len(p)], "token_ids": t[len(p) :]} for p, t in zip(PROMPTS, texts, strict=True)]
    data.write_text("\n".join(map(json.dumps, lines)))
    # With 40 of the 60 tokens of the texts to draft from, some drafts are wrong.
    heads = fitted_medusa(target, PROMPTS, LENGTH, K, output="shared", draft_vocab_size=40)

    arguments = ["evaluate", "--target", str(target), "--against", str(other), "--data", str(data), "--json"]
    arguments += ["--speculative-config", json.dumps(medusa(heads, draft_budget_ms=PATIENCE_MS))]
    arguments += ["--max-tokens", str(LENGTH), "--engine-args", '{"dtype": "float32"}', "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    report = Evaluation.model_validate_json(done.stdout)

    greedy, sampled = report.acceptance
    assert (greedy.temperature, sampled.temperature) == (0.0, 1.0)
    drafted, accepted = expected_acceptance(heads, known, K)
    assert greedy.drafts * K == drafted
    assert sum(place.value for place in greedy.by_position) * greedy.drafts == pytest.approx(accepted)
    assert greedy.tokens == len(PROMPTS) * (LENGTH - 1)
    assert greedy.length.value == pytest.approx(greedy.tokens / greedy.drafts)  # every pass has a draft
    assert 1.3 < sampled.length.value < greedy.length.value < K + 1
    for part in report.acceptance:
        shares = [place.value for place in part.by_position]
        assert len(shares) == K
        assert 1 > shares[0] >= shares[1] >= shares[2] >= shares[3] > 0
        assert part.length.low <= part.length.value <= part.length.high
        assert part.speed_up > 0

    alone, with_drafts, against = report.main_head
    assert report.scored_tokens == len(PROMPTS) * LENGTH
    assert alone.loss.value == pytest.approx(loss(model, texts), rel=SAME_LOSS)
    assert alone.next_token.value == 1.0  # it wrote these texts
    assert difference(with_drafts) == pytest.approx(0, abs=SAME_LOSS)
    assert against.loss.value == pytest.approx(loss(load_target(other), texts), rel=SAME_LOSS)
    assert difference(against) == pytest.approx(against.loss.value - alone.loss.value)
    assert against.loss_difference is not None
    assert against.loss_difference.settled
    assert Evaluation.model_validate_json((tmp_path / "out" / "evaluation.json").read_text()) == report


def difference(part: MainHead) -> float:
    """Of its loss and the target's."""
    assert part.loss_difference is not None
    return part.loss_difference.value
