"""What the tests of decoding share: the same engine with and without drafts, and what drafts must have come to."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import steps
from tests.support.engine import EngineWorker, Logprob, Result
from tests.support.scripted.scripted_parts import ScriptedProposer
from tests.support.tiny import VOCAB_SIZE
from vllm_specplugin import Proposer, ProposerOptions, Request
from vllm_specplugin.counts import STATES
from vllm_specplugin.errors import RegistryError
from vllm_specplugin.guard import Guard
from vllm_specplugin.registry import PROPOSERS

# fp32 sums in another order: a verifying pass has k + 1 rows where plain decoding has one
LOGPROB_TOLERANCE = 1e-4

PATIENCE_MS = 60_000.0  # for drafting: on a busy machine the budget that users have would now and then drop a draft

MAX_MODEL_LEN = 256  # of the harness
SEED = 20  # of requests; any will do

GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": SEED, "ignore_eos": True}  # the seed is for random drafts
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": SEED, "ignore_eos": True}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt of so many tokens, without an obvious pattern."""
    return [(37 * (place + salt) ** 2 + 11 * place + 5 * salt) % 251 for place in range(length)]


PROMPTS = [prompt_of(length, salt) for salt, length in enumerate((1, 2, 7, 16, 3, 33, 5, 64))]
"""Eight of mixed lengths."""


# -- what to draft -----------------------------------------------------------------------------------------


