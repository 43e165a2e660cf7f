"""The guard: what stands between any proposer and the engine.

Whatever a proposer does (raises, hangs, drafts too much, invents ids, answers late), the engine gets drafts that it can
verify, in time, and requests get right answers. Each kind of fault is counted, and logged once.

* **Shape.** A row is cut at its limit (k and max_model_len) and at its first id outside the vocabulary.
* **Exceptions.** The step is tried again row by row, while its budget lasts, so that the request at fault is found: it
  decodes plainly from then on, its neighbours keep their drafts. After `MAX_FAILED_STEPS` failed steps in a row in which
  none was found the proposer is switched off.
* **Time.** A proposer that lives on the host alone runs in a thread, and a step waits for it no longer than its budget;
  a late answer is for a step that has passed, so it is dropped. One that works on the target's device cannot be left
  behind (its work is in the engine's stream): it is measured, and skips as many steps as bring its mean back to the budget.
  Where tensor-parallel ranks work together on drafts it skips none: their clocks differ, and one would wait for the other.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet, finalize

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_specplugin.errors import DraftError
from vllm_specplugin.proposers.base import Proposer
from vllm_specplugin.types import Drafts, History, Step, Verdict

logger = logging.getLogger("vllm.specplugin")  # a child of vLLM's logger, so that it is formatted and shown like vLLM's own

T = TypeVar("T")

RAISED = (Exception, SystemExit)
"""What a proposer may raise without harm; `sys.exit` in one must not end the engine."""

MAX_FAILED_STEPS = 8
"""Steps in a row that failed, be it that every row did or that none did alone, after which a proposer is switched off."""

LEAST_ROWS = 2
"""So many rows of a failed step are tried alone in any case: one that fails is at fault only where another one does not."""

HUNG_SECONDS = 60
"""After so long on one step a proposer is taken not to come back."""

MAX_PROBABILITY_ERROR = 0.02
"""How far a distribution's sum may be from 1 and still be taken for one: what summing 150,000 bfloat16 values can lose."""

ROUNDING = 1e-5
"""How far it may be without being brought to 1: what float32 loses."""


class Fault(str, Enum):
    """What a proposer can do wrong."""

    __str__ = str.__str__

    EXCEPTION = "exception"
    LATE = "late"
    TOO_LONG = "too_long"
    BAD_TOKEN = "bad_token"
    BAD_SHAPE = "bad_shape"
    BAD_PROBABILITIES = "bad_probabilities"


class Fallback(str, Enum):
    """Why a row that could have had drafts decodes without."""

    __str__ = str.__str__

    LATE = "late"
    """The proposer's answer did not come in time."""
    SKIPPED = "skipped"
    """The proposer is not asked: it is still at an earlier step, or makes good for time that it took too much."""
    FAILED = "failed"
    """The proposer raised, or returned something that is no set of drafts."""
    EXCLUDED = "excluded"
    """The proposer failed at this very request before."""
    SWITCHED_OFF = "switched_off"
    """The proposer failed in too many steps in a row."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedDrafts:
    """Drafts that the engine can verify as they are."""

    token_ids: NDArray[np.int64]
    """`[rows, k]`, every id within the vocabulary; 0 from each row's length on."""
    lengths: NDArray[np.int64]
    """`[rows]`, at most the step's limits."""
    probabilities: torch.Tensor | None = None
    """`[rows, k, vocab]`, what the ids were drawn from; None where they were chosen deterministically."""
    unreliable: frozenset[int] = frozenset()
    """Rows whose probabilities say nothing: their drafts were drawn by chance, but it is not known from what."""
    expected: NDArray[np.float32] | None = None
    """`[rows, k]`, how probably each draft is accepted once those before it are, as the proposer sees it; within [0, 1]."""
    sources: Sequence[str] | None = None
    """`[rows]`, which part of the proposer drafted each row; '' without drafts. None for a proposer of one part."""

    def rows(self) -> list[list[int]]:
        """The ragged rows."""
        if not self.lengths.any():
            return [[] for _ in self.lengths]
        return [ids[:length] for ids, length in zip(self.token_ids.tolist(), self.lengths.tolist(), strict=True)]


