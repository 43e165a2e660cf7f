"""The objectives of EAGLE and EAGLE-3: what they learn from, that a head learns by them, that its checkpoint is the head."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.chains import draft
from tests.support.eagles import AUX_LAYERS, LAYERS, PROMPT, VOCAB, Tiny, fit, length_on
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.checkpoint import inspect, tensors
from vllm_specplugin.heads.decoder import DecoderConfig
from vllm_specplugin.heads.eagle import Eagle3Head, EagleHead
from vllm_specplugin.train.batch import Batch
from vllm_specplugin.train.eagle import EagleObjective
from vllm_specplugin.train.eagle3 import Eagle3Objective
from vllm_specplugin.train.unrolled import Chains, Drafting, UnrolledObjective

TOLERANCE = 1e-5
"""Float32, relative: the same sums in another order."""

FAMILIES: Mapping[str, Mapping[str, Any]] = {"eagle": {}, "eagle3": {"draft_vocab_size": 20}}
"""EAGLE-3 with a draft vocabulary, so that some of the target's tokens cannot be drafted."""


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny.make()


@pytest.fixture(scope="module")
def texts(tiny: Tiny) -> list[list[int]]:
    return tiny.texts(4, 30)


@pytest.fixture(scope="module")
def batch(tiny: Tiny, texts: list[list[int]]) -> Batch:
    return tiny.batch(texts)


@pytest.fixture(scope="module", params=FAMILIES)
def fitted(request: pytest.FixtureRequest, tiny: Tiny, batch: Batch) -> UnrolledObjective:
    """A head that is right often and wrong often."""
    objective = tiny.objective(request.param, batch, **FAMILIES[request.param])
    fit(objective, batch, steps=15)
    return objective


# -- what is learnt from -----------------------------------------------------------------------------------


def test_chains_start_where_the_target_wrote_the_next_token() -> None:
    counts = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 0]])
    chains = Chains.of(Batch(tokens, valid=counts | True, counts=counts))
    # The token after place 1 is the first answer; the one after that is known as long as there are two more.
    assert chains.places[0].tolist() == [1, 2, 3]
    assert chains.places[1, :2].tolist() == [2, 3]
    assert chains.live.tolist() == [[True, True, True], [True, True, False]]
    assert chains.ahead(tokens, 2)[0].tolist() == [13, 14, 15]
    assert chains.reach(counts, 2).tolist() == [[True, True, True], [True, False, False]]
    assert chains.reach(counts, 3).tolist() == [[True, True, False], [False, False, False]]


@torch.no_grad()
def test_acceptance_is_what_drafting_comes_to(
    tiny: Tiny, texts: list[list[int]], batch: Batch, fitted: UnrolledObjective
) -> None:
    """Draft from every place as a server would, token by token, and count."""
    steps = fitted.depth
    right, tested = [0] * steps, [0] * steps
    for text in texts:
        for place in range(PROMPT - 1, len(text) - 2):
            drafts = draft(fitted.head, tiny.target, text, place, steps, AUX_LAYERS)
            for step, (guess, token) in enumerate(zip(drafts, text[place + 2 :], strict=False)):
                tested[step] += 1
                if guess != token:
                    break
                right[step] += 1
    losses = fitted.loss(batch)
    assert (losses.right.tolist(), losses.tested.tolist()) == (right, tested)
    assert 0 < right[-1] < tested[-1]  # both outcomes are there to be counted