def script(mode: str, prompt: Sequence[int] = (), tokens: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """What `scripted_parts` shall draft for a request, as its sampling parameters say it."""
    said = {"mode": mode, "prompt": len(prompt), "tokens": list(tokens), **more}
    return {"extra_args": {"specplugin": {"script": said}}}


def reads_scripts(proposer: str) -> bool:
    """Whether requests may carry a script for it; those that only the workers know are of `scripted_parts`, and do."""
    try:
        return "script" in PROPOSERS.resolve(proposer).capabilities.request_keys
    except RegistryError:
        return True


def absent_token(*outputs: Sequence[int]) -> int:
    """A token that none of the outputs holds: drafting it is always wrong."""
    return min(set(range(VOCAB_SIZE)).difference(*outputs))


# -- what came of it ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counters:
    """The engine's own metrics of one batch."""

    drafts: int
    """Passes that verified something."""
    draft_tokens: int
    accepted: int
    by_position: tuple[int, ...]
    generated: int
    preemptions: int
    cache_hits: int

    @classmethod
    def read(cls, metrics: dict[str, Any]) -> Counters:
        return cls(
            drafts=metrics.get("vllm:spec_decode_num_drafts", 0),
            draft_tokens=metrics.get("vllm:spec_decode_num_draft_tokens", 0),
            accepted=metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
            by_position=metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos", ()),
            generated=metrics["vllm:generation_tokens"],
            preemptions=metrics["vllm:num_preemptions"],
            cache_hits=metrics["vllm:prefix_cache_hits"],
        )

    def since(self, earlier: Counters) -> Counters:
        new = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in new.items():
            before = getattr(earlier, name)
            new[name] = tuple(np.subtract(value, before).tolist()) if name == "by_position" else value - before
        return Counters(**new)


@dataclass(frozen=True)
class PluginCounters:
    """The plugin's own metrics of one batch, all proposers together."""

    tokens: dict[str, tuple[int, ...]]
    """State -> at each position how many."""
    passes: int
    """Over drafts."""
    plain: int
    """Passes that verified none."""

    @classmethod
    def read(cls, metrics: dict[str, Any]) -> PluginCounters:
        tokens: dict[str, dict[int, int]] = {state: {} for state in STATES}
        passes = {True: 0, False: 0}
        for name, value in metrics.items():
            if found := re.fullmatch(r"vllm:specplugin_(\w+)_tokens{position=(\d+),proposer=.*}", name):
                of_state, position = tokens[found[1]], int(found[2])
                of_state[position] = of_state.get(position, 0) + value
            elif name.startswith("vllm:specplugin_passes{"):
                passes[name.endswith("=none}")] += value
        by_position = {state: tuple(of.get(place, 0) for place in range(max(of, default=-1) + 1)) for state, of in tokens.items()}
        return cls(by_position, passes[False], passes[True])

    def since(self, earlier: PluginCounters) -> PluginCounters:
        tokens = {
            state: tuple(np.subtract(now, earlier.tokens[state] + (0,) * (len(now) - len(earlier.tokens[state]))).tolist())
            for state, now in self.tokens.items()
        }
        return PluginCounters(tokens, self.passes - earlier.passes, self.plain - earlier.plain)

    def total(self, state: str) -> int:
        return sum(self.tokens[state])

    def check(self, results: Sequence[Result], counters: Counters) -> None:
        """They agree with each other, with vLLM's own, with the outputs of the requests, and with what each of these says."""
        total, of_vllm = self.total, counters
        assert total("drafted") >= max(total("scheduled"), total("trimmed") + total("verified"))
        assert total("verified") <= min(total("scheduled"), of_vllm.draft_tokens)
        assert (total("accepted"), self.passes <= of_vllm.drafts) == (of_vllm.accepted, True)
        assert self.tokens["accepted"] == of_vllm.by_position[: len(self.tokens["accepted"])]
        assert self.passes <= total("emitted") <= total("accepted") + self.passes
        completions = [completion for result in results for completion in result.completions]
        assert total("emitted") + self.plain == sum(len(completion.token_ids) for completion in completions)
        said = [completion.speculation for completion in completions]
        assert all(each is not None for each in said)
        sums: Counter[str] = Counter()
        for completion, each in zip(completions, filter(None, said), strict=True):
            assert each["emitted"] == len(completion.token_ids)
            sums.update({"all": each["passes"], "passes": sum(each["histogram"])})
            for part in each["by_source"].values():
                sums.update({state: part[state] for state in ("drafted", "verified", "accepted", "emitted")})
        assert (sums["all"], sums["passes"]) == (self.passes + self.plain, self.passes)
        for state in ("verified", "accepted", "emitted"):
            assert sums[state] == total(state), state
        assert sums["drafted"] <= total("drafted")  # more may be drafted for a request that a stop string has ended


@dataclass(frozen=True)
class Forecast:
    """What the metrics must say of requests whose outputs are known."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()
    unknown: int = 0
    """Accepted beyond the known output, perhaps: that many drafts lay there, after others that were all accepted."""

    def __add__(self, other: Forecast) -> Forecast:
        return Forecast(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            tuple(np.add(self.by_position or np.zeros(len(other.by_position), int), other.by_position).tolist()),
            self.unknown + other.unknown,
        )

    def check(self, counters: Counters) -> None:
        """The metrics are exactly these, but for acceptance that cannot be known."""
        assert (counters.drafts, counters.draft_tokens) == (self.drafts, self.draft_tokens)
        assert self.accepted <= counters.accepted <= self.accepted + self.unknown
        assert sum(counters.by_position) == counters.accepted
        if not self.unknown:
            assert counters.by_position == self.by_position


def forecast(
    prompt: Sequence[int],
    output: Sequence[int],
    params: dict[str, Any],
    k: int,
    *,
    emitted: int | None = None,
    proposer: Proposer | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    padded: bool = False,
) -> Forecast:
    """Run the proposer over a known output, as the engine must have done.

    Args:
        prompt: of the request.
        output: its tokens; may go on after those that the request emitted, which leaves less unknown.
        params: its sampling parameters, with the script in them.
        k: the most drafts per pass.
        emitted: how many of `output` the request emitted; all where None.
        proposer: the one to ask; the scripted one where None.
        max_model_len: of the engine.
        padded: asynchronous scheduling counts k drafts in every pass, whatever was drafted.
    """
    host = steps.host(vocab_size=VOCAB_SIZE, max_model_len=max_model_len, k=k)
    guard = Guard(proposer or ScriptedProposer(host, ProposerOptions()), "forecast", PATIENCE_MS)
    request = Request("0", seed=params.get("seed"), extra=params.get("extra_args", {}).get("specplugin", {}))
    total = Forecast(by_position=(0,) * k)
    known, step_size = 1, 1  # the first token comes from the prompt alone
    while known < (len(output) if emitted is None else emitted):
        tokens = [*prompt, *output[:known]]
        limit = max(0, min(k, max_model_len - 1 - len(tokens)))
        step = steps.step({"0": tokens}, {"0": step_size}, k=k, limits=[limit], requests={"0": request})
        drafts = guard.propose(step).rows()[0]
        truth = list(output[known : known + len(drafts)])
        right = [draft == token for draft, token in zip(drafts, truth, strict=False)]
        accepted = right.index(False) if False in right else len(right)
        scheduled = k if padded else len(drafts)
        total += Forecast(
            drafts=int(scheduled > 0),
            draft_tokens=scheduled,
            accepted=accepted,
            by_position=tuple(int(place < accepted) for place in range(k)),
            unknown=len(drafts) - len(truth) if accepted == len(truth) else 0,
        )
        step_size = accepted + 1
        known += step_size
    guard.forget(["0"])
    return total


# -- two engines -------------------------------------------------------------------------------------------


class SideBySide:
    """One engine decodes plainly, the other through the plugin; everything else about them is the same."""

    def __init__(self, plain: EngineWorker, drafting: EngineWorker, model: Path) -> None:
        self.plain, self.drafting, self.model = plain, drafting, model
        self.runner = plain.runner
        self.k = 0
        self._reads_scripts = True
        self.counted = PluginCounters({}, 0, 0)
        """The plugin's metrics of the last batch."""
        self._opened: dict[EngineWorker, str] = {}
        self._baselines: dict[bytes, list[Result]] = {}

    def open(
        self, k: int, *, force_async: bool = False, again: bool = False, plugin: dict[str, Any] | None = None, **engine: Any
    ) -> None:
        """Have both engines open with these arguments; an engine that is so already is left alone, but for `again`.

        `plugin` are further keys of the speculative configuration (the proposer is `scripted` unless it says so).
        """
        self.k = k
        spec = {"proposer": "scripted", "num_speculative_tokens": k, "draft_budget_ms": PATIENCE_MS, **(plugin or {})}
        self._reads_scripts = reads_scripts(spec["proposer"])
        if again:
            self._opened.clear()
        jobs = [(self.plain, None, engine), (self.drafting, spec, engine | {"force_async": force_async})]
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(self._open, *job) for job in jobs]:
                done.result()

    def _open(self, worker: EngineWorker, spec: dict[str, Any] | None, engine: dict[str, Any]) -> None:
        key = json.dumps([spec, engine], sort_keys=True)
        if worker.alive and self._opened.get(worker) == key:
            return
        self._opened.pop(worker, None)
        worker.open(engine.get("model", self.model), spec, **{name: value for name, value in engine.items() if name != "model"})
        self._opened[worker] = key
        if worker is self.plain:
            self._baselines.clear()

    def replaced(self) -> None:
        """Somebody has opened the drafting engine otherwise: the next `open` must not take it for what it was."""
        self._opened.pop(self.drafting, None)

    def baseline(self, prompts: Sequence[Sequence[int]], params: dict[str, Any] | Sequence[dict[str, Any]]) -> list[Result]:
        """Plain decoding; kept, so that asking again costs nothing."""
        question = pickle.dumps((prompts, params))
        if question not in self._baselines:
            self._baselines[question] = self.plain.generate(prompts, params)
        return self._baselines[question]

    def draft(
        self,
        prompts: Sequence[Sequence[int]],
        params: dict[str, Any] | Sequence[dict[str, Any]],
        timeout: float | None = None,
    ) -> tuple[list[Result], Counters]:
        """The same through the plugin, and the metrics of it."""
        before = self.drafting.metrics()
        results = self.drafting.generate(prompts, params, timeout=timeout)
        after = self.drafting.metrics()
        counters = Counters.read(after).since(Counters.read(before))
        self.counted = PluginCounters.read(after).since(PluginCounters.read(before))
        self.counted.check(results, counters)
        return results, counters

    def draft_as_planned(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[dict[str, Any]] | dict[str, Any],
        modes: Sequence[str],
        max_model_len: int = MAX_MODEL_LEN,
        padded: bool = False,
    ) -> tuple[list[Result], Counters, Forecast]:
        """A batch with scripted drafts, one mode per request, whose results must be those of plain decoding.

        A proposer that reads no script is taken to draft as those with the mode do.

        Also returned are the metrics, and what they have to be where no pass is lost to other requests.
        """
        known = self.baseline(prompts, params)
        wrong = absent_token(*(result.token_ids for result in known))
        each = [params] * len(prompts) if isinstance(params, dict) else params
        asked = [
            one | script(mode, prompt, result.token_ids, token=wrong)
            for one, mode, prompt, result in zip(each, modes, prompts, known, strict=True)
        ]
        results, counters = self.draft(prompts, asked if self._reads_scripts else each)
        assert_same(results, known)
        plan = Forecast()
        for prompt, result, said in zip(prompts, known, asked, strict=True):
            plan += forecast(prompt, result.token_ids, said, self.k, max_model_len=max_model_len, padded=padded)
        return results, counters, plan

    def inside(self, name: str, *args: Any) -> Any:
        """A function of `tests.engine.inside` in the process of the engine that drafts."""
        return self.drafting.call(f"tests.engine.inside:{name}", *args)


