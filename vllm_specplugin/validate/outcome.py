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
from vllm_specplugin.validate.membership import growth
from vllm_specplugin.validate.plan import Plan
from vllm_specplugin.validate.prompts import name_of
from vllm_specplugin.validate.report import Report, Settings
from vllm_specplugin.validate.sampling import Sampling
from vllm_specplugin.validate.state import State
from vllm_specplugin.validate.verdict import Levels, count, decide

NOTHING_LEFT = "Nothing was left to measure: this is the report of an earlier run; --fresh measures anew."


def martingale_of(plan: Plan, state: State) -> Martingale:
    """The bets so far."""
    level = Levels.of(plan.alpha).martingale
    return Martingale(level) if state.martingale is None else Martingale.from_state(state.martingale)


def make_report(plan: Plan, state: State, distributions: Path, *, interrupted: bool = False, measured: bool = True) -> Report:
    """The report.

    Args:
        plan: what was asked for.
        state: what was measured.
        distributions: the file with the logits at the places of the chi-square, `[places, vocab]`.
        interrupted: the run ended before its tokens were generated.
        measured: this call added something to the state.
    """
    evidence = martingale_of(plan, state).evidence(plan.bias)
    greedy = _greedy(plan, state)
    square, left_out = _chi_square(plan, state, greedy, distributions)
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
        not_tested=[*([] if measured else [NOTHING_LEFT]), *_not_tested(plan, state, greedy, square, left_out)],
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


def rounding(sampling: Sampling, greedy: Greedy) -> tuple[float, float]:
    """By how many nats it moves two logits relative to each other at most, and one logit in the root mean square.

    Both are measured between the engines on greedy outputs; here they are those of logits after `sampling`. More than the limit
    is no rounding, and excuses nothing.
    """
    larger = growth(sampling)
    return 2 * larger * min(greedy.noise, greedy.noise_limit), larger * min(greedy.spread, greedy.noise_limit)


def _chi_square(plan: Plan, state: State, greedy: Greedy | None, distributions: Path) -> tuple[ChiSquare | None, int]:
    """The test, and how many samples it leaves out, since rounding decides whether the parameters allow their tokens."""
    if state.plain is None or greedy is None or not state.first:
        return None, 0
    slack, spread = rounding(plan.sampling, greedy)
    values = np.load(distributions, mmap_mode="r")
    found, left_out = cells(state.plain.prefixes, values, plan.sampling, slack, state.first)
    return chi_square(found, Levels.of(plan.alpha).chi_square, plan.bias, spread=spread) if found else None, left_out


def _not_tested(plan: Plan, state: State, greedy: Greedy | None, square: ChiSquare | None, left_out: int) -> list[str]:
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
    if state.unclear:
        lines.append(f"{state.unclear:,} tokens at places where rounding decides which tokens the parameters allow.")
    if left_out:
        lines.append(
            f"{count(left_out, 'sample')} of the chi-square, of tokens so near to the cut of top_k, top_p or min_p that rounding "
            "decides whether they are allowed."
        )
    unused = sorted(set(type(plan.sampling).model_fields) - plan.sampling.model_fields_set - {"temperature", "max_tokens"})
    if unused:
        lines.append(f"Sampling parameters that this run did not use: {', '.join(unused)}.")
    lines.append("Requests with a seed, a grammar, bad_words or min_tokens.")
    return lines