def reference(
    objective: UnrolledObjective, batch: Batch, texts: list[list[int]], labels: str, chains: str
) -> Mapping[str, Tensor]:
    """The loss by its definition: place by place, in full logits, each chain computed by itself in a text cut behind it."""
    head, entropy, features = objective.head, torch.zeros(()), torch.zeros(())
    embedding, output = objective.embedding, objective.target_output
    drafted = head.draft_tokens.tolist() if isinstance(head, Eagle3Head) else list(range(VOCAB))
    for row, text in enumerate(texts):
        length = len(text)
        ids, last = batch.token_ids[row, :length], batch.last[row, :length]
        states = batch.aux[row] if isinstance(head, Eagle3Head) else batch.last[row]
        for start in range(PROMPT - 1, length - 2):
            # One chain alone needs no special mask: it is a text whose later states are the head's own.
            hidden = head.fuse(states[: start + 1])
            for step in range(min(objective.depth, length - 2 - start)):
                now = start + step
                place = torch.arange(now + 1)
                output_state = head(embedding[ids[1 : now + 2]][None], hidden[None], place)[0, -1]
                hidden = torch.cat((hidden, output_state[None]))
                token = int(ids[now + 2])
                if token not in drafted:
                    if chains == "accepted":
                        break
                    continue
                chosen_by = last[now + 1]
                logits = head.logits(output_state, output).log_softmax(-1)
                wanted = F.one_hot(torch.tensor(drafted.index(token)), len(drafted)).float()
                if labels == "soft":
                    wanted = (tiny_output(objective, drafted) @ chosen_by).softmax(-1)
                weight = objective.step_decay**step / batch.num_counted
                entropy = entropy - weight * (wanted * logits).sum()
                features = features + weight * F.smooth_l1_loss(output_state, chosen_by)
                if chains == "accepted" and drafted[int(logits.argmax())] != token:
                    break
    return {"entropy": entropy, "features": features}


def tiny_output(objective: UnrolledObjective, drafted: list[int]) -> Tensor:
    """The target's output matrix for the tokens that can be drafted."""
    return Tiny.make().frozen.output[torch.tensor(drafted)] if isinstance(objective, Eagle3Objective) else objective.target_output


