"""The heads' decoder layer: transformers' Llama layer to the last digit, and what each place may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.decoder import Cached, Context, DecoderConfig, DecoderLayer, Rope, Unrolled, at_places
from vllm_specplugin.heads.eagle import DraftHead, Eagle3Head, EagleHead

TOLERANCE = 1e-5
"""Float32 and another order of the same operations; states are of size 1."""

SMALL = DecoderConfig(hidden_size=24, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=10)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random, norms and biases too: none may be overlooked."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        spread = 0.5 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread + (1.0 if parameter.ndim == 1 else 0.0)
    return module


def random_states(rows: int, length: int, size: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, length, size, generator=torch.Generator().manual_seed(seed))


# -- the same as transformers ------------------------------------------------------------------------------

LLAMA = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "max_position_embeddings": 128, "vocab_size": 8}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-2},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
        {
            # Of the three pairs one keeps its speed, one is blended, one is slowed down.
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["plain", "grouped", "biases", "theta", "linear", "llama3"],
)
def test_it_is_the_layer_of_transformers(config: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    llama = LlamaConfig(**LLAMA | config, attn_implementation="eager")
    theirs = randomised(LlamaDecoderLayer(llama, layer_idx=0))
    ours = DecoderLayer(DecoderConfig.from_hf(llama))
    ours.load_state_dict(theirs.state_dict())  # strict: the names are the same, and none is missing

    hidden, positions = random_states(2, 30, 24), torch.arange(70, 100)
    causal = torch.full((30, 30), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        rotation = LlamaRotaryEmbedding(llama)(hidden, positions[None])
        wanted = theirs(hidden, attention_mask=causal, position_ids=positions[None], position_embeddings=rotation)
        for places in (positions, positions.expand(2, -1)):
            torch.testing.assert_close(ours(hidden, places), wanted, atol=TOLERANCE, rtol=0)
    # The configuration that a head's checkpoint carries says the same again.
    assert DecoderConfig.from_hf(LlamaConfig(**DecoderConfig.from_hf(llama).to_hf())) == DecoderConfig.from_hf(llama)


def test_older_configurations_are_read_too() -> None:
    stretched = LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert DecoderConfig.from_hf(stretched).rope == Rope(theta=500.0, kind="linear", factor=2.0)


def test_only_the_query_key_and_value_of_a_qwen2_have_biases() -> None:
    config = DecoderConfig.from_hf(LLAMA | {"model_type": "qwen2"})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'rope_type' is 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is not 1"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"intermediate_size": None}, "has no 'intermediate_size'"),
    ],
)
def test_what_a_head_cannot_be_sized_by_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_hf(LLAMA | config)


@torch.no_grad()
def test_eagle3_starts_as_a_layer_of_the_target() -> None:
    """Its first pass is then that layer over the topmost fused state, whatever the next token is."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

    llama = LlamaConfig(**LLAMA, attn_implementation="eager")
    layer, norm = randomised(LlamaDecoderLayer(llama, layer_idx=0)), randomised(LlamaRMSNorm(24, llama.rms_norm_eps), seed=5)
    weights, config = layer.state_dict(), DecoderConfig.from_hf(llama)
    hidden, embeddings, places = random_states(2, 9, 24), random_states(2, 9, 24, seed=2), torch.arange(9)
    seen = {
        "attention_mask": torch.full((9, 9), float("-inf")).triu(1)[None, None],
        "position_embeddings": LlamaRotaryEmbedding(llama)(hidden, places[None]),
    }

    eagle3 = Eagle3Head(config, vocab_size=8)
    eagle3.initialise(weights, norm.weight)
    fused = eagle3.fuse(torch.cat((random_states(2, 9, 48, seed=3), hidden), dim=-1))
    output = eagle3.norm(eagle3(embeddings, fused, places))
    torch.testing.assert_close(output, norm(layer(hidden, **seen)), atol=TOLERANCE, rtol=0)


# -- what a place sees -------------------------------------------------------------------------------------


def test_a_cache_filled_in_pieces_is_the_whole_text() -> None:
    layer, hidden = randomised(DecoderLayer(SMALL)), random_states(2, 12, 24)
    cache, places = Cached(), torch.arange(12)
    with torch.no_grad():
        pieces = [layer(hidden[:, part], places[part], cache) for part in (slice(0, 7), slice(7, 8), slice(8, 12))]
        torch.testing.assert_close(torch.cat(pieces, dim=1), layer(hidden, places), atol=TOLERANCE, rtol=0)


def head_of(family: str) -> tuple[DraftHead, int]:
    """A random head, and the size of the target's states that it reads."""
    if family == "eagle":
        return randomised(EagleHead(SMALL)), 24  # type: ignore[return-value]
    return randomised(Eagle3Head(SMALL, vocab_size=20, draft_vocab_size=12)), 3 * 24  # type: ignore[return-value]


