"""Proposers and a verifier for tests: a folder on the Python path with a dist-info, found by entry points like any package.

`scripted` does what each request asks for in `extra_args["specplugin"]["script"]`, so that one engine serves a whole
matrix and requests of one batch can differ:

    {"mode": "oracle", "prompt": number of prompt tokens, "tokens": the continuation to draft}
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from vllm_specplugin import Capabilities, Drafts, Proposer, SampleVerifier, Step, Verdict, Verifier
from vllm_specplugin.proposers.draft_model import DraftModelProposer

SEEN: dict[str, Any] = {}
"""What happened, for tests to look at inside the engine's process."""

WRONG_PLACES = {1, 3, 6, 10, 15}
"""Where `half_oracle` errs (output positions modulo 21): ever farther apart, so that every length of acceptance occurs."""


def reset() -> None:
    SEEN.update(steps=0, drafted=0, forgotten=[], verdicts=[], rows=[], hidden=[], aux=[], judged=[])


reset()


class ScriptedProposer(Proposer):
    """Does what the requests say."""

    capabilities = Capabilities(tokens="host", request_keys=("script",))

    def propose(self, step: Step) -> Drafts:
        SEEN["steps"] += 1
        modes = [(request.extra.get("script") or {}).get("mode") for request in step.requests]
        if "none" in modes:
            return None  # type: ignore[return-value]
        if "exit" in modes:
            sys.exit(3)
        if "slow" in modes:
            time.sleep(2.0)
        rows = [self._row(step, row, mode) for row, mode in enumerate(modes)]
        if "missing_row" in modes:
            rows = rows[:-1]
        SEEN["drafted"] += sum(len(row) for row in rows)
        SEEN["rows"].append((step.request_ids, [len(row) for row in rows], step.lengths.tolist(), step.limits.tolist()))
        if "nan" in modes:
            nan = torch.full((len(rows), step.k, self.host.vocab_size), float("nan"))
            return Drafts(rows, probabilities=nan)
        if "tensor" in modes and rows:
            return Drafts(torch.full((len(rows), step.k), 5, dtype=torch.int32))
        return Drafts(rows)

    def _row(self, step: Step, row: int, mode: str | None) -> list[Any]:
        request, k = step.requests[row], step.k
        script = request.extra.get("script") or {}
        if mode == "raise":
            raise RuntimeError(f"boom for {request.request_id}")
        if mode == "over_long":  # whatever the limit says
            return [5] * (k + 3)
        if mode == "out_of_vocabulary":
            return [5, self.host.vocab_size + 7, 5][: k or 1]
        if mode == "huge":
            return [2**40] * k
        if mode == "negative":
            return [-1] * k
        if mode == "negative_later":
            return [5, -5, 7][:k]
        if mode == "float":
            return [5.0] * k
        limit = int(step.limits[row])
        if mode in ("constant", "nan", "slow", "tensor", "missing_row"):
            return [int(script.get("token", 5))] * limit
        if mode == "random":
            generator = step.noise.generator(row)
            return generator.integers(0, self.host.vocab_size, size=limit).tolist()
        if mode in ("oracle", "half_oracle"):
            done = int(step.lengths[row]) - int(script["prompt"])
            tokens = list(script["tokens"])[done : done + limit]
            if mode == "half_oracle":
                for place in range(len(tokens)):
                    if (done + place) % 21 in WRONG_PLACES:
                        tokens[place] = (tokens[place] + 1) % self.host.vocab_size
            return tokens
        return []

    def observe(self, verdict: Verdict) -> None:
        assert verdict.tested is not None
        SEEN["verdicts"].append((list(verdict.request_ids), verdict.tested.tolist(), verdict.accepted.tolist()))

    def forget(self, request_ids: Sequence[str]) -> None:
        SEEN["forgotten"].extend(request_ids)


class HiddenStateProbe(ScriptedProposer):
    """Scripted, and keeps what the target's own head makes of the hidden states beside the token that was committed."""

    capabilities = Capabilities(tokens="host", hidden_states="last", request_keys=("script",))

    def load(self, target: torch.nn.Module) -> None:
        self.target = target

    def propose(self, step: Step) -> Drafts:
        assert step.hidden_states is not None
        predicted = self.target.compute_logits(step.hidden_states).argmax(dim=-1).tolist()
        for row, token in enumerate(predicted):
            committed = step.committed(row)
            if len(committed):
                SEEN["hidden"].append((len(committed), int(committed[-1]), int(token)))
        return super().propose(step)


