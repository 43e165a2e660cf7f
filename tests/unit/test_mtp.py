"""Multi-token prediction heads: what each depth may see, and that training computes what an engine does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig

from tests.support.mtp import DEPTH, SIZES, VARIANTS, joint, texts
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.decoder import Cached, DecoderConfig
from vllm_specplugin.heads.mtp import MTPConfig, MTPModule, SequentialMTP
from vllm_specplugin.runtime import spec_config
from vllm_specplugin.runtime.spec_config import target_of
from vllm_specplugin.train.mtp import JointMTP
from vllm_specplugin.types import Target

LENGTH = 9

# fp32: attention over other lengths and other batch shapes sums in another order
SAME = 1e-5


def states(objective: JointMTP, token_ids: Tensor) -> list[Tensor]:
    """`[rows, length, hidden]` of every depth, the main head's first."""
    trunk = objective.trunk(token_ids)
    return [trunk.after_norm, *objective.drafted(trunk)]


def last_seen(variant: str, place: int, depth: int) -> int:
    """The last token that depth `depth` may see at a place, by the definition of each variant."""
    return place if variant == "parallel" else place + depth - 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_head_sees_a_later_token_by_value(variant: str) -> None:
    """Another token at any later place changes nothing; another one at the last place that may be seen does."""
    objective = joint(variant)
    token_ids = texts(1, LENGTH)
    with torch.no_grad():
        before = states(objective, token_ids)
        for changed in range(LENGTH):
            other = token_ids.clone()
            other[0, changed] = (other[0, changed] + 1) % SIZES["vocab_size"]
            after = states(objective, other)
            for depth in range(1, DEPTH + 1):
                difference = (after[depth - 1] - before[depth - 1])[0].abs().amax(dim=-1)  # [length]
                for place in range(LENGTH):
                    if changed > last_seen(variant, place, depth):
                        assert difference[place] == 0, (depth, place, changed)
                    elif changed == last_seen(variant, place, depth) and place > 0:
                        assert difference[place] > SAME, (depth, place, changed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_head_sees_a_later_token_by_gradient(variant: str) -> None:
    """d logits_d(t) / d embedding(x_s) is exactly zero for every later s, and is not for the last one that may be seen."""
    objective = joint(variant)
    trunk = objective.trunk(texts(1, LENGTH))
    for depth, state in enumerate([trunk.after_norm, *objective.drafted(trunk)], 1):
        for place in range(1, LENGTH):
            logits = state[0, place] @ trunk.output.T
            (gradient,) = torch.autograd.grad(logits.square().sum(), trunk.embeddings, retain_graph=True)
            size = gradient[0].abs().amax(dim=-1)  # [length]
            last = last_seen(variant, place, depth)
            assert bool((size[last + 1 :] == 0).all()), (depth, place)
            if last < LENGTH:
                assert size[last] > 0, (depth, place)


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_module_computes_what_a_drafter_does(gated: bool) -> None:
    """Every chain of the unrolled module equals the drafter's own course: its cache, its positions, one token at a time."""
    modules = _modules(gated=gated)
    hidden, embeddings = _inputs(LENGTH)
    unrolled = [state.clone() for state in modules(hidden, embeddings, torch.arange(LENGTH))]
    module = modules.mtp_layers[0]
    for place in range(LENGTH - DEPTH):
        known, cache = place + 1, Cached()
        state = module(hidden[:, :known], embeddings[:, 1 : known + 1], torch.arange(known), cache)[:, -1:]
        for draft in range(DEPTH - 1):
            assert torch.allclose(unrolled[draft][:, place], state[:, 0], atol=SAME), (place, draft)
            token = embeddings[:, place + 2 + draft, None]
            state = module(state, token, torch.tensor([place + 1 + draft]), cache)


def test_separate_modules_run_over_their_own_states() -> None:
    """DeepSeek's form: the module of each depth is causal over the states of the depth before, at every place."""
    modules = _modules(modules="separate")
    hidden, embeddings = _inputs(LENGTH)
    state = hidden
    for draft, found in enumerate(modules(hidden, embeddings, torch.arange(LENGTH))):
        known = LENGTH - 1 - draft
        state = modules.mtp_layers[draft](state[:, :known], embeddings[:, draft + 1 :], torch.arange(known))
        assert torch.allclose(found[:, :known], state, atol=SAME)


def test_the_first_place_has_no_token() -> None:
    """As the engine runs it: at position 0 the embedding is left out, and nowhere else."""
    module = _modules().mtp_layers[0]
    hidden, embeddings = _inputs(3)
    other = embeddings.clone()
    other[:, 0] += 1.0
    positions = torch.arange(3)
    assert torch.equal(module(hidden, embeddings, positions), module(hidden, other, positions))
    assert not torch.equal(module(hidden, embeddings, positions + 1), module(hidden, other, positions + 1))


def test_gates_and_scale_fold_into_the_matrices() -> None:
    """A folded module has the names and the arithmetic of a plain one."""
    config = MTPConfig(_decoder(), gated=True, output_scale=True)
    trained, plain = _random(MTPModule(config)), MTPModule(MTPConfig(_decoder()))
    folded = trained.fold()
    assert "scale" not in folded
    assert not any("gate" in name and "gate_proj" not in name for name in folded)
    plain.load_state_dict({_own_name(name): tensor for name, tensor in folded.items()})
    hidden, embeddings = _inputs(5)
    positions = torch.arange(5)
    assert torch.allclose(plain(hidden, embeddings, positions), trained(hidden, embeddings, positions), atol=SAME)


def test_a_closed_gate_passes_the_input_on_and_learns() -> None:
    module = MTPModule(MTPConfig(_decoder(), gated=True))
    hidden, embeddings = _inputs(4)
    positions = torch.arange(1, 5)
    joined = module.input_proj(torch.cat((module.hidden_layernorm(hidden), module.token_layernorm(embeddings)), dim=-1))
    state = module(hidden, embeddings, positions)
    assert torch.equal(state, module.final_layernorm(joined))
    state.square().mul(torch.arange(state.numel()).view_as(state)).sum().backward()
    for gate in (module.layer.attention_gate, module.layer.mlp_gate):
        assert gate.grad is not None
        assert bool(gate.grad.abs().min() > 0)


def test_a_module_starts_near_the_main_head() -> None:
    """What it makes of a state is nearly what the target's final norm makes of it."""
    torch.manual_seed(3)
    modules = SequentialMTP(MTPConfig(DecoderConfig.from_hf({**SIZES, "hidden_size": 256})))
    norm = torch.rand(256) + 0.5
    modules.initialise(norm)
    hidden, embeddings = torch.randn(2, 1, 6, 256)
    found = next(modules(10 * hidden, embeddings, torch.arange(6)))
    wanted = hidden / hidden.square().mean(-1, keepdim=True).sqrt() * norm
    assert torch.cosine_similarity(found, wanted, dim=-1).min() > 0.7


@pytest.mark.parametrize(("change", "said"), [({"num_drafts": 0}, "is 1; at least 2"), ({"modules": "many"}, "'many'")])
def test_impossible_modules_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MTPConfig(_decoder(), **change)  # type: ignore[arg-type]


# -- how many layers a target has --------------------------------------------------------------------------


def stock_override(hf_config: Any) -> Any:
    """vLLM 0.32's, of a family that it has no MTP layers for."""
    return hf_config


def override_for_transformers(hf_config: Any, transformers_mtp_overrides: dict[str, Any] | None = None) -> Any:
    """vLLM 0.33's."""
    return hf_config


@pytest.mark.parametrize(
    ("override", "backend", "layers", "found"),
    [
        (override_for_transformers, True, 2, 2),
        (override_for_transformers, True, None, 0),
        (override_for_transformers, False, 2, 0),
        (stock_override, True, 2, 0),
    ],
)
def test_layers_that_the_transformers_backend_runs_count(
    override: Callable[..., Any], backend: bool, layers: int | None, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeculativeConfig, "hf_config_override", staticmethod(override))
    config = SimpleNamespace(model_type="some", architectures=["SomeForCausalLM"])
    if layers is not None:
        config.num_mtp_layers = layers
    model: Any = SimpleNamespace(
        model="m",
        hf_config=config,
        hf_text_config=config,
        get_hidden_size=lambda: 8,
        get_vocab_size=lambda: 16,
        get_total_num_hidden_layers=lambda: 2,
        using_transformers_backend=lambda: backend,
    )
    assert target_of(model).num_mtp_layers == found


def test_a_target_whose_layers_vllm_does_not_run_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise NotImplementedError("not for multimodal models yet")

    monkeypatch.setattr(spec_config, "target_of", lambda _: Target("m", "some", 8, 16, 2, num_mtp_layers=1))
    monkeypatch.setattr(spec_config, "PluginSpeculativeConfig", refuse)
    model: Any = None
    with pytest.raises(ConfigError, match="vLLM refuses the proposer 'mtp' with this target: not for multimodal models yet"):
        spec_config.create({"proposer": "mtp"}, {}, model, model)


# -- helpers -----------------------------------------------------------------------------------------------


def _decoder() -> DecoderConfig:
    return DecoderConfig.from_hf(SIZES)


def _random(module: torch.nn.Module) -> MTPModule:
    """Parameters that have all left where they start."""
    _fill(module, lambda parameter: torch.randn_like(parameter) * 0.3)
    return module  # type: ignore[return-value]


def _modules(**options: object) -> SequentialMTP:
    torch.manual_seed(1)
    modules = SequentialMTP(MTPConfig(_decoder(), num_drafts=DEPTH - 1, **options))  # type: ignore[arg-type]
    _fill(modules, lambda parameter: torch.randn_like(parameter) * 0.3)
    return modules


@torch.no_grad()
def _fill(module: torch.nn.Module, draw: Callable[[Tensor], Tensor]) -> None:
    for parameter in module.parameters():
        parameter.copy_(draw(parameter))


def _inputs(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden, embeddings = torch.randn(2, 2, length, SIZES["hidden_size"], generator=generator)
    return hidden, embeddings


def _own_name(name: str) -> str:
    """MiMo's name of a tensor as the module calls it."""
    inside = name.split(".")[0] in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    return f"layer.{name}" if inside else name
