"""An anytime-valid test of losslessness over every token that an engine emits: betting against p.

Let x be the next token, p its distribution under losslessness, and A a set of tokens chosen from p and q before the draft is
looked at. A gambler who stakes a share of her wealth on 1{x in A}, at the odds that p(A) makes fair, has a wealth that is a
martingale: it exceeds 1/alpha *at any time* with probability <= alpha (Ville's inequality), so the run may be watched and
stopped at will. Shafer, "Testing by betting" (2021); Waudby-Smith and Ramdas, "Estimating means of bounded random variables
by betting" (2023), section 4, for the mixture over a grid of stakes.

The wealth of a set is the mean over a fixed grid of bets (`stakes`), of a family the mean over its sets, the e-value the mean
over the families. All of them count from the start: one that never bets keeps its 1, else the mean would be no martingale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.validate.evidence import Evidence, Family, FamilyEvidence, Path, Place, Power
from vllm_specplugin.validate.power import PowerModel, Spread
from vllm_specplugin.validate.records import Kind, Tokens
from vllm_specplugin.validate.stakes import COUNT, Floats, log_factors, log_mean, running_sums
from vllm_specplugin.validate.tallies import CEILING, Passes, Tally

CHUNK = 16_384
"""Tokens at a time: a set's bets then take 4 MB."""
MOST_POINTS = 2_000
"""Of a path."""
OTHER_PLACES = {0: "bonus", -1: "plain"}
"""Draft positions count from 1; what else a pass emits is numbered like this."""


@dataclass(frozen=True, slots=True)
class Bet:
    """A set of tokens and where it is bet on: at drafted places or at the others."""

    family: Family
    set: str
    drafted: bool

    def columns(self, tokens: Tokens) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
        """p(A), 1{x in A} and where to bet, `[tokens]` each.

        Whether a draft was accepted is known only after looking, so a drafted place counts whatever became of its draft.
        """
        drafted = (tokens.kind == Kind.ACCEPTED) | (tokens.kind == Kind.RESIDUAL)
        p, hits = getattr(tokens, f"p_{self.set}"), getattr(tokens, f"in_{self.set}")
        return p, hits, (drafted == self.drafted) & ~np.isnan(p)


BETS = (
    Bet(Family.ACCEPTED, "draft", drafted=True),
    Bet(Family.RESIDUAL, "residual", drafted=True),
    Bet(Family.RESIDUAL, "processed", drafted=True),
    Bet(Family.BONUS, "top", drafted=False),
    Bet(Family.BONUS, "processed", drafted=False),
)