class StepIsOver(BaseException):
    """Raised in a proposer that asks for tokens of a step which nobody waits for any more; no failure of its own."""


class PassingHistory:
    """A step's history for a proposer's thread: copies, and none once the engine has gone on and changes the tables under it."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.over = False

    def host(self, row: int) -> NDArray[np.int32]:
        tokens = np.array(self._history.host(row), dtype=np.int32)
        if self.over:  # before or while they were copied
            raise StepIsOver
        return tokens

    def device(self, row: int) -> torch.Tensor:
        tokens = self._history.device(row)
        if self.over:
            raise StepIsOver
        return tokens


class Guard:
    """Runs one proposer; has its verbs, and never raises."""

    def __init__(self, proposer: Proposer, name: str, budget_ms: float) -> None:
        self.proposer = proposer
        self.name = name
        self.budget_seconds = budget_ms / 1000
        self.faults: Counter[Fault] = Counter()
        """How often each fault happened."""
        self.fallbacks: Counter[Fallback] = Counter()
        """How many rows decoded without drafts for each reason."""
        self.switched_off = False
        self.wants_verdicts = type(proposer).observe is not Proposer.observe
        """The proposer learns from verdicts; where it does not, nobody needs to make them."""
        self._plain: set[str] = set()
        """Requests that the proposer failed at."""
        self._to_forget: set[str] = set()
        self._ended: set[str] = set()
        """Those to forget that ended, or are preempted, which a late proposer must not be said to have failed at."""
        self._lock = threading.Lock()
        """Held while one of the three is read and changed, which the proposer's thread does, too."""
        self._hung = False
        """It was switched off in the middle of its work."""
        self._failed_steps = 0
        self._next_row = 0
        """Where the next search for a row at fault begins: where the last one ran out of time."""
        self._steps_to_skip = 0
        self._rows_are_independent = not proposer.capabilities.own_kv_cache
        self.on_host_only = proposer.on_host_only
        self._spans_ranks = proposer.host.tensor_parallel_size > 1 and not self.on_host_only
        self._worker = Worker(f"specplugin-{name}") if self.on_host_only else None

    def propose(self, step: Step) -> CheckedDrafts:
        """The proposer's drafts for a step, checked; rows without drafts where it failed."""
        if self.switched_off or step.num_rows == 0:
            return self._without(Fallback.SWITCHED_OFF, step)
        if not self._plain:
            return self._ask(step)
        kept = [row for row, request in enumerate(step.requests) if request.request_id not in self._plain]
        if len(kept) == step.num_rows:
            return self._ask(step)
        result = _empty(step)
        self.fallbacks[Fallback.EXCLUDED] += step.num_rows - len(kept)
        if kept:
            drafts = self._ask(step.select(kept))
            result.token_ids[kept] = drafts.token_ids
            result.lengths[kept] = drafts.lengths
            result = replace(result, **_spread(drafts, kept, step))
            if drafts.probabilities is not None:
                place = torch.tensor(kept, device=drafts.probabilities.device)
                every = drafts.probabilities.new_zeros(step.num_rows, *drafts.probabilities.shape[1:])
                result = replace(
                    result,
                    probabilities=every.index_copy_(0, place, drafts.probabilities),
                    unreliable=frozenset(kept[row] for row in drafts.unreliable),
                )
        return result

    def skip(self, request_ids: Sequence[str]) -> None:
        """The proposer does not see a step, so it must start afresh with the requests in it, unless it catches up."""
        if self._hung or self.proposer.catches_up:
            return
        with self._lock:
            self._to_forget.update(request_ids)

    def observe(self, verdict: Verdict) -> None:
        """Hand the verdict on, unless the proposer has not kept up. It may take as long as a step's drafts."""
        if self.switched_off or not self.wants_verdicts:
            return

        def hand_on() -> None:
            self._caught("observe", lambda: self.proposer.observe(verdict))

        if self._worker is None:
            hand_on()
        elif not self._worker.busy:
            self._worker.run(hand_on, self.budget_seconds)
            if self._worker.busy:
                self._fault(Fault.LATE, f"taking over a verdict takes longer than {self._budget}; steps go on without it")

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the state of requests that ended; at once, or as soon as the proposer is free."""
        if self._hung:  # for ever, perhaps, and nobody asks it again
            return
        with self._lock:
            self._plain.difference_update(request_ids)
            self._ended.update(request_ids)
            self._to_forget.update(request_ids)
        if self._worker is None:
            self._forget_now()
        elif not self._worker.busy:
            self._worker.run(self._forget_now, self.budget_seconds)

    @property
    def _budget(self) -> str:
        return f"a budget of {self.budget_seconds * 1000:g} ms per step"

    # -- asking ------------------------------------------------------------

    def _ask(self, step: Step) -> CheckedDrafts:
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
            return self._missed(Fallback.SKIPPED, step)
        if self._worker is not None and self._worker.busy:
            if self._worker.busy_seconds < HUNG_SECONDS:
                return self._missed(Fallback.SKIPPED, step)
            self._hung = self.switched_off = True
            logger.error(
                "The proposer %r has not come back for %d seconds and is switched off; decoding goes on without drafts.",
                self.name,
                HUNG_SECONDS,
            )
            return self._without(Fallback.SWITCHED_OFF, step)
        started = time.perf_counter()
        if self._worker is None:
            drafts = self._attempt(step)
        else:
            history = PassingHistory(step.history)
            job = partial(self._attempt_while_it_lasts, replace(step, history=history))
            drafts = self._worker.run(job, self.budget_seconds) or _empty(step)
            history.over = self._worker.busy
        seconds = time.perf_counter() - started
        if seconds <= self.budget_seconds:
            return drafts
        then = "they wait for it, as the ranks work together" if self._spans_ranks else "steps go on without it"
        self._fault(Fault.LATE, f"drafting takes {seconds * 1000:.0f} ms or more, of {self._budget}; {then}")
        if self._spans_ranks:
            return drafts
        if self._worker is None:
            self._steps_to_skip = min(int(seconds / self.budget_seconds), 10_000)
            return drafts
        return self._missed(Fallback.LATE, step)

    def _missed(self, reason: Fallback, step: Step) -> CheckedDrafts:
        self.skip(step.request_ids)
        return self._without(reason, step)

    def _without(self, reason: Fallback, step: Step) -> CheckedDrafts:
        self._fell_back(reason, step)
        return _empty(step)

    def _fell_back(self, reason: Fallback, step: Step) -> None:
        self.fallbacks[reason] += int(np.count_nonzero(step.limits))  # the others have no use for drafts

    def _attempt_while_it_lasts(self, step: Step) -> CheckedDrafts:
        try:
            return self._attempt(step)
        except StepIsOver:
            self.skip(step.request_ids)  # a part of another proposer is not told so by its own guard, which did not wait in vain
            return _empty(step)

    def _attempt(self, step: Step) -> CheckedDrafts:
        until = time.perf_counter() + self.budget_seconds
        self._forget_now()
        try:
            drafts = self._check(self.proposer.propose(step), step)
        except RAISED as error:
            return self._after_exception(step, error, until)
        self._failed_steps = 0
        return drafts

    def _after_exception(self, step: Step, error: BaseException, until: float) -> CheckedDrafts:
        kind = Fault.BAD_SHAPE if isinstance(error, DraftError) else Fault.EXCEPTION
        self._fault(kind, f"propose: {_text(error)}", error)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self.switched_off = True
            logger.error(
                "The proposer %r failed in %d steps in a row and is switched off; decoding goes on without drafts.",
                self.name,
                self._failed_steps,
            )
            return self._without(Fallback.FAILED, step)
        return self._row_by_row(step, until) if self._rows_are_independent else self._without(Fallback.FAILED, step)

    def _row_by_row(self, step: Step, until: float) -> CheckedDrafts:
        """Find the rows at fault: they decode plainly from now on, the others keep their drafts.

        It ends before `until` (of `time.perf_counter`), after which nobody may wait for it; rows that it does not reach have no
        drafts. Ranks that draft together try every row, since their clocks differ.
        """
        result = _empty(step)
        drawn_by_chance = set()
        sources = [""] * step.num_rows
        # Not `_forget_now`: a request that ended while the proposer was late is still to be forgotten after this.
        self._caught("forget", lambda: self.proposer.forget(step.request_ids))
        failed = []
        first, self._next_row = self._next_row % step.num_rows, 0
        order = [*range(first, step.num_rows), *range(first)]
        tried, longest = 0, 0.0
        while tried < step.num_rows:
            begun = time.perf_counter()
            # A row takes as long as the longest so far, and the answer some time to be taken over.
            if tried >= LEAST_ROWS and begun + 2 * longest > until and not self._spans_ranks:
                self._next_row = order[tried]
                if self._worker is None or begun <= until:  # else the whole step is late, and counted as that
                    self._fell_back(Fallback.FAILED, step.select(sorted(order[tried:])))
                break
            row = order[tried]
            tried += 1
            part = step.select([row])
            try:
                checked = self._check(self.proposer.propose(part), part)
            except RAISED:
                failed.append(step.requests[row].request_id)
                self._fell_back(Fallback.FAILED, part)
                continue
            finally:
                longest = max(longest, time.perf_counter() - begun)
            result.token_ids[row] = checked.token_ids[0]
            result.lengths[row] = checked.lengths[0]
            if checked.sources is not None:
                sources[row] = checked.sources[0]
            if checked.probabilities is not None:
                drawn_by_chance.add(row)
        found = 0 < len(failed) < tried  # where none fails alone, the proposer is at fault, with the batch's size perhaps
        if found:
            self._failed_steps = 0
        with self._lock:
            if found or step.num_rows == 1:
                self._plain.update(set(failed) - self._ended)
            self._to_forget.update(failed)
        # Their probabilities are not put together for a step that went wrong: without them a row is verified by samples.
        return replace(result, unreliable=frozenset(drawn_by_chance), sources=sources if any(sources) else None)

    def _forget_now(self) -> None:
        with self._lock:
            request_ids = sorted(self._to_forget)
            self._to_forget.clear()
            self._ended.clear()
        if request_ids:
            self._caught("forget", lambda: self.proposer.forget(request_ids))

    # -- checking ----------------------------------------------------------

    def _check(self, drafts: Any, step: Step) -> CheckedDrafts:
        if not isinstance(drafts, Drafts):
            raise DraftError(f"propose returned {type(drafts).__name__}, not Drafts")
        rows, k = step.num_rows, step.k
        token_ids, lengths = _rectangular(drafts, rows)
        probabilities = self._probabilities(drafts, rows, k)
        width = token_ids.shape[1]
        expected, sources = self._remarks(drafts, rows, k)
        if not lengths.any():  # as in most steps of text that repeats nothing
            return replace(_empty(step), expected=expected, sources=sources)
        position = np.arange(width)
        if (lengths > k).any():
            self._fault(Fault.TOO_LONG, f"a row of {int(lengths.max())} drafts where k is {k}; it is cut")
        lengths = np.minimum(lengths, np.minimum(step.limits, width))
        bad = ((token_ids < 0) | (token_ids >= self.proposer.host.vocab_size)) & (position < lengths[:, None])  # [rows, width]
        if bad.any():
            row, column = np.argwhere(bad)[0]
            self._fault(
                Fault.BAD_TOKEN,
                f"token id {int(token_ids[row, column])} is outside [0, {self.proposer.host.vocab_size}); the row is cut there",
            )
            lengths = _cut_at_first(bad, lengths)
        checked = np.zeros((rows, k), dtype=np.int64)
        used = min(width, k)
        checked[:, :used] = np.where(position[:used] < lengths[:, None], token_ids[:, :used], 0)
        if probabilities is None or k == 0:
            return CheckedDrafts(checked, lengths, expected=expected, sources=sources)
        probabilities, unreliable = self._check_probabilities(probabilities, checked, lengths)
        unreliable |= bad.any(axis=1)  # cut by looking at what was drawn, so what is left was drawn from something else
        unreliable_rows = frozenset(np.flatnonzero(unreliable).tolist())
        return CheckedDrafts(checked, lengths, probabilities, unreliable_rows, expected, sources)

    def _remarks(self, drafts: Drafts, rows: int, k: int) -> tuple[NDArray[np.float32] | None, Sequence[str] | None]:
        """What the drafts say about themselves, `[rows, k]` and `[rows]`; nothing that an answer depends on."""
        expected, sources = None, None
        if drafts.expected is not None:
            given = np.asarray(drafts.expected, dtype=np.float32)
            if given.ndim != 2 or given.shape[0] != rows:
                raise DraftError(f"expected has the shape {given.shape}, not [rows, k] = {(rows, k)}")
            expected = np.zeros((rows, k), dtype=np.float32)
            width = min(k, given.shape[1])
            expected[:, :width] = np.clip(np.nan_to_num(given[:, :width]), 0.0, 1.0)
        if drafts.sources is not None:
            if len(drafts.sources) != rows:
                raise DraftError(f"{len(drafts.sources)} sources for {rows} rows")
            sources = list(map(str, drafts.sources))
        return expected, sources

    def _probabilities(self, drafts: Drafts, rows: int, k: int) -> torch.Tensor | None:
        if drafts.probabilities is None and drafts.logits is None:
            return None
        probabilities = drafts.probabilities if drafts.probabilities is not None else drafts.logits.float().softmax(dim=-1)  # type: ignore[union-attr]
        expected = (rows, k, self.proposer.host.vocab_size)
        if tuple(probabilities.shape) != expected:
            raise DraftError(f"probabilities have the shape {tuple(probabilities.shape)}, not [rows, k, vocab] = {expected}")
        return probabilities

    def _check_probabilities(
        self, probabilities: torch.Tensor, token_ids: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Probabilities `[rows, k, vocab]` as a verifier may rely on them, and the rows `[rows]` where it may not.

        What is drawn in proportion to weights that do not quite sum to 1 (a narrow type, say) was drawn from the weights
        over their sum, so that is what they become.
        """
        probabilities = probabilities.float()
        total = probabilities.sum(dim=-1)  # [rows, k]
        ids = torch.from_numpy(token_ids).to(probabilities.device)
        of_draft = probabilities.gather(2, ids[..., None]).squeeze(2)
        # A NaN makes its row's smallest value NaN, and is not good either.
        good = (probabilities.amin(dim=-1) >= 0) & ((total - 1).abs() < MAX_PROBABILITY_ERROR) & (of_draft > 0)
        facts = torch.stack([good.float(), (total - 1).abs()]).cpu().numpy()  # one copy to the host for both
        counted = np.arange(token_ids.shape[1]) < lengths[:, None]
        bad = (facts[0] == 0) & counted  # [rows, k]
        if bad.any():
            what = "probabilities that are NaN, negative, do not sum to 1 or rule out the very token that was drafted"
            self._fault(Fault.BAD_PROBABILITIES, f"{what}; the row is verified without them")
        if facts[1][counted & ~bad].max(initial=0.0) > ROUNDING:
            probabilities = probabilities / total[..., None]
        return probabilities, bad.any(axis=1)

    # -- faults ------------------------------------------------------------

    def _fault(self, kind: Fault, what: str, error: BaseException | None = None) -> None:
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            text = "The proposer %r is at fault (%s): %s. Said once; answers are not affected."
            logger.warning(text, self.name, kind, what, exc_info=error)

    def _caught(self, verb: str, action: Callable[[], None]) -> None:
        try:
            action()
        except RAISED as error:
            self._fault(Fault.EXCEPTION, f"{verb}: {_text(error)}", error)