STEPS = 4


def unrolled(head: DraftHead, embeddings: Tensor, states: Tensor) -> list[Tensor]:
    """A training-time test: step j's output at every place, `[rows, length - STEPS + 1, hidden]` each."""
    context: Context = Unrolled()
    length = states.shape[1] - STEPS + 1
    hidden, outputs = head.fuse(states[:, :length]), []
    for step in range(STEPS):
        hidden = head(embeddings[:, step : step + length], hidden, torch.arange(length) + step, context)
        outputs.append(hidden)
    return outputs


def served(head: DraftHead, embeddings: Tensor, states: Tensor, place: int) -> list[Tensor]:
    """A drafter that has come to a place and drafts STEPS tokens, one after another, with a cache."""
    cache = Cached()
    text = slice(0, place + 1)
    hidden = head(embeddings[:, text], head.fuse(states[:, text]), torch.arange(place + 1), cache)[:, -1:]
    outputs = [hidden]
    for step in range(1, STEPS):
        now = place + step
        hidden = head(embeddings[:, now : now + 1], hidden, torch.tensor([now]), cache)
        outputs.append(hidden)
    return outputs


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@torch.no_grad()
def test_the_training_time_test_is_what_a_drafter_does(family: str) -> None:
    head, size = head_of(family)
    embeddings, states = random_states(2, 13, 24), random_states(2, 13, size, seed=2)
    trained = unrolled(head, embeddings, states)
    target_output = random_states(1, 20, 24, seed=3)[0]
    for place in range(13 - STEPS + 1):
        for step, output in enumerate(served(head, embeddings, states, place)):
            torch.testing.assert_close(
                head.logits(trained[step][:, place : place + 1], target_output),
                head.logits(output, target_output),
                atol=TOLERANCE * 10,  # logits are a sum over 24 channels
                rtol=0,
            )


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@torch.no_grad()
def test_chains_that_are_dropped_leave_the_others_as_they_are(family: str) -> None:
    head, size = head_of(family)
    embeddings, states = random_states(2, 13, 24), random_states(2, 13, size, seed=2)
    places = torch.tensor([[1, 4, 6, 9], [0, 2, 3, 8]])

    def drafted(kept: list[Tensor]) -> Tensor:
        """What the last step puts out at the chains that are left, others having been dropped after each step."""
        context, now = Unrolled(places), places
        hidden = head(embeddings, head.fuse(states), torch.arange(13), context, places)
        for step, chains in enumerate(kept, 1):
            context.keep(chains)
            now, hidden = now.take_along_dim(chains, dim=1), at_places(hidden, chains)
            hidden = head(at_places(embeddings, now + step), hidden, now + step, context)
        return hidden

    every = torch.arange(4).expand(2, -1)
    left = drafted([torch.tensor([[0, 1, 3], [0, 2, 3]]), torch.tensor([[1, 2], [0, 1]]), torch.tensor([[1], [1]])])
    whole = at_places(drafted([every, every, every]), torch.tensor([[3], [2]]))
    torch.testing.assert_close(left, whole, atol=TOLERANCE, rtol=0)
    with pytest.raises(ValueError, match="name their places"):
        Unrolled().keep(every)


Change = Callable[[int], slice]


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("what", ["embeddings", "states"])
def test_no_step_sees_what_is_not_yet_there(family: str, what: str) -> None:
    """Draft `step` at place t may depend on the tokens up to t + 1 + step and on the target's states up to t, and does."""
    head, size = head_of(family)
    embeddings, states = random_states(1, 13, 24).requires_grad_(), random_states(1, 13, size, seed=2).requires_grad_()
    subject = embeddings if what == "embeddings" else states
    for step, output in enumerate(unrolled(head, embeddings, states)):
        for place in (0, 4, 9):
            (gradient,) = torch.autograd.grad(output[0, place].square().sum(), subject, retain_graph=True)
            touched = gradient[0].abs().amax(dim=-1) > 0  # [length]
            last = place + step if what == "embeddings" else place  # embeddings[t] is that of token t + 1
            assert touched.tolist() == [seen <= last for seen in range(13)], (step, place)


def test_draft_tokens_are_offsets_as_the_host_reads_them() -> None:
    head = Eagle3Head(SMALL, vocab_size=20, draft_vocab_size=4)
    head.set_draft_tokens(torch.tensor([3, 4, 11, 19]))
    state = head.state_dict()
    assert state["d2t"].tolist() == [3, 3, 9, 16]
    assert state["t2d"].nonzero().flatten().tolist() == [3, 4, 11, 19]
    assert head.draft_tokens.tolist() == [3, 4, 11, 19]
    whole = Eagle3Head(SMALL, vocab_size=20)
    assert not {"d2t", "t2d"} & whole.state_dict().keys()  # the host has no place for them then
    assert whole.draft_tokens.tolist() == list(range(20))
