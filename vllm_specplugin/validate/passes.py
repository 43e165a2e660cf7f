"""From one engine step to records: what each emitted token was drawn from, and which sets of tokens it fell into.

Pure: the recorder gathers a `Step` from whichever model runner it sits in, `tokens_of` does the rest for all rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_specplugin.validate.distribution import Distribution, Ties, distribution
from vllm_specplugin.validate.records import Kind, Tokens
from vllm_specplugin.validate.sampling import Sampling

VISIBLY_MORE = 1 + 1e-6
"""p(x) counts as larger than softmax(logits)(x) only beyond float32 rounding."""

CHUNK = 2**24
"""Numbers at a time, places times vocabulary: each takes about 50 bytes while it is worked on."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One target pass over a batch. A request with m drafts owns m + 1 consecutive rows of logits."""

    request_ids: Sequence[str]
    """`[requests]`"""
    logits: torch.Tensor
    """`[rows, vocab]`, before any sampling parameter."""
    first_row: NDArray[np.int64]
    """`[requests]`: where each request's rows begin."""
    draft_ids: NDArray[np.int64]
    """`[requests, most drafts]`, anything after a request's own."""
    drafts: NDArray[np.int64]
    """`[requests]`: how many drafts the pass tested."""
    token_ids: NDArray[np.int64]
    """`[requests, most emitted]`, anything after those that were emitted."""
    emitted: NDArray[np.int64]
    """`[requests]`: 0 for a request whose prompt is still being read."""
    draft_probs: Mapping[int, torch.Tensor]
    """Request's place -> `[drafts, vocab]`, what its drafts were drawn from; the others were chosen deterministically."""


@dataclass(frozen=True, slots=True)
class Context:
    """What came before a request's pass, where penalties need it."""

    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The emitted tokens of a step, flattened: columns `[tokens]`, request by request in the order of emission."""

    request: NDArray[np.int64]
    """The request's place in the step."""
    index: NDArray[np.int64]
    """The token's place in its pass, from 0."""
    drafted: NDArray[np.bool_]
    """A draft was tested here."""

    def part(self, begin: int, end: int) -> _Places:
        """Some of them."""
        return _Places(self.request[begin:end], self.index[begin:end], self.drafted[begin:end])


