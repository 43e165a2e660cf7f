"""Suffix decoding (arXiv 2411.04975): drafts what followed the same tokens before, in this request or in earlier answers."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from pydantic import Field

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.proposers.base import Proposer, ProposerOptions
from vllm_specplugin.proposers.ngram_index import most_bytes
from vllm_specplugin.proposers.ngram_kernels import MAX_N, MAX_TOKENS
from vllm_specplugin.proposers.suffix_answers import MAX_RING, ring_bytes, ring_size
from vllm_specplugin.proposers.suffix_index import SuffixIndex
from vllm_specplugin.proposers.suffix_store import AnswersFile, check_corpus, read_corpus
from vllm_specplugin.proposers.suffix_tree import MAX_VOCAB, NODE_WORDS
from vllm_specplugin.types import Capabilities, Depth, Drafts, Host, Step, Target

if TYPE_CHECKING:
    from torch import nn

    from vllm_specplugin.config import SpecConfig

logger = logging.getLogger("vllm.specplugin.suffix")


class SuffixOptions(ProposerOptions):
    """The `options` of the proposer `suffix`."""

    min_match: int = Field(
        default=1,
        ge=1,
        le=8,
        description="Shortest context, in tokens, that is drafted from. 2 makes drafting about a quarter faster and drafts a "
        "little less.",
        json_schema_extra={"tune": [1, 2]},
    )
    max_tree_depth: int = Field(
        default=24, ge=1, le=MAX_N, description="Longest context that is told apart, in tokens; at least min_match."
    )
    min_token_prob: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="A draft goes on while all of it will be accepted with this probability, as far as experience tells. Higher "
        "drafts less and better.",
        json_schema_extra={"tune": [0.1, 0.3, 0.5]},
    )
    max_index_mib: int = Field(
        default=1024,
        ge=1,
        description="Most memory of the trees over the running requests' own tokens, in MiB. A request takes 32 to 64 bytes per "
        "token, and never more than 128; requests beyond the bound are drafted for from past answers alone.",
    )
    max_cached_tokens: int = Field(
        default=1 << 20,
        ge=1,
        le=MAX_RING,
        description="How many tokens of past answers are kept, at 36.25 bytes each; rounded up to a power of two, and to room "
        "for the running requests. The oldest answers go first.",
    )
    index_tokens_per_step: int = Field(
        default=65536,
        ge=1,
        description="Most tokens of new requests that are indexed in one step, at 0.2 to 0.4 microseconds each.",
    )
    corpus: str | None = Field(
        default=None,
        description='A file of answers to start with: a UTF-8 text, or JSONL with {"text": ...} or {"token_ids": [...]} per '
        "line, as `vllm-specplugin distill` writes it. Not read where cache_file exists, which holds it already.",
    )
    cache_file: str | None = Field(
        default=None,
        description="A file that keeps the past answers: read at the start where it exists, written once a minute and at the end. "
        "`vllm serve` kills its engine when it stops, so up to a minute of answers is lost. Each engine needs a file of its own; "
        "data-parallel ranks after the first add theirs to its name (answers.dp1.npz).",
    )


class SuffixProposer(Proposer[SuffixOptions]):
    """Drafts what most often followed the latest tokens, in the request itself or in what any request was answered.

    Two suffix trees count what followed each context of up to `max_tree_depth` tokens: one over the request's own prompt and
    answer, one over the latest `max_cached_tokens` of all answers. Each draft is the most likely next token by either tree, where
    the probabilities are measured: how often did such a forecast, from a context so long and counts so clear, come true? A
    draft ends where it would stand with less than `min_token_prob`.

    A step costs what it commits and drafts, not the context (`suffix_tree`). Needs neither weights nor the target's device.
    """

    Options = SuffixOptions
    catches_up = True
    capabilities = Capabilities(tokens="host")
    default_num_speculative_tokens = 8
    adaptive_num_speculative_tokens = 16

    def __init__(self, host: Host, options: SuffixOptions) -> None:
        super().__init__(host, options)
        _check_limits(host)
        try:
            self.index = SuffixIndex(
                options.min_match,
                options.max_tree_depth,
                least=options.min_token_prob,
                ring=ring_size(options.max_cached_tokens, host.max_num_seqs),
                max_bytes=options.max_index_mib << 20,
                max_tokens=host.max_model_len,
                max_requests=host.max_num_seqs,
                build_tokens=options.index_tokens_per_step,
            )
        except MemoryError:
            raise ConfigError(
                f"the system refuses to reserve {options.max_index_mib} MiB and {options.max_cached_tokens} tokens of past "
                "answers for the suffix trees; lower the options max_index_mib or max_cached_tokens"
            ) from None
        rank = host.data_parallel_rank
        self._file = AnswersFile(options.cache_file, host.vocab_size, rank) if options.cache_file else None
        self._saves = self._file is not None and host.tensor_parallel_rank == 0

    @classmethod
    def depth(cls, config: SpecConfig, options: SuffixOptions, target: Target | None) -> Depth:
        """As many as wanted. Looks whether there is a corpus, and a place for the answers, before any model is loaded."""
        if options.min_match > options.max_tree_depth:
            raise ConfigError(
                f"'options.min_match' is {options.min_match}, more than 'options.max_tree_depth' ({options.max_tree_depth}); set "
                "both so that min_match <= max_tree_depth."
            )
        if options.corpus is not None:
            check_corpus(options.corpus)
        if options.cache_file is not None:
            AnswersFile(options.cache_file, 0).check_place()
        return super().depth(config, options, target)

    def load(self, target: nn.Module) -> None:
        """Compile (about 10 s the first time, 1 s from numba's cache on disk), and take in the file of answers or the corpus."""
        start = time.perf_counter()
        self.index.compile()
        logger.info("Compiled the suffix trees in %.1f s.", time.perf_counter() - start)
        start = time.perf_counter()
        count = self._load_answers()
        if count:
            text = "Took in %d tokens of past answers in %.1f s; the latest %d are kept (option max_cached_tokens)."
            logger.info(text, count, time.perf_counter() - start, len(self.index.answers.tokens))
        if self._file is not None and self._saves:
            kept = self.index.answers, self.index.odds, self.index.trust
            self._file.keep(*kept)
            # Runs when the engine lets go of the proposer, or when the process ends; holds the index but not the proposer. A
            # process that was forked off, as vLLM's engine core may be, ends with multiprocessing's own finalizers alone.
            Finalize(None, weakref.finalize(self, self._file.close, *kept), exitpriority=0)

    def _load_answers(self) -> int:
        """How many tokens there were."""
        index, corpus, file = self.index, self.options.corpus, self._file
        if file is not None and file.path.exists():
            if corpus is not None:
                logger.info(
                    "The corpus %s is not read, since %s exists; remove that to start from the corpus.", corpus, file.path
                )
            return file.load(index.answers, index.odds, index.trust)
        count = 0
        if corpus is not None:
            for piece in read_corpus(corpus, self.host.encode, self.host.vocab_size):
                index.answers.add(piece, index.odds)
                count += len(piece.tokens)
        return count

    def propose(self, step: Step) -> Drafts:
        """Draft up to `limits[row]` tokens per row: int32 `[rows, k]` with lengths, and their odds."""
        token_ids, counts, expected = self.index.draft(
            step.requests, step.committed_ids, step.committed_offsets, step.lengths, step.limits, step.k, step.history.host
        )
        return Drafts(token_ids=token_ids, lengths=counts, expected=expected)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the requests' own trees. What they were answered stays, whether they ended or were preempted."""
        self.index.forget(request_ids)

    @classmethod
    def memory_bill(cls, host: Host, options: SuffixOptions) -> dict[str, int]:
        """The requests' trees at their largest, and the past answers."""
        worst = most_bytes(host.max_model_len, host.max_num_seqs, NODE_WORDS)
        return {
            "suffix trees of requests (32-64 B per token)": min(worst, options.max_index_mib << 20),
            "past answers (36 B per token)": ring_bytes(ring_size(options.max_cached_tokens, host.max_num_seqs)),
        }

    def memory_bytes(self) -> int:
        """Bytes that the requests' trees have come to occupy, and those set aside for past answers."""
        return self.index.touched_bytes + self.index.answers.nbytes


def _check_limits(host: Host) -> None:
    if host.max_model_len > MAX_TOKENS:
        raise ConfigError(f"proposer 'suffix' can index {MAX_TOKENS} tokens per request; max_model_len is {host.max_model_len}")
    if host.vocab_size > MAX_VOCAB:
        raise ConfigError(f"proposer 'suffix' can tell {MAX_VOCAB} token ids apart; the target has {host.vocab_size}")
