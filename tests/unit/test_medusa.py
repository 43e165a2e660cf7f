"""Medusa heads as modules and as a proposer: what they compute, what is drawn, and what goes to the verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.heads import random_heads, write
from tests.support.steps import host, step
from vllm_specplugin import ConfigError, Drafts, Request, Step, Target
from vllm_specplugin.config import SpecConfig, resolve
from vllm_specplugin.guard import Guard
from vllm_specplugin.heads import checkpoint, medusa_files
from vllm_specplugin.heads.graphs import RowGraphs, batch_sizes
from vllm_specplugin.heads.law import law_of
from vllm_specplugin.heads.layers import HostLayers, made_on
from vllm_specplugin.heads.medusa import MedusaConfig, MedusaHeads
from vllm_specplugin.proposers.medusa import MedusaProposer

HEADS, HIDDEN, VOCAB = 3, 16, 30
PLAIN = MedusaConfig(num_heads=HEADS, hidden_size=HIDDEN, vocab_size=VOCAB)
SHARED = replace(PLAIN, output="shared", draft_vocab_size=20)

EVERY_KIND = [
    MedusaConfig(
        num_heads=HEADS,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        num_layers=layers,
        output=output,  # type: ignore[arg-type]
        draft_vocab_size=draft_vocab,
        gated=gated,
        norm=norm,  # type: ignore[arg-type]
        output_scale=scale,
        bias=bias,
    )
    for output, draft_vocab in (("own", None), ("own", 20), ("shared", None), ("shared", 20), ("target", None))
    for layers, gated, norm, scale, bias in (
        *product((1,), (False, True), ("none", "pre", "post"), (False,), (False,)),
        (2, False, "none", False, True),
        (2, True, "pre", True, True),
    )
]


def kind(config: MedusaConfig) -> str:
    said = [config.output, config.draft_vocab_size, config.norm, config.num_layers]
    return "-".join([*map(str, said), *(name for name in ("gated", "output_scale", "bias") if getattr(config, name))])


# -- the mathematics ---------------------------------------------------------------------------------------


def by_hand(heads: MedusaHeads, state: torch.Tensor, head: int, target_output: torch.Tensor) -> torch.Tensor:
    """One head's logits for one state, as the paper and the options say, without batching."""
    config = heads.config

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * weight

    x = state
    for block in heads.blocks:
        inner = normed(x, block.norm.weight[head]) if config.norm == "pre" else x
        branch = block.linear.weight[head] @ inner
        if config.bias:
            branch = branch + block.linear.bias[head]
        branch = branch * torch.sigmoid(branch)
        x = x + (block.gate[head] * branch if config.gated else branch)
        if config.norm == "post":
            x = normed(x, block.norm.weight[head])
    if heads.scale is not None:
        x = x * heads.scale[head]
    if config.output == "target":
        return target_output @ x
    assert heads.output is not None
    return heads.output.weight[head if config.output == "own" else 0] @ x


@pytest.mark.parametrize("config", EVERY_KIND, ids=kind)
def test_every_kind_of_heads(config: MedusaConfig, tmp_path: Path) -> None:
    """What is computed is what the formula says, and heads come back from a checkpoint as they were."""
    heads = random_heads(config)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    output = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    states = heads(hidden)
    assert states.shape == (5, HEADS, HIDDEN)
    logits = heads.logits(states, output)
    wanted = torch.stack([torch.stack([by_hand(heads, row, head, output) for head in range(HEADS)]) for row in hidden])
    torch.testing.assert_close(logits, wanted)
    best = logits.argmax(-1)
    best = best if heads.draft_to_target is None else heads.draft_to_target[best]
    assert torch.equal(heads.best(states, output), best)

    info = checkpoint.inspect(str(write(tmp_path, heads)))
    assert (info.family, info.depth, info.hidden_size, info.vocab_size) == ("medusa", HEADS, HIDDEN, VOCAB)
    assert medusa_files.config_of(info.shapes, info.config, "here") == config
    again = MedusaHeads(config)
    medusa_files.load(again, checkpoint.tensors(info.folder), "here")
    assert {name: value.tolist() for name, value in again.state_dict().items()} == {
        name: value.tolist() for name, value in heads.state_dict().items()
    }


def test_the_targets_output_may_be_a_function() -> None:
    heads = random_heads(replace(PLAIN, output="target"))
    states = heads(torch.randn(4, HIDDEN))
    output = torch.randn(VOCAB, HIDDEN)
    torch.testing.assert_close(heads.logits(states, lambda rows: rows @ output.T), heads.logits(states, output))
    with pytest.raises(ValueError, match="share the target's output layer"):
        heads.logits(states)


