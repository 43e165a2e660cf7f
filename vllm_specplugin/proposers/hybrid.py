"""Several proposers as one: for each request and step the one drafts of which most tokens are expected to be accepted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator

from vllm_specplugin.compiled import compile_all
from vllm_specplugin.guard import CheckedDrafts, Guard
from vllm_specplugin.proposers.base import Proposer, ProposerOptions
from vllm_specplugin.proposers.hybrid_estimates import Estimates, Value
from vllm_specplugin.proposers.hybrid_parts import PartPlan, depth_of, plan, together
from vllm_specplugin.types import Capabilities, Depth, Drafts, Host, Request, Step, Target, Verdict

if TYPE_CHECKING:
    from torch import nn

    from vllm_specplugin.config import SpecConfig

LEAST_BUDGET = 1e-3
"""Seconds that a part is given in any case."""

EXPLORE = 32
"""Passes after which a part whose drafts have gone unseen in a request is asked, or verified, once."""

Mask = NDArray[np.bool_]


class HybridOptions(ProposerOptions):
    """The `options` of the proposer `hybrid`."""

    proposers: tuple[str | dict[str, Any], ...] = Field(
        default=("predicted", "suffix"),
        min_length=2,
        description='The parts, each a name or {"proposer": name, "options": {...}}; where two promise the same, the earlier '
        "drafts. One of them may draft with a model, whose checkpoint is the configuration's 'model'.",
    )

    @field_validator("proposers", mode="before")
    @classmethod
    def _entries(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            raise ValueError("expected a list of proposers")
        for entry in given:
            if not isinstance(entry, str | Mapping):
                raise ValueError(f'{entry!r} is neither a proposer\'s name nor {{"proposer": name, "options": {{...}}}}')
        return tuple(given)


@dataclass(eq=False)
class _Part:
    """One part at work."""

    name: str
    index: int
    guard: Guard
    """Its own, so that one which fails or is late takes none of the others' drafts along."""
    k: int
    """The most it drafts."""
    asked_anyhow: bool
    """Its drafts cost the same whether they are used or not, or it has to see every step, or ranks work on them together, each
    of which may have had other answers from parts on its host; else it is asked when they may be used."""
    by_chance: bool
    """Its drafts are drawn. Then nothing may depend on what was drawn, so that it is chosen before it drafts, or not at all."""


@dataclass(eq=False)
class _Choice:
    """What has been decided about one step."""

    part: NDArray[np.int64]
    """`[rows]`: which part drafts, -1 for none."""
    worth: NDArray[np.float64]
    """`[rows]`: how many of its drafts are expected to be accepted."""
    expected: NDArray[np.float64]
    """`[rows, most k]`: how probably each is accepted once those before it are."""
    answers: dict[int, CheckedDrafts]
    """What the parts have drafted."""

    def take(self, part: int, rows: Mask, value: Value) -> None:
        """Let a part draft in these rows."""
        self.part[rows] = part
        self.worth[rows] = value.worth[rows]
        self.expected[rows] = value.expected[rows]


