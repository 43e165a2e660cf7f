"""Medusa-1: which token each head learns, its loss, and the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support import training
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads import checkpoint, medusa_files
from vllm_specplugin.heads.medusa import MedusaHeads
from vllm_specplugin.train import medusa
from vllm_specplugin.train.batch import Batch, pad
from vllm_specplugin.train.medusa import MedusaObjective
from vllm_specplugin.train.objective import acceptance, acceptance_length, chained
from vllm_specplugin.train.run import train_heads
from vllm_specplugin.train.target import FrozenTarget, Setting, TargetModel

HIDDEN, VOCAB, DEPTH = 16, 20, 3


def setting(counts: torch.Tensor | None = None) -> Setting:
    torch.manual_seed(5)
    matrix = torch.randn(VOCAB, HIDDEN)
    target = FrozenTarget("toy", Path("toy"), {}, matrix, matrix, num_layers=8)
    return Setting(target, torch.ones(VOCAB, dtype=torch.int64) if counts is None else counts, torch.float32)


def objective(tmp_path: Path, counts: torch.Tensor | None = None, **options: Any) -> MedusaObjective:
    """Heads that are not at their start any more."""
    made = MedusaObjective.build(training.medusa_options(tmp_path, num_heads=DEPTH, **options), setting(counts))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def batch(seed: int = 0, rows: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(VOCAB, (7 + 3 * row,), generator=generator).numpy() for row in range(rows)]
    plain = pad(ids, [2 + row for row in range(rows)])
    hidden = torch.randn(*plain.token_ids.shape, HIDDEN, generator=generator)
    return Batch(plain.token_ids, plain.valid, plain.counts, hidden)


def load(folder: Path) -> MedusaHeads:
    """Heads as the proposer loads them."""
    info = checkpoint.inspect(str(folder))
    heads = MedusaHeads(medusa_files.config_of(info.shapes, info.config, "the test"))
    medusa_files.load(heads, checkpoint.tensors(info.folder), "the test")
    return heads


# -- which token a head learns -------------------------------------------------------------------------------


def test_heads_draft_what_the_engine_asks_for(tmp_path: Path) -> None:
    """The state at place t chose token t + 1, which is there when drafts are wanted: draft k is token t + 2 + k."""
    path = str(training.target(layers=2))
    training.write_data(tmp_path / "data.jsonl", count=100)
    outcome = train_heads(training.medusa_options(tmp_path, target=path, lr=1e-2), MedusaObjective.build, training.silent())
    assert outcome.results["acceptance_length"] > 3.9  # of at most 1 + 3
    heads = load(outcome.folder)
    target = TargetModel(path, torch.float32, torch.device("cpu"))
    text = torch.tensor([training.text(start=9, length=24)])
    hidden, _ = target.states(text)
    drafts = heads.best(heads(hidden[0]), target.frozen.output)
    wanted = torch.tensor([[training.law(training.law(int(token)))] for token in text[0]])
    for _ in range(heads.config.num_heads - 1):
        wanted = torch.cat([wanted, torch.tensor([[training.law(int(token))] for token in wanted[:, -1]])], dim=1)
    # Within the prompt, the first four tokens, nobody asks for drafts, and nothing was learnt.
    assert (drafts == wanted)[4:].float().mean() > 0.97
    assert not (drafts[4:, :-1] == wanted[4:, 1:]).any()


def test_the_places_and_tokens_of_a_text() -> None:
    ids = torch.tensor([10, 11, 12, 13, 14]).numpy()
    plain = pad([ids, ids[:3]], [2, 2])
    hidden = torch.arange(10.0).view(2, 5, 1)
    found, labels, known = medusa.places(Batch(plain.token_ids, plain.valid, plain.counts, hidden), depth=2)
    # Token 12 is the first that counts, and the state at place 1 chose it; the second text ends with it.
    assert found[:, 0].tolist() == [1, 2, 3, 6]
    assert labels[known].tolist() == [13, 14, 14]
    assert known.tolist() == [[True, True], [True, False], [False, False], [False, False]]
    following = medusa.places_of_labels(Batch(plain.token_ids, plain.valid, plain.counts, hidden), depth=2)
    # The state that chose a label lies one place before it.
    assert following[:, :, 0][known].tolist() == [2, 3, 3]


def test_texts_do_not_run_into_each_other(tmp_path: Path) -> None:
    both, made = batch(rows=2), objective(tmp_path)
    alone = [both.token_ids[row][both.valid[row]].numpy() for row in range(2)]
    total = torch.zeros(())
    for row, ids in enumerate(alone):
        plain = pad([ids], [2 + row])
        single = Batch(plain.token_ids, plain.valid, plain.counts, both.last[row : row + 1, : len(ids)])
        total = total + made.loss(single).total * single.num_counted
    torch.testing.assert_close(made.loss(both).total * both.num_counted, total)


# -- the loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["own", "shared", "target"])
def test_the_loss_is_the_papers(tmp_path: Path, output: str) -> None:
    made, given = objective(tmp_path, output=output, decay=0.5), batch()
    losses = made.loss(given)
    hidden, labels, known = medusa.places(given, DEPTH)
    logits = made.heads.logits(made.heads(hidden), made.target_output)
    assert logits.shape == (len(hidden), DEPTH, VOCAB)
    nats = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels) * known
    torch.testing.assert_close(losses.total, (nats.sum(0) @ torch.tensor([1, 0.5, 0.25])) / given.num_counted)
    torch.testing.assert_close(losses.parts["head_2"], nats.sum(0)[1] / given.num_counted)
    right, tested = chained(logits.argmax(-1) == labels, known)
    assert torch.equal(losses.right, right)
    assert torch.equal(losses.tested, tested)


def test_soft_labels_are_the_targets_distribution_at_the_place(tmp_path: Path) -> None:
    made, given = objective(tmp_path, distill_soft=True, decay=1.0), batch()
    hidden, _, known = medusa.places(given, DEPTH)
    logits = made.heads.logits(made.heads(hidden), made.target_output)
    wanted = (medusa.places_of_labels(given, DEPTH) @ made.target_output.T).softmax(-1)
    nats = -(wanted * logits.log_softmax(-1)).sum(-1) * known
    torch.testing.assert_close(made.loss(given).total, nats.sum() / given.num_counted)


def test_tokens_that_cannot_be_drafted_teach_nothing_but_are_not_accepted(tmp_path: Path) -> None:
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[10:] = 5  # the upper half is drafted
    made, given = objective(tmp_path, counts, draft_vocab_size=10, decay=1.0), batch()
    assert made.heads.draft_to_target is not None
    assert made.heads.draft_to_target.tolist() == list(range(10, 20))
    hidden, labels, known = medusa.places(given, DEPTH)
    logits = made.heads.logits(made.heads(hidden))
    can = labels >= 10
    assert (known & can).any()
    assert (known & ~can).any()
    nats = functional.cross_entropy(logits.flatten(0, 1), (labels - 10).clamp(0).flatten(), reduction="none").view_as(labels)
    losses = made.loss(given)
    torch.testing.assert_close(losses.total, (nats * (known & can)).sum() / given.num_counted)
    right, tested = chained((made.heads.best(made.heads(hidden)) == labels) & can, known)
    assert torch.equal(losses.right, right)
    assert torch.equal(losses.tested, tested)


def test_batches_add_up_to_the_large_one(tmp_path: Path) -> None:
    made, given = objective(tmp_path), batch(rows=4)

    def part(rows: slice) -> Batch:
        return Batch(given.token_ids[rows], given.valid[rows], given.counts[rows], given.last[rows])

    halves = [part(slice(0, 1)), part(slice(1, 4))]
    summed = sum(made.loss(half).total * half.num_counted for half in halves)
    torch.testing.assert_close(made.loss(given).total * given.num_counted, summed)


def test_the_targets_matrix_is_not_trained(tmp_path: Path) -> None:
    made = objective(tmp_path, output="target")
    names = {name for name, _ in made.named_parameters()}
    assert names == {"heads.blocks.0.linear.weight"}
    made.loss(batch()).total.backward()
    assert made.target_output.grad is None


def test_an_output_layer_may_stay_as_it_starts(tmp_path: Path) -> None:
    options = training.medusa_options(tmp_path, freeze_output=True, draft_vocab_size=10)
    made = MedusaObjective.build(options, setting())
    assert [name for name, parameter in made.named_parameters() if parameter.requires_grad] == ["heads.blocks.0.linear.weight"]
    assert made.heads.output is not None
    assert torch.equal(made.heads.output.weight[0], made.drafted_output)


def test_gates_norms_and_scales_do_not_decay(tmp_path: Path) -> None:
    made = objective(tmp_path, gated=True, norm="pre", output_scale=True)
    decaying = {name for name, parameter in made.named_parameters() if made.decays(name, parameter)}
    assert decaying == {"heads.blocks.0.linear.weight", "heads.output.weight"}


def test_impossible_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        objective(tmp_path, output="target", draft_vocab_size=10)


@pytest.mark.parametrize(
    "options",
    [{"output": "own"}, {"draft_vocab_size": 10, "gated": True, "norm": "post", "output_scale": True}, {"output": "target"}],
)
def test_the_checkpoint_holds_all_that_was_trained(tmp_path: Path, options: dict[str, Any]) -> None:
    made = objective(tmp_path, **options)
    made.export(tmp_path / "heads", {"command": "the test"})
    heads = load(tmp_path / "heads")
    hidden = batch().last[0]
    ours, theirs = (part.logits(part(hidden), made.target_output) for part in (made.heads, heads))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert heads.config == made.heads.config


# -- what is shown -------------------------------------------------------------------------------------------


def test_acceptance_is_given_the_drafts_before() -> None:
    right = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1], [1, 0]]).bool()
    known = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0], [0, 0]]).bool()
    counted = chained(right, known)
    assert [tensor.tolist() for tensor in counted] == [[3, 1], [4, 2]]
    assert acceptance(*counted) == [0.75, 0.5]
    assert acceptance_length([0.75, 0.5]) == 1 + 0.75 + 0.375
    assert acceptance(torch.zeros(2), torch.zeros(2)) == [0.0, 0.0]
