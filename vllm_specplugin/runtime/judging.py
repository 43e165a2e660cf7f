"""Verification by probabilities, for either model runner: which requests of a step it is for, and their verdict.

A request is *walked* (the host's sampler draws at every verified row, and drafts stand while they equal its draws) or
*judged* (a verifier looks at the probabilities). Walking is lossless for every draft, drawn by chance or not, as long as the
draft knows nothing of the target's noise; judging accepts more of the drafts that were drawn by chance. So a request is walked

* where it is greedy: its distribution is one-hot, and the host's own argmax decides;
* where it has a seed and the verifier is lossless: it then gets plain decoding's tokens, in whatever batch and after
  whatever preemption. A judged token depends on where passes begin and end, and could not be repeated;
* where no probabilities came with its drafts, if the verifier is about those; or such as nobody could rely on;
* where a grammar may cut its drafts short, and the verifier is lossless: the cut depends on what was drawn, so that a judge who
  does not see what was cut off would take the next token from the wrong law (stock vLLM does);
* where the verifier is about samples (`one_hot`), unless that is the slower way to the same law: the host's sampler makes noise
  for the whole vocabulary at every verified row, which on V1 on a CPU takes many times as long as one uniform number per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugin.guard import CheckedDrafts
from vllm_specplugin.scorers.base import SampleVerifier
from vllm_specplugin.scorers.one_hot import walk
from vllm_specplugin.scorers.uniforms import uniforms
from vllm_specplugin.types import Request, Verdict

if TYPE_CHECKING:
    from vllm_specplugin.runtime.core import Runtime

SURE = 1e-3
"""How far from 1 the sum of a softmax in float32 may be; a NaN among the logits makes it NaN."""
CHUNK_BYTES = 2**28
"""Of probabilities that are looked at together."""


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The judged requests of one step."""

    requests: Sequence[Request]
    """`[judged]`"""
    places: Sequence[int]
    """`[judged]`: their places in the step's batch."""
    rows: torch.Tensor
    """The same on the device."""
    every: bool
    """Nobody in the step is walked."""


