"""Multi-token prediction as an objective: the loss, where its gradients go, lambda, and what frozen and joint have in common."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.mtp import DEPTH, VARIANTS, joint, texts
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.train.batch import Batch
from vllm_specplugin.train.mtp import DepthWeights, FrozenMTP, FrozenParts, JointMTP
from vllm_specplugin.train.objective import acceptance

LAMBDAS = (1.0, 0.5, 0.25, 0.125)

# fp32 sums over a few hundred terms, in another order
SAME = 1e-5


def batch(pairs: int = 1) -> Batch:
    """Texts of 12 and 7 tokens; of the first the target wrote all, of the second what follows four tokens of prompt."""
    token_ids = texts(2 * pairs, 12, seed=5)
    lengths = torch.tensor([12, 7] * pairs)
    valid = torch.arange(12) < lengths[:, None]
    counts = valid & (torch.arange(12) >= torch.tensor([0, 4] * pairs)[:, None])
    return Batch(token_ids.masked_fill(~valid, 0), valid, counts)


def depths(objective: JointMTP, example: Batch) -> list[Tensor]:
    """`[rows, length, vocab]` of log-probabilities, the main head's first."""
    trunk = objective.trunk(example.token_ids)
    return [(state @ trunk.output.T).log_softmax(dim=-1) for state in (trunk.after_norm, *objective.drafted(trunk))]


# -- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_the_formula(variant: str) -> None:
    """L = sum_d lambda_d (- sum_t log p_d(x_{t+d})), over the tokens that count, term by term."""
    objective, example = joint(variant, LAMBDAS), batch()
    found = objective.loss(example)
    expected = 0.0
    with torch.no_grad():
        logs = depths(objective, example)
    for depth in range(1, DEPTH + 1):
        part = 0.0
        for row in range(2):
            for place in range(12 - depth):
                if example.counts[row, place + depth]:
                    part -= float(logs[depth - 1][row, place, example.token_ids[row, place + depth]])
        part /= int(example.counts.sum())
        assert float(found.parts["main" if depth == 1 else f"depth {depth}"]) == pytest.approx(part, rel=SAME)
        expected += LAMBDAS[depth - 1] * part
    assert float(found.total.detach()) == pytest.approx(expected, rel=SAME)


@pytest.mark.parametrize("variant", VARIANTS)
def test_acceptance_is_counted_as_it_is_served(variant: str) -> None:
    """At every place whose next token the target wrote: drafts in order, up to the first that is wrong or has no token."""
    pairs = 30  # so that random heads are right here and there, twice in a row
    objective, example = joint(variant, LAMBDAS), batch(pairs)
    best = [log.argmax(dim=-1) for log in depths(objective, example)]
    right, tested = [0] * (DEPTH - 1), [0] * (DEPTH - 1)
    for row in range(2 * pairs):
        for place in range(11):
            if not example.counts[row, place + 1]:
                continue
            for draft in range(DEPTH - 1):
                at = place + 2 + draft
                if at >= 12 or not example.counts[row, at]:
                    break
                tested[draft] += 1
                if best[draft + 1][row, place] != example.token_ids[row, at]:
                    break
                right[draft] += 1
    found = objective.loss(example)
    assert (found.right.tolist(), found.tested.tolist()) == (right, tested)
    assert tested[0] == pairs * (10 + 2)  # of 12 tokens, and of 3 after a prompt
    assert right[0] >= tested[1] > 0


def test_padding_changes_nothing() -> None:
    objective, example = joint("shared", LAMBDAS), batch()
    wide = Batch(*(torch.nn.functional.pad(part, (0, 3)) for part in (example.token_ids, example.valid, example.counts)))
    narrow_loss, wide_loss = objective.loss(example), objective.loss(wide)
    assert torch.allclose(narrow_loss.total, wide_loss.total, atol=SAME)
    assert torch.equal(narrow_loss.right, wide_loss.right)


# -- gradients ---------------------------------------------------------------------------------------------