class AuxiliaryStateProbe(HiddenStateProbe):
    """The same with auxiliary states, which are kept by request and by number of known tokens."""

    capabilities = Capabilities(tokens="host", hidden_states="aux", request_keys=("script",))

    def propose(self, step: Step) -> Drafts:
        assert step.aux_hidden_states is not None
        for row, request_id in enumerate(step.request_ids):
            if len(step.committed(row)):
                SEEN["aux"].append((request_id, int(step.lengths[row]), step.aux_hidden_states[row].tolist()))
        return super().propose(step)


class FailingNative(DraftModelProposer):
    """Fails in the steps that `SEEN["fail"]` names; in the others the host's drafts are its own.

    It sees to it that what a step says of its requests' tokens holds together from step to step, or fails, too.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._known: dict[str, list[int]] = {}

    def propose(self, step: Step) -> Drafts:
        SEEN["steps"] += 1
        for row, request_id in enumerate(step.request_ids):
            tokens, committed = step.history.host(row).tolist(), step.committed(row).tolist()
            before = self._known.get(request_id, tokens[: len(tokens) - len(committed)])
            assert tokens == before + committed == step.history.device(row).tolist()
            assert len(tokens) == step.lengths[row]
            self._known[request_id] = tokens
        if SEEN["steps"] in SEEN.get("fail", ()):
            raise RuntimeError("told to fail")
        return super().propose(step)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._known.pop(request_id, None)


class SampledProposer(ScriptedProposer):
    """Draws its drafts by chance, from laws that each request's script names, and returns these laws.

    {"mode": "sampled", "sharpness": s}: a law depends on the token before it alone (see `law_after`). With "trust": t, "tokens"
    and "prompt" as for `oracle` it puts so much weight on what the oracle would say. A "flaw" spoils what is returned.
    Requests in other modes draft as the script says, with one-hot rows where another request of the step samples.
    """

    capabilities = Capabilities(tokens="host", probabilities=True, request_keys=("script",))

    def propose(self, step: Step) -> Drafts:
        scripts = [request.extra.get("script") or {} for request in step.requests]
        flaws = {script.get("flaw") for script in scripts}
        on_another_rank = "other_rank" in flaws and self.host.tensor_parallel_rank > 0
        if on_another_rank or not any(script.get("mode") == "sampled" for script in scripts):
            return super().propose(step)
        SEEN["steps"] += 1
        dtype = next((getattr(torch, flaw) for flaw in ("bfloat16", "float16") if flaw in flaws), torch.float32)
        probabilities = torch.zeros(len(scripts), step.k, self.host.vocab_size, dtype=dtype)
        rows: list[list[int]] = []
        for row, script in enumerate(scripts):
            if script.get("mode") == "sampled":
                rows.append(self._drawn(step, row, script, probabilities[row]))
                spoil(probabilities[row], rows[-1], script.get("flaw"))
            else:
                rows.append(self._row(step, row, script.get("mode")))
                for draft, token in enumerate(rows[-1]):
                    probabilities[row, draft, token] = 1.0
        SEEN["drafted"] += sum(len(row) for row in rows)
        return Drafts(rows, probabilities=probabilities[:, :, 1:] if "shape" in flaws else probabilities)

    def _drawn(self, step: Step, row: int, script: dict[str, Any], laws: torch.Tensor) -> list[int]:
        """Drafts drawn one after another, and in `laws` `[k, vocab]` what each was drawn from."""
        vocab, trust = self.host.vocab_size, float(script.get("trust", 0.0))
        hints = self._row(step, row, "oracle") if trust else []
        last = int(step.history.host(row)[-1])
        drafts: list[int] = []
        for draft in range(int(step.limits[row])):
            law = law_after(last, vocab, float(script.get("sharpness", 1.0)))
            if draft < len(hints):
                law = law * (1 - trust)
                law[hints[draft]] += trust
            laws[draft] = law
            # A double-precision draw from exactly the law that is returned, whatever its type.
            cumulative = laws[draft].double().cumsum(0)
            point = cumulative[-1] * step.noise.generator(row, draft).random()
            last = int(torch.searchsorted(cumulative, point, right=True))
            drafts.append(last)
        return drafts


def spoil(laws: torch.Tensor, drafts: list[int], flaw: str | None) -> None:
    """Change what one request's drafts are said to be drawn from: `laws` `[k, vocab]`, in place."""
    if flaw == "nan":
        laws[:, 0] = float("nan")
    if flaw == "impossible":
        laws[torch.arange(len(drafts)), drafts] = 0.0
        laws /= laws.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    if flaw == "half":
        laws *= 0.5
    if flaw == "scaled":  # so little that it may be a narrow type's rounding
        laws *= 0.995