# -- equality ----------------------------------------------------------------------------------------------


def assert_same(actual: Sequence[Result], expected: Sequence[Result]) -> None:
    """Everything that a user sees is the same: tokens, text, reasons, log-probabilities."""
    assert len(actual) == len(expected)
    for result, wanted in zip(actual, expected, strict=True):
        assert result.prompt_token_ids == wanted.prompt_token_ids
        assert len(result.completions) == len(wanted.completions)
        for completion, wish in zip(result.completions, wanted.completions, strict=True):
            assert completion.token_ids == wish.token_ids
            assert (completion.finish_reason, completion.stop_reason) == (wish.finish_reason, wish.stop_reason)
            assert completion.text == wish.text
            assert_same_logprobs(completion.logprobs, wish.logprobs)
            assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
        assert_same_logprobs(result.prompt_logprobs, wanted.prompt_logprobs)


def assert_same_logprobs(
    actual: Sequence[dict[int, Logprob] | None] | None, expected: Sequence[dict[int, Logprob] | None] | None
) -> None:
    assert (actual is None) == (expected is None)
    for place, (here, there) in enumerate(zip(actual or (), expected or (), strict=True)):
        assert (here is None) == (there is None)
        if here is None or there is None:
            continue
        assert here.keys() == there.keys(), f"place {place}"
        for token, entry in here.items():
            assert entry.rank == there[token].rank, f"rank of {token} at place {place}"
            assert abs(entry.logprob - there[token].logprob) < LOGPROB_TOLERANCE, f"logprob of {token} at place {place}"


def check_that_padding_is_refused(engines: SideBySide, params: dict[str, Any]) -> None:
    """A request `new` of one token joins another one that drafts k tokens, all of which are right, and takes a step with it.

    vLLM fills its row up with k drafts that nobody made.
    """
    before = Counters.read(engines.drafting.metrics())
    engines.inside("add", "new", [9], params | script("empty"))
    engines.inside("step_once")
    after = Counters.read(engines.drafting.metrics()).since(before)
    k = engines.k
    assert (after.draft_tokens, after.accepted) == (2 * k, k), "vLLM no longer pads, or a draft of nobody was accepted"
