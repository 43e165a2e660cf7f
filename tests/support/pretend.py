"""A pretended engine for tests of control: steps take what a function says, and drafts are right as often as a traffic says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.control.controller import Controller

Cost = Callable[[int, int], float]
"""Seconds of a step by its requests and its drafts in all."""

Traffic = Callable[[np.random.Generator, int], NDArray[np.bool_]]
"""`[tokens]`: for a request of so many tokens, which of them a proposer would draft right."""


def dense(requests: int, drafts: int) -> float:
    """Bound by memory up to some 100 rows, by arithmetic beyond."""
    return max(0.020 + 2e-5 * (requests + drafts), 2e-4 * (requests + drafts)) + 5e-5 * requests


def mixture(requests: int, drafts: int) -> float:
    """64 experts of which a token takes 4: the more rows, the more weights are read."""
    touched = 1 - (1 - 4 / 64) ** (requests + drafts)
    return 0.004 + 0.030 * touched + 1e-5 * (requests + drafts)


def few_cores(requests: int, drafts: int) -> float:
    """As timed on two cores of a CPU: a second row is nearly free, the twentieth is not."""
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    milliseconds = [27.5, 28, 29, 33, 42, 68, 115, 200, 330, 630]
    return float(np.interp(requests + drafts, rows, milliseconds)) / 1e3


def steady(probability: float) -> Traffic:
    return lambda rng, tokens: rng.random(tokens) < probability


def copying(rng: np.random.Generator, tokens: int) -> NDArray[np.bool_]:
    """Stretches of some 20 tokens that are copied, and such that are not."""
    switches = rng.random(tokens) < 1 / 20
    copies = (switches.cumsum() + rng.integers(2)) % 2 == 0
    return rng.random(tokens) < np.where(copies, 0.97, 0.15)


def fields(rng: np.random.Generator, tokens: int) -> NDArray[np.bool_]:
    """Names and numbers: copies of one to three tokens, and after each something else."""
    found = np.zeros(tokens, dtype=np.bool_)
    at = 0
    while at < tokens:
        at += int(rng.integers(1, 4))
        length = int(rng.integers(1, 4))
        found[at : at + length] = True
        at += length
    return found


@dataclass
class Pretended:
    """Serves as many requests at once as it is told, each of `tokens_each` tokens, one after another."""

    cost: Cost
    traffic: Traffic
    concurrency: int
    k: int = 8
    control: Controller | int | None = None
    """A controller, a fixed number of drafts, or None for plain decoding."""
    asking: float = 1e-4
    """Seconds that drafting takes."""
    catching_up: float = 0.0
    """Seconds that it takes more in a step after one without."""
    tokens_each: int = 200
    noise: float = 0.03
    by_chance: bool = False
    seed: int = 0
    now: float = 0.0
    emitted: int = 0
    tested: int = 0
    asked: int = 0
    seconds_asking: float = 0.0
    """How long a controller's proposer was at it."""
    steps: int = 0
    _kept_up: bool = True
    _requests: dict[str, tuple[NDArray[np.bool_], int]] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._lengths = np.zeros(self.concurrency, dtype=np.int64)

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self.emitted / self.now

    def run(self, steps: int) -> Pretended:
        for _ in range(steps):
            self._step()
        return self

    def until(self, tokens: int) -> Pretended:
        """Run until so many tokens are emitted."""
        while self.emitted < tokens:
            self._step()
        return self

    def _step(self) -> None:
        while len(self._requests) < self.concurrency:
            rng = np.random.default_rng((self.seed, self._next))  # whoever serves them, requests are the same
            self._requests[f"r{self._next}"] = (self.traffic(rng, 2 * self.tokens_each), 0)
            self._next += 1
        ids = list(self._requests)
        lengths = self._lengths
        self.steps += 1
        self.now += self.cost(len(ids), int(lengths.sum())) * float(np.exp(self._rng.normal(0, self.noise)))
        tokens, counts = [], []
        for name, length in zip(ids, lengths.tolist(), strict=True):
            right, at = self._requests[name]
            accepted = int(right[at : at + length].cumprod().sum())
            tokens += [_token(at + place) for place in range(accepted + 1)]
            counts.append(accepted + 1)
            self._requests[name] = (right, at + accepted + 1)
        self.emitted += len(tokens)
        self.tested += int(lengths.sum())
        self._lengths = self._drafts(ids, tokens, counts)
        done = [name for name, (_, at) in self._requests.items() if at >= self.tokens_each]
        for name in done:
            del self._requests[name]
            if isinstance(self.control, Controller):
                self.control.forget([name])
        kept = [place for place, name in enumerate(ids) if name in self._requests]
        self._lengths = np.concatenate([self._lengths[kept], np.zeros(self.concurrency - len(kept), dtype=np.int64)])

    def _drafts(self, ids: list[str], tokens: list[int], counts: list[int]) -> NDArray[np.int64]:
        if self.control is None:
            return np.zeros(len(ids), dtype=np.int64)
        if isinstance(self.control, int):
            self.now += self.asking
            return np.full(len(ids), self.control)
        control = self.control
        offsets = np.concatenate([[0], np.cumsum(counts)])
        control.begin(ids, np.array(tokens), offsets, self._lengths)
        lengths = np.zeros(len(ids), dtype=np.int64)
        asks, kept_up = control.asks(ids), self._kept_up
        self._kept_up = asks
        if asks:
            self.asked += 1
            asking = self.asking + (0.0 if kept_up else self.catching_up)
            self.now += asking
            self.seconds_asking += asking
            drafts = np.zeros((len(ids), self.k), dtype=np.int64)
            for row, name in enumerate(ids):
                right, at = self._requests[name]
                drafts[row] = [_token(at + place) if right[at + place] else 0 for place in range(self.k)]
            full = np.full(len(ids), self.k)
            lengths = control.lengths(ids, drafts, full, full, asking, by_chance=self.by_chance)
        control.end()
        return lengths


def _token(place: int) -> int:
    return 1 + place % 997


def controlled(cost: Cost, traffic: Traffic, concurrency: int, k: int = 8, **more: object) -> Pretended:
    """The same with a controller that knows the engine's start-up curve: the cost of bare rows, without what requests add."""
    engine = Pretended(cost, traffic, concurrency, k, **more)  # type: ignore[arg-type]
    engine.control = Controller("pretended", k, 64, clock=lambda: engine.now)
    sizes = [1 << power for power in range(10)]
    engine.control.calibrate(sizes, [cost(1, size - 1) for size in sizes])
    return engine
