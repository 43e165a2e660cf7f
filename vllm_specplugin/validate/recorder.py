"""Inside the engine's worker: watches what goes into its samplers and what comes out, and keeps the records.

vLLM mixes `RecorderExtension` into its worker (`worker_extension_cls`) and calls its methods by `collective_rpc`. What is
wrapped are attributes of this worker's own runner, samplers that stock methods and the plugin's proposers go through alike.
The wrapped samplers get what they would have got and return what they would have returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_specplugin.validate.distribution import Ties
from vllm_specplugin.validate.passes import Context, Step, tokens_of
from vllm_specplugin.validate.records import Tokens
from vllm_specplugin.validate.sampling import Sampling
from vllm_specplugin.validate.wire import NO_TOKENS, pack, pack_tokens


class Recorder:
    """What one worker has seen since recording began."""

    def __init__(self) -> None:
        self.mode: Literal["off", "tokens", "likeliest"] = "off"
        self.unclear = 0
        """Places that cannot be tested, because rounding decides which tokens are allowed there."""
        self._sampling = Sampling()
        self._ties: Ties = "keep"
        self._numbers: dict[str, int] = {}
        self._emitted: dict[str, int] = {}
        self._outputs: dict[str, list[int]] = {}
        self._tokens: list[Tokens] = []
        self._count = 0
        self._likeliest: list[tuple[NDArray[np.int32], torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @property
    def wants_prompts(self) -> bool:
        """Only a repetition penalty looks at them."""
        return self.mode == "tokens" and self._sampling.repetition_penalty != 1

    def start(self, sampling: Sampling, ties: Ties) -> None:
        """Record every token from now on; requests that were running before are not expected."""
        self.mode, self._sampling, self._ties = "tokens", sampling, ties
        self._forget()

    def start_likeliest(self, count: int) -> None:
        """Keep the `count` largest logits at every emitted token's place, whatever the sampling parameters."""
        self.mode, self._count = "likeliest", count
        self._forget()

    def add(self, step: Step, prompts: Sequence[Sequence[int]]) -> None:
        """One step, with the prompt of each request (empty where no repetition penalty asks for it)."""
        emitting = np.flatnonzero(step.emitted > 0)
        if not len(emitting):
            return
        ids = step.request_ids
        numbers = np.array([self._numbers.setdefault(name, len(self._numbers)) for name in ids], dtype=np.int32)
        if self.mode == "likeliest":
            self._likeliest.append(_likeliest(step, numbers, self._count))
            return
        positions = np.array([self._emitted.get(name, 0) for name in ids], dtype=np.int32)
        contexts = None
        if self._sampling.penalised:
            contexts = [Context(prompt, self._outputs.get(name, [])) for name, prompt in zip(ids, prompts, strict=True)]
        tokens, unclear = tokens_of(step, self._sampling, self._ties, numbers, positions, contexts)
        self._tokens.append(tokens)
        self.unclear += unclear
        for place in emitting.tolist():
            count = int(step.emitted[place])
            self._emitted[ids[place]] = self._emitted.get(ids[place], 0) + count
            if contexts is not None:
                self._outputs.setdefault(ids[place], []).extend(step.token_ids[place, :count].tolist())

    def take(self) -> bytes:
        """Stop, and hand over and clear what was recorded, packed: `Tokens`; or the likeliest tokens, columns by emitted token.

        These are `request` (its place in `names`), `ids` and `logits` `[tokens, count]`, largest first, and `normaliser`, the
        logarithm of the sum of exp(logit) over the vocabulary.
        """
        if self.mode == "likeliest":
            columns = [torch.cat(parts) for parts in zip(*[part[1:] for part in self._likeliest], strict=True)]
            names = ("ids", "logits", "normaliser")
            packed = pack(
                {"names": np.array(list(self._numbers)), "request": np.concatenate([part[0] for part in self._likeliest])}
                | {name: column.numpy() for name, column in zip(names, columns, strict=True)}
            )
        else:
            packed = pack_tokens(Tokens.concatenate(self._tokens or [NO_TOKENS]))
        self.mode = "off"
        self._forget()
        return packed

    def _forget(self) -> None:
        self._numbers, self._emitted, self._outputs = {}, {}, {}
        self._tokens, self._likeliest = [], []
        self.unclear = 0


def _likeliest(
    step: Step, numbers: NDArray[np.int32], count: int
) -> tuple[NDArray[np.int32], torch.Tensor, torch.Tensor, torch.Tensor]:
    request, index = np.nonzero(np.arange(step.token_ids.shape[1]) < step.emitted[:, None])
    logits = step.logits[torch.from_numpy(step.first_row[request] + index).to(step.logits.device)].float()
    values, ids = logits.topk(count, dim=-1)
    return numbers[request], ids.int().cpu(), values.cpu(), logits.logsumexp(dim=-1).cpu()


