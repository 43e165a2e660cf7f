"""Verification on the V1 runner, with the host's own sampler over every verified row.

Stock V1 processes verified rows by code of its own, which leaves out logit_bias and min_p, reads uninitialised memory for
temperature, top-k and top-p on the CPU, and cannot serve a request's seed there. Here each verified row becomes a request
of its own, whose output is the committed one plus the drafts before it, and the batch of these goes through the same
sampler as plain decoding. What the host serves without speculation is thereby served with it, in the same way. Only the
last step of sampling, drawing a token from the processed logits, is ours for requests that are judged by probabilities.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, build_logitsprocs
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_specplugin.runtime.core import Runtime
from vllm_specplugin.runtime.judging import Judge, Judged, probabilities_at, valid_lengths
from vllm_specplugin.types import Verdict

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger("vllm.specplugin")

PENALTIES = ("frequency_penalties", "presence_penalties", "repetition_penalties")


def _logits_processors(runner: GPUModelRunner, max_rows: int) -> LogitsProcessors:
    """The processors of plain decoding (vLLM drops all but min_tokens when it sees a speculative configuration)."""
    plain = copy.copy(runner.vllm_config)
    plain.speculative_config = None
    plain.scheduler_config = copy.copy(plain.scheduler_config)
    plain.scheduler_config.max_num_seqs = max_rows
    return build_logitsprocs(plain, runner.device, is_pin_memory_available(), runner.is_pooling_model, ())


def serve_every_logits_processor(runner: GPUModelRunner) -> None:
    """Let steps without drafts serve min_p and logit_bias, too; before the runner has seen a request."""
    runner.input_batch.logitsprocs = _logits_processors(runner, runner.max_num_reqs)
    logger.info_once("min_p and logit_bias are served at every position; vLLM's warning about them does not apply here.")


class Verification(torch.nn.Module):
    """Stands where V1 has its `RejectionSampler`."""

    def __init__(self, runner: GPUModelRunner, runtime: Runtime) -> None:
        super().__init__()
        self.runner = runner
        self.runtime = runtime
        self.judge = Judge(runtime)
        self.sampler = copy.copy(runner.sampler)
        self.sampler._modules = dict(runner.sampler._modules)
        self.sampler.topk_topp_sampler = self.final_draw = _FinalDraw(runner.sampler.topk_topp_sampler, self.judge)
        max_rows = runner.max_num_reqs * (runner.num_spec_tokens + 1)
        self.processors = _RowProcessors(_logits_processors(runner, max_rows))

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample every row; then walk, or judge.

        Args:
            metadata: how many drafts each request has, and which.
            draft_probs: unused; what drafts were drawn from is kept by the runtime.
            logits: `[total, vocab]`, for each request the rows before its drafts and after the last one.
            sampling_metadata: the requests' sampling parameters; may change `logits` in place, as in plain decoding.

        Returns:
            SamplerOutput: `sampled_token_ids` `[requests, longest draft + 1]` int32, -1 after the last emitted token.
        """
        if not any(metadata.num_draft_tokens):  # V1 comes here in every step; one without drafts is a plain one
            return self.runner.sampler(logits=logits, sampling_metadata=sampling_metadata)
        layout = _Layout(np.asarray(metadata.num_draft_tokens, dtype=np.int64), logits.device)
        rows = self._as_requests(layout, metadata, sampling_metadata)
        draft_ids = layout.pad_drafts(metadata.draft_token_ids)  # [requests, longest]
        self.final_draw.step = step = self._judged(layout, draft_ids)
        sampled = self.sampler(logits=logits, sampling_metadata=rows)
        target_ids = layout.by_position(sampled.sampled_token_ids.view(-1))  # [requests, longest + 1]
        verdict = self.judge.walk(target_ids, draft_ids.to(target_ids.dtype), layout.lengths)
        verdict = self.judge.merge(verdict, None if step is None else step.judged, None if step is None else step.verdict)
        if isinstance(rows.generators, _RowGenerators):
            rows.generators.rewind(layout.first_row, verdict.accepted.tolist())
        return SamplerOutput(
            sampled_token_ids=verdict.token_ids.to(torch.int32),
            logprobs_tensors=None if sampled.logprobs_tensors is None else _select(sampled.logprobs_tensors, layout.row_at),
        )

    def _judged(self, layout: _Layout, draft_ids: torch.Tensor) -> _JudgedStep | None:
        batch = self.runner.input_batch
        ids = batch.req_ids[: len(layout.drafts)]
        requests = [self.runtime.request(request_id, self.runner.requests[request_id].sampling_params) for request_id in ids]
        judged = self.judge.choose(requests, layout.drafts, layout.lengths.device)
        if judged is None:
            return None
        known = torch.from_numpy(batch.num_tokens_no_spec[: len(ids)].astype(np.int64)).to(layout.lengths.device)
        # Of the others only those that are sampled need a draw: the host's sampler takes the likeliest token of greedy ones.
        drawn = [place for place, request in enumerate(requests) if request.temperature > 0 and place not in judged.places]
        return _JudgedStep(judged, layout, draft_ids, known, layout.rows_of(drawn))

    def _as_requests(self, layout: _Layout, metadata: SpecDecodeMetadata, requests: SamplingMetadata) -> SamplingMetadata:
        needs_output = bool(requests.bad_words_token_ids) or not requests.no_penalties
        processors = self.processors.select(self.runner, layout, metadata)
        drafts = layout.split(metadata.draft_token_ids.tolist()) if needs_output else []
        return replace(
            requests,
            temperature=layout.repeat(requests.temperature),
            top_p=layout.repeat(requests.top_p),
            top_k=layout.repeat(requests.top_k),
            generators=_RowGenerators(layout, requests.generators) if requests.generators else {},
            prompt_token_ids=layout.repeat(requests.prompt_token_ids),
            **{name: layout.repeat(getattr(requests, name)) for name in PENALTIES if not requests.no_penalties},
            output_token_ids=layout.outputs(requests.output_token_ids, drafts) if needs_output else [],
            allowed_token_ids_mask=layout.repeat(requests.allowed_token_ids_mask),
            bad_words_token_ids=layout.by_row(requests.bad_words_token_ids),
            logitsprocs=processors,
            logprob_token_ids=layout.by_row(requests.logprob_token_ids) if requests.logprob_token_ids else None,
            spec_token_ids=None,
        )


