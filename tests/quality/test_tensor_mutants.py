"""The tests of the tensor code have teeth: each of these small changes to its source is found by one of three checks.

The checks are the ones of `test_exact_tensors.py` (the exact law), `test_agreement.py` (number by number) and
`tests/unit/test_drawing.py` (never a token without weight), over a few cases each. The unchanged source passes all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from tests.quality.agreement import Comparison, compare, random_batch
from tests.quality.cases import CASES, CONTROLS
from tests.quality.laws import Way
from tests.quality.tensor_laws import tensor_distance
from vllm_specplugin.scorers import exact
from vllm_specplugin.scorers.base import Verifier
from vllm_specplugin.scorers.exact import Rule

PACKAGE = "vllm_specplugin.scorers"
FILES = ["drawing", "token", "block", "one_hot"]
"""In the order in which they import each other."""
VERIFIERS: dict[str, tuple[str, str, Rule]] = {
    "token": ("token", "TokenVerifier", exact.token),
    "block": ("block", "BlockVerifier", exact.block),
    "one_hot": ("one_hot", "OneHotVerifier", exact.walk),
}
"""name -> (file, class, the rule that it follows)"""
KILLED_ABOVE = Fraction(1, 1000)
"""Total variation; the unchanged code has 0."""


@dataclass(frozen=True)
class Mutation:
    """A place of a source file, what is put there, the verifiers that use it, and the check that finds it."""

    file: str
    old: str
    new: str
    killer: str
    verifiers: tuple[str, ...] = ("token",)


@contextmanager
def loaded(mutation: Mutation | None) -> Iterator[dict[str, ModuleType]]:
    """The modules by file name, made anew from their sources, one of them changed; they import each other and no original."""
    with mock.patch.dict(sys.modules):
        modules = {}
        for file in FILES:
            original = import_module(f"{PACKAGE}.{file}")
            source = Path(str(original.__file__)).read_text(encoding="utf-8")
            if mutation is not None and mutation.file == file:
                assert source.count(mutation.old) == 1, f"{file}.py has changed: {mutation.old!r} is not there once"
                source = source.replace(mutation.old, mutation.new)
            module = ModuleType(f"{PACKAGE}.{file}")
            sys.modules[module.__name__] = modules[file] = module
            exec(compile(source, f"{file}.py, changed", "exec"), module.__dict__)
        yield modules


def law(verifier: Verifier, rule: Rule) -> bool:
    """Whether the exact law of what is emitted is the target's."""
    for case in ("soft", "zeros", "refused_after_an_unlikely_one"):
        for control in ("always", "stop_after_low_confidence"):
            if tensor_distance(verifier, Way(*CASES[case], rule, 2, CONTROLS[control])) > KILLED_ABOVE:
                return False
    return tensor_distance(verifier, Way(*CASES["one_hot_drafter"], rule, 2, one_hot=True)) <= KILLED_ABOVE


def agreement(verifier: Verifier, rule: Rule) -> bool:
    """Whether it says what the reference says, also over wide vocabularies and where finite nonsense lies past the lengths."""
    seen = Comparison()
    for seed, vocab in enumerate([3, 5, 2, 2500]):
        rows = 60 if vocab > 100 else 400
        batch = random_batch(seed, rows, 4, vocab, past=0.5)
        compare(verifier, rule, batch, seen)
        compare(verifier, rule, random_batch(seed, rows, 4, vocab, one_hot=True, past=0.5) | {"draft_probs": None}, seen)
    return not seen.far()