class V1Watch:
    """Around `_sample` of V1's runner, through which every step goes, with drafts and without."""

    def __init__(self, runner: Any, recorder: Recorder) -> None:
        self._runner, self._recorder = runner, recorder
        self._sample = runner._sample
        self._draft_probs: torch.Tensor | None = None
        """`[drafts of the step, vocab]`, what stock handed to its verification."""
        runner._sample = self.sample
        if (verification := getattr(runner, "rejection_sampler", None)) is not None:
            self._verify = verification.forward
            verification.forward = self.verify

    def verify(self, metadata: Any, draft_probs: torch.Tensor | None, *arguments: Any, **named: Any) -> Any:
        """As the wrapped verification; the drafts' probabilities are remembered."""
        self._draft_probs = draft_probs
        return self._verify(metadata, draft_probs, *arguments, **named)

    def sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """As the wrapped method."""
        if self._recorder.mode == "off" or logits is None:  # None: not the last pipeline stage
            return self._sample(logits, spec_decode_metadata)
        raw = logits.clone()  # samplers change logits in place
        ids: list[str] = list(self._runner.input_batch.req_ids)
        drawn = _drawn_from(getattr(self._runner, "rejection_sampler", None), ids)
        output = self._sample(logits, spec_decode_metadata)
        self._recorder.add(self._step(ids, raw, spec_decode_metadata, output, drawn), self._prompts(ids))
        return output

    def _step(self, ids: list[str], raw: torch.Tensor, metadata: Any, output: Any, drawn: dict[int, torch.Tensor]) -> Step:
        token_ids = output.sampled_token_ids.cpu().numpy().astype(np.int64)
        emitted = ((token_ids >= 0) & (token_ids < raw.shape[1])).sum(axis=1)
        emitted[self._runner.discard_request_mask.np[: len(ids)]] = 0
        drafts = np.zeros(len(ids), dtype=np.int64)
        flat = np.zeros(0, dtype=np.int64)
        if metadata is not None:
            drafts = np.asarray(metadata.num_draft_tokens, dtype=np.int64)
            flat = metadata.draft_token_ids.cpu().numpy().astype(np.int64)
        first = np.cumsum(drafts) - drafts
        if self._draft_probs is not None:  # a proposer of the plugin keeps its own
            spans = zip(first.tolist(), drafts.tolist(), strict=True)
            drawn = {place: self._draft_probs[begin : begin + count] for place, (begin, count) in enumerate(spans)}
        draft_ids = _padded(flat, first, drafts)
        drafts = _valid(draft_ids, drafts, raw.shape[1])
        rows = np.arange(len(ids)) + first
        return Step(ids, raw, rows, draft_ids, drafts, token_ids, emitted, drawn)

    def _prompts(self, ids: list[str]) -> list[Sequence[int]]:
        requests = self._runner.requests
        return [requests[name].prompt_token_ids or () if self._recorder.wants_prompts else () for name in ids]