@pytest.mark.parametrize("config", [config for config in EVERY_KIND if config.norm != "post"], ids=kind)
def test_heads_begin_as_the_targets_own_output(config: MedusaConfig) -> None:
    """All but those with a norm behind the block, which is no identity."""
    heads, output, hidden = MedusaHeads(config), torch.randn(VOCAB, HIDDEN), torch.randn(4, HIDDEN)
    mapping = None if config.draft_vocab_size is None else torch.randperm(VOCAB)[: config.draft_vocab_size]
    heads.initialise(output, mapping)
    wanted = hidden @ (output if mapping is None else output[mapping]).T
    torch.testing.assert_close(heads.logits(heads(hidden), output), wanted[:, None].expand(-1, HEADS, -1))
    heads.logits(heads(hidden), output).square().sum().backward()
    for block in heads.blocks:  # and can leave it: something in each branch has a gradient
        touched = block.linear.weight if block.gate is None else block.gate
        assert touched.grad is not None
        assert touched.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "'num_heads' of Medusa heads is 0; it must be at least 1."),
        ({"output": "mine"}, "'output' of Medusa heads is 'mine'"),
        ({"norm": "both"}, "'norm' of Medusa heads is 'both'"),
        ({"draft_vocab_size": 31}, "'draft_vocab_size' is 31; it must be from 1 to the target's vocabulary, 30."),
        ({"output": "target", "draft_vocab_size": 9}, "does not go with 'output': 'target'"),
    ],
)
def test_impossible_heads(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PLAIN, **change)


# -- what drafts are drawn from ----------------------------------------------------------------------------


def test_the_law_is_a_softmax_cut_at_top_k_then_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None, None]
    one = torch.ones(1)

    def law(temperature: float = 1.0, **cut: float) -> list[float]:
        return law_of(logits, one * temperature, **cut)[0, 0].tolist()  # type: ignore[arg-type]

    assert law() == pytest.approx([0.5, 0.3, 0.15, 0.05])
    hot = np.sqrt([0.5, 0.3, 0.15, 0.05])
    assert law(2.0) == pytest.approx(hot / hot.sum())
    assert law(top_k=2) == pytest.approx([0.625, 0.375, 0, 0])
    assert law(top_p=0.5) == pytest.approx([1, 0, 0, 0])
    assert law(top_p=0.51) == pytest.approx([0.625, 0.375, 0, 0])
    assert law(top_k=3, top_p=0.84) == pytest.approx([0.625, 0.375, 0, 0])  # 0.8 / 0.95 = 0.842 are in two
    assert law(top_k=9, top_p=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05])


# -- the proposer ------------------------------------------------------------------------------------------


