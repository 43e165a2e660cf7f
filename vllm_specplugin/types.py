"""The data that passes between the parts: what a proposer is given, what it returns, what a verifier answers.

Nothing here imports vLLM. Shapes use these letters: `rows` is the number of requests in this engine step, `k` the most
tokens drafted per step, `vocab` the target's vocabulary, `hidden` its hidden size. A *row* is a place in this step's
batch, not a request slot: the order of rows changes between steps, so state is kept by request id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from vllm_specplugin.config import SpecConfig
    from vllm_specplugin.heads.layers import HostLayers
    from vllm_specplugin.noise import DraftNoise


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a proposer needs and gives; declared on its class and checked once, at start."""

    hidden_states: Literal["none", "last", "aux"] = "none"
    """Which target hidden states each step must carry: none, the last layer's, or the auxiliary layers' too."""
    tokens: Literal["none", "host", "device"] = "host"
    """Where the proposer reads the known tokens: nowhere, as numpy arrays, or as tensors on the device."""
    probabilities: bool = False
    """It can return the distribution that each draft was drawn from."""
    trees: bool = False
    """It can return several continuations of one position."""
    own_kv_cache: bool = False
    """It keeps attention state of its own, so it must see every step of every request."""
    checkpoint: bool = False
    """It needs weights: the `model` key of the configuration."""
    native: Literal["eagle", "eagle3", "mtp", "draft_model"] | None = None
    """The host's own drafting method that does its work, with the host's layers and KV cache; None for one of our own."""
    request_keys: tuple[str, ...] = ()
    """What it reads of a request's `extra_args["specplugin"]`, beside what every request may say."""
    parts: tuple[str, ...] = ()
    """The proposers that it is made of, of which a request may choose one."""

    @property
    def on_host_only(self) -> bool:
        """It asks nothing of the target's device, so that it can run beside the step."""
        return self.tokens != "device" and self.hidden_states == "none" and not self.own_kv_cache


@dataclass(frozen=True, slots=True)
class Target:
    """The target model, as far as heads or a draft checkpoint must fit it."""

    model: str
    """Its name or path."""
    model_type: str
    """As Hugging Face's config names it ('llama')."""
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_mtp_layers: int = 0
    """Layers that predict tokens further ahead, in the target's own checkpoint."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How many tokens a proposer can draft per step."""

    default: int
    """k where the configuration does not say."""
    most: int | None = None
    """The largest k that it can serve; None where nothing limits it."""
    why: str = ""
    """What sets `most`, to be read after 'at most 4: ' ('heads.safetensors has 4 Medusa heads')."""
    adaptive: int | None = None
    """k where the configuration does not say and control shortens drafts that do not pay; None: as `default`."""


@dataclass(frozen=True, slots=True)
class Host:
    """The engine around a proposer, as far as a proposer may know it; constant for the life of the engine."""

    vocab_size: int
    """Ids in [0, vocab_size) can be drafted."""
    max_model_len: int
    """Most tokens in a request, prompt included."""
    max_num_seqs: int
    """Most rows in a step."""
    num_speculative_tokens: int
    """k, the most tokens that a step may draft per row."""
    hidden_size: int
    device: str
    """Where the target runs, as PyTorch names it ('cpu', 'cuda:0')."""
    dtype: str
    """The target's type, as PyTorch names it ('bfloat16')."""
    seed: int
    """The engine's seed; noise for requests without a seed of their own starts from it."""
    runner: Literal["v1", "v2"]
    config: SpecConfig
    """The configuration that named the proposer."""
    model: str = ""
    """The target's name or path."""
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    """Drafts must be the same on every rank."""
    data_parallel_rank: int = 0
    """Which of several engines this is; each has requests of its own."""
    encode: Callable[[str], list[int]] | None = None
    """The target's tokenizer, adding no special tokens; None where the engine runs without one."""
    layers: HostLayers | None = None
    """How the host builds the layers of heads, spread over the ranks; None for plain PyTorch on one device."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, constant while it lives."""

    request_id: str
    temperature: float = 0.0
    """0 means greedy."""
    seed: int | None = None
    sampling: Any = None
    """The host's own sampling parameters, complete."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the request said under `extra_args["specplugin"]`, but for the prediction."""
    arrival: int | None = None
    """Its number in the order in which the engine first scheduled requests, if the engine counts them."""
    max_draft_tokens: int | None = None
    """The most drafts per step that the request wants (a step's limits say so already); None where it leaves that open."""
    proposer: str | None = None
    """Which part of the configured proposer it wants to be drafted by; None where it leaves that open."""
    prediction: str | Sequence[int] | NDArray[np.int32] | None = None
    """What it expects to be answered, as text or token ids `[ids]`: drafts to be verified like any others."""


class History(Protocol):
    """The tokens of a step's rows, fetched only when asked for."""

    def host(self, row: int) -> NDArray[np.int32]:
        """Every known token of a row, prompt first, this step's included: `[lengths[row]]`. Read only; valid during the step."""
        ...

    def device(self, row: int) -> torch.Tensor:
        """The same as an integer tensor on the target's device: `[lengths[row]]`."""
        ...