class Judge:
    """Verifies the drafts of one model runner."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.verifier = runtime.verifier
        self.samples = isinstance(self.verifier, SampleVerifier)
        """The verifier decides by samples of the target, whoever draws them."""
        self._own_samples = runtime.host.runner == "v1" and runtime.host.device.startswith("cpu")
        self.shared = runtime.host.tensor_parallel_size > 1 and not self.samples and not runtime.shards_sampling
        """Other tensor-parallel ranks verify the same drafts, and might judge where this one walks."""

    def choose(self, requests: Sequence[Request], num_drafts: NDArray[np.integer], device: torch.device) -> Judged | None:
        """The requests of a step that are judged, None where all are walked; `requests` and `num_drafts` are `[requests]`."""
        if self.samples and not self._own_samples:  # as on V2 with `one_hot`: no step needs to be looked through
            return None
        places = [place for place, request in enumerate(requests) if num_drafts[place] and self._judges(request)]
        if not places:
            return None
        # Where there is a judge, requests without drafts may get their one token from it, too: fewer have to be walked.
        undrafted = [place for place, request in enumerate(requests) if not num_drafts[place] and _is_free(request)]
        places = sorted(places + undrafted)
        judged = [requests[place] for place in places]
        return Judged(judged, places, _on(device, places), every=len(places) == len(requests))

    def nobody_is_walked(self, requests: Sequence[Request], num_drafts: NDArray[np.integer]) -> bool:
        """Whether each request with drafts is judged or greedy, and at least one is judged."""
        any_judged = False
        for request, drafts in zip(requests, num_drafts.tolist(), strict=True):
            if drafts and self._judges(request):
                any_judged = True
            elif drafts and request.temperature > 0:
                return False
        return any_judged

    def _judges(self, request: Request) -> bool:
        verifier = self.verifier
        if request.temperature == 0 or (verifier.lossless and request.seed is not None):
            return False
        if self.samples:
            return request.seed is None
        drafted = self.runtime.drafted
        if verifier.lossless and (drafted.unknown(request.request_id) or _has_grammar(request)):
            return False
        return not verifier.needs_probabilities or drafted.drawn(request.request_id)

    def verify(
        self, judged: Judged, target_probs: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor, passes: torch.Tensor
    ) -> Verdict:
        """The verdict on the judged requests.

        Args:
            judged: the requests.
            target_probs: `[judged, k + 1, vocab]` float32.
            draft_ids: `[judged, k]`.
            lengths: `[judged]`.
            passes: `[judged]`, how many tokens of each were known before this pass.
        """
        k = draft_ids.shape[1]
        draft_probs = None if self.samples else self.runtime.drafted.stacked(judged.requests, draft_ids, lengths)
        keys = _on(lengths.device, [self.runtime.noise_key(request) for request in judged.requests])
        return self.verifier.verify(target_probs, draft_probs, draft_ids, lengths, uniforms(keys, passes, k))

    def walk(self, target_ids: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
        """The verdict on all requests by the host's samples: `[requests, k + 1]`, `[requests, k]`, `[requests]`."""
        if isinstance(self.verifier, SampleVerifier):
            return self.verifier.walk(target_ids, draft_ids, lengths)
        return walk(target_ids, draft_ids, lengths)

    def merge(self, walked: Verdict, judged: Judged | None, verdict: Verdict | None) -> Verdict:
        """One verdict on all requests of a step, the same on every tensor-parallel rank."""
        accepted, token_ids = walked.accepted, walked.token_ids
        if judged is not None and verdict is not None:
            accepted = accepted.index_copy(0, judged.rows, verdict.accepted)
            width = verdict.token_ids.shape[1]  # the judged requests may all have fewer drafts than the longest one
            padded = torch.nn.functional.pad(verdict.token_ids, (0, token_ids.shape[1] - width), value=-1)
            token_ids = token_ids.index_copy(0, judged.rows, padded.to(token_ids.dtype))
        accepted, token_ids = self.agree(accepted, token_ids)
        return Verdict(accepted=accepted, token_ids=token_ids, tested=walked.tested)

    def agree(self, counts: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`counts` `[requests]` and `token_ids` `[requests, k + 1]` as the first tensor-parallel rank has them.

        Counts are of accepted drafts, whichever way a rank came by them. What a rank's proposer gave may be missing on another
        (it was late there, say); the tokens must not differ.
        """
        if not self.shared:
            return counts, token_ids
        packed = torch.cat([counts[:, None].long(), token_ids.long()], dim=1)
        packed = get_tp_group().broadcast(packed, src=0)
        return packed[:, 0].to(counts.dtype), packed[:, 1:].to(token_ids.dtype)


def valid_lengths(draft_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`[rows]`: how many of each row's `lengths` `[rows]` drafts `[rows, k]` come before the first that is none: -1."""
    inside = torch.arange(draft_ids.shape[1], device=draft_ids.device) < lengths[:, None]
    return ((draft_ids >= 0) & inside).long().cumprod(dim=1).sum(dim=1)


def _on(device: torch.device, values: list[Any]) -> torch.Tensor:
    """Numbers of the host on a device, which nobody waits for: the host runs ahead under asynchronous scheduling."""
    return async_tensor_h2d(values, device=device)


def _has_grammar(request: Request) -> bool:
    return getattr(request.sampling, "structured_outputs", None) is not None


def _is_free(request: Request) -> bool:
    """Its tokens are drawn by chance, and nobody expects certain ones."""
    return request.temperature > 0 and request.seed is None


def probabilities_at(logits: torch.Tensor, row_at: torch.Tensor, every: bool) -> torch.Tensor:
    """`[judged, k + 1, vocab]` float32, from processed logits `[rows, vocab]` and the rows of each place `[judged, k + 1]`.

    Rows of others cost nothing; where there are none (`every` request is judged) and no place is padded, nothing is copied.
    """
    if every and len(logits) == row_at.numel():
        return logits.softmax(dim=-1, dtype=torch.float32).view(*row_at.shape, -1)
    return logits[row_at].softmax(dim=-1, dtype=torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class DraftLogits:
    """What the drafts of one step were drawn from, where one of vLLM's own drafters on V2 keeps it.

    That is a buffer with a place for each request, which holds it until the same request is drafted for again, and so until after
    its verification. A copy would take gigabytes at hundreds of requests, and vLLM, which sees no drafts when it measures what a
    step takes, has set nothing aside for it.
    """

    logits: torch.Tensor
    """`[slots, >= k, >= vocab]`, before temperature."""
    slots: torch.Tensor
    """`[rows]`"""
    temperature: torch.Tensor
    """`[rows]` float32, none of them 0."""
    k: int
    vocab: int

    def probabilities(self, rows: Sequence[int]) -> torch.Tensor:
        """`[len(rows), k, vocab]` float32, of some of the step's rows."""
        slots, temperature = _rows_of(rows, self.slots, self.temperature)
        # The drafter draws from the same numbers, in float32, divided in the same way.
        logits = self.logits[slots, : self.k, : self.vocab].float()
        return logits.div_(temperature[:, None, None]).softmax(dim=-1)

    def sound(self) -> torch.Tensor:
        """`[rows, k]`: which places have a distribution at all; a NaN among the logits leaves none."""
        rows = len(self.slots)
        at_once = max(1, CHUNK_BYTES // (4 * max(self.k, 1) * self.vocab))
        parts = [range(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]
        return torch.cat([(self.probabilities(part).sum(dim=-1) - 1).abs() < SURE for part in parts])


class Drafted:
    """What each request's drafts were drawn from, kept until it is drafted for again."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[torch.Tensor | DraftLogits, int]] = {}
        """Those of one step, and the request's row among them."""
        self._unknown: set[str] = set()

    def keep(self, request_ids: Sequence[str], drafts: CheckedDrafts) -> None:
        """Remember what one step's drafts, one row for each request, were drawn from; it replaces what was known before."""
        if drafts.probabilities is None and not (drafts.unreliable or self._of or self._unknown):
            return
        for row, (request_id, length) in enumerate(zip(request_ids, drafts.lengths.tolist(), strict=True)):
            self.drop(request_id)
            if row in drafts.unreliable:
                self._unknown.add(request_id)
            elif drafts.probabilities is not None and length > 0:
                self._of[request_id] = (drafts.probabilities, row)

    def keep_all(self, request_ids: Sequence[str], drawn_from: DraftLogits | None) -> None:
        """The same where all rows were drawn from what is given, or all deterministically."""
        for row, request_id in enumerate(request_ids):
            self.drop(request_id)
            if drawn_from is not None:
                self._of[request_id] = (drawn_from, row)

    def drawn(self, request_id: str) -> bool:
        """It is known what a request's drafts were drawn from; else they were chosen deterministically, or `unknown` holds."""
        return request_id in self._of

    def get(self, request_id: str) -> torch.Tensor | None:
        """`[k, vocab]` float32, what a request's drafts were drawn from; None where they were chosen deterministically."""
        kept = self._of.get(request_id)
        return None if kept is None else _probabilities(kept[0], [kept[1]])[0]

    def drop(self, request_id: str) -> None:
        """The request ended, or its drafts are void."""
        self._of.pop(request_id, None)
        self._unknown.discard(request_id)

    def drop_all(self, request_ids: Iterable[str]) -> None:
        """The same for several, which costs nothing where nothing is kept."""
        if self._of or self._unknown:
            for request_id in request_ids:
                self.drop(request_id)

    def unknown(self, request_id: str) -> bool:
        """A request's drafts were drawn by chance, and nobody knows from what."""
        return request_id in self._unknown

    def stacked(self, requests: Sequence[Request], draft_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """`[rows, k, vocab]` for the requests of a step, None where no draft was drawn by chance.

        Where only some were, the others get what they are: one-hot rows. `draft_ids` is `[rows, k]`, `lengths` `[rows]`. What was
        kept may be narrower, where a step was planned with fewer drafts than may be: the ids behind it are filler, and get zeros.
        """
        kept = [self._of.get(request.request_id) for request in requests]
        k = draft_ids.shape[1]
        of_step: dict[int, tuple[torch.Tensor | DraftLogits, list[int], list[int]]] = {}
        for place, entry in enumerate(kept):
            if entry is not None:
                _, places, rows = of_step.setdefault(id(entry[0]), (entry[0], [], []))
                places.append(place)
                rows.append(entry[1])
        if not of_step:
            return None
        stacked: torch.Tensor | None = None
        for drawn_from, places, rows in of_step.values():
            drawn = _probabilities(drawn_from, rows)[:, :k]
            if len(places) == len(kept) and drawn.shape[1] == k:
                return drawn
            if stacked is None:
                stacked = drawn.new_zeros(len(kept), k, drawn.shape[2])
            stacked[_on(stacked.device, places), : drawn.shape[1]] = drawn
        assert stacked is not None
        without = _on(stacked.device, [entry is None for entry in kept])
        inside = torch.arange(k, device=stacked.device) < lengths[:, None]
        mask = (without[:, None] & inside)[..., None].to(stacked.dtype)
        ids = draft_ids.long().masked_fill(~inside, 0)[..., None]
        return stacked.scatter_add_(2, ids, mask)


def _probabilities(drawn_from: torch.Tensor | DraftLogits, rows: Sequence[int]) -> torch.Tensor:
    """`[len(rows), k, vocab]` float32, of what a step's drafts were drawn from."""
    return drawn_from.probabilities(rows) if isinstance(drawn_from, DraftLogits) else _rows_of(rows, drawn_from)[0]


def _rows_of(rows: Sequence[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """These rows of tensors that are equally long; the tensors themselves where it is all rows in order."""
    if list(rows) == list(range(len(tensors[0]))):
        return tensors
    index = _on(tensors[0].device, list(rows))
    return tuple(tensor[index] for tensor in tensors)