def drawing(draw: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether every token drawn has a weight, at both ends of the unit interval."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(500, 3000, generator=generator) * (torch.rand(500, 3000, generator=generator) < 0.3)
    weights[:, :5] = weights[:, -5:] = 0.0
    for uniform in (0.0, 1.0 - 2.0**-53):
        tokens, _ = draw(weights, torch.full((500,), uniform, dtype=torch.float64))
        if not (weights.gather(1, tokens[:, None]) > 0).all():
            return False
    return True


def passes(check: str, mutation: Mutation | None, verifiers: tuple[str, ...]) -> bool:
    with loaded(mutation) as modules:
        if check == "drawing":
            return drawing(modules["drawing"].draw)
        for name in verifiers:
            file, cls, rule = VERIFIERS[name]
            verifier = getattr(modules[file], cls)()
            if not {"law": law, "agreement": agreement}[check](verifier, rule):
                return False
        return True


MUTATIONS: dict[str, Mutation] = {
    # token.py
    "token_without_q": Mutation("token", "* q < p)", "< p)", "law"),
    "token_reads_the_residuals_number": Mutation("token", "Use.ACCEPT", "Use.RESIDUAL", "law"),
    "token_goes_on_after_a_refusal": Mutation("token", "stands.cumprod(dim=1).sum", "stands.sum", "law"),
    "token_accepts_past_the_length": Mutation("token", " & counts", "", "agreement"),
    "token_reads_the_next_positions_number": Mutation(
        "token", "uniforms[:, : ids.shape[1], Use.ACCEPT]", "uniforms[:, 1:, Use.ACCEPT]", "law"
    ),
    "token_takes_one_hot_drafts_for_even_odds": Mutation("token", "torch.ones_like(p)", "torch.full_like(p, 0.5)", "law"),
    # block.py
    "block_ratio_not_cut": Mutation("block", ".clamp_(max=1.0)", "", "law", ("block",)),
    "block_ratio_of_the_draft_before": Mutation("block", "< r[:, 1:])", "< r[:, :-1])", "law", ("block",)),
    "block_ratio_not_chained": Mutation("block", "torch.mul(r[:, i], ratio", "torch.mul(r[:, 0], ratio", "law", ("block",)),
    "block_first_that_stands": Mutation("block", "reversed(range(1, k))", "range(1, k)", "agreement", ("block",)),
    "block_chance_without_the_rest": Mutation("block", "mass + 1.0 - r", "mass + 1.0", "law", ("block",)),
    "block_mass_without_scale": Mutation("block", "row, i), draft_probs, r)", "row, i), draft_probs)", "law", ("block",)),
    "block_residual_without_scale": Mutation(
        "block", "uniforms, r.gather(1, accepted[:, None]).squeeze(1))", "uniforms)", "law", ("block",)
    ),
    "block_one_hot_mass_without_scale": Mutation("block", "r * (1.0 - p[row, i])", "1.0 - p[row, i]", "law", ("block",)),
    "block_reads_one_number_twice": Mutation(
        "block", "uniforms[row, i - 1, Use.ACCEPT]", "uniforms[row, i, Use.ACCEPT]", "law", ("block",)
    ),
    # drawing.py
    "residual_not_cut_at_zero": Mutation(
        "drawing", "weights.sub_(drawn_from).clamp_(min=0.0)", "weights.sub_(drawn_from).abs_()", "law"
    ),
    "residual_is_p": Mutation("drawing", "weights if drawn_from is None else", "weights if True else", "law"),
    "residual_of_the_row_above": Mutation(
        "drawing", "self.draft_probs[row, position, tokens]", "self.draft_probs[row, 0, tokens]", "law"
    ),
    "refused_token_keeps_its_weight": Mutation("drawing", "tokens == self.left_out", "tokens < 0", "law"),
    "refused_token_counts_in_the_sums": Mutation(
        "drawing", "number = self.left_out // BLOCK", "number = self.left_out % 1", "agreement"
    ),
    "residual_reads_the_accepting_number": Mutation("drawing", "position, Use.RESIDUAL]", "position, Use.ACCEPT]", "law"),
    "bonus_reads_the_residuals_number": Mutation("drawing", "position, Use.BONUS]", "position, Use.RESIDUAL]", "agreement"),
    "ragged_rows_are_all_full": Mutation("drawing", "accepted < lengths", "accepted < draft_ids.shape[1]", "law"),
    "block_of_the_draw_counted_twice": Mutation(
        "drawing", "ends.gather(1, block) - sums.gather(1, block)", "ends.gather(1, block)", "agreement"
    ),
    "search_may_stop_without_a_weight": Mutation("drawing", "right=True", "right=False", "drawing"),
    "search_may_run_past_the_last_weight": Mutation("drawing", ".minimum(inside[:, -1:] * BELOW_ONE)", "", "drawing"),
    "verdict_keeps_drafts_behind": Mutation(
        "drawing", "masked_fill_(position > accepted", "masked_fill_(position > 1 + accepted", "law"
    ),
    # one_hot.py
    "walk_goes_on_after_a_refusal": Mutation("one_hot", ".cumprod(dim=1)", "", "law", ("one_hot",)),
    "walk_past_the_length": Mutation("one_hot", " & (position[:k] < lengths[:, None])", "", "agreement", ("one_hot",)),
    "walk_compares_with_the_next_row": Mutation("one_hot", "target_ids[:, :k] == ", "target_ids[:, 1:] == ", "law", ("one_hot",)),
    "walk_emits_all_samples": Mutation("one_hot", "position > accepted", "position < 0 * accepted", "law", ("one_hot",)),
}


@pytest.mark.parametrize("check", ["law", "agreement", "drawing"])
def test_the_unchanged_source_passes(check: str) -> None:
    assert passes(check, None, tuple(VERIFIERS))


@pytest.mark.parametrize("name", MUTATIONS)
def test_is_killed(name: str) -> None:
    mutation = MUTATIONS[name]
    assert not passes(mutation.killer, mutation, mutation.verifiers)