@pytest.mark.parametrize(("labels", "chains"), [("soft", "all"), ("text", "all"), ("soft", "accepted")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_its_definition(
    tiny: Tiny, batch: Batch, texts: list[list[int]], family: str, labels: str, chains: str
) -> None:
    few = Batch(*(getattr(batch, name)[:2, :16] for name in Batch.__slots__))
    objective = tiny.objective(family, batch, labels=labels, chains=chains, **FAMILIES[family])
    fit(objective, batch, steps=5)  # so that some drafts are right and some are not
    wanted = reference(objective, few, [text[:16] for text in texts[:2]], labels, chains)
    total = wanted["entropy"]
    if isinstance(objective, EagleObjective):
        total = objective.token_weight * total + objective.feature_weight * wanted["features"]
    losses = objective.train().loss(few)
    assert 0 < losses.right[1] < losses.tested[1]
    torch.testing.assert_close(losses.total, total, rtol=TOLERANCE, atol=0)
    # All parameters learn, and by the same gradient.
    mine = torch.autograd.grad(losses.total, list(objective.parameters()))
    theirs = torch.autograd.grad(total, list(objective.parameters()))
    for one, other in zip(mine, theirs, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_nothing_is_learnt_from_the_future(tiny: Tiny, batch: Batch, fitted: UnrolledObjective) -> None:
    """Change tokens from place p on, and the target's states there: drafts that were due before stay as they are."""
    cut = 15
    changed = replace(
        batch,
        token_ids=batch.token_ids.where(torch.arange(batch.token_ids.shape[1]) < cut, 1),
        hidden_states=batch.last.clone(),
        aux_hidden_states=batch.aux.clone(),
    )
    changed.last[:, cut:] += 1.0
    changed.aux[:, cut:] += 1.0
    chains = Chains.of(batch)
    with torch.no_grad():
        before, after = list(Drafting(fitted, batch)), list(Drafting(fitted, changed))
    for step, (one, other) in enumerate(zip(before, after, strict=True)):
        early = chains.live & (chains.places + 1 + step < cut)  # the last token that was read
        assert torch.equal(one[early], other[early])
        late = chains.live & (chains.places + 1 + step == cut)  # the first that has read a changed one
        assert (one[late] != other[late]).any(dim=-1).all()


def test_noise_is_for_training_alone_and_comes_from_the_run_s_generator(tiny: Tiny, batch: Batch) -> None:
    objective = tiny.objective("eagle", batch, noise=0.5)
    torch.manual_seed(7)
    noisy = objective.train().loss(batch).total
    torch.manual_seed(7)
    assert torch.equal(objective.loss(batch).total, noisy)
    assert not torch.equal(objective.loss(batch).total, noisy)
    quiet = objective.eval().loss(batch).total
    assert torch.equal(objective.loss(batch).total, quiet)
    assert torch.equal(tiny.objective("eagle", batch).eval().loss(batch).total, quiet)


def test_a_loss_over_part_of_the_vocabulary_leaves_drafting_as_it_is(tiny: Tiny, batch: Batch) -> None:
    whole, part = (tiny.objective("eagle", batch, loss_vocab_size=size) for size in (None, 12))
    assert torch.equal(part.eval().loss(batch).total, whole.eval().loss(batch).total)
    assert part.train().loss(batch).total < whole.train().loss(batch).total  # fewer to choose from, fewer places
    written = torch.bincount(batch.token_ids[batch.counts], minlength=VOCAB)
    assert written[part.frequent].sum() == written.topk(12).values.sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_can_end_where_serving_would(tiny: Tiny, batch: Batch, family: str) -> None:
    """`--chains accepted` judges the same drafts and learns from fewer: the first everywhere, a later one behind right ones."""
    every, accepted = (tiny.objective(family, batch, chains=chains, **FAMILIES[family]) for chains in ("all", "accepted"))
    fit(every, batch, steps=10)
    accepted.load_state_dict(every.state_dict())
    one, other = every.loss(batch), accepted.train().loss(batch)
    assert torch.equal(one.right, other.right)
    assert torch.equal(one.tested, other.tested)
    # Soft labels have entropy, so each place that is left out was worth something.
    assert other.total < one.total
    every.ttt_steps = accepted.ttt_steps = 1
    assert torch.equal(every.loss(batch).total, accepted.loss(batch).total)


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_losses_compare(tiny: Tiny, batch: Batch, family: str) -> None:
    """With each other as the head gets better, and goes on to more drafts, and with those of `--chains all`."""
    every, accepted = (tiny.objective(family, batch, chains=chains, **FAMILIES[family]) for chains in ("all", "accepted"))
    found = []
    for steps in (5, 35):
        fit(accepted, batch, steps)
        every.load_state_dict(accepted.state_dict())
        losses, other = accepted.loss(batch), every.eval().loss(batch)
        assert torch.equal(losses.total, other.total)
        assert all(torch.equal(part, other.parts[name]) for name, part in losses.parts.items())
        found.append(losses)
    worse, better = found
    assert bool((better.right > worse.right).all())
    assert better.total < worse.total


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_whose_answer_is_one_token_teaches_nothing(tiny: Tiny, texts: list[list[int]], batch: Batch, family: str) -> None:
    """No draft is due in it; alone in a batch it must not stop the run."""
    objective = tiny.objective(family, batch, **FAMILIES[family])
    losses = objective.loss(tiny.batch([texts[0][: PROMPT + 1]]))
    losses.total.backward()
    assert losses.total == 0
    assert losses.tested.tolist() == [0, 0, 0]


# -- learning ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "options"), [("eagle", {}), ("eagle3", {"init": "target"}), ("eagle3", {"init": "random"})])
def test_a_head_learns(tiny: Tiny, batch: Batch, family: str, options: Mapping[str, Any]) -> None:
    objective = tiny.objective(family, batch, **FAMILIES[family], **options)
    frozen = {name: tensor.clone() for name, tensor in objective.named_buffers()}
    before = length_on(objective, batch)
    fit(objective, batch, steps=40)
    # Of four at most: one token is drafted without a head at all. Where 20 of 32 can be drafted, some never are.
    assert before < 1.6
    assert length_on(objective, batch) > 2.2
    for name, tensor in objective.named_buffers():
        assert torch.equal(tensor, frozen[name]), name


def test_the_output_layer_can_stay_the_target_s(tiny: Tiny, batch: Batch) -> None:
    for init in ("target", "random"):
        objective = tiny.objective("eagle3", batch, draft_vocab_size=20, freeze_output=True, init=init)
        fit(objective, batch, steps=3)
        head = objective.head
        assert isinstance(head, Eagle3Head)
        assert torch.equal(head.lm_head.weight, tiny.frozen.output[head.draft_tokens])
        assert not head.lm_head.weight.requires_grad


def test_eagle3_starts_from_the_target_s_last_layer(tiny: Tiny, batch: Batch) -> None:
    """What that comes to is tested on the head; here, that it is the last layer, and not another one."""
    head = tiny.objective("eagle3", batch, draft_vocab_size=20).head
    assert isinstance(head, Eagle3Head)
    assert torch.equal(head.midlayer.mlp.gate_proj.weight, tiny.target.model.model.layers[LAYERS - 1].mlp.gate_proj.weight)
    assert torch.equal(head.lm_head.weight, tiny.frozen.output[head.draft_tokens])


SPOILT: Mapping[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "fused projections": lambda stored: {name: tensor for name, tensor in stored.items() if "k_proj" not in name},
    "norms behind the blocks": lambda stored: {name.replace("input_layernorm", "post_norm"): t for name, t in stored.items()},
    "no final norm": lambda stored: {name: tensor for name, tensor in stored.items() if name != "model.norm.weight"},
    "scales beside weights": lambda stored: {
        name: tensor.to(torch.float8_e4m3fn) if "mlp" in name else tensor for name, tensor in stored.items()
    },
    "norms of queries": lambda stored: {
        **stored,
        **{f"model.layers.{n}.self_attn.q_norm.weight": torch.ones(4) for n in range(LAYERS)},
    },
    "biases": lambda stored: {
        **stored,
        **{name[: -len("weight")] + "bias": torch.ones(len(t)) for name, t in stored.items() if "k_proj" in name},
    },
    "other shapes": lambda stored: {name: tensor[:-1] if "gate_proj" in name else tensor for name, tensor in stored.items()},
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_last_layer_of_another_make_is_left_alone(
    how: str, tiny: Tiny, batch: Batch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The head starts at random, and says so."""
    save_file(SPOILT[how](load_file(tiny.folder / "model.safetensors")), tmp_path / "model.safetensors")
    setting = replace(tiny.setting(batch), target=replace(tiny.frozen, folder=tmp_path))
    with caplog.at_level("WARNING", logger="vllm.specplugin"):
        head = Eagle3Objective.build(tiny.options("eagle3", draft_vocab_size=20), setting).head
    assert "starts at random" in caplog.text
    assert bool(head.midlayer.self_attn.q_proj.weight.isfinite().all())
    assert head.fc.weight.count_nonzero() > head.fc.weight.shape[0]  # not the identity that a start from the target has


def test_a_language_model_among_other_parts_is_found(tiny: Tiny, batch: Batch, tmp_path: Path) -> None:
    stored = {f"language_model.{name}": tensor for name, tensor in load_file(tiny.folder / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors")
    setting = replace(tiny.setting(batch), target=replace(tiny.frozen, folder=tmp_path))
    head = Eagle3Objective.build(tiny.options("eagle3", draft_vocab_size=20), setting).head
    assert torch.equal(head.midlayer.mlp.gate_proj.weight, tiny.target.model.model.layers[LAYERS - 1].mlp.gate_proj.weight)


def test_eagle3_needs_three_layers_to_fuse(tiny: Tiny, batch: Batch) -> None:
    shallow = replace(tiny.frozen, num_layers=LAYERS - 1)
    with pytest.raises(ConfigError, match="has 6 layers; EAGLE-3 reads three different ones, which takes 7"):
        Eagle3Objective.build(tiny.options("eagle3"), replace(tiny.setting(batch), target=shallow))


# -- checkpoints -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_the_head(fitted: UnrolledObjective, batch: Batch, tmp_path: Path) -> None:
    fitted.export(tmp_path, {"command": "vllm-specplugin train"})
    config = json.loads((tmp_path / "config.json").read_text())
    info = inspect(str(tmp_path))
    assert (info.family, info.layout, info.hidden_size, info.vocab_size) == (fitted.name, "safeailab", 64, VOCAB)
    assert info.provenance["command"] == "vllm-specplugin train"
    size = DecoderConfig.from_hf(config)
    if fitted.name == "eagle3":
        assert info.draft_vocab_size == 20
        assert config["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)
        again: Any = Eagle3Head(size, config["vocab_size"], config["draft_vocab_size"])
    else:
        again = EagleHead(size)
    again.load_state_dict(dict(tensors(tmp_path)))
    states = fitted.states_of(batch)[:1]
    embeddings, places = fitted.embedding[batch.token_ids[:1]], torch.arange(states.shape[1])
    for head in (fitted.head, again):
        torch.testing.assert_close(
            head(embeddings, head.fuse(states), places), fitted.head(embeddings, fitted.head.fuse(states), places), atol=0, rtol=0
        )