class V2Watch:
    """In place of the two samplers that V2's runner calls: the plain one, and the one that verifies."""

    def __init__(self, runner: Any, recorder: Recorder) -> None:
        self._runner, self._recorder = runner, recorder
        runner.sampler = _Wrapped(runner.sampler, self)
        if runner.rejection_sampler is not None:
            runner.rejection_sampler = _Wrapped(runner.rejection_sampler, self)

    def call(self, stock: Any, logits: torch.Tensor, batch: Any, *more: Any) -> Any:
        """As `stock(logits, batch, *more)`; `more` is for the one that verifies: draft logits, and which drafts are void."""
        if self._recorder.mode == "off":
            return stock(logits, batch, *more)
        raw = logits.clone()
        ids: list[str] = list(batch.req_ids)[: batch.num_reqs]
        rows = batch.cu_num_logits_np.astype(np.int64)
        first, drafts = rows[: len(ids)], np.diff(rows)[: len(ids)] - 1
        inputs = batch.input_ids[batch.logits_indices].cpu().numpy().astype(np.int64)  # row j + 1 was fed draft j
        draft_ids = _padded(inputs, first + 1, drafts)
        draft_logits, void = (*more, None, None)[:2]
        drafts = np.minimum(_valid(draft_ids, drafts, raw.shape[1]), self._meant(batch, void, first, drafts))
        drawn = _drawn_from(self._runner.rejection_sampler, ids)
        if draft_logits is not None and drafts.any():
            drawn = self._softmax(draft_logits, batch, drafts) | drawn
        output = stock(logits, batch, *more)
        token_ids = output.sampled_token_ids.cpu().numpy().astype(np.int64)
        emitted = output.num_sampled.cpu().numpy().astype(np.int64)[: len(ids)]
        self._recorder.add(Step(ids, raw, first, draft_ids, drafts, token_ids, emitted, drawn), self._prompts(batch))
        return output

    def _meant(
        self, batch: Any, void: torch.Tensor | None, first: NDArray[np.int64], drafts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`[requests]`: drafts before the first that only fills up the row, or that a grammar has ruled out."""
        lengths = getattr(self._runner.rejection_sampler, "draft_lengths", None)
        meant = drafts if lengths is None else np.minimum(drafts, lengths[batch.idx_mapping].cpu().numpy()[: len(drafts)])
        if void is not None:  # [rows], row j + 1 for draft j
            good = _padded(1 - void.cpu().numpy().astype(np.int64), first + 1, drafts) > 0
            meant = np.minimum(meant, good.cumprod(axis=1).sum(axis=1))
        return meant

    def _softmax(self, draft_logits: torch.Tensor, batch: Any, drafts: NDArray[np.int64]) -> dict[int, torch.Tensor]:
        """V2 keeps what drafts were drawn from as logits `[slots, k, vocab]`, before temperature."""
        slots = batch.idx_mapping[: len(drafts)]
        temperature = self._runner.sampler.sampling_states.temperature.gpu[slots]
        scaled = draft_logits[slots].float() / temperature[:, None, None]
        return {place: q for place, q in enumerate(scaled.softmax(dim=-1)) if drafts[place]}

    def _prompts(self, batch: Any) -> list[Sequence[int]]:
        if not self._recorder.wants_prompts:
            return [()] * batch.num_reqs
        states = self._runner.req_states
        slots = batch.idx_mapping_np[: batch.num_reqs].tolist()
        return [states.all_token_ids.gpu[slot, : int(states.prompt_len.np[slot])].tolist() for slot in slots]


class _Wrapped:
    """Stands where the runner has a sampler: calls go past the watch, everything else to the sampler itself."""

    def __init__(self, stock: Any, watch: V2Watch) -> None:
        self._stock, self._watch = stock, watch

    def __call__(self, logits: torch.Tensor, batch: Any, *more: Any) -> Any:
        return self._watch.call(self._stock, logits, batch, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def _padded(flat: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[requests, most]`: `counts` values from `first` on, then -1."""
    places = np.arange(int(counts.max(initial=0)))
    index = np.minimum(first[:, None] + places, max(len(flat) - 1, 0))
    return np.where(places < counts[:, None], flat[index], -1) if len(flat) else np.full(index.shape, -1)


def _valid(draft_ids: NDArray[np.int64], drafts: NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """`[requests]`: drafts before the first that is no token; asynchronous scheduling fills rows up with such."""
    good = (draft_ids >= 0) & (draft_ids < vocab)
    return np.minimum(drafts, good.cumprod(axis=1).sum(axis=1))


def _drawn_from(verification: Any, ids: Sequence[str]) -> dict[int, torch.Tensor]:
    """What the plugin's proposer drew each request's drafts from, `[drafts, vocab]`; only requests where it drew at all."""
    drafted = getattr(getattr(verification, "runtime", None), "drafted", None)
    if drafted is None:
        return {}
    found = {place: drafted.get(name) for place, name in enumerate(ids)}
    return {place: q for place, q in found.items() if q is not None}


class RecorderExtension:
    """Mixed into vLLM's worker; the names are long because they live among the worker's own."""

    model_runner: Any
    _specplugin_recorder: Recorder

    def specplugin_watch(self) -> Mapping[str, Any]:
        """Begin to watch, once per engine; returns which runner this is, and who verifies."""
        runner = self.model_runner
        version = 2 if ".gpu.model_runner" in ".".join(kind.__module__ for kind in type(runner).__mro__) else 1
        runtime = getattr(getattr(runner, "rejection_sampler", None), "runtime", None)
        facts = {"model_runner": f"V{version}", "verifier": "", "lossless": True}
        if runtime is not None:
            facts |= {"verifier": runtime.resolved.verifier_name, "lossless": bool(runtime.verifier.lossless)}
        self._specplugin_recorder = Recorder()
        (V2Watch if version == 2 else V1Watch)(runner, self._specplugin_recorder)
        return facts

    def specplugin_record(self, sampling: Mapping[str, Any], ties: Ties) -> None:
        """Record tokens drawn with `sampling` (fields of `Sampling`)."""
        self._specplugin_recorder.start(Sampling(**sampling), ties)

    def specplugin_record_likeliest(self, count: int) -> None:
        """Record the largest logits."""
        self._specplugin_recorder.start_likeliest(count)

    def specplugin_take(self) -> tuple[int, bytes]:
        """Stop recording: the number of places that cannot be tested, and the packed records."""
        return self._specplugin_recorder.unclear, self._specplugin_recorder.take()