class Target30(torch.nn.Module):
    """A target of which only the output layer is there."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.output.T


def proposer(
    tmp_path: Path,
    config: MedusaConfig = PLAIN,
    sampling: str = "greedy",
    k: int = HEADS,
    layers: HostLayers | None = None,
    **options: Any,
) -> MedusaProposer:
    folder = write(tmp_path / "heads", random_heads(config))
    said = SpecConfig(proposer="medusa", model=str(folder), draft_sampling=sampling, options=options)  # type: ignore[arg-type]
    around = host(vocab_size=VOCAB, k=k, hidden_size=HIDDEN, config=said, layers=layers)
    made = MedusaProposer(around, MedusaProposer.Options(**options))
    made.load(Target30())
    return made


def asking(temperatures: list[float], limits: list[int] | None = None, k: int = HEADS) -> Step:
    rows = {f"r{place}": Request(f"r{place}", temperature=value, seed=place) for place, value in enumerate(temperatures)}
    known = {name: [place, place + 1, place + 2] for place, name in enumerate(rows)}
    return step(known, k=k, limits=limits or [k] * len(rows), requests=rows, hidden_size=HIDDEN)


def logits_of(made: MedusaProposer, now: Step) -> torch.Tensor:
    assert now.hidden_states is not None
    return made.heads.logits(made.heads(now.hidden_states), Target30().output)


def rows_of(made: MedusaProposer, now: Step) -> list[list[int]]:
    guard = Guard(made, "medusa", 60_000)
    rows = guard.propose(now).rows()
    assert not guard.faults
    return rows


@pytest.mark.parametrize("config", [PLAIN, SHARED, replace(PLAIN, output="target")], ids=["own", "shared", "target"])
def test_greedy_drafts_are_the_likeliest_tokens(tmp_path: Path, config: MedusaConfig) -> None:
    made = proposer(tmp_path, config)
    now = asking([0.0, 1.0, 0.0, 0.7], limits=[3, 1, 0, 2])
    best = logits_of(made, now).argmax(-1)
    best = best if made.heads.draft_to_target is None else made.heads.draft_to_target[best]
    assert rows_of(made, now) == [best[row, :limit].tolist() for row, limit in enumerate([3, 1, 0, 2])]
    assert made.propose(now).probabilities is None


def test_fewer_tokens_than_heads_load_fewer_heads(tmp_path: Path) -> None:
    two, three = proposer(tmp_path, k=2), proposer(tmp_path)
    assert two.heads.config.num_heads == 2
    now = asking([0.0] * 4)
    assert rows_of(two, asking([0.0] * 4, k=2)) == [row[:2] for row in rows_of(three, now)]
    assert rows_of(three, asking([0.0] * 4, k=1)) == [row[:1] for row in rows_of(three, now)]  # and a step may want fewer


@pytest.mark.parametrize("config", [PLAIN, SHARED], ids=["own", "shared"])
def test_what_goes_to_the_verifier_is_what_was_drawn_from(tmp_path: Path, config: MedusaConfig) -> None:
    made = proposer(tmp_path, config, "probabilistic", temperature=0.8, top_k=7)
    now = asking([1.0, 0.0, 0.5, 1.5], limits=[3, 2, 3, 0])
    drafts = made.propose(now)
    assert isinstance(drafts.token_ids, torch.Tensor)
    assert drafts.probabilities is not None
    logits = logits_of(made, now)
    draftable = torch.arange(VOCAB) if made.heads.draft_to_target is None else made.heads.draft_to_target
    for row, temperature in ((0, 1.0), (2, 0.5)):
        wanted = torch.zeros(HEADS, VOCAB)
        wanted[:, draftable] = law_of(logits[row, None], torch.tensor([temperature * 0.8]), top_k=7)[0]
        torch.testing.assert_close(drafts.probabilities[row], wanted)
        assert (drafts.probabilities[row] > 0).sum(-1).tolist() == [7] * HEADS
    # A greedy neighbour gets greedy drafts and says so; one without drafts gets nothing.
    best = draftable[logits[1].argmax(-1)]
    assert torch.equal(drafts.token_ids[1], best)
    assert torch.equal(drafts.probabilities[1], torch.nn.functional.one_hot(best, VOCAB).float())
    assert drafts.probabilities[3].count_nonzero() == 0
    assert [len(row) for row in rows_of(made, now)] == [3, 2, 3, 0]


def test_a_batch_of_greedy_requests_costs_no_probabilities(tmp_path: Path) -> None:
    made = proposer(tmp_path, sampling="probabilistic")
    now = asking([0.0, 0.0])
    assert made.propose(now).probabilities is None
    assert rows_of(made, now) == rows_of(proposer(tmp_path), now)


def test_a_draw_does_not_depend_on_the_neighbours(tmp_path: Path) -> None:
    made = proposer(tmp_path, sampling="probabilistic")
    together = asking([1.0, 0.0, 1.0, 1.0])
    alone = [made.propose(together.select([row])) for row in range(4)]
    drafts = made.propose(together)
    assert torch.equal(ids_of(drafts), torch.cat([ids_of(each) for each in alone]))
    assert drafts.probabilities is not None
    torch.testing.assert_close(drafts.probabilities[[0]], alone[0].probabilities)


def ids_of(drafts: Drafts) -> torch.Tensor:
    assert isinstance(drafts.token_ids, torch.Tensor)
    return drafts.token_ids


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_the_likeliest_tokens_are_kept_on_demand(tmp_path: Path, sampling: str) -> None:
    made = proposer(tmp_path, SHARED, sampling, keep_top_k=4)
    now = asking([0.0, 1.0, 1.0], limits=[3, 0, 2])
    drafts = rows_of(made, now)
    assert drafts[0] == rows_of(proposer(tmp_path, SHARED), now)[0]
    made.propose(now)
    kept = made.last_top_k
    assert kept is not None
    assert kept.request_ids == ["r0", "r2"]
    law = logits_of(made, now)[[0, 2]].log_softmax(-1)
    assert made.heads.draft_to_target is not None
    places = torch.searchsorted(made.heads.draft_to_target, kept.token_ids)
    torch.testing.assert_close(law.gather(-1, places), kept.logprobs)
    assert torch.equal(law.topk(4).indices, places)
    made.propose(asking([0.0], limits=[0]))
    assert made.last_top_k is None
    assert proposer(tmp_path, SHARED).last_top_k is None


def test_heads_have_the_targets_type(tmp_path: Path) -> None:
    folder = write(tmp_path, random_heads(SHARED))
    around = host(vocab_size=VOCAB, k=HEADS, dtype="bfloat16", config=SpecConfig(proposer="medusa", model=str(folder)))
    made = MedusaProposer(around, MedusaProposer.Options())
    made.load(Target30())
    assert {parameter.dtype for parameter in made.heads.parameters()} == {torch.bfloat16}
    assert made.heads.draft_to_target is not None
    assert made.heads.draft_to_target.dtype == torch.int64
    now = replace(asking([0.0] * 2), hidden_states=torch.randn(2, HIDDEN, dtype=torch.bfloat16))
    assert [len(row) for row in rows_of(made, now)] == [HEADS] * 2
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(RuntimeError), made_on("cpu", torch.bfloat16):
        raise RuntimeError
    assert torch.get_default_dtype() == torch.float32


# -- start -------------------------------------------------------------------------------------------------

TARGET = Target(model="target", model_type="llama", hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=2)


def test_k_is_the_number_of_heads_and_never_more(tmp_path: Path) -> None:
    folder = str(write(tmp_path, random_heads(PLAIN)))
    assert resolve(SpecConfig(proposer="medusa", model=folder), TARGET).num_speculative_tokens == HEADS
    assert resolve(SpecConfig(proposer="medusa", model=folder, num_speculative_tokens=2)).num_speculative_tokens == 2
    with pytest.raises(ConfigError) as refused:
        resolve(SpecConfig(proposer="medusa", model=folder, num_speculative_tokens=4), TARGET)
    assert str(refused.value) == f"'num_speculative_tokens' is 4, but it can be at most 3: {folder} has 3 Medusa heads."


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (replace(TARGET, hidden_size=17), "for a hidden size of 16 .*, but the target 'target' has 17"),
        (replace(TARGET, vocab_size=31), "for a vocabulary of 30 tokens .*, but the target 'target' has 31"),
    ],
)
def test_heads_of_another_target_are_refused(tmp_path: Path, target: Target, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(SpecConfig(proposer="medusa", model=str(write(tmp_path, random_heads(PLAIN)))), target)


@pytest.mark.parametrize("option", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9}])
def test_options_of_drawing_need_drawing(tmp_path: Path, option: dict[str, float]) -> None:
    folder = str(write(tmp_path, random_heads(PLAIN)))
    with pytest.raises(ConfigError, match=f"'options.{next(iter(option))}' is .*, but greedy drafts are not drawn"):
        resolve(SpecConfig(proposer="medusa", model=folder, options=option))
    resolve(SpecConfig(proposer="medusa", model=folder, options=option, draft_sampling="probabilistic"))


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    said = {"proposer": "medusa", "model": str(write(tmp_path, random_heads(PLAIN))), "quantization": "fp8", "revision": "main"}
    assert resolve(SpecConfig.parse(said)).ignored() == ["'quantization': the proposer 'medusa' heeds no such key"]


# -- graphs ------------------------------------------------------------------------------------------------


def test_batch_sizes_leave_little_padding() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(16) == [1, 2, 4, 8, 16]
    assert batch_sizes(200) == [1, 2, 4, 8, 16, 32, 64, 128, 192, 200]


class Recorder:
    """A stand-in for CUDA graphs: remembers a function as it was called, and does exactly that again into the same buffer."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def __call__(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        result = function().clone()

        def replay() -> None:
            self.replayed.append(len(result))
            result.copy_(function())

        return result, replay


class RecordingLayers(HostLayers):
    """A host with graphs."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    def recorded(self, function: Any, example: torch.Tensor) -> Any:
        return RowGraphs(function, example, batch_sizes(len(example)), self.recorder)


def test_greedy_drafts_come_from_graphs(tmp_path: Path) -> None:
    layers = RecordingLayers()
    graphed, eager = proposer(tmp_path, SHARED, layers=layers), proposer(tmp_path, SHARED)
    for rows in (1, 3, 8, 5, 1):  # stale rows of a larger batch lie behind those of a smaller one
        now = asking([0.0] * rows)
        assert rows_of(graphed, now) == rows_of(eager, now)
    assert layers.recorder.replayed == [1, 4, 8, 8, 1]
    more = asking([0.0] * 9)  # than the host said: no graph is so large
    assert rows_of(graphed, more) == rows_of(eager, more)
    assert len(layers.recorder.replayed) == 5


def test_there_are_no_graphs_where_there_is_no_device_for_them() -> None:
    def function(rows: torch.Tensor) -> torch.Tensor:
        return rows

    assert HostLayers().recorded(function, torch.zeros(4, 2)) is function
