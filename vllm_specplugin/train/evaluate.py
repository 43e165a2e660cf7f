"""`evaluate`: main-head loss, a downstream score and draft acceptance, which must be read together.

Heads that draft well say nothing of the model, and a model that was trained together with its heads (multi-token prediction)
may have paid for good drafts with worse answers. So one run measures all three, on the engine that serves them: the target
alone and with its drafts, and where asked for another model beside it, such as one pre-trained without the extra heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from vllm_specplugin.engine_process import EngineProcess
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.train.evaluate_questions import Question, kind_of
from vllm_specplugin.train.evaluate_report import Acceptance, Evaluation, MainHead
from vllm_specplugin.train.evaluate_statistics import difference, ratio, share

ENGINE = "vllm_specplugin.train.evaluate_engine"
SLACK = 32  # room in the context beyond the longest request, for drafts past its end
SCORED_AT_ONCE = 16  # texts per call, so that the bar moves


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One held-out text."""

    token_ids: tuple[int, ...]
    answer_from: int
    """Tokens from here on are scored, and those before are the prompt of the measured request."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, checked."""

    target: str
    speculative_config: dict[str, Any] | None
    against: str | None
    data: str
    excerpts: Sequence[Excerpt]
    questions: Sequence[Question]
    questions_file: str | None = None
    prompts: int = 32
    """Requests per temperature."""
    max_tokens: int = 64
    """Of each of them."""
    temperatures: Sequence[float] = (0.0, 1.0)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.excerpts:
            raise ConfigError(f"--data: {self.data} holds no text to score.")
        if min(self.prompts, self.max_tokens) < 1 or self.max_tokens < 2:
            raise ConfigError(f"--prompts is {self.prompts} and --max-tokens {self.max_tokens}; at least 1 and 2 are needed.")
        for temperature in self.temperatures:
            if temperature < 0:
                raise ConfigError(f"--temperature is {temperature}; 0 (greedy) or more is expected.")

    def settings(self, model: str, speculative_config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Of one engine."""
        longest = max(len(excerpt.token_ids) for excerpt in self.excerpts)
        longest = max([longest, *(len(text) for question in self.questions for text in question.texts)])
        arguments = {"max_model_len": longest + self.max_tokens + SLACK, "seed": self.seed, **self.engine_args}
        return {"model": model, "speculative_config": speculative_config, "engine_args": arguments}


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one model: per text and per question."""

    logprobs: Sequence[float]
    tokens: Sequence[float]
    right: Sequence[float]
    """How many tokens of each text are the model's first choice."""
    answers: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Request:
    """What one measured request took."""

    token_ids: Sequence[int]
    passes: int
    """After the first token."""
    seconds: float
    drafts: int
    accepted: Sequence[int]
    """`[k]`: drafts accepted at least that far."""


def evaluate(plan: Plan, logs: Path, bars: Progress) -> Evaluation:
    """Run the plan. `logs` is a folder for what the engines print.

    Raises:
        SpecPluginError: an engine failed; its log is named.
    """
    began = time.monotonic()
    main: list[MainHead] = []
    acceptance: list[Acceptance] = []
    with ExitStack() as engines:
        plain = engines.enter_context(_engine("target", plan.settings(plan.target, None), logs, bars))
        engine_facts = plain.facts
        _check_ids(plan, engine_facts["vocab_size"])
        alone = _score(plain, plan, bars)
        main.append(_main_head("target", alone))
        if plan.speculative_config is not None:
            settings = plan.settings(plan.target, plan.speculative_config)
            drafting = engines.enter_context(_engine("target with drafts", settings, logs, bars))
            main.append(_main_head("target with drafts", _score(drafting, plan, bars), alone))
            acceptance = [_acceptance(plain, drafting, plan, temperature, bars) for temperature in plan.temperatures]
    if plan.against is not None:
        with _engine("against", plan.settings(plan.against, None), logs, bars) as other:
            _check_ids(plan, other.facts["vocab_size"])
            main.append(_main_head(plan.against, _score(other, plan, bars), alone))
    return Evaluation(
        target=plan.target,
        speculative_config=plan.speculative_config,
        against=plan.against,
        data=plan.data,
        texts=len(plan.excerpts),
        scored_tokens=int(sum(alone.tokens)),
        questions=plan.questions_file,
        downstream_kind=kind_of(plan.questions) if plan.questions else None,
        seed=plan.seed,
        engine=engine_facts,
        main_head=main,
        acceptance=acceptance,
        seconds=time.monotonic() - began,
    )


# -- engines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loaded:
    call: Callable[..., dict[str, Any]]
    title: str
    facts: dict[str, Any]


@contextmanager
def _engine(title: str, settings: Mapping[str, Any], logs: Path, bars: Progress) -> Iterator[_Loaded]:
    task = bars.add_task(f"loading: {title}", total=1)
    process = EngineProcess(title, ENGINE, settings, logs / f"{title.replace(' ', '-')}.log")
    try:
        facts = process.wait()
        bars.advance(task)
        yield _Loaded(process.call, title, facts)
    finally:
        process.close()


def _check_ids(plan: Plan, vocab_size: int) -> None:
    """A model with another vocabulary would be scored on other texts, or crash."""
    highest = max(max(excerpt.token_ids) for excerpt in plan.excerpts)
    if highest >= vocab_size:
        raise ConfigError(f"--data: {plan.data} has the token id {highest}, but a model's vocabulary has {vocab_size} tokens.")


# -- main head ---------------------------------------------------------------------------------------------


def _score(engine: _Loaded, plan: Plan, bars: Progress) -> Scores:
    texts = [list(excerpt.token_ids) for excerpt in plan.excerpts]
    starts = [max(1, excerpt.answer_from) for excerpt in plan.excerpts]
    for question in plan.questions:
        texts += question.texts
        starts += [len(question.prompt)] * len(question.choices)
    task = bars.add_task(f"scoring: {engine.title}", total=len(texts))
    found: dict[str, list[float]] = {"logprobs": [], "tokens": [], "right": []}
    for first in range(0, len(texts), SCORED_AT_ONCE):
        part = slice(first, first + SCORED_AT_ONCE)
        for name, values in engine.call("score", texts=texts[part], starts=starts[part]).items():
            found[name] += values
        bars.update(task, completed=len(found["tokens"]))
    answers, place = [], len(plan.excerpts)
    for question in plan.questions:
        part = slice(place, place + len(question.choices))
        answers.append(question.is_right(found["logprobs"][part], found["tokens"][part], found["right"][part]))
        place += len(question.choices)
    here = slice(len(plan.excerpts))
    return Scores(found["logprobs"][here], found["tokens"][here], found["right"][here], answers)


def _main_head(name: str, scores: Scores, target: Scores | None = None) -> MainHead:
    losses = [-value for value in scores.logprobs]
    compared: dict[str, Any] = {}
    if target is not None:
        base = [-value for value in target.logprobs]
        compared["loss_difference"] = difference(losses, scores.tokens, base, target.tokens)
        if scores.answers:
            ones = [1.0] * len(scores.answers)
            compared["downstream_difference"] = difference(_numbers(scores.answers), ones, _numbers(target.answers), ones)
    return MainHead(
        name=name,
        loss=ratio(losses, scores.tokens),
        next_token=ratio(scores.right, scores.tokens),
        downstream=share(sum(scores.answers), len(scores.answers)) if scores.answers else None,
        **compared,
    )


def _numbers(values: Sequence[bool]) -> list[float]:
    return [float(value) for value in values]


# -- acceptance --------------------------------------------------------------------------------------------


def _acceptance(plain: _Loaded, drafting: _Loaded, plan: Plan, temperature: float, bars: Progress) -> Acceptance:
    """Both engines answer the same prompts in turns, each alone on the machine while it works."""
    prompts = [list(prompt_of(excerpt)) for excerpt in plan.excerpts][: plan.prompts]
    task = bars.add_task(f"drafting at temperature {temperature:g}", total=2 * len(prompts))
    arguments = {"max_tokens": plan.max_tokens, "temperature": temperature}
    for engine in (plain, drafting):  # what is compiled on first use
        engine.call("decode", prompt=prompts[0], **arguments)
    without: list[Request] = []
    with_drafts: list[Request] = []
    for prompt in prompts:
        for engine, requests in ((plain, without), (drafting, with_drafts)):
            requests.append(Request(**engine.call("decode", prompt=prompt, **arguments)))
            bars.advance(task)
    return summarise(temperature, with_drafts, without)


def prompt_of(excerpt: Excerpt) -> tuple[int, ...]:
    """What comes before the answer; the first half of a text that has none."""
    return excerpt.token_ids[: excerpt.answer_from if excerpt.answer_from > 1 else max(1, len(excerpt.token_ids) // 2)]


def summarise(temperature: float, drafting: Sequence[Request], plain: Sequence[Request]) -> Acceptance:
    """The figures of one temperature.

    Raises:
        ConfigError: every request ended with its first token, so that there was nothing to draft.
    """
    if not any(request.passes for request in drafting):
        raise ConfigError("every answer ended with its first token; --data with other prompts is needed to measure drafts.")
    after_first = [len(request.token_ids) - 1 for request in drafting]
    drafts = [request.drafts for request in drafting]
    depth = max(len(request.accepted) for request in drafting)
    return Acceptance(
        temperature=temperature,
        length=ratio(after_first, [request.passes for request in drafting]),
        by_position=[ratio([request.accepted[place] for request in drafting], drafts) for place in range(depth) if any(drafts)],
        drafts=sum(drafts),
        tokens=sum(after_first),
        tokens_per_second=ratio(after_first, [request.seconds for request in drafting]),
        plain_tokens_per_second=ratio([len(request.token_ids) - 1 for request in plain], [request.seconds for request in plain]),
    )