class Martingale:
    """The wealth of all bets so far; feed it tokens in the order in which the engine's steps emitted them.

    The order matters across requests where a proposer drafts for one from what another said: a token must not come before
    one that it depended on. Within a step any order will do.

    `alpha` is this test's own level (`verdict.Levels`).
    """

    def __init__(self, alpha: float) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie between 0 and 1, not {alpha}")
        self.alpha = alpha
        self.tokens = 0
        self.crossed_at: int | None = None
        self._wealth = np.zeros((len(BETS), COUNT))  # logarithms
        self._logs = np.zeros(len(BETS))  # of each set's mixture
        self._bet_on = dict.fromkeys(Family, 0)
        self._impossible = [0] * len(BETS)
        self._impossible_tokens = 0
        self._highest = np.zeros(1 + len(Family))  # overall, then by family
        self._highest_at = 0
        self._path = _ThinnedPath()
        self._tallies: dict[tuple[int, int], Tally] = {}
        self._passes = Passes()
        self._spread = Spread()

    def add(self, tokens: Tokens) -> None:
        """Bet on some more tokens."""
        for start in range(0, len(tokens), CHUNK):
            part = slice(start, start + CHUNK)
            self._add(Tokens(**{f.name: getattr(tokens, f.name)[part] for f in fields(Tokens)}))

    def _add(self, tokens: Tokens) -> None:
        places = np.where(tokens.kind == Kind.PLAIN, -1, tokens.draft_position)
        logs = np.empty((len(BETS), len(tokens)))
        applied = np.zeros((len(BETS), len(tokens)), np.bool_)
        impossible = np.zeros(len(tokens), np.bool_)  # in any of the sets
        for index, bet in enumerate(BETS):
            p, hits, where = bet.columns(tokens)
            applied[index] = where
            impossible |= where & hits & (p <= 0)
            logs[index] = self._bet(index, p[where], hits[where], where, places[where])
        for family in Family:
            self._bet_on[family] += int(applied[[bet.family is family for bet in BETS]].any(axis=0).sum())
        self._passes.add(tokens)
        self._impossible_tokens += int(impossible.sum())
        self._follow(_mixtures(logs))

    def _bet(self, index: int, p: Floats, hits: NDArray[np.bool_], where: NDArray[np.bool_], places: NDArray[Any]) -> Floats:
        """The log-wealth of one set after each token of the chunk, `[tokens]`; the columns are only those it bets on."""
        before = self._logs[index]
        if not len(p):
            return np.full(len(where), before)
        factors = log_factors(p, hits)
        wealth = running_sums(self._wealth[index], factors)
        logs = log_mean(wealth, axis=1)
        never = self._impossible[index] + np.cumsum(hits & (p <= 0))
        logs = np.where(never > 0, np.maximum(logs, CEILING), logs)
        self._wealth[index], self._logs[index], self._impossible[index] = wealth[-1], logs[-1], int(never[-1])
        for place in np.unique(places).tolist():
            at = places == place
            self._tallies.setdefault((index, place), Tally()).add(p[at], hits[at], factors[at])
        if BETS[index].family is Family.ACCEPTED:
            self._spread.add(p)
        return np.concatenate([[before], logs])[np.cumsum(where)]

    def _follow(self, logs: Floats) -> None:
        """Note the path, the highest points and the first crossing: `logs` is `[1 + families, tokens]`, overall first."""
        over = np.flatnonzero(logs[0] >= -log(self.alpha))
        if self.crossed_at is None and len(over):
            self.crossed_at = self.tokens + int(over[0]) + 1
        if logs.shape[1] and logs[0].max() > self._highest[0]:
            self._highest_at = self.tokens + int(logs[0].argmax()) + 1
        self._highest = np.maximum(self._highest, logs.max(axis=1, initial=0.0))
        self._path.add(self.tokens, logs)
        self.tokens += logs.shape[1]

    @property
    def crossed(self) -> bool:
        """Whether the e-value ever reached 1/alpha, which one impossible token is enough for: BIASED, the run may stop."""
        return self.crossed_at is not None

    def evidence(self, bias: float, power: float = 0.95, worst: int = 5) -> Evidence:
        """All of it as values for the verdict and the report, with the power to find `bias`."""
        last = _mixtures(self._logs[:, None])[:, 0] / log(10)
        highest = self._highest / log(10)
        families = [
            FamilyEvidence(family, self._bet_on[family], float(last[1 + i]), float(highest[1 + i]))
            for i, family in enumerate(Family)
        ]
        return Evidence(
            alpha=self.alpha,
            tokens=self.tokens,
            drafted=self._passes.drafted,
            kinds={kind.name.lower(): int(self._passes.kinds[kind]) for kind in Kind},
            passes=self._passes.passes,
            acceptance_length=self._passes.acceptance_length(),
            acceptance_per_position=self._passes.acceptance_per_position(),
            log10_e=float(last[0]),
            log10_max=float(highest[0]),
            max_at=self._highest_at,
            crossed_at=self.crossed_at,
            impossible=self._impossible_tokens,
            families=tuple(families),
            path=self._path.path(self.tokens, last),
            places=self.places(),
            worst=self.worst(worst),
            power=self._power(bias, power),
        )

    def places(self) -> tuple[Place, ...]:
        """Every set at every place of a pass where it was bet on."""
        return tuple(
            tally.place(BETS[index].family, BETS[index].set, max(place, 0), OTHER_PLACES.get(place, ""))
            for (index, place), tally in sorted(
                self._tallies.items(), key=lambda item: (item[0][0], item[0][1] <= 0, abs(item[0][1]))
            )
        )

    def worst(self, n: int) -> tuple[Place, ...]:
        """The places with the most evidence, most first."""
        return tuple(sorted(self.places(), key=lambda place: -place.log10_e)[:n])

    def tokens_needed(self, bias: float, power: float = 0.95) -> int | None:
        """Tokens in all to find `bias` with probability `power`, from what was seen; None where nothing was drafted."""
        if not self._spread.total:
            return None
        drafted = self._power_model().tokens_needed(bias, power)
        return None if drafted is None else -(-drafted * self.tokens // self._spread.total)

    def detectable_bias(self, power: float = 0.95) -> float | None:
        """The smallest bias found with probability `power` in the tokens seen; None where even the largest is not."""
        return self._power_model().detectable(self._spread.total, power)

    def _power(self, bias: float, asked: float) -> Power:
        needed = self.tokens_needed(bias, asked)
        return Power(
            bias=bias,
            asked=asked,
            probability=self._power_model().probability(bias, self._spread.total),
            tokens_needed=needed,
            tokens_more=None if needed is None else max(0, needed - self.tokens),
            detectable=self.detectable_bias(asked),
        )

    def _power_model(self) -> PowerModel:
        """Of the bets on accepted drafts, whose family is one of three equal parts of the e-value."""
        return PowerModel(self._spread, self.alpha, share=1 / len(Family))

    def state(self) -> dict[str, Any]:
        """JSON values from which `from_state` goes on exactly where this one is."""
        return {
            "alpha": self.alpha,
            "tokens": self.tokens,
            "crossed_at": self.crossed_at,
            "wealth": self._wealth.tolist(),
            "logs": self._logs.tolist(),
            "bet_on": {family.value: count for family, count in self._bet_on.items()},
            "impossible": self._impossible,
            "impossible_tokens": self._impossible_tokens,
            "highest": self._highest.tolist(),
            "highest_at": self._highest_at,
            "path": self._path.state(),
            "tallies": [[*key, tally.state()] for key, tally in sorted(self._tallies.items())],
            "passes": self._passes.state(),
            "spread": self._spread.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Martingale:
        """Go on from a saved state."""
        martingale = cls(state["alpha"])
        martingale.tokens, martingale.crossed_at = state["tokens"], state["crossed_at"]
        martingale._wealth, martingale._logs = np.asarray(state["wealth"]), np.asarray(state["logs"])
        martingale._bet_on = {Family(name): count for name, count in state["bet_on"].items()}
        martingale._impossible, martingale._impossible_tokens = list(state["impossible"]), state["impossible_tokens"]
        martingale._highest, martingale._highest_at = np.asarray(state["highest"]), state["highest_at"]
        martingale._path = _ThinnedPath.from_state(state["path"])
        martingale._tallies = {(index, place): Tally.from_state(tally) for index, place, tally in state["tallies"]}
        martingale._passes, martingale._spread = Passes.from_state(state["passes"]), Spread.from_state(state["spread"])
        return martingale


class _ThinnedPath:
    """The e-values after every `stride`-th token; the stride doubles when the points become too many."""

    def __init__(self) -> None:
        self.stride = 1
        self.tokens = np.zeros(1, np.int64)
        self.logs = np.zeros((1 + len(Family), 1))  # base 10

    def add(self, before: int, logs: Floats) -> None:
        """`[1 + families, tokens]` natural logarithms of the e-values after each token that followed the first `before`."""
        counts = before + 1 + np.arange(logs.shape[1])
        kept = counts % self.stride == 0
        self.tokens = np.concatenate([self.tokens, counts[kept]])
        self.logs = np.concatenate([self.logs, logs[:, kept] / log(10)], axis=1)
        while len(self.tokens) > MOST_POINTS:
            self.stride *= 2
            kept = self.tokens % self.stride == 0
            self.tokens, self.logs = self.tokens[kept], self.logs[:, kept]

    def path(self, tokens: int, last: Sequence[float] | Floats) -> Path:
        """As it is reported, up to the last token."""
        at, logs = self.tokens, self.logs
        if at[-1] != tokens:
            at, logs = np.append(at, tokens), np.column_stack([logs, last])
        overall, *families = (tuple(row) for row in logs.tolist())
        return Path(tuple(at.tolist()), overall, dict(zip(Family, families, strict=True)))

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"stride": self.stride, "tokens": self.tokens.tolist(), "logs": self.logs.tolist()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _ThinnedPath:
        """From `state`."""
        path = cls()
        path.stride, path.tokens, path.logs = state["stride"], np.asarray(state["tokens"]), np.asarray(state["logs"])
        return path


def _mixtures(logs: Floats) -> Floats:
    """`[1 + families, tokens]` log e-values, overall first, from those of the sets, `[sets, tokens]`."""
    families = np.stack([log_mean(logs[[bet.family is family for bet in BETS]], axis=0) for family in Family])
    return np.concatenate([log_mean(families, axis=0)[None], families])
