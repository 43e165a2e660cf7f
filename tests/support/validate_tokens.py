"""Tokens as `validate` records them, from simulated passes over a small vocabulary: lossless ones, and some that are not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.validate.records import Kind, Tokens

Floats = NDArray[np.float64]


def bets(p: Floats, hits: NDArray[np.bool_], draft_position: NDArray[np.int16] | None = None) -> Tokens:
    """Drafted places where only the set of the draft is bet on: p(A) and 1{x in A}, `[tokens]`."""
    nan, no = np.full(len(p), np.nan), np.zeros(len(p), np.bool_)
    return Tokens(
        request=np.zeros(len(p), np.int32),
        position=np.arange(len(p), dtype=np.int32),
        token=np.zeros(len(p), np.int32),
        kind=np.where(hits, Kind.ACCEPTED, Kind.RESIDUAL).astype(np.int8),
        draft_position=np.ones(len(p), np.int16) if draft_position is None else draft_position,
        logprob=np.zeros(len(p), np.float32),
        p_draft=p,
        in_draft=hits,
        p_residual=nan,
        in_residual=no,
        p_top=nan,
        in_top=no,
        p_processed=nan,
        in_processed=no,
    )


def sampled(rng: np.random.Generator, p: Floats, bias: float = 0.0) -> Tokens:
    """The same where the engine samples: each hit has probability p + bias."""
    return bets(p, rng.random(len(p)) < np.minimum(p + bias, 1.0))


def walked(
    rng: np.random.Generator,
    passes: int,
    k: int = 3,
    lenient: float = 0.0,
    greedy_bonus: bool = False,
    raw_after: int | None = None,
) -> Tokens:
    """Sample-and-walk over one-hot drafts, 16 tokens, temperature 0.7, each distribution its own.

    Lossy on demand: `lenient` is the chance that a refused draft is taken all the same, `greedy_bonus` takes the likeliest
    token after the last draft, `raw_after` samples without the temperature from that draft position on.
    """
    logits = rng.normal(0, 2, (passes, k + 1, 16))
    p, raw = softmax(logits / 0.7), softmax(logits)
    draws = softmax_draws(rng, p)
    if raw_after is not None:
        draws[:, raw_after - 1 : k] = softmax_draws(rng, raw[:, raw_after - 1 : k])
    if greedy_bonus:
        draws[:, k] = p[:, k].argmax(-1)
    drafts = np.where(rng.random((passes, k)) < 0.6, p[:, :k].argmax(-1), rng.integers(0, 16, (passes, k)))
    emitted = draws.copy()
    emitted[:, :k] = np.where(rng.random((passes, k)) < lenient, drafts, draws[:, :k])
    accepted = np.cumprod(emitted[:, :k] == drafts, axis=1).sum(axis=1)  # [passes]
    place = np.broadcast_to(np.arange(k + 1), (passes, k + 1))
    out = place <= accepted[:, None]  # what a pass emits, in its order
    drafted = (place < k)[out]
    d = np.pad(drafts, ((0, 0), (0, 1)))[out]
    p, raw, x, tokens = p[out], raw[out], emitted[out], int(out.sum())
    rows = np.arange(tokens)
    gap = p.copy()
    gap[rows, d] -= 1  # p - q
    kind = np.where(~drafted, Kind.BONUS, np.where(x == d, Kind.ACCEPTED, Kind.RESIDUAL)).astype(np.int8)
    sharpened = p > raw
    return Tokens(
        request=np.zeros(tokens, np.int32),
        position=np.arange(tokens, dtype=np.int32),
        token=x.astype(np.int32),
        kind=kind,
        draft_position=np.where(drafted, place[out] + 1, 0).astype(np.int16),
        logprob=np.log(raw[rows, x]).astype(np.float32),
        p_draft=np.where(drafted, p[rows, d], np.nan),
        in_draft=drafted & (x == d),
        p_residual=np.where(drafted, p[rows, gap.argmax(-1)], np.nan),
        in_residual=drafted & (x == gap.argmax(-1)),
        p_top=np.where(drafted, np.nan, p.max(-1)),
        in_top=~drafted & (x == p.argmax(-1)),
        p_processed=(p * sharpened).sum(-1),
        in_processed=sharpened[rows, x],
    )


def plain(rng: np.random.Generator, tokens: int) -> Tokens:
    """Passes without drafts, all at the same distribution."""
    hits = rng.random(tokens) < 0.5
    nan, no = np.full(tokens, np.nan), np.zeros(tokens, np.bool_)
    columns = {name: getattr(bets(nan, no), name) for name in Tokens.__slots__}
    return Tokens(
        **columns
        | {
            "kind": np.full(tokens, Kind.PLAIN, np.int8),
            "draft_position": np.zeros(tokens, np.int16),
            "p_top": np.full(tokens, 0.5),
            "in_top": hits,
        }
    )


def softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def softmax_draws(rng: np.random.Generator, p: Floats) -> NDArray[np.int64]:
    """One token from each distribution."""
    return (p.cumsum(-1) < rng.random((*p.shape[:-1], 1)) * p.sum(-1, keepdims=True)).sum(-1)
