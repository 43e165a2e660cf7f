"""A trained MTP module means the same in the engine as in training: the same drafts, counted draft by draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from tests.support import tiny
from tests.support.engine import EngineWorker
from tests.support.results import Result
from vllm_specplugin.heads.checkpoint import inspect, tensors
from vllm_specplugin.heads.decoder import DecoderConfig
from vllm_specplugin.heads.files import read_json
from vllm_specplugin.heads.mtp import MTPConfig, SequentialMTP
from vllm_specplugin.train.batch import Batch, pad
from vllm_specplugin.train.evaluate import Excerpt, Plan, evaluate
from vllm_specplugin.train.evaluate_questions import Question
from vllm_specplugin.train.export_mtp import export_with_modules
from vllm_specplugin.train.mtp import DepthWeights, FrozenMTP, FrozenParts
from vllm_specplugin.train.trunk import Trunk, load_trunk

K = 3
NUM_TOKENS = 48
PROMPTS = [[5, 9, 200, 33], [17, 18, 19, 20, 21, 22], [110, 112, 9], [7] * 9, [250, 3, 250, 4], [60, 61, 62]]
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@dataclass(frozen=True)
class Trained:
    target: Path
    """The plain Llama."""
    folder: Path
    """The same with a module, in MiMo's layout."""
    answers: list[Result]
    """Of the plain Llama, greedily."""
    drafts: int
    """Passes with drafts that training expects for these answers, and how many drafts it expects accepted up to each place."""
    accepted: list[int]


@pytest.fixture(scope="module")
def trained(v1: EngineWorker, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A module fitted a little to the target's answers, so that it is right often and wrong often, at every draft."""
    # vLLM's MiMo goes by hidden_size / heads for the size of its attention heads.
    target = tiny.tiny_model(pytestconfig.cache.mkdir("tiny"), hidden=128, seed=3)
    v1.open(target)
    answers = v1.generate(PROMPTS, GREEDY)
    trunk = load_trunk(target)
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    module = fit(trunk, read_json(target / "config.json"), texts, [len(prompt) for prompt in PROMPTS])
    folder = tmp_path_factory.mktemp("mtp")
    export_with_modules(module, tensors(target), read_json(target / "config.json"), target, folder, {"command": "test"})
    drafts, accepted = 0, [0] * K
    for prompt, text in zip(PROMPTS, texts, strict=True):
        passes, right = served(trunk, module, text, len(prompt))
        drafts += passes
        accepted = [one + more for one, more in zip(accepted, right, strict=True)]
    return Trained(target, folder, answers, drafts, accepted)


def fit(trunk: Trunk, config: dict[str, Any], texts: Sequence[Sequence[int]], prompts: Sequence[int]) -> SequentialMTP:
    torch.manual_seed(0)
    module = SequentialMTP(MTPConfig(DecoderConfig.from_hf(config), K, output_scale=True))
    module.initialise(trunk.final_norm)
    parts = FrozenParts(
        trunk.model.get_input_embeddings().weight.detach(),  # type: ignore[operator, union-attr]
        trunk.output.detach(),
        trunk.final_norm.detach(),
    )
    objective = FrozenMTP(parts, module, DepthWeights((1.0,) * (K + 1)), lambda *arguments: None)
    tokens = pad([torch.tensor(text).numpy() for text in texts], prompts)
    with torch.no_grad():
        batch = Batch(tokens.token_ids, tokens.valid, tokens.counts, trunk(tokens.token_ids).after_norm)
    optimiser = torch.optim.Adam(objective.parameters(), lr=2e-3)
    for _ in range(8):
        optimiser.zero_grad()
        objective.loss(batch).total.backward()
        optimiser.step()
    return module


@torch.no_grad()
def served(trunk: Trunk, module: SequentialMTP, text: Sequence[int], prompt: int) -> tuple[int, list[int]]:
    """What serving a known answer takes by training's own forward pass: drafts, and those accepted up to each place.

    Drafts past the end of the answer are in vain: the engine emits no more, and counts none as accepted.
    """
    token_ids = torch.tensor([text])
    states = trunk(token_ids)
    drafted = module(states.before_norm, states.embeddings, torch.arange(len(text)))
    best = [(state[0] @ states.output.T).argmax(dim=-1).tolist() for state in drafted]
    drafts, accepted, known = 0, [0] * K, prompt + 1  # the first token comes with the prompt
    while known < len(text):
        drafts += 1
        place, right = known - 2, 0
        while right < K and known + right < len(text) and best[right][place] == text[known + right]:
            accepted[right] += 1
            right += 1
        known += right + 1
    return drafts, accepted


def counted(worker: EngineWorker) -> tuple[int, list[int]]:
    metrics = worker.metrics()
    per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    return metrics["vllm:spec_decode_num_drafts"], list(per_position)


def test_the_layout_holds_the_same_model(v1: EngineWorker, trained: Trained) -> None:
    """A Llama in MiMo's layout says what the Llama says, to the token, in float32."""
    info = inspect(str(trained.folder))
    assert (info.family, info.depth, info.hidden_size) == ("mtp", 1, 128)
    v1.open(trained.folder)
    assert [answer.token_ids for answer in v1.generate(PROMPTS, GREEDY)] == [answer.token_ids for answer in trained.answers]


@pytest.mark.parametrize("config", [{"method": "mtp"}, {"proposer": "mtp"}], ids=["stock", "plugin"])
def test_the_engine_accepts_what_training_expects(v1: EngineWorker, trained: Trained, config: dict[str, Any]) -> None:
    """Greedily: equal numbers of drafts, and of drafts accepted up to each of k places."""
    v1.open(trained.folder, {**config, "num_speculative_tokens": K})
    answers = v1.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in trained.answers]
    drafts, accepted = counted(v1)
    assert (drafts, accepted) == (trained.drafts, trained.accepted)
    assert drafts > accepted[0] > accepted[1] > accepted[2] > 10


