"""Proposers that draft with the host's own methods: what they ask for, and what they refuse, before any engine starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import natives
from tests.support.steps import host, step
from tests.support.tiny import VOCAB_SIZE, tiny_model
from vllm_specplugin import ConfigError, DraftError, Drafts, Target
from vllm_specplugin.config import SpecConfig, resolve
from vllm_specplugin.guard import Guard
from vllm_specplugin.proposers.base import ProposerOptions
from vllm_specplugin.proposers.eagle import EagleProposer
from vllm_specplugin.runtime.native import NativeDrafts, check_draft_vocabulary
from vllm_specplugin.scorers.uniforms import pass_keys

TARGET = Target(model="tiny", model_type="llama", hidden_size=64, vocab_size=VOCAB_SIZE, num_hidden_layers=2)


def resolved(target: Target = TARGET, **keys: Any) -> int:
    """The k that a configuration comes to."""
    return resolve(SpecConfig.parse(keys), target).num_speculative_tokens


def test_the_default_k(tmp_path: Path) -> None:
    """Three for EAGLE, five for a draft model; what a checkpoint recommends comes first."""
    assert resolved(proposer="eagle", model=str(natives.eagle(tmp_path))) == 3
    assert resolved(proposer="eagle3", model=str(natives.eagle3(tmp_path))) == 3
    assert resolved(proposer="eagle3", model=str(natives.eagle3(tmp_path, layout="speculators"))) == 2
    assert resolved(proposer="draft_model", model=str(tiny_model(tmp_path))) == 5
    assert resolved(proposer="draft_model", model=str(tiny_model(tmp_path)), num_speculative_tokens=9) == 9


def test_mtp_uses_each_layer_once_or_all_of_them_again() -> None:
    def with_layers(layers: int) -> Target:
        return Target("deep", "deepseek_v3", 64, VOCAB_SIZE, 2, num_mtp_layers=layers)

    assert resolved(with_layers(1), proposer="mtp") == 1
    assert resolved(with_layers(3), proposer="mtp") == 3
    assert resolved(with_layers(1), proposer="mtp", num_speculative_tokens=4) == 4
    assert resolved(with_layers(3), proposer="mtp", num_speculative_tokens=2) == 2
    assert resolved(with_layers(3), proposer="mtp", num_speculative_tokens=6) == 6
    with pytest.raises(ConfigError, match=r"'num_speculative_tokens' is 4, but 'deep' has 3 MTP layers.*multiple of 3"):
        resolved(with_layers(3), proposer="mtp", num_speculative_tokens=4)
    with pytest.raises(ConfigError, match=r"the target 'tiny' \(llama\) has no layers for multi-token prediction"):
        resolved(proposer="mtp")
    with pytest.raises(ConfigError, match="'model' is 'heads', but the proposer 'mtp' loads no checkpoint"):
        resolved(with_layers(1), proposer="mtp", model="heads")


@pytest.mark.parametrize("proposer", ["eagle", "eagle3", "draft_model"])
def test_a_checkpoint_of_another_family_is_refused(tmp_path: Path, proposer: str) -> None:
    makers: dict[str, Callable[[Path], Path]] = {"eagle": natives.eagle, "eagle3": natives.eagle3, "draft_model": tiny_model}
    for family, make in makers.items():
        model = str(make(tmp_path))
        if family == proposer:
            resolved(proposer=proposer, model=model)
        else:
            with pytest.raises(ConfigError, match=f"the proposer '{proposer}' needs .*use 'proposer': '{family}'"):
                resolved(proposer=proposer, model=model)


def test_a_checkpoint_for_another_target_is_refused(tmp_path: Path) -> None:
    other = Target("large", "llama", 128, 1000, 2)
    with pytest.raises(ConfigError, match="hidden size of 64, but the target 'large' has 128"):
        resolved(other, proposer="eagle", model=str(natives.eagle(tmp_path)))
    with pytest.raises(ConfigError, match="vocabulary of 258 tokens, but the target 'large' has 1000"):
        resolved(other, proposer="draft_model", model=str(tiny_model(tmp_path)))


def test_a_head_in_its_own_format_says_which_methods_there_are(tmp_path: Path) -> None:
    folder = natives.eagle3(tmp_path, layout="speculators")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"speculators_model_type": "eagle3"', '"speculators_model_type": "dflash"'))
    with pytest.raises(ConfigError, match="kind 'dflash', which no proposer here serves"):
        resolved(proposer="eagle3", model=str(folder))


def test_without_the_hosts_drafter_there_are_no_drafts() -> None:
    proposer = EagleProposer(host(), ProposerOptions())
    with pytest.raises(DraftError, match="needs the host's own drafter"):
        proposer.propose(step({"a": [1, 2]}))


def test_drafts_are_cut_and_selected_like_any_other() -> None:
    """The host drafts k tokens for every row; what counts is each row's limit, also in a step over some of the rows."""
    native = NativeDrafts(Drafts(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), probabilities=torch.full((3, 3, 100), 0.01)))
    whole = replace(step({"a": [1], "b": [2], "c": [3]}, k=3, limits=[3, 0, 2]), native=native)
    guard = Guard(EagleProposer(host(k=3), ProposerOptions()), "eagle", 1000.0)
    checked = guard.propose(whole)
    assert checked.rows() == [[1, 2, 3], [], [7, 8]]
    assert checked.probabilities is not None
    part = whole.select([2, 0])
    assert part.native is not None
    assert part.native.draft().token_ids.tolist() == [[7, 8, 9], [1, 2, 3]]  # type: ignore[union-attr]
    assert guard.propose(part).rows() == [[7, 8], [1, 2, 3]]


def test_a_map_to_tokens_that_the_target_has_not_is_refused() -> None:
    class Head:
        draft_id_to_target_id: torch.Tensor | None = torch.tensor([0, 5, 8])

    check_draft_vocabulary(Head(), 11)  # to 0, 6 and 10
    with pytest.raises(ConfigError, match="'d2t' maps draft tokens to 0 to 10, outside the target's vocabulary of 10"):
        check_draft_vocabulary(Head(), 10)
    Head.draft_id_to_target_id = None  # its vocabulary is the target's
    check_draft_vocabulary(Head(), 10)


def test_a_pass_has_a_key_of_its_own() -> None:
    """No two passes share one, nor do two requests, nor is one the request's own."""
    seeds = torch.tensor([0, 1, -5, 2**62])
    keys = torch.cat([pass_keys(seeds, torch.full((4,), known, dtype=torch.int32)) for known in range(1000)])
    assert len(set(keys.tolist()) | set(seeds.tolist())) == 4 * 1000 + 4
    assert pass_keys(seeds, torch.full((4,), 7)).tolist() == keys[28:32].tolist()
