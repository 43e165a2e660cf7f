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

from vllm_specplugin import Capabilities, Drafts, Proposer, SampleVerifier, Step, Verdict

SEEN: dict[str, Any] = {"steps": 0, "drafted": 0, "forgotten": [], "verdicts": [], "rows": [], "hidden": [], "aux": []}
"""What happened, for tests to look at inside the engine's process."""

WRONG_PLACES = {1, 3, 6, 10, 15}
"""Where `half_oracle` errs (output positions modulo 21): ever farther apart, so that every length of acceptance occurs."""


def reset() -> None:
    SEEN.update(steps=0, drafted=0, forgotten=[], verdicts=[], rows=[], hidden=[], aux=[])


class ScriptedProposer(Proposer):
    """Does what the requests say."""

    capabilities = Capabilities(tokens="host")

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

    capabilities = Capabilities(tokens="host", hidden_states="last")

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

    capabilities = Capabilities(tokens="host", hidden_states="aux")

    def propose(self, step: Step) -> Drafts:
        assert step.aux_hidden_states is not None
        for row, request_id in enumerate(step.request_ids):
            if len(step.committed(row)):
                SEEN["aux"].append((request_id, int(step.lengths[row]), step.aux_hidden_states[row].tolist()))
        return super().propose(step)


class SampledProposer(ScriptedProposer):
    """Draws its drafts by chance, from laws that each request's script names, and returns these laws.

    {"mode": "sampled", "sharpness": s}: a law depends on the token before it alone (see `law_after`). Requests in other modes
    draft as the script says, with one-hot rows where another request of the step samples.
    """

    capabilities = Capabilities(tokens="host", probabilities=True)

    def propose(self, step: Step) -> Drafts:
        modes = [(request.extra.get("script") or {}).get("mode") for request in step.requests]
        if "sampled" not in modes:
            return super().propose(step)
        SEEN["steps"] += 1
        vocab, k = self.host.vocab_size, step.k
        probabilities = torch.zeros(len(modes), k, vocab)
        rows: list[list[int]] = []
        for row, mode in enumerate(modes):
            drafts = self._row(step, row, mode) if mode != "sampled" else []
            last = int(step.history.host(row)[-1])
            for draft in range(int(step.limits[row]) if mode == "sampled" else len(drafts)):
                if mode == "sampled":
                    law = law_after(last, vocab, float(step.requests[row].extra["script"].get("sharpness", 1.0)))
                    # A double-precision draw from exactly the float32 law that is returned.
                    cumulative = law.double().cumsum(0)
                    last = int(
                        torch.searchsorted(cumulative, cumulative[-1] * step.noise.generator(row, draft).random(), right=True)
                    )
                    drafts.append(last)
                    probabilities[row, draft] = law
                else:
                    probabilities[row, draft, drafts[draft]] = 1.0
            rows.append(drafts)
        SEEN["drafted"] += sum(len(row) for row in rows)
        return Drafts(rows, probabilities=probabilities)


@functools.cache
def law_after(token: int, vocab: int, sharpness: float) -> torch.Tensor:
    """`[vocab]` float32: what `sampled` draws from after a token."""
    return (sharpness * torch.randn(vocab, generator=torch.Generator().manual_seed(token))).softmax(-1)


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