def test_evaluate(trained: Trained, tmp_path: Path) -> None:
    """The whole of `evaluate` on real engines: its loss is torch's, its acceptance what training expects."""
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, trained.answers, strict=True)]
    plan = Plan(
        target=str(trained.folder),
        speculative_config={"method": "mtp", "num_speculative_tokens": K},
        against=None,
        data="answers",
        excerpts=[Excerpt(tuple(text), len(prompt)) for text, prompt in zip(texts, PROMPTS, strict=True)],
        questions=[
            Question(tuple(texts[0][:8]), (tuple(texts[0][8:12]),), 0),
            Question(tuple(texts[0][:8]), ((1, 2, 3),), 0),
            Question(tuple(texts[1][:9]), ((1, 2, 3), tuple(texts[1][9:11])), 1),
        ],
        max_tokens=NUM_TOKENS,
        temperatures=(0.0,),
        engine_args={"dtype": "float32"},
    )
    with Progress(disable=True) as bars:
        report = evaluate(plan, tmp_path, bars)
    alone, with_drafts = report.main_head
    assert alone.loss.value == pytest.approx(_loss(trained.target, texts), abs=1e-4)
    assert with_drafts.loss.value == pytest.approx(alone.loss.value, abs=1e-5)
    assert alone.next_token.value == 1.0  # it wrote these texts
    assert alone.downstream is not None
    assert alone.downstream.value == pytest.approx(2 / 3)
    found = report.acceptance[0]
    assert found.drafts == trained.drafts
    shares = [position.value for position in found.by_position]
    assert shares == pytest.approx([accepted / trained.drafts for accepted in trained.accepted])
    assert found.length.value > 1.2
    assert math.isfinite(found.speed_up)


@torch.no_grad()
def _loss(target: Path, texts: Sequence[Sequence[int]]) -> float:
    trunk = load_trunk(target)
    total, tokens = 0.0, 0
    for text, prompt in zip(texts, PROMPTS, strict=True):
        states = trunk(torch.tensor([text]))
        log = (states.after_norm[0] @ states.output.T).log_softmax(dim=-1)
        places = range(len(prompt), len(text))
        total -= sum(float(log[place - 1, text[place]]) for place in places)
        tokens += len(places)
    return total / tokens