@functools.cache
def law_after(token: int, vocab: int, sharpness: float) -> torch.Tensor:
    """`[vocab]` float32: what `sampled` draws from after a token."""
    return (sharpness * torch.randn(vocab, generator=torch.Generator().manual_seed(token))).softmax(-1)


class Recording(Verifier):
    """Keeps what it is asked, row by row, and stays on the drafts' path: what a pass emits is its drafts and nothing else.

    With an oracle's drafts the output is then the oracle's, while every row that led there was judged.
    """

    lossless = False  # so that requests with a seed are judged, too
    needs_probabilities = False

    def verify(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_ids: torch.Tensor,
        lengths: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> Verdict:
        for row, length in enumerate(lengths.tolist()):
            SEEN["judged"].append(
                {
                    "target_probs": target_probs[row, : length + 1].cpu().numpy().copy(),
                    "draft_probs": None if draft_probs is None else draft_probs[row, :length].cpu().numpy().copy(),
                    "draft_ids": draft_ids[row, :length].tolist(),
                    "uniforms": uniforms[row, : length + 1].cpu().numpy().copy(),
                }
            )
        # The last draft is emitted in the place of itself, since nothing is known of what an oracle would say after it.
        accepted = (lengths - 1).clamp(min=0)
        row_of = torch.arange(len(lengths), device=lengths.device)
        last = torch.where(lengths > 0, draft_ids[row_of, accepted].long(), target_probs[:, 0].argmax(dim=-1))
        position = torch.arange(draft_ids.shape[1] + 1, device=lengths.device)
        token_ids = torch.cat([draft_ids.long(), last[:, None]], dim=1)
        token_ids = torch.where(position == accepted[:, None], last[:, None], token_ids)
        return Verdict(accepted, token_ids.masked_fill(position > accepted[:, None], -1), lengths)


class WithOrWithout(Verifier):
    """Somebody's own: lossless, and content with drafts that come without probabilities. It accepts none of them."""

    lossless = True
    needs_probabilities = False

    def verify(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_ids: torch.Tensor,
        lengths: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> Verdict:
        ends = target_probs[:, 0].double().cumsum(dim=1)  # [rows, vocab]
        token = torch.searchsorted(ends, uniforms[:, 0, :1] * ends[:, -1:], right=True)
        padding = token.new_full(draft_ids.shape, -1)
        return Verdict(torch.zeros_like(lengths), torch.cat([token, padding], dim=1), lengths)


class RefuseAll(SampleVerifier):
    """Accepts nothing: every pass emits one token, drawn from the target."""

    lossless = True
    needs_probabilities = False

    def walk(self, target_ids: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
        token_ids = target_ids.clone()
        token_ids[:, 1:] = -1
        return Verdict(accepted=torch.zeros_like(lengths), token_ids=token_ids, tested=lengths)


class AcceptAll(SampleVerifier):
    """A negative control, wrong on purpose: whatever is drafted is emitted."""

    lossless = False
    needs_probabilities = False

    def walk(self, target_ids: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
        position = torch.arange(target_ids.shape[1], device=target_ids.device)
        padded = torch.cat([draft_ids, draft_ids[:, :1]], dim=1).to(target_ids.dtype)
        token_ids = torch.where(position < lengths[:, None], padded, target_ids)
        return Verdict(lengths, token_ids.masked_fill(position > lengths[:, None], -1), lengths)


class NextRowAfterRefusal(SampleVerifier):
    """A negative control, wrong on purpose: what follows a refusal comes from the row behind the refused draft."""

    lossless = False
    needs_probabilities = False

    def walk(self, target_ids: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
        position = torch.arange(target_ids.shape[1], device=target_ids.device)
        agrees = (target_ids[:, :-1] == draft_ids) & (position[:-1] < lengths[:, None])
        accepted = agrees.long().cumprod(dim=1).sum(dim=1)
        wrong = target_ids.gather(1, torch.minimum(accepted + 1, lengths)[:, None])
        token_ids = torch.where(position == accepted[:, None], wrong, target_ids)
        return Verdict(accepted, token_ids.masked_fill(position > accepted[:, None], -1), lengths)