_WORKERS: WeakSet[Worker] = WeakSet()


def wait_for_late_work(seconds: float) -> None:
    """Until no proposer of this process works on at drafts that nobody waited for; at most so long for each."""
    for worker in list(_WORKERS):
        worker.wait(seconds)


class Worker:
    """A daemon thread that does one job at a time, and that nobody has to wait for. It ends with its worker."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._began = 0.0
        _WORKERS.add(self)
        threading.Thread(target=_work, args=(self._jobs, self._idle), name=name, daemon=True).start()
        finalize(self, self._jobs.put, None)

    @property
    def busy(self) -> bool:
        """The last job is not done yet."""
        return not self._idle.is_set()

    @property
    def busy_seconds(self) -> float:
        """How long ago the last job was begun."""
        return time.monotonic() - self._began

    def wait(self, seconds: float) -> None:
        """Until the last job is done, at most so long."""
        self._idle.wait(seconds)

    def run(self, job: Callable[[], T], timeout: float) -> T | None:
        """The job's result, or None where it takes longer than `timeout` seconds; it then goes on by itself."""
        result: list[T] = []
        self._began = time.monotonic()
        self._idle.clear()
        self._jobs.put(lambda: result.append(job()))
        return result[0] if self._idle.wait(timeout) and result else None