class HybridProposer(Proposer[HybridOptions]):
    """Combines the proposers that its options name, for example `predicted`, `suffix` and `ngram` with one EAGLE head.

    In each step every part that costs nothing on the target's device drafts for every request, and a part with a model where it
    may do better; a request gets the drafts of the part that promises most accepted tokens (see `hybrid_estimates`), or of the
    one that it names. Every part sees all of its requests' tokens, whoever drafted them, and one of vLLM's own drafters runs in
    every step, so its KV cache keeps up. A part at fault loses its own drafts only.
    """

    Options = HybridOptions
    catches_up = True  # as far as its parts do; see `_make_good`
    # Of the parts that it has by default; of others, each object's own.
    capabilities = Capabilities(tokens="host", request_keys=("prediction",), parts=("predicted", "suffix"))
    default_num_speculative_tokens = 16

    def __init__(self, host: Host, options: HybridOptions) -> None:
        super().__init__(host, options)
        plans = plan(host.config, options.proposers)
        self.capabilities = together(plans)  # type: ignore[misc]
        self._probabilistic = host.config.draft_sampling == "probabilistic"
        self._parts = [self._made(part, index) for index, part in enumerate(plans)]
        # What is free is asked first, and so known when it is decided whether to ask for more.
        self._order = sorted(self._parts, key=lambda part: not plans[part.index].is_cheap)
        self._index = {part.name: part.index for part in self._parts}
        self._estimates = Estimates(len(plans), host.num_speculative_tokens, host.max_num_seqs)
        self._lengths: dict[str, int] = {}
        """Each request's known tokens after its last step."""
        self._drafted_by: dict[str, int] = {}
        """Which part each request's last drafts are of, -1 for none."""
        self._tested: dict[str, int] = {}
        """How many of them were verified, where any were."""

    def _made(self, part: PartPlan, index: int) -> _Part:
        most = part.depth(None).most
        k = self.host.num_speculative_tokens if most is None else min(most, self.host.num_speculative_tokens)
        proposer = part.proposer(replace(self.host, config=part.config, num_speculative_tokens=k), part.options)
        guard = Guard(proposer, part.name, self.host.config.draft_budget_ms)
        has_memory = part.capabilities.own_kv_cache or part.capabilities.native is not None
        asked_anyhow = part.is_cheap or has_memory or self.host.tensor_parallel_size > 1
        by_chance = self._probabilistic and part.capabilities.probabilities
        return _Part(part.name, index, guard, k, asked_anyhow, by_chance)

    @property
    def on_host_only(self) -> bool:
        """No part asks anything of the target's device. (What they need together says it of tokens on the host alone.)"""
        return all(part.guard.on_host_only for part in self._parts)

    @property
    def guards(self) -> dict[str, Guard]:
        """Each part's guard by name, with its faults and times."""
        return {part.name: part.guard for part in self._parts}

    @classmethod
    def capabilities_for(cls, config: SpecConfig, options: HybridOptions) -> Capabilities:
        return together(plan(config, options.proposers))

    @classmethod
    def depth(cls, config: SpecConfig, options: HybridOptions, target: Target | None) -> Depth:
        """See `depth_of`; every part looks at its checkpoint."""
        return depth_of(plan(config, options.proposers), target)

    def load(self, target: nn.Module) -> None:
        """Load every part, and compile."""
        for part in self._parts:
            part.guard.proposer.load(target)
        compile_all(self._estimates.compile, 3)

    # -- steps -----------------------------------------------------------------

    def propose(self, step: Step) -> Drafts:
        """Draft up to `limits[row]` tokens per row: `[rows, k]` with lengths, where from, and how likely they are accepted."""
        ends = time.perf_counter() + self.host.config.draft_budget_ms / 1000
        slots = self._estimates.slots(step.requests)
        self._make_good(step, slots)
        self._leave_out_what_nobody_verified(step, slots)
        self._estimates.learn(slots, step.committed_ids, step.committed_offsets)
        rows = step.num_rows
        choice = _Choice(np.full(rows, -1), np.zeros(rows), np.zeros((rows, self._estimates.k)), {})
        wished = np.array([self._wish(request) for request in step.requests], dtype=np.int64)  # [rows]
        for part in self._order:
            # Half of what is left, so that one which hangs leaves time for those behind it.
            part.guard.budget_seconds = max((ends - time.perf_counter()) / 2, LEAST_BUDGET)
            self._ask(part, step, slots, (wished < 0) | (wished == part.index), choice)
        self._drafted_by.update(zip(step.request_ids, choice.part.tolist(), strict=True))
        return self._assembled(step, choice)

    def _make_good(self, step: Step, slots: NDArray[np.int64]) -> None:
        """See to requests whose last steps were missed: parts that do not catch up start afresh, and old drafts say nothing."""
        before = (step.lengths - np.diff(step.committed_offsets)).tolist()
        missed = [row for row, name in enumerate(step.request_ids) if self._lengths.get(name, before[row]) != before[row]]
        if missed:
            self._estimates.void(slots[missed])
            for part in self._parts:
                part.guard.skip([step.requests[row].request_id for row in missed])
        self._lengths.update(zip(step.request_ids, step.lengths.tolist(), strict=True))

    def _leave_out_what_nobody_verified(self, step: Step, slots: NDArray[np.int64]) -> None:
        """Drafts by chance that were cut off before the pass: that the target says the same is not that it had accepted them."""
        drafted_by = [self._drafted_by.get(name, -1) for name in step.request_ids]
        for part in self._parts:
            if part.by_chance:
                drawn = [row for row, by in enumerate(drafted_by) if by == part.index and step.requests[row].temperature > 0]
                tested = np.array([self._tested.get(step.requests[row].request_id, 0) for row in drawn], dtype=np.int64)
                self._estimates.cut(part.index, slots[drawn], tested)
        self._tested.clear()

    def _wish(self, request: Request) -> int:
        """The part that a request names, -1 where it leaves that open."""
        return -1 if request.proposer is None else self._index.get(request.proposer, -1)

    def _ask(self, part: _Part, step: Step, slots: NDArray[np.int64], allowed: Mask, choice: _Choice) -> None:
        """Let a part see the step and draft where it may, and take its drafts where they promise more than what there is."""
        estimates, k = self._estimates, min(step.k, part.k)
        limits = np.where(allowed, np.minimum(step.limits, k), 0)
        if part.by_chance or not part.asked_anyhow:
            value = estimates.value(part.index, slots, None, limits)
            unseen = (limits > 0) & (estimates.passes_without_evidence(part.index, slots) >= EXPLORE)
            wanted = (value.worth > choice.worth) | unseen
            if not part.asked_anyhow:
                limits = np.where(wanted, limits, 0)
        drafts = choice.answers[part.index] = part.guard.propose(replace(step, k=k, limits=limits))
        counted = drafts.lengths
        if part.by_chance:
            # Where its drafts fall short of the limit they count as refused; where nobody verifies them they show nothing.
            taken = wanted & (drafts.lengths > 0)
            counted = np.where(drafts.lengths > 0, limits, 0)
            if drafts.probabilities is not None:
                counted *= taken | np.array([request.temperature == 0 for request in step.requests])
            # Where control verifies none of them they stay unseen: the next try is as far off as the first was.
            estimates.wait(part.index, slots[taken & unseen])
        else:
            value = estimates.value(part.index, slots, drafts.expected, counted)
            taken = value.worth > choice.worth
        choice.take(part.index, taken, value)
        estimates.keep(part.index, slots, drafts.token_ids, drafts.lengths, counted, value)

    def _assembled(self, step: Step, choice: _Choice) -> Drafts:
        """The drafts of a step from those of its parts."""
        token_ids = np.zeros((step.num_rows, step.k), dtype=np.int64)
        lengths = np.zeros(step.num_rows, dtype=np.int64)
        for index, drafts in choice.answers.items():
            rows = choice.part == index
            token_ids[rows, : drafts.token_ids.shape[1]] = drafts.token_ids[rows]
            lengths[rows] = drafts.lengths[rows]
        names = ["", *(part.name for part in self._parts)]
        return Drafts(
            token_ids=token_ids,
            lengths=lengths,
            probabilities=self._laws(choice, token_ids, lengths),
            expected=choice.expected[:, : step.k],
            sources=[names[index + 1] for index in choice.part.tolist()],
        )

    def _laws(self, choice: _Choice, token_ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> torch.Tensor | None:
        """What the drafts were drawn from, `[rows, k, vocab]`; None where all were chosen deterministically.

        Rows that a deterministic part drafted are one-hot, and so are those of which it is not known what they were drawn from:
        given the draft that is what they are, which costs acceptance and is as lossless. So may be treated whatever
        comes with probabilities that the part did not announce.
        """
        drawn: dict[int, NDArray[np.intp]] = {}
        for part in self._parts:
            drafts = choice.answers[part.index]
            if part.by_chance and drafts.probabilities is not None:
                chosen = choice.part == part.index
                chosen[list(drafts.unreliable)] = False
                if chosen.any():
                    drawn[part.index] = np.flatnonzero(chosen)
        if not drawn:
            return None
        first = choice.answers[next(iter(drawn))].probabilities
        assert first is not None
        others = lengths > 0
        others[np.concatenate(list(drawn.values()))] = False
        if len(drawn) == 1 and not others.any() and first.shape[1] == token_ids.shape[1]:
            return first
        laws = first.new_zeros(*token_ids.shape, self.host.vocab_size)
        for index, rows in drawn.items():
            given, place = choice.answers[index].probabilities, torch.from_numpy(rows).to(laws.device)
            assert given is not None
            laws[place, : given.shape[1]] = given[place].to(laws.dtype)
        row, draft = np.nonzero(others[:, None] & (np.arange(token_ids.shape[1]) < lengths[:, None]))
        where = (torch.from_numpy(index).to(laws.device) for index in (row, draft, token_ids[row, draft]))
        laws[tuple(where)] = 1.0
        return laws

    # -- the other verbs -------------------------------------------------------

    def observe(self, verdict: Verdict) -> None:
        """Tell each part that learns from verdicts what became of its own drafts."""
        if verdict.tested is None:
            return
        tested = verdict.tested.tolist()
        self._tested = dict(zip(verdict.request_ids, tested, strict=True))
        for part in self._parts:
            if not part.guard.wants_verdicts:
                continue
            names = enumerate(verdict.request_ids)
            rows = [row for row, name in names if tested[row] and self._drafted_by.get(name, -1) == part.index]
            if rows:
                part.guard.observe(
                    Verdict(
                        accepted=verdict.accepted[rows],
                        token_ids=verdict.token_ids[rows],
                        tested=verdict.tested[rows],
                        request_ids=[verdict.request_ids[row] for row in rows],
                    )
                )

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop what is kept of requests that ended, here and in every part."""
        for part in self._parts:
            part.guard.forget(request_ids)
        self._estimates.forget(request_ids)
        for name in request_ids:
            self._drafted_by.pop(name, None)
            self._lengths.pop(name, None)

    @classmethod
    def memory_bill(cls, host: Host, options: HybridOptions) -> dict[str, int]:
        """The parts' bills, one after the other."""
        bills = ((part, part.proposer.memory_bill(host, part.options)) for part in plan(host.config, options.proposers))
        return {f"{part.name}: {what}": size for part, bill in bills for what, size in bill.items()}

    def memory_bytes(self) -> int | None:
        """What the parts hold, as far as they know."""
        known = [part.guard.proposer.memory_bytes() for part in self._parts]
        return sum(size for size in known if size is not None)