def tokens_of(
    step: Step,
    sampling: Sampling,
    ties: Ties,
    numbers: NDArray[np.int32],
    positions: NDArray[np.int32],
    contexts: Sequence[Context] | None = None,
) -> tuple[Tokens, int]:
    """The records of a step, and how many of its places cannot be tested (see `Distribution.clear`).

    Args:
        step: the pass.
        sampling: the parameters of all its requests.
        ties: the engine's rule for equally likely tokens.
        numbers: `[requests]`, the validator's number of each.
        positions: `[requests]`, how many tokens each has emitted before.
        contexts: `[requests]`, wanted where `sampling` has penalties.
    """
    request, index = np.nonzero(np.arange(step.token_ids.shape[1]) < step.emitted[:, None])
    places = _Places(request, index, index < step.drafts[request])
    columns: list[dict[str, NDArray[Any]]] = []
    unclear = 0
    size = max(CHUNK // step.logits.shape[1], 1)
    for begin in range(0, len(request), size):
        measured, uncertain = _measured(step, places.part(begin, begin + size), sampling, ties, contexts)
        columns.append(measured)
        unclear += uncertain
    return Tokens(
        request=numbers[request],
        position=(positions[request] + index).astype(np.int32),
        token=step.token_ids[request, index].astype(np.int32),
        kind=_kinds(step, places),
        draft_position=np.where(places.drafted, index + 1, 0).astype(np.int16),
        **{name: np.concatenate([part[name] for part in columns]) for name in columns[0]},
    ), unclear


def _measured(
    step: Step, places: _Places, sampling: Sampling, ties: Ties, contexts: Sequence[Context] | None
) -> tuple[dict[str, NDArray[Any]], int]:
    """The columns of `Tokens` that need the distribution, and how many places cannot be tested."""
    device = step.logits.device
    logits = step.logits[torch.from_numpy(step.first_row[places.request] + places.index).to(device)].float()  # [tokens, vocab]
    token = torch.from_numpy(step.token_ids[places.request, places.index]).to(device)
    plain = logits.log_softmax(dim=-1)
    prompt, output = _seen(step, places, contexts, logits) if sampling.penalised else (None, None)
    found = distribution(logits, sampling, prompt, output, ties)
    sets = _drafted_sets(step, places, found) | _bonus_set(places, found)
    if sampling.processes:
        sets["processed"] = found.probabilities > plain.exp() * VISIBLY_MORE
    columns: dict[str, NDArray[Any]] = {
        "logprob": plain.gather(1, token[:, None])[:, 0].cpu().numpy(),
        "p_processed": np.full(len(token), np.nan),
        "in_processed": np.zeros(len(token), dtype=bool),
    }
    for name, members in sets.items():
        columns[f"p_{name}"], columns[f"in_{name}"] = _measure(members, found, token)
    return columns, int((~found.clear).sum())


def _kinds(step: Step, places: _Places) -> NDArray[np.int8]:
    """A request's last token is a residual, bonus or plain one; those before it were accepted."""
    last = places.index == step.emitted[places.request] - 1
    undrafted = np.where(step.drafts[places.request] > 0, Kind.BONUS, Kind.PLAIN)
    return np.where(~last, Kind.ACCEPTED, np.where(places.drafted, Kind.RESIDUAL, undrafted)).astype(np.int8)


def _drafted_sets(step: Step, places: _Places, found: Distribution) -> dict[str, torch.Tensor]:
    """Members `[tokens, vocab]` of the sets at drafted places: {q > p}, and the token with the largest p - q."""
    p = found.probabilities
    more = torch.zeros_like(p, dtype=torch.bool)
    refuge = torch.zeros_like(p, dtype=torch.bool)
    at = torch.from_numpy(np.flatnonzero(places.drafted)).to(p.device)
    if len(at):
        request, index = places.request[places.drafted], places.index[places.drafted]
        draft = torch.from_numpy(step.draft_ids[request, index]).to(p.device)
        difference = p[at]
        difference[torch.arange(len(at), device=p.device), draft] -= 1  # q is one-hot at the draft
        chosen = torch.zeros_like(difference, dtype=torch.bool)
        chosen.scatter_(1, draft[:, None], True)  # {q > p}; p = 1 there is no exception, as all of p is inside either way
        for place in np.flatnonzero(np.isin(request, list(step.draft_probs))):
            q = step.draft_probs[int(request[place])][int(index[place])].to(p.device, torch.float32)
            difference[place] = p[at[place]] - q
            chosen[place] = difference[place] < 0
        more[at] = chosen
        refuge[at] = torch.zeros_like(chosen).scatter_(1, difference.argmax(dim=-1, keepdim=True), True)
    return {"draft": more, "residual": refuge}


def _bonus_set(places: _Places, found: Distribution) -> dict[str, torch.Tensor]:
    """Members `[tokens, vocab]` of the set at places without a draft: the likeliest token."""
    p = found.probabilities
    top = torch.zeros_like(p, dtype=torch.bool).scatter_(1, p.argmax(dim=-1, keepdim=True), True)
    return {"top": top & torch.from_numpy(~places.drafted).to(p.device)[:, None]}


def _measure(members: torch.Tensor, found: Distribution, token: torch.Tensor) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """p(A) and whether the token is in A, for sets A `[tokens, vocab]`; NaN and False where A is empty or p is not certain."""
    if found.tied is not None:
        members = members & ~found.tied  # a set may be any that p alone decides; without these tokens p(A) is certain
    p = found.probabilities
    # Inside and outside are added up apart: 1 - p(A) must not be rounded away where p(A) is nearly 1.
    inside = torch.where(members, p, 0).sum(dim=-1, dtype=torch.float64)
    outside = torch.where(members, 0, p).sum(dim=-1, dtype=torch.float64)
    applies = members.any(dim=-1) & found.clear
    hit = members.gather(1, token[:, None])[:, 0] & applies
    probability = torch.where(applies, inside / (inside + outside), torch.nan)
    return probability.cpu().numpy(), hit.cpu().numpy()


def _seen(
    step: Step, places: _Places, contexts: Sequence[Context] | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[tokens, vocab]` each: whether the prompt has a token, and how often the output before the place has it.

    The output before a place counts the tokens that the same pass emitted before it: they are the drafts that stood there.
    """
    assert contexts is not None
    present, row_of = np.unique(places.request, return_inverse=True)
    prompt = torch.zeros(len(present), logits.shape[1], dtype=torch.bool)
    output = torch.zeros(len(present), logits.shape[1], dtype=torch.int32)
    for row, request in enumerate(present.tolist()):
        prompt[row, torch.tensor(contexts[request].prompt, dtype=torch.int64)] = True
        said = torch.tensor(contexts[request].output, dtype=torch.int64)
        output[row].scatter_add_(0, said, torch.ones(len(said), dtype=torch.int32))
    counts = output[torch.from_numpy(row_of)]
    for earlier in range(step.token_ids.shape[1] - 1):
        later = np.flatnonzero(places.index > earlier)
        counts[torch.from_numpy(later), torch.from_numpy(step.token_ids[places.request[later], earlier])] += 1
    return prompt[torch.from_numpy(row_of)].to(logits.device), counts.to(logits.device)