def _work(jobs: SimpleQueue[Callable[[], None] | None], idle: threading.Event) -> None:
    """What a worker's thread does. Between two jobs it holds on to nothing, least of all to an engine that is gone."""
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:  # whatever it was, the thread must outlive it
            logger.exception("A proposer's thread met %s.", type(error).__name__)
        finally:
            del job
            idle.set()


def _rectangular(drafts: Drafts, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids as `[rows, width]` and lengths as `[rows]`, from any of the forms that `Drafts` allows."""
    ids = drafts.token_ids
    if hasattr(ids, "shape"):
        array = _array(ids)
        if array.ndim != 2 or array.shape[0] != rows or array.dtype.kind not in "iu":
            raise DraftError(f"token_ids are {array.dtype} {list(array.shape)}, not integers [rows, k] with {rows} rows")
        lengths = np.full(rows, array.shape[1]) if drafts.lengths is None else _array(drafts.lengths)
        if lengths.shape != (rows,) or lengths.dtype.kind not in "iu":
            raise DraftError(f"lengths are {lengths.dtype} {list(lengths.shape)}, not integers [rows] with {rows} rows")
        if (lengths < 0).any() or (lengths > array.shape[1]).any():
            raise DraftError(f"lengths run from {lengths.min()} to {lengths.max()}, but token_ids have {array.shape[1]} columns")
        return array.astype(np.int64, copy=False), lengths.astype(np.int64, copy=False)
    if len(ids) != rows:
        raise DraftError(f"{len(ids)} rows of drafts for {rows} rows")
    widths = np.array([len(row) for row in ids], dtype=np.int64)
    array = np.zeros((rows, int(widths.max(initial=0))), dtype=np.int64)
    for row, tokens in enumerate(ids):
        array[row, : len(tokens)] = [operator.index(token) for token in tokens]
    return array, widths


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


def _cut_at_first(bad: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`lengths` `[rows]`, each no longer than up to the row's first place that is `bad` `[rows, width]`."""
    return np.where(bad.any(axis=1), np.minimum(lengths, bad.argmax(axis=1)), lengths)


def _spread(drafts: CheckedDrafts, rows: Sequence[int], step: Step) -> dict[str, Any]:
    """What the drafts of some of a step's rows say about themselves, for all of its rows."""
    said: dict[str, Any] = {}
    if drafts.expected is not None:
        said["expected"] = np.zeros((step.num_rows, step.k), dtype=np.float32)
        said["expected"][list(rows)] = drafts.expected
    if drafts.sources is not None:
        said["sources"] = [""] * step.num_rows
        for row, source in zip(rows, drafts.sources, strict=True):
            said["sources"][row] = source
    return said


def _empty(step: Step) -> CheckedDrafts:
    return CheckedDrafts(np.zeros((step.num_rows, step.k), dtype=np.int64), np.zeros(step.num_rows, dtype=np.int64))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
