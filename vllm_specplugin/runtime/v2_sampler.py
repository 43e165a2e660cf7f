"""Verification on the V2 runner, with the host's own sampler over every verified row; see `judging` for who is judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from vllm_specplugin.runtime.core import Runtime
from vllm_specplugin.runtime.judging import Judge, probabilities_at, valid_lengths
from vllm_specplugin.scorers.token import TokenVerifier
from vllm_specplugin.types import Request

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch


class Verification(RejectionSampler):
    """V2's rejection sampler with the decision replaced: sample every row as plain decoding would and walk, or judge.

    V2 keys its noise by (seed, position), so a seeded request, which is walked, emits plain decoding's tokens.
    """

    def __init__(self, runtime: Runtime, draft_lengths: torch.Tensor, spec_config: SpeculativeConfig, sampler: Any) -> None:
        """`draft_lengths` `[request slots]`: how many of a request's k draft tokens are drafts."""
        super().__init__(sampler, spec_config, draft_lengths.device)
        self.runtime = runtime
        self.draft_lengths = draft_lengths
        self.judge = Judge(runtime)
        self.fused = draft_lengths.device.type == "cuda" and type(runtime.verifier) is TokenVerifier
        """The host's own kernels do the token rule, where nobody in the step has to be walked."""
        self._requests: dict[int, Request] = {}
        """By slot, of this step."""
        self._num_drafts: dict[int, int] = {}
        """By slot, of this step: how many rows beyond its first a request has."""
        self._most_token_ids = 0
        """The longest `logprob_token_ids` of this step's requests."""
        self._slot_of_row = draft_lengths
        """`[rows]`, of the part of the batch that was verified last."""

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> Any:
        # Row j holds draft j - 1. Under asynchronous scheduling every row is k long, so what only fills it up is marked.
        filler = input_batch.expanded_local_pos > self.draft_lengths[input_batch.expanded_idx_mapping]
        invalid = filler if invalid_drafts is None else filler | invalid_drafts
        slots = input_batch.idx_mapping_np.tolist()
        request = self.runtime.request
        self._requests = {slot: request(name, None) for slot, name in zip(slots, input_batch.req_ids, strict=True)}
        self._num_drafts = dict(zip(slots, (np.diff(input_batch.cu_num_logits_np) - 1).tolist(), strict=True))
        self._most_token_ids = self.sampler.logprob_token_ids_state.max_num_token_ids(input_batch.idx_mapping_np)
        return super().__call__(logits, input_batch, draft_logits, invalid)

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: NDArray[np.int32],
        max_num_logprobs: int,
    ) -> Any:
        """As in stock, and with the tokens of `logprob_token_ids`, which stock leaves out where it verifies drafts."""
        if self._most_token_ids == 0:
            return super()._get_logprobs_tensors(sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs)
        position = torch.arange(sampled.shape[1], device=sampled.device)
        emitted = position < num_sampled[:, None]  # [requests, k + 1]
        row_at = cu_num_logits[:-1, None].long() + position
        # What is not emitted goes to a place behind the rows: which those are only the device knows.
        token_of_row = sampled.new_zeros(len(logits) + 1).scatter(0, row_at.where(emitted, len(logits)).ravel(), sampled.ravel())
        return compute_topk_scores(
            logits,
            0 if max_num_logprobs == NO_LOGPROBS else max_num_logprobs,
            token_of_row[:-1],
            cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=self._slot_of_row,
            max_per_req_token_ids=self._most_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: NDArray[np.intp],
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: NDArray[np.int32],
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns processed logits `[total, vocab]`, sampled `[requests, k + 1]`, number sampled `[requests]`."""
        sampling = (
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        self._slot_of_row = expanded_idx_mapping
        slots = idx_mapping_np.tolist()
        requests = [self._requests[slot] for slot in slots]
        num_drafts = np.array([self._num_drafts[slot] for slot in slots], dtype=np.int64)
        if self.fused and self.judge.nobody_is_walked(requests, num_drafts):
            processed = self.sampler.apply_sampling_params(*sampling)
            return self._by_host_kernels(
                processed, requests, num_drafts, verify_draft_sampled, cu_num_logits, pos, idx_mapping, expanded_local_pos
            )
        judged = self.judge.choose(requests, num_drafts, logits.device)
        first = cu_num_logits[:-1].long()  # [requests]
        lengths = cu_num_logits[1:].long() - first - 1
        width = max(int(num_drafts.max(initial=0)), 1)  # fewer than k, where fewer were planned
        position = torch.arange(width + 1, device=first.device)
        row_at = (first[:, None] + position).clamp(max=logits.shape[0] - 1)  # [requests, width + 1]
        drafts = verify_draft_sampled[row_at[:, 1:]]  # [requests, width]; -1 where a draft is marked invalid
        if judged is None or not judged.every:
            with self._noise_by_position():
                target_ids, processed = self.sampler.sample(*sampling, return_logprobs=True)
        else:
            # Nobody is walked. What is sampled takes this type, which pipeline stages are sent.
            target_ids = torch.zeros_like(verify_draft_sampled, dtype=torch.int64)
        if judged is not None:  # a fused sampler applies top-k and top-p where its caller does not see it
            processed = self.sampler.apply_sampling_params(*sampling)
        walked = self.judge.walk(target_ids[row_at], drafts.to(target_ids.dtype), lengths)
        verdict = None
        if judged is not None:
            target_probs = probabilities_at(processed, row_at[judged.rows], judged.every)
            drafts = drafts[judged.rows]
            valid = valid_lengths(drafts, lengths[judged.rows])  # [judged]
            known = pos[first[judged.rows]].long() + 1
            verdict = self.judge.verify(judged, target_probs, drafts, valid, known)
        merged = self.judge.merge(walked, judged, verdict)
        return processed, self._as_wide_as_k(merged.token_ids.clamp(min=0)), (merged.accepted + 1).to(torch.int32)

    def _as_wide_as_k(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[requests, k + 1]`, as the runner wants what was sampled; 0 behind what there is."""
        return torch.nn.functional.pad(token_ids, (0, self.num_speculative_steps + 1 - token_ids.shape[1]))

    @contextmanager
    def _noise_by_position(self) -> Iterator[None]:
        """Where ranks share a step, have the host draw by (seed, position) and not by a generator.

        FlashInfer's sampler draws from the device's generator. A rank that judges where another one walks would draw from it less
        often, and ranks draw the tokens of later steps, of prompts for example, each by itself.
        """
        flashinfer = self.sampler.use_flashinfer
        self.sampler.use_flashinfer = flashinfer and not self.judge.shared
        try:
            yield
        finally:
            self.sampler.use_flashinfer = flashinfer

    def _by_host_kernels(
        self,
        processed: torch.Tensor,
        requests: Sequence[Request],
        num_drafts: NDArray[np.int64],
        drafts: torch.Tensor,
        cu_num_logits: torch.Tensor,
        pos: torch.Tensor,
        idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The token rule over processed logits `[total, vocab]`; `drafts` `[total]`, one row after each draft, -1 if invalid."""
        states = self.sampler.sampling_states
        first = cu_num_logits[:-1].long()  # [requests]
        lengths = cu_num_logits[1:].long() - first - 1
        request = torch.arange(len(requests), device=first.device, dtype=idx_mapping.dtype)
        request_of_row = request.repeat_interleave(lengths + 1, output_size=len(processed))  # [total]
        width = int(num_drafts.max())
        place = (first[:, None] + 1 + torch.arange(width, device=first.device)).clamp(max=len(drafts) - 1)
        temperature = states.temperature.gpu[idx_mapping]
        draft_probs = self.runtime.drafted.stacked(requests, drafts[place].clamp(min=0), lengths)  # [requests, width, vocab]
        assert draft_probs is not None
        # The kernels divide by the temperature, which these are past.
        draft_logits = draft_probs.log().mul_(temperature[:, None, None])
        sampled, num_sampled = rejection_sample(
            processed,
            draft_logits,
            drafts,
            cu_num_logits,
            pos,
            request,
            request_of_row,
            expanded_local_pos,
            temperature,
            states.seeds.gpu[idx_mapping],
            width,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        accepted, sampled = self.judge.agree(num_sampled - 1, sampled)  # as a rank that walks has it
        return processed, self._as_wide_as_k(sampled), accepted + 1