class NativeDrafter(Protocol):
    """The host's own drafter in one step: it has run, or will once asked, whoever drafts, so that its KV cache keeps up."""

    def draft(self) -> Drafts:
        """Its drafts for the step's rows: token ids `[rows, k]` on the device, and what they were drawn from, if by chance.

        Rows that are still prefilling, and places past a row's limit, hold ids that mean nothing. Asking again costs nothing.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One engine step as a proposer sees it: the target has run, its tokens are committed, drafts are wanted.

    Between `forget` calls a proposer sees every step of a request. A request id that it does not know (new, or after
    `forget`) comes with a complete `history`; for a known one `committed` is what was added since the last step. A proposer
    that catches up (`Proposer.catches_up`) may miss steps instead of being told to forget.
    """

    requests: Sequence[Request]
    """`[rows]`"""
    k: int
    """The most tokens to draft per row in this step; may be 0."""
    committed_ids: NDArray[np.int32]
    """`[total]`: the tokens that this step committed, row after row."""
    committed_offsets: NDArray[np.int64]
    """`[rows + 1]`: row r committed `committed_ids[committed_offsets[r]:committed_offsets[r + 1]]`; none while it prefills."""
    lengths: NDArray[np.int64]
    """`[rows]`: known tokens per row, prompt and this step's included."""
    limits: NDArray[np.int64]
    """`[rows]`: the most drafts that are of use: at most k, and within max_model_len; 0 where none is wanted."""
    history: History
    noise: DraftNoise
    """Randomness for drafting, apart from every stream that the verifier draws from."""
    hidden_states: torch.Tensor | None = None
    """`[rows, hidden]`: the target's last hidden state from which each row's last committed token was chosen, where asked for."""
    aux_hidden_states: torch.Tensor | None = None
    """`[rows, layers * hidden]`: the auxiliary layers' states at that place, where asked for."""
    native: NativeDrafter | None = None
    """The host's own drafter, for a proposer with the capability `native`."""

    @property
    def num_rows(self) -> int:
        return len(self.requests)

    @property
    def request_ids(self) -> list[str]:
        """`[rows]`"""
        return [request.request_id for request in self.requests]

    def committed(self, row: int) -> NDArray[np.int32]:
        """The tokens that this step committed in a row: `[number committed]`."""
        return self.committed_ids[self.committed_offsets[row] : self.committed_offsets[row + 1]]

    def select(self, rows: Sequence[int]) -> Step:
        """This step with only some of its rows, in the order given."""
        parts = [self.committed(row) for row in rows]
        index = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            requests=[self.requests[row] for row in rows],
            committed_ids=np.concatenate(parts) if parts else self.committed_ids[:0],
            committed_offsets=np.cumsum([0, *map(len, parts)], dtype=np.int64),
            lengths=self.lengths[index],
            limits=self.limits[index],
            history=_SelectedHistory(self.history, list(rows)),
            noise=self.noise.select(rows),
            hidden_states=None if self.hidden_states is None else self.hidden_states[list(rows)],
            aux_hidden_states=None if self.aux_hidden_states is None else self.aux_hidden_states[list(rows)],
            native=None if self.native is None else _SelectedNative(self.native, list(rows)),
        )


@dataclass(frozen=True, slots=True)
class _SelectedHistory:
    history: History
    rows: list[int]

    def host(self, row: int) -> NDArray[np.int32]:
        return self.history.host(self.rows[row])

    def device(self, row: int) -> torch.Tensor:
        return self.history.device(self.rows[row])


@dataclass(frozen=True, slots=True)
class _SelectedNative:
    native: NativeDrafter
    rows: list[int]

    def draft(self) -> Drafts:
        drafts = self.native.draft()
        probabilities = None if drafts.probabilities is None else drafts.probabilities[self.rows]
        return Drafts(token_ids=drafts.token_ids[self.rows], probabilities=probabilities)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """What a proposer suggests for a step. Everything is checked before the engine sees it."""

    token_ids: Sequence[Sequence[int]] | NDArray[np.integer] | torch.Tensor
    """Ragged rows `[rows][<= k]`, or one array or tensor `[rows, k]` with `lengths`."""
    lengths: NDArray[np.integer] | torch.Tensor | Sequence[int] | None = None
    """`[rows]`: how many of each row's ids count; all of them where None."""
    logits: torch.Tensor | None = None
    """`[rows, k, vocab]`: exactly what each id was drawn from by softmax, temperature and truncation already applied."""
    probabilities: torch.Tensor | None = None
    """`[rows, k, vocab]`: the same as probabilities. None for both means that the ids were chosen deterministically."""
    expected: NDArray[np.floating] | None = None
    """`[rows, k]`: the proposer's own estimate of the probability that each draft is accepted, those before it accepted."""
    sources: Sequence[str] | None = None
    """`[rows]`: for a proposer made of several, which of them drafted each row; '' for a row without drafts."""
    parents: Sequence[Sequence[int]] | None = None
    """For trees: `[rows][nodes]`, each node's parent (-1 is the last committed token), parents before children."""

    @classmethod
    def none(cls, num_rows: int) -> Drafts:
        """No drafts for any row."""
        return cls(token_ids=[[] for _ in range(num_rows)])


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What the target made of the drafts.

    A verifier returns one without request ids, on its device; a proposer observes one with them, on the host.
    """

    accepted: torch.Tensor
    """`[rows]`: how many drafts were accepted."""
    token_ids: torch.Tensor
    """`[rows, k + 1]`: the tokens emitted (the accepted drafts and one more), filled up with -1."""
    tested: torch.Tensor | None = None
    """`[rows]`: how many drafts were verified."""
    request_ids: Sequence[str] = ()
    """`[rows]`, where a proposer observes it."""


class Use(IntEnum):
    """What a uniform number decides; each use has a stream of its own (see `scorers/uniforms.py`)."""

    ACCEPT = 0
    """Whether the draft at this position stands."""
    RESIDUAL = 1
    """What replaces a draft that was refused at this position."""
    BONUS = 2
    """What is drawn from the target's own distribution at this position."""
