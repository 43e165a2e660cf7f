"""What a run's state amounts to: the three tests over it, the verdict, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugin.config import SpecConfig, names_a_proposer
from vllm_specplugin.validate.betting import Martingale
from vllm_specplugin.validate.chisquare import ChiSquare, chi_square
from vllm_specplugin.validate.first_tokens import cells
from vllm_specplugin.validate.greedy import Greedy, Output, compare
from vllm_specplugin.validate.plan import Plan
from vllm_specplugin.validate.prompts import name_of
from vllm_specplugin.validate.report import Report, Settings
from vllm_specplugin.validate.state import State
from vllm_specplugin.validate.verdict import Levels, decide


def martingale_of(plan: Plan, state: State) -> Martingale:
    """The bets so far."""
    level = Levels.of(plan.alpha).martingale
    return Martingale(level) if state.martingale is None else Martingale.from_state(state.martingale)


def make_report(plan: Plan, state: State, distributions: Path, interrupted: bool) -> Report:
    """The report; `distributions` is the file with the places of the chi-square, `[places, vocab]`."""
    evidence = martingale_of(plan, state).evidence(plan.bias)
    greedy = _greedy(plan, state)
    square = _chi_square(plan, state, distributions)
    facts = {} if state.tested is None else state.tested.facts
    settings = Settings(
        model=plan.model,
        speculative_config=plan.speculative_config,
        sampling_params=plan.sampling.model_dump(mode="json", exclude_defaults=True) | {"temperature": plan.sampling.temperature},
        engine=facts.get("engine", {}),
        verifier=facts.get("verifier") or "",
        lossy=not facts.get("lossless", True),
        alpha=plan.alpha,
        bias=plan.bias,
        seed=plan.seed,
        prompts=len(facts.get("prompts", ())),
        tokens_asked=plan.tokens,
    )
    decision = decide(evidence, square, greedy, lossy=settings.verifier if settings.lossy else None, interrupted=interrupted)
    return Report(
        settings=settings,
        verdict=decision.verdict,
        reason=decision.reason,
        martingale=evidence,
        greedy=greedy,
        chi_square=square,
        not_tested=_not_tested(plan, state, greedy, square),
        interrupted=interrupted,
        seconds=round(state.seconds, 1),
    )


def _greedy(plan: Plan, state: State) -> Greedy | None:
    if state.plain is None or state.tested is None:
        return None
    facts = state.tested.facts
    names = [name_of(index, prompt) for index, prompt in enumerate(plan.prompts or facts["prompts"])]
    outputs = zip(names, map(_output, state.plain.greedy), map(_output, state.tested.greedy), strict=True)
    return compare(list(outputs), facts["engine"]["dtype"], state.tested.texts)


def _output(said: Mapping[str, Any]) -> Output:
    return Output(said["token_ids"], [{int(token): value for token, value in row.items()} for row in said["logprobs"]])


def _chi_square(plan: Plan, state: State, distributions: Path) -> ChiSquare | None:
    if state.plain is None or not state.first:
        return None
    found = cells(state.plain.prefixes, np.load(distributions, mmap_mode="r"), state.plain.uncertain, state.first)
    return chi_square(found, Levels.of(plan.alpha).chi_square, plan.bias) if found else None


def _not_tested(plan: Plan, state: State, greedy: Greedy | None, square: ChiSquare | None) -> list[str]:
    lines = []
    if names_a_proposer(plan.speculative_config) and SpecConfig.parse(plan.speculative_config).adaptive:
        lines.append(
            "Drafts that adaptive control leaves off because they do not pay: 'control': 'fixed' in --speculative-config has "
            "them made, and tested."
        )
    if greedy is None:
        lines.append("Greedy equality: the run ended before it.")
    if square is None:
        lines.append("The chi-square of the first tokens: too few samples.")
    reason = "where rounding decides which tokens the parameters allow."
    if state.unclear:
        lines.append(f"{state.unclear:,} tokens at places {reason}")
    if state.plain is not None and state.plain.uncertain:
        lines.append(f"{len(state.plain.uncertain)} places of the chi-square {reason}")
    unused = sorted(set(type(plan.sampling).model_fields) - plan.sampling.model_fields_set - {"temperature", "max_tokens"})
    if unused:
        lines.append(f"Sampling parameters that this run did not use: {', '.join(unused)}.")
    lines.append("Requests with a seed, a grammar, bad_words or min_tokens.")
    return lines
