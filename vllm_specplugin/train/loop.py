"""The training loop, the same for every objective: schedule, accumulation, evaluation, and a state that survives interruption.

Parameters and the optimiser's moments stay in float32 and the arithmetic runs in bfloat16 by autocast: small updates are not
lost to rounding, there is one copy of the parameters, and casting a matrix costs little beside multiplying a batch with it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from vllm_specplugin.errors import SpecPluginError
from vllm_specplugin.train.batch import Batch, Source, in_order, plan_epoch
from vllm_specplugin.train.objective import Objective
from vllm_specplugin.train.options import LoopOptions
from vllm_specplugin.train.progress import Screen
from vllm_specplugin.train.state import Progress, load_state, save_state
from vllm_specplugin.train.tally import Tally

ROWS = 200
"""Points of a training curve."""
PLACE_COLUMNS = ("split", "step", "tokens", "seconds", "learning_rate")
"""Columns of the curves that say where a point lies; the others are figures."""


class Loop:
    """One run: an objective, its data, and how far it is."""

    def __init__(
        self,
        objective: Objective,
        train: Source,
        held_out: Source | None,
        options: LoopOptions,
        device: torch.device,
        screen: Screen,
    ) -> None:
        self.objective = objective.to(device)
        self.train, self.held_out = train, held_out
        self.options, self.device, self.screen = options, device, screen
        self.lengths = train.lengths
        self.optimizer = _optimizer(objective, options)
        self.objective.train()  # a trunk comes as transformers loads it, set to evaluate: without dropout
        self.progress = load_state(options.out, objective, self.optimizer)
        self.steps = self._steps()
        self._plan: tuple[int, list[list[int]]] = (-1, [])
        self._started = self._saved = time.monotonic()

    def run(self) -> Progress:
        """Train to the end.

        Raises:
            SpecPluginError: Ctrl-C, after the state was written; or a loss that is no number.
        """
        self._saved = time.monotonic()
        self._started = self._saved - self.progress.seconds
        length = f"{self.steps:,} steps" if self.steps else f"{self.options.minutes:g} minutes"
        with _interrupts() as interrupted, self.screen.training(self.progress, length):
            while self.share() < 1:
                self._step()
                self._look(last=self.share() >= 1)
                if interrupted.is_set() and self.share() < 1:
                    self.save()
                    raise SpecPluginError(
                        f"stopped at {self.share():.0%} (step {self.progress.step}); the same command goes on from there."
                    )
                if time.monotonic() - self._saved > 60 * self.options.checkpoint_minutes:
                    self.save()
        self.save()  # what is left to do may still fail
        return self.progress

    def share(self) -> float:
        """The share of the run that is done, in [0, 1]."""
        if self.options.minutes is not None:
            return min(1.0, self.progress.seconds / (60 * self.options.minutes))
        return min(1.0, self.progress.step / self.steps) if self.steps else 1.0

    def save(self) -> None:
        """Write the state of the run."""
        save_state(self.options.out, self.progress, self.objective, self.optimizer)
        self._saved = time.monotonic()

    def evaluate(self) -> Tally:
        """The held-out examples, without touching anything that training depends on."""
        assert self.held_out is not None
        tally = Tally()
        self.objective.eval()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), self._autocast():
            for examples in in_order(self.held_out.lengths, self.options.batch_tokens):
                batch = self.held_out.read(examples).to(self.device)
                tally.add(self.objective.loss(batch), batch.num_counted)
        self.objective.train()
        return tally

    # -- one step ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        share = self.share()
        rate = self.options.lr * learning_rate(share, self.options.warmup, self.options.final_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.objective.schedule(share)
        batches = [self._next_batch() for _ in range(self.options.accumulate)]
        counted = sum(batch.num_counted for batch in batches)
        tally = Tally()
        for batch in batches:
            with self._autocast():
                losses = self.objective.loss(batch)
            (losses.total * (batch.num_counted / counted)).backward()
            tally.add(losses, batch.num_counted)
        norm = torch.nn.utils.clip_grad_norm_(self.objective.parameters(), self.options.clip or math.inf)
        if not torch.isfinite(norm):
            raise SpecPluginError(
                f"the gradient is {float(norm)} at step {self.progress.step + 1}, with a learning rate of {rate:.2g}; "
                "lower --lr, and start anew with --fresh."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += sum(int(batch.valid.sum()) for batch in batches)
        self.progress.seconds = time.monotonic() - self._started
        self.progress.window.merge(tally)
        self.screen.step(self.progress, self.share(), tally)

    def _next_batch(self) -> Batch:
        if self._plan[0] != self.progress.epoch:
            plan = plan_epoch(self.lengths, self.options.batch_tokens, self.options.seed, self.progress.epoch)
            self._plan = (self.progress.epoch, plan)
        batch = self.train.read(self._plan[1][self.progress.batch]).to(self.device)
        self.progress.batch += 1
        if self.progress.batch == len(self._plan[1]):
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        return batch

    def _look(self, last: bool) -> None:
        """Write a row of the curves where the step passed one of the places for it, and evaluate likewise."""
        share = self.share()
        if last or int(share * ROWS) > self.progress.rows_due:
            self.progress.rows_due = int(share * ROWS)
            self._row("train", self.progress.window)
            self.progress.window = Tally()
        if self.held_out is not None and (last or int(share * self.options.evaluations) > self.progress.evaluations):
            self.progress.evaluations = int(share * self.options.evaluations)
            tally = self.evaluate()
            self._row("held_out", tally)
            self.progress.seconds = time.monotonic() - self._started
            self.screen.evaluated(self.progress, tally)

    def _row(self, split: str, tally: Tally) -> None:
        done, rate = self.progress, self.optimizer.param_groups[0]["lr"]
        place = dict(zip(PLACE_COLUMNS, (split, done.step, done.tokens, round(done.seconds, 3), rate), strict=True))
        done.rows.append({**place, **tally.figures()})

    def _steps(self) -> int | None:
        """Optimiser steps of the whole run; None where its time is given instead."""
        if self.options.minutes is not None:
            return None
        if self.options.steps is not None:
            return self.options.steps
        epochs = range(self.options.epochs or 1)
        batches = sum(len(plan_epoch(self.lengths, self.options.batch_tokens, self.options.seed, epoch)) for epoch in epochs)
        return math.ceil(batches / self.options.accumulate)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16")


def learning_rate(share: float, warmup: float, final: float) -> float:
    """The factor of the learning rate when `share` of the run is done: a straight rise, then a cosine from 1 to `final`."""
    if share < warmup:
        # Half a percent at least: the very first step must not be lost.
        return max(0.005, share / warmup)
    down = (share - warmup) / (1 - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * down))


def device_of(name: str) -> torch.device:
    """The device that `--device` names.

    Raises:
        SpecPluginError: there is none of that name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise SpecPluginError(f"'--device' is '{name}', which PyTorch cannot use here ({first}); use 'cpu' or 'cuda'.") from error
    return device


def _optimizer(objective: Objective, options: LoopOptions) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over what is trained; norms, gates, scales and biases are not pulled to zero."""
    trained = [(objective.decays(name, p), p) for name, p in objective.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for decays, p in trained if decays], "weight_decay": options.weight_decay},
        {"params": [p for decays, p in trained if not decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=options.lr, betas=(options.beta1, options.beta2), fused=True
    )


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C, or what a job scheduler sends, sets an event, so that a step is never cut in half; the next one acts as usual."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals are not for other threads to handle
        yield interrupted
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(number, usual[signal.Signals(number)])

    for number in usual:
        signal.signal(number, note)
    try:
        yield interrupted
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
