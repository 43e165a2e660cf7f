"""A proposer in one file: remembers which token followed each short run of tokens, and drafts along these memories.

Where `ngram` looks for repetition within one request, this looks across requests: an answer that goes like an earlier one
is drafted from it. That suits services whose answers resemble each other (forms, templates, a fixed JSON shape).

Everything comes from the public contract, `vllm_specplugin`; vLLM itself is never imported. The plugin checks what is
drafted and the target decides, so a bug in here can cost time but cannot change an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from vllm_specplugin import Capabilities, Drafts, Host, Proposer, ProposerOptions, Step, Verdict

PROMPT_TOKENS_PER_STEP = 4096
"""How much of the prompts that arrive in one step is learned: about 2 microseconds per token, so a step stays cheap."""


class CopycatOptions(ProposerOptions):
    """What a user may write under `options`; wrong keys and values are refused before the engine starts."""

    context: int = Field(3, ge=1, le=16, description="how many tokens must agree before a continuation is drafted")
    max_entries: int = Field(200_000, ge=1, description="runs to remember; the one learned longest ago goes first")


@dataclass
class Trace:
    """What is kept of one running request."""

    tail: list[int]
    """Its last `context` tokens."""
    reach: int
    """How many tokens to draft next: doubled when all were accepted, halved when none was."""


class CopycatProposer(Proposer[CopycatOptions]):
    """Drafts what followed the same `context` tokens the last time, in this request or any other."""

    Options = CopycatOptions
    capabilities = Capabilities(tokens="host")  # reads tokens as numpy arrays; needs no hidden states, gives no probabilities
    default_num_speculative_tokens = 6

    def __init__(self, host: Host, options: CopycatOptions) -> None:
        super().__init__(host, options)
        self._next: OrderedDict[tuple[int, ...], int] = OrderedDict()  # a run of `context` tokens -> what followed it
        self._traces: dict[str, Trace] = {}  # by request id, since the order of rows changes from step to step

    def propose(self, step: Step) -> Drafts:
        """Learn what the step committed in each row, then draft for it."""
        newcomers = sum(request_id not in self._traces for request_id in step.request_ids)
        window = max(PROMPT_TOKENS_PER_STEP // max(newcomers, 1), self.options.context)
        traces = [self._follow(step, row, window) for row in range(step.num_rows)]
        return Drafts([self._draft(trace, int(limit)) for trace, limit in zip(traces, step.limits, strict=True)])

    def observe(self, verdict: Verdict) -> None:
        """A refused draft wastes a row of the target's pass: reach less far where memory misleads, further where it helps."""
        assert verdict.tested is not None
        rows = zip(verdict.request_ids, verdict.tested.tolist(), verdict.accepted.tolist(), strict=True)
        for request_id, tested, accepted in rows:
            trace = self._traces.get(request_id)
            if trace is None or tested == 0:
                continue
            if accepted == tested:
                trace.reach = min(2 * trace.reach, self.host.num_speculative_tokens)
            elif accepted == 0:
                trace.reach = max(trace.reach // 2, 1)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the requests, not what was learned from them."""
        for request_id in request_ids:
            self._traces.pop(request_id, None)

    @classmethod
    def memory_bill(cls, host: Host, options: CopycatOptions) -> Mapping[str, int]:
        """For `vllm-specplugin doctor`; measured with tracemalloc."""
        return {"memory of copycat, when full": options.max_entries * (220 + 8 * options.context)}

    def _follow(self, step: Step, row: int, window: int) -> Trace:
        """Bring a request's trace up to date and learn its new tokens."""
        request_id, context = step.requests[row].request_id, self.options.context
        trace = self._traces.get(request_id)
        if trace is None:  # new, or forgotten since: only then is its history looked at
            trace = self._traces[request_id] = Trace(tail=[], reach=self.host.num_speculative_tokens)
            new = step.history.host(row)[-window:].tolist()
        else:
            new = step.committed(row).tolist()
        tokens = trace.tail + new
        for end in range(context, len(tokens)):
            run = tuple(tokens[end - context : end])
            self._next[run] = tokens[end]
            self._next.move_to_end(run)
        while len(self._next) > self.options.max_entries:
            self._next.popitem(last=False)
        trace.tail = tokens[-context:]
        return trace

    def _draft(self, trace: Trace, limit: int) -> list[int]:
        run, drafts = tuple(trace.tail), []
        while len(drafts) < min(limit, trace.reach):
            token = self._next.get(run)
            if token is None:
                break
            drafts.append(token)
            run = (*run[1:], token)
        return drafts
