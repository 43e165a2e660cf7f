"""Drafts by copying: what followed the last time that the request's latest tokens occurred in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.proposers.base import Proposer, ProposerOptions
from vllm_specplugin.proposers.ngram_index import NgramIndex, most_bytes
from vllm_specplugin.proposers.ngram_kernels import MAX_N, MAX_TOKENS
from vllm_specplugin.types import Capabilities, Drafts, Host, Step

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("vllm.specplugin.ngram")


class NgramOptions(ProposerOptions):
    """The `options` of the proposer `ngram`."""

    min_n: int = Field(
        default=2,
        ge=1,
        le=MAX_N,
        description="Shortest suffix, in tokens, whose earlier occurrence is worth drafting from. 1 drafts nearly always, which "
        "pays at a small batch; 3 or more drafts seldom and well, which suits a large one.",
        json_schema_extra={"tune": [1, 2, 3]},
    )
    max_n: int = Field(
        default=5,
        ge=1,
        le=MAX_N,
        description="Longest suffix that is told apart: of all occurrences that agree on this many tokens the latest is taken.",
        json_schema_extra={"tune": [3, 5, 8]},
    )
    max_index_mib: int = Field(
        default=1024,
        ge=1,
        description="Most memory of the index, in MiB. A request takes 16 to 32 bytes per token, and never more than 64; "
        "requests beyond the bound decode without drafts until others end.",
    )
    index_tokens_per_step: int = Field(
        default=65536,
        ge=1,
        description="Most tokens of new requests that are indexed in one step, at 0.1 to 0.2 microseconds each. A request is "
        "drafted for once all of its tokens are indexed.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> NgramOptions:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n ({self.min_n}) is larger than max_n ({self.max_n}); set both so that min_n <= max_n")
        return self


class NgramProposer(Proposer[NgramOptions]):
    """Looks for the longest suffix of a request's tokens, `min_n` to `max_n` long, that occurs earlier in the request.

    Of that suffix's occurrences the latest counts, and may overlap the suffix. The tokens that followed it are the draft;
    where they run into the end of the known tokens, the draft goes on with itself, as LZ77 does, so that a text which
    repeats every few tokens is drafted to full length. `ngram_reference` says the same in a dozen lines.

    A step costs what it committed, not the context (see NgramIndex). Needs neither weights nor the target's device.
    """

    Options = NgramOptions
    catches_up = True
    adaptive_num_speculative_tokens = 10
    capabilities = Capabilities(tokens="host")

    def __init__(self, host: Host, options: NgramOptions) -> None:
        super().__init__(host, options)
        if host.max_model_len > MAX_TOKENS:
            raise ConfigError(
                f"proposer 'ngram' can index {MAX_TOKENS} tokens per request; max_model_len is {host.max_model_len}"
            )
        try:
            self.index = NgramIndex(
                options.min_n,
                options.max_n,
                max_bytes=options.max_index_mib << 20,
                max_tokens=host.max_model_len,
                max_requests=host.max_num_seqs,
                build_tokens=options.index_tokens_per_step,
            )
        except MemoryError:
            raise ConfigError(
                f"the system refuses to reserve {options.max_index_mib} MiB for the n-gram index; lower the option max_index_mib"
            ) from None

    def load(self, target: nn.Module) -> None:
        """Compile, so that no request waits for it: about 3 s the first time, 0.3 s from numba's cache on disk."""
        start = time.perf_counter()
        self.index.compile()
        logger.info("Compiled the n-gram index in %.1f s.", time.perf_counter() - start)

    def propose(self, step: Step) -> Drafts:
        """Draft up to `limits[row]` tokens per row: int32 `[rows, k]` with lengths."""
        token_ids, counts = self.index.advance(
            step.requests, step.committed_ids, step.committed_offsets, step.lengths, step.limits, step.k, step.history.host
        )
        return Drafts(token_ids=token_ids, lengths=counts)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the requests' part of the index."""
        self.index.forget(request_ids)

    @classmethod
    def memory_bill(cls, host: Host, options: NgramOptions) -> dict[str, int]:
        """The index at its largest: every request at full length, of text that makes two entries per token."""
        worst = most_bytes(host.max_model_len, host.max_num_seqs)
        return {"n-gram index (16-32 B per token)": min(worst, options.max_index_mib << 20)}

    def memory_bytes(self) -> int:
        """Bytes of memory that the index has come to occupy; it keeps what requests leave for those that follow."""
        return self.index.touched_bytes