class _JudgedStep:
    """What the final draw needs to know of a step with judged requests, and what comes of it."""

    def __init__(
        self, judged: Judged, layout: _Layout, draft_ids: torch.Tensor, known: torch.Tensor, drawn_rows: NDArray[np.int64]
    ) -> None:
        self.judged = judged
        longest = int(layout.drafts[list(judged.places)].max())
        self.row_at = layout.row_at[judged.rows, : longest + 1]  # [judged, longest + 1]
        self.draft_ids = draft_ids[judged.rows, :longest]
        # The scheduler fills up a request that joins others with a single token: -1 is no draft, nor is what comes after it.
        self.lengths = valid_lengths(self.draft_ids, layout.lengths[judged.rows])  # [judged]
        self.known = known[judged.rows]
        self.drawn_rows = drawn_rows
        """The rows of requests that are walked and sampled."""
        self.verdict: Verdict | None = None


class _FinalDraw(torch.nn.Module):
    """Stands where V1's sampler draws tokens from processed logits, and lets the judge draw those of judged requests."""

    def __init__(self, stock: torch.nn.Module, judge: Judge) -> None:
        super().__init__()
        self.stock = stock
        self.judge = judge
        self.step: _JudgedStep | None = None

    def forward(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `[rows]` for logits `[rows, vocab]`; of a judged request those that it emits, row by row."""
        step = self.step
        if step is None:
            drawn: tuple[torch.Tensor, torch.Tensor | None] = self.stock(logits, generators, k, p)
            return drawn
        logits = apply_top_k_top_p(logits, k, p)
        target_probs = probabilities_at(logits, step.row_at, step.judged.every)
        step.verdict = self.judge.verify(step.judged, target_probs, step.draft_ids, step.lengths, step.known)
        # A rank that walks (its proposer was late, say) draws from the noise that all ranks have in common; so must the others.
        if self.judge.shared or self.stock.logprobs_mode in ("processed_logits", "processed_logprobs"):
            tokens, processed = self.stock(logits, generators, None, None)  # what they keep is applied
        else:
            tokens, processed = torch.zeros(len(logits), dtype=torch.int64, device=logits.device), None
            if len(step.drawn_rows):
                tokens[step.drawn_rows] = self._drawn(logits, generators, step.drawn_rows)
        emitted = step.verdict.token_ids >= 0
        tokens = tokens.long().index_put((step.row_at[emitted],), step.verdict.token_ids[emitted])
        return tokens, processed

    def _drawn(self, logits: torch.Tensor, generators: dict[int, torch.Generator], rows: NDArray[np.int64]) -> torch.Tensor:
        """The stock sampler's tokens for some of the rows, `[len(rows)]` int64."""
        index = torch.from_numpy(rows).to(logits.device)
        tokens, _ = self.stock(logits[index], _Renumbered(generators, rows.tolist()), None, None)
        return tokens.long()


class _Layout:
    """Where the verified rows of each request lie: request i owns `drafts[i] + 1` consecutive rows."""

    def __init__(self, drafts: NDArray[np.int64], device: torch.device) -> None:
        self.drafts = drafts
        self.device = device
        self.longest = int(drafts.max(initial=0))
        self.even = int(drafts.min(initial=self.longest)) == self.longest
        """All requests have as many drafts, as they mostly do: rows and places are then the same thing, in another shape."""
        self.lengths = torch.from_numpy(drafts).to(device)

    @cached_property
    def first_row(self) -> NDArray[np.int64]:
        """`[requests]`"""
        owned = self.drafts + 1
        return np.cumsum(owned) - owned

    @cached_property
    def request_of_row(self) -> NDArray[np.int64]:
        """`[rows]`"""
        return np.repeat(np.arange(len(self.drafts)), self.drafts + 1)

    @cached_property
    def request_of_row_on_device(self) -> torch.Tensor:
        return torch.from_numpy(self.request_of_row).to(self.device)

    @cached_property
    def row_at(self) -> torch.Tensor:
        """`[requests, longest + 1]`: the row of a request's position, its last row where it has fewer."""
        position = np.minimum(np.arange(self.longest + 1), self.drafts[:, None])
        return torch.from_numpy(self.first_row[:, None] + position).to(self.device)

    def rows_of(self, requests: Sequence[int]) -> NDArray[np.int64]:
        """The rows of some requests."""
        return np.flatnonzero(np.isin(self.request_of_row, requests))

    def repeat(self, of_requests: torch.Tensor | None) -> torch.Tensor | None:
        """`[requests, ...]` to `[rows, ...]`."""
        return None if of_requests is None else of_requests[self.request_of_row_on_device]

    def by_position(self, of_rows: torch.Tensor) -> torch.Tensor:
        """`[rows]` to `[requests, longest + 1]`, the last row's value again where a request has fewer."""
        if self.even:
            return of_rows.view(len(self.drafts), self.longest + 1)
        return of_rows[self.row_at]

    def pad_drafts(self, flat: torch.Tensor) -> torch.Tensor:
        """`[drafts in all]` to `[requests, longest]`; what lies past a request's drafts is not meant to be read."""
        if self.even:
            return flat.view(len(self.drafts), self.longest)
        first = np.cumsum(self.drafts) - self.drafts
        index = np.minimum(first[:, None] + np.arange(self.longest), flat.numel() - 1)
        return flat[torch.from_numpy(index).to(flat.device)]

    def split(self, flat: list[int]) -> list[list[int]]:
        """Each request's drafts."""
        ends = np.cumsum(self.drafts).tolist()
        return [flat[end - count : end] for end, count in zip(ends, self.drafts.tolist(), strict=True)]

    def outputs(self, committed: list[list[int]], drafts: list[list[int]]) -> list[list[int]]:
        """`[rows]`: a row's output is the committed one and the drafts before that row."""
        return [
            output if position == 0 else [*output, *draft[:position]]
            for output, draft in zip(committed, drafts, strict=True)
            for position in range(len(draft) + 1)
        ]

    def by_row(self, by_request: dict[int, Any] | None) -> dict[int, Any]:
        """A mapping from request to value, as one from row to value."""
        if not by_request:
            return {}
        return {row: by_request[request] for row, request in enumerate(self.request_of_row.tolist()) if request in by_request}


class _RowGenerators(dict[int, torch.Generator]):
    """Requests' generators, one entry per row, drawn from in the order of rows.

    A request's rows share its generator, so row j gets the noise that plain decoding would give to its j-th next token.
    The sampler draws while it iterates over `items`; the state after each draw is kept, so that afterwards the generator
    can be set back to where plain decoding would be after the tokens that were really emitted.
    """

    def __init__(self, layout: _Layout, generators: dict[int, torch.Generator]) -> None:
        super().__init__(layout.by_row(generators))
        self._of_request = generators
        self._state_after: dict[int, torch.Tensor] = {}

    def items(self) -> Iterator[tuple[int, torch.Generator]]:  # type: ignore[override]
        for row, generator in super().items():
            yield row, generator
            self._state_after[row] = generator.get_state()

    def rewind(self, first_row: NDArray[np.int64], accepted: list[int]) -> None:
        """Keep one draw per emitted token: `first_row` and `accepted` are `[requests]`."""
        for request, generator in self._of_request.items():
            state = self._state_after.get(int(first_row[request]) + accepted[request])
            if state is None:
                logger.warning_once(
                    "This vLLM draws seeded noise in a way the plugin does not know: answers stay correct, but a seed does not "
                    "repeat plain decoding's tokens."
                )
                return
            generator.set_state(state)


class _Renumbered(dict[int, torch.Generator]):
    """Generators by place among some of the rows, drawn from through the mapping by row, which keeps account of it."""

    def __init__(self, generators: dict[int, torch.Generator], rows: list[int]) -> None:
        place_of = {row: place for place, row in enumerate(rows)}
        super().__init__({place_of[row]: generator for row, generator in dict.items(generators) if row in place_of})
        self._generators, self._place_of = generators, place_of

    def items(self) -> Iterator[tuple[int, torch.Generator]]:  # type: ignore[override]
        for row, generator in self._generators.items():
            if row in self._place_of:
                yield self._place_of[row], generator


class _RowProcessors:
    """The host's logits processors over verified rows, told of the rows as if they were requests."""

    def __init__(self, processors: LogitsProcessors) -> None:
        self.processors = processors
        self._rows: list[int] = []
        known = {"MinTokensLogitsProcessor", "LogitBiasLogitsProcessor", "MinPLogitsProcessor"}
        self._any_request = any(type(processor).__name__ not in known for processor in processors.all)

    def _output(self, params: SamplingParams, output: list[int], drafts: list[int]) -> list[int]:
        """A row's output as far as its processors look at it: a long answer is not copied for every row of every step."""
        if self._any_request or len(output) < params.min_tokens:
            return [*output, *drafts]
        return output if params.min_tokens else []

    def select(self, runner: GPUModelRunner, layout: _Layout, metadata: SpecDecodeMetadata) -> LogitsProcessors:
        """The processors, ready for this step's rows; none at all where no request needs one."""
        added = []
        drafts: list[list[int]] | None = None
        ids = runner.input_batch.req_ids
        for request, request_id in enumerate(ids[: len(layout.drafts)]):
            state = runner.requests.get(request_id)
            params = getattr(state, "sampling_params", None)
            if params is None or not (self._any_request or params.min_tokens or params.logit_bias or params.min_p):
                continue
            drafts = layout.split(metadata.draft_token_ids.tolist()) if drafts is None else drafts
            for position in range(int(layout.drafts[request]) + 1):
                output = self._output(params, state.output_token_ids, drafts[request][:position])
                added.append((int(layout.first_row[request]) + position, params, state.prompt_token_ids, output))
        if not added and not self._rows:
            return LogitsProcessors()
        rows = [row for row, *_ in added]
        # A row that is added again replaces its predecessor; naming it as removed would undo that.
        removed = sorted(set(self._rows).difference(rows))
        update = BatchUpdate(batch_size=len(layout.request_of_row), removed=removed, added=added, moved=[])
        for processor in self.processors.all:
            processor.update_state(update)
        self._rows = rows
        return self.processors if added else LogitsProcessors()


def _select(logprobs: LogprobsTensors, row_at: torch.Tensor) -> LogprobsTensors:
    """One entry for each place of `[requests, longest + 1]`; the host drops those of places without a token."""
    rows = row_at.flatten()
    return LogprobsTensors(logprobs.logprob_token_ids[rows], logprobs.logprobs[rows], logprobs.selected_token_ranks[rows])