def gradients(objective: JointMTP, example: Batch) -> dict[str, Tensor]:
    objective.zero_grad()
    objective.loss(example).total.backward()
    return {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trunk_learns_from_every_depth(variant: str) -> None:
    """With the main head's weight at 0, each single depth still moves the trunk, all of it that the heads read."""
    own = set() if variant == "parallel" else {"trunk.model.model.norm.weight"}  # modules read what comes before it
    for depth in range(2, DEPTH + 1):
        lambdas = tuple(float(d == depth) for d in range(1, DEPTH + 1))
        found = gradients(joint(variant, lambdas), batch())
        still = {name for name, gradient in found.items() if name.startswith("trunk.") and not gradient.any()}
        assert still == own, depth


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_lambda_it_is_plain_language_modelling(variant: str) -> None:
    """Extra depths of weight 0 leave the trunk the gradient of the next-token loss alone: the baseline of a comparison."""
    objective, example = joint(variant, (1.0, 0.0, 0.0, 0.0)), batch()
    found = gradients(objective, example)
    assert not any(gradient.any() for name, gradient in found.items() if name.startswith("heads."))
    objective.zero_grad()
    log = depths(objective, example)[0][:, :-1].gather(2, example.token_ids[:, 1:, None])[..., 0]
    (-(log * example.counts[:, 1:]).sum() / example.num_counted).backward()
    for name, parameter in objective.trunk.named_parameters():
        assert torch.allclose(found[f"trunk.{name}"], parameter.grad, atol=SAME), name  # type: ignore[arg-type]


def freeze(objective: JointMTP, **options: Any) -> FrozenMTP:
    """The same heads on the same model, which does not learn."""
    embedding = objective.trunk.model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    parts = FrozenParts(embedding.detach(), objective.trunk.output.detach(), objective.trunk.final_norm.detach())
    return FrozenMTP(parts, objective.heads, objective.weights, lambda *arguments: None, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_frozen_trunk_has_the_same_heads(variant: str) -> None:
    """From stored states (after the final norm) the extra depths have the loss and the gradients that they have jointly."""
    objective, example = joint(variant, LAMBDAS), batch()
    with torch.no_grad():
        objective.trunk.final_norm.copy_(torch.rand_like(objective.trunk.final_norm) + 0.5)
        states = objective.trunk(example.token_ids).after_norm
    frozen = freeze(objective)
    together = objective.loss(example)
    there = gradients(objective, example)
    frozen.zero_grad()
    alone = frozen.loss(Batch(example.token_ids, example.valid, example.counts, states))
    alone.total.backward()
    main = LAMBDAS[0] * together.parts["main"]
    # The norm's epsilon comes in twice, 1e-5 against states of size 1.
    assert float(alone.total.detach()) == pytest.approx(float((together.total - main).detach()), abs=1e-4)
    assert torch.equal(alone.right, together.right)
    for name, parameter in frozen.named_parameters():
        assert torch.allclose(parameter.grad, there[name], atol=1e-4), name  # type: ignore[arg-type]
    assert {name.split(".")[0] for name, _ in frozen.named_parameters()} == {"heads"}


def test_a_final_norm_with_a_zero_is_refused() -> None:
    objective = joint("shared")
    with torch.no_grad():
        objective.trunk.final_norm[3] = 0.0
    with pytest.raises(ConfigError, match="exactly 0"):
        freeze(objective)


def with_states(objective: JointMTP, example: Batch) -> Batch:
    with torch.no_grad():
        return replace(example, hidden_states=objective.trunk(example.token_ids).after_norm)


@pytest.mark.parametrize("variant", VARIANTS)
def test_soft_labels_are_the_targets_distribution_at_the_place_of_the_label(variant: str) -> None:
    objective, example = joint(variant, LAMBDAS), batch()
    logs = [log.detach() for log in depths(objective, example)]
    found = freeze(objective, soft=True).loss(with_states(objective, example))
    for depth in range(2, DEPTH + 1):
        part = 0.0
        for row, place in product(range(2), range(12 - depth)):
            if example.counts[row, place + depth]:
                wanted = logs[0][row, place + depth - 1].exp()  # what chose x_{t + depth}
                part -= float(wanted @ logs[depth - 1][row, place])
        assert float(found.parts[f"depth {depth}"]) == pytest.approx(part / int(example.counts.sum()), rel=SAME)


def test_a_part_of_the_vocabulary_in_the_loss() -> None:
    """Training compares the kept tokens alone and leaves other labels out; an evaluation ranges over all tokens."""
    objective, example = joint("parallel", LAMBDAS), batch(20)
    kept = torch.tensor([1, 2, 5, 7, 11, 12, 18, 23])
    frozen = freeze(objective, compared=kept)
    states = with_states(objective, example)
    found = frozen.loss(states)
    trunk = objective.trunk(example.token_ids)
    state = next(objective.drafted(trunk)).detach()
    logs = (state @ trunk.output.detach()[kept].T).log_softmax(dim=-1)
    part, right = 0.0, 0
    for row, place in product(range(40), range(10)):
        token = int(example.token_ids[row, place + 2])
        if example.counts[row, place + 2] and token in kept:
            part -= float(logs[row, place, kept.tolist().index(token)])
        if example.counts[row, place + 1] and example.counts[row, place + 2]:
            right += int(kept[logs[row, place].argmax()]) == token
    assert float(found.parts["depth 2"]) == pytest.approx(part / example.num_counted, rel=SAME)
    assert int(found.right[0]) == right > 0
    frozen.eval()
    everything = objective.loss(example)
    assert torch.equal(frozen.loss(states).right, everything.right)
    assert float(frozen.loss(states).parts["depth 2"]) == pytest.approx(float(everything.parts["depth 2"]), abs=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_learns_what_can_be_learnt(variant: str) -> None:
    """A text in which each token follows from the one before: every depth can be right, and soon is."""
    objective = joint(variant, (1.0, 1.0, 1.0, 1.0))
    places = torch.arange(24)
    token_ids = (places[None] * 5 + torch.tensor([0, 7, 13, 20])[:, None]) % 24
    everything = torch.ones_like(token_ids, dtype=torch.bool)
    example = Batch(token_ids, everything, everything)
    optimiser = torch.optim.Adam(objective.parameters(), lr=3e-3)
    before = acceptance(*_counts(objective, example))
    for _ in range(60):
        optimiser.zero_grad()
        objective.loss(example).total.backward()
        optimiser.step()
    after = acceptance(*_counts(objective, example))
    assert before[0] < 0.5
    assert min(after) > 0.95


def _counts(objective: JointMTP, example: Batch) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found = objective.loss(example)
    return found.right, found.tested


# -- lambda ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [("0.3", (1.0, 0.3, 0.3)), ("0.3,0.1", (1.0, 0.3, 0.1)), ("0.5,0.3,0.1", (0.5, 0.3, 0.1)), ("0", (1.0, 0.0, 0.0))],
)
def test_lambdas_for_depth_three(values: str, expected: tuple[float, ...]) -> None:
    assert DepthWeights.parse(values, "constant", 3).at(0.4) == expected


@pytest.mark.parametrize(
    ("course", "factors"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("ramp", [0.0, 0.25, 0.5, 1.0]),
        ("0:0,0.5:1", [0.0, 0.5, 1.0, 1.0]),
        ("0.25:1,0.25:0.2", [1.0, 0.2, 0.2, 0.2]),  # a jump, as in DeepSeek-V3's 0.3 and then 0.1
    ],
)
def test_lambda_over_the_run(course: str, factors: list[float]) -> None:
    weights = DepthWeights.parse("2", course, 2)
    assert [weights.at(share) for share in (0.0, 0.25, 0.5, 1.0)] == [(1.0, pytest.approx(2 * f)) for f in factors]


def test_the_loop_changes_lambda() -> None:
    objective = joint("parallel", (1.0, 0.5))
    objective.weights = DepthWeights((1.0, 0.5), ((0.0, 0.0), (1.0, 1.0)))
    example = batch()
    for share in (0.0, 0.5, 1.0):
        objective.schedule(share)
        found = objective.loss(example)
        expected = found.parts["main"] + 0.5 * share * found.parts["depth 2"]
        assert torch.allclose(found.total.detach(), expected, atol=SAME)


@pytest.mark.parametrize(
    ("values", "course", "said"),
    [
        ("a", "constant", "'--lambdas' is 'a'"),
        ("1,2,3,4", "constant", "2 by commas, or 3"),
        ("-1", "constant", "at least 0"),
        ("1", "wild", "'--lambda-schedule' is 'wild'"),
        ("1", "0.5:1,0.2:0", "in order"),
        ("1", "0:1,2:1", "in order"),
        ("1", "0:-1", "in order"),
    ],
)
def test_impossible_lambdas_are_refused(values: str, course: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DepthWeights.parse(values, course, 3)
