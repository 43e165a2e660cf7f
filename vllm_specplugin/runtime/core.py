"""What both model runners share: one proposer, its guard, and the requests it knows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.logger import init_logger

from vllm_specplugin.arithmetic import slow_on_cpu
from vllm_specplugin.config import SpecConfig
from vllm_specplugin.control.controller import Controller
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.guard import CheckedDrafts, Guard
from vllm_specplugin.noise import DraftNoise, owner_of
from vllm_specplugin.proposers.native import NativeProposer
from vllm_specplugin.registry import PROPOSERS, normalise
from vllm_specplugin.request_args import draft_limit, read
from vllm_specplugin.runtime.judging import Drafted
from vllm_specplugin.runtime.layers import VllmLayers
from vllm_specplugin.runtime.meter import Meter
from vllm_specplugin.runtime.spec_config import PluginSpeculativeConfig, host_of
from vllm_specplugin.runtime.text import encoder
from vllm_specplugin.scorers.uniforms import key_of
from vllm_specplugin.types import Capabilities, History, NativeDrafter, Request, Step, Verdict

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

logger = init_logger("vllm.specplugin")

GREEDY_TEMPERATURE = 1e-5
"""Below it vLLM samples greedily."""


class Runtime:
    """The plugin inside one model runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Literal["v1", "v2"]) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, PluginSpeculativeConfig)
        self.resolved = spec.resolve()
        self.k: int = spec.num_speculative_tokens
        host = host_of(vllm_config, self.resolved, runner, str(device), get_tensor_model_parallel_rank())
        no_graphs = vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
        eager = self.resolved.config.host.get("enforce_eager", vllm_config.model_config.enforce_eager or no_graphs)
        self._data_parallel = vllm_config.parallel_config.data_parallel_size > 1
        self.shards_sampling = bool(getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False))
        """Each tensor-parallel rank samples requests of its own, on V2 where the user asks for it."""
        self.host = replace(host, layers=VllmLayers(device, eager), encode=encoder(vllm_config.model_config))
        self._model_config = vllm_config.model_config
        self._asked_for, self._plans_ahead = SpecConfig.parse(spec.plugin), spec.plans_ahead
        proposer = self.resolved.proposer(self.host, self.resolved.options)
        self.guard = Guard(proposer, self.resolved.config.proposer, self.resolved.config.draft_budget_ms)
        self.verifier = self.resolved.verifier()
        self.drafted = Drafted()
        self.controller = self._control(vllm_config)
        """What sets draft lengths; None where they are fixed."""
        self._asked: bool | None = None
        """Whether the host's own drafter was asked in this step, where that is decided before its tokens are known."""
        self.lapsed: set[str] = set()
        """Requests that lived through a step which the host's drafter was left out of: its drafts are no good for them."""
        self._tested: NDArray[np.int64] | None = None
        """`[rows]`, how many drafts the pass that is over verified; None for none."""
        self.meter = Meter(self, device)
        self.warming_up = False
        """The requests are vLLM's own, before it serves any."""
        self._requests: dict[str, Request] = {}
        self._arrived = 0
        self._noise_keys: dict[str, int] = {}
        self._drafted: dict[str, int] = {}
        """How many drafts each request was given last, for a proposer that wants verdicts."""
        self._ends: dict[str, int] = {}
        """How many tokens each request can have by its own max_tokens, where control asked."""

    def _control(self, vllm_config: VllmConfig) -> Controller | None:
        config, capabilities = self.resolved.config, self.resolved.capabilities
        if not config.adaptive or vllm_config.scheduler_config.async_scheduling:  # then the engine core plans; see `planning`
            return None
        drafting = {name: PROPOSERS.resolve(name).capabilities for name in capabilities.parts if name in PROPOSERS.names()}
        if not drafting or len(drafting) < len(capabilities.parts):  # a third party's hybrid may have made names up
            drafting[config.proposer] = capabilities
        stateful = [name for name, needs in drafting.items() if needs.native is not None or needs.own_kv_cache]
        if self._data_parallel and capabilities.native is not None:
            stateful = []  # asked in every step (see `asks_native`), so that no request can lapse
        return Controller(config.proposer, self.k, self.host.max_num_seqs, stateful)

    @property
    def capabilities(self) -> Capabilities:
        return self.resolved.capabilities

    @property
    def wants_verdicts(self) -> bool:
        return self.guard.wants_verdicts

    @property
    def hands_native_drafts_on(self) -> bool:
        """The proposer takes the host's drafts as they are, so that nobody need wait for what the host does not know yet."""
        guard = self.guard
        passes_on = type(guard.proposer).propose is NativeProposer.propose
        return passes_on and not guard.wants_verdicts and not guard.switched_off and self.controller is None

    @property
    def max_model_len(self) -> int:
        """Asked anew in each step: vLLM may lower it after the drafter is built, to fit the KV cache into memory."""
        limit: int = self._model_config.max_model_len
        return limit

    def load(self, target: torch.nn.Module) -> None:
        """Load the proposer; an error here stops the start, as any error of loading a model does."""
        self.guard.proposer.load(target)
        if self.controller is not None:
            self.controller.compile()
        logger.info(
            "Speculative decoding by vllm-specplugin: proposer=%s, k=%d, verifier=%s, model runner %s, control %s.",
            self.resolved.config.proposer,
            self.k,
            self.resolved.verifier_name,
            self.host.runner.upper(),
            self._asked_for.control_in_words(self.controller is not None or self._plans_ahead),
        )
        if not self.resolved.verifier.lossless:
            logger.warning(
                "The verifier %r is lossy: what requests with a temperature above 0 are answered does not follow the target's "
                "distribution. Use 'verifier': 'auto' for answers that do.",
                self.resolved.verifier_name,
            )
        if slow := slow_on_cpu(self.host.device, self.host.dtype):
            logger.warning("%s%s.", slow[0].upper(), slow[1:])
        for line in self.resolved.ignored():
            logger.warning("Ignored in --speculative-config: %s.", line)

    # -- the life of requests ------------------------------------------------

    def request(self, request_id: str, params: SamplingParams | None) -> Request:
        """What a proposer sees of a request; made when it is first scheduled."""
        known = self._requests.get(request_id)
        if known is None:
            said = self._said(request_id, getattr(params, "extra_args", None))
            prediction = said.pop("prediction", "")
            temperature = float(getattr(params, "temperature", 0.0) or 0.0)
            known = Request(
                request_id=request_id,
                temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
                seed=getattr(params, "seed", None),
                sampling=params,
                extra=MappingProxyType(said),
                arrival=self._arrived,
                max_draft_tokens=draft_limit(said),
                proposer=normalise(said["proposer"]) if said.get("proposer") else None,
                prediction=prediction if len(prediction) else None,
            )
            self._requests[request_id] = known
            self._arrived += 1
        return known

    def noise_key(self, request: Request) -> int:
        """The key of a request's noise for verification."""
        key = self._noise_keys.get(request.request_id)
        if key is None:
            key = self._noise_keys[request.request_id] = key_of(owner_of(request, self.host.seed))
        return key

    @staticmethod
    def _said(request_id: str, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            return read(extra_args)
        except ConfigError as error:  # the front end refuses such requests; whatever gets past it must not stop the engine
            logger.warning("Ignored in request %s: %s", request_id, error)
            return {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests finished, were aborted or were preempted."""
        gone = [request_id for request_id in request_ids if self._requests.pop(request_id, None) is not None]
        for request_id in gone:
            self._drafted.pop(request_id, None)
            self._ends.pop(request_id, None)
            self._noise_keys.pop(request_id, None)
            self.drafted.drop(request_id)
        self.lapsed.difference_update(gone)
        if gone:
            self.guard.forget(gone)
            if self.controller is not None:
                self.controller.forget(gone)

    # -- steps -----------------------------------------------------------------

    def propose(
        self,
        requests: Sequence[Request],
        k: int,
        committed_ids: NDArray[np.int32],
        committed_counts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        history: History,
        hidden_states: torch.Tensor | None = None,
        aux_hidden_states: torch.Tensor | None = None,
        native: NativeDrafter | None = None,
        spent: float = 0.0,
    ) -> CheckedDrafts:
        """One step's drafts, checked.

        Args:
            requests: `[rows]`.
            k: the most drafts per row in this step.
            committed_ids: `[total]`, the tokens committed, row after row.
            committed_counts: `[rows]`, how many of them each row has; 0 for a row that is still prefilling.
            lengths: `[rows]`, known tokens per row, with those committed.
            history: the rows' tokens.
            hidden_states: `[rows, hidden]`, where the proposer asks for them.
            aux_hidden_states: `[rows, layers * hidden]`, likewise.
            native: the host's own drafter, where the proposer works with one.
            spent: seconds that the host's own drafter took for this step.
        """
        offsets = np.zeros(len(requests) + 1, dtype=np.int64)
        committed_counts.cumsum(out=offsets[1:])
        request_ids = [request.request_id for request in requests]
        if self.controller is not None and not self._asks(self.controller, request_ids, committed_ids, offsets, spent):
            return self._without_drafts(self.controller, request_ids, k)
        began = time.perf_counter() - spent
        # A pass over d drafts can emit d + 1 tokens, and none may lie at or beyond max_model_len.
        room = self.max_model_len - 1 - lengths
        limits = np.minimum(np.maximum(room, 0), self.wanted(requests, k)) * (committed_counts > 0)
        step = Step(
            requests=requests,
            k=k,
            committed_ids=committed_ids,
            committed_offsets=offsets,
            lengths=lengths,
            limits=limits,
            history=history,
            noise=DraftNoise(self.host.seed, requests, lengths),
            hidden_states=hidden_states,
            aux_hidden_states=aux_hidden_states,
            native=native,
        )
        checked = self.guard.propose(step)
        if self.controller is not None:
            checked = self._controlled(self.controller, checked, step, time.perf_counter() - began)
        self.drafted.keep(step.request_ids, checked)
        if self.wants_verdicts:
            self._drafted.update(zip(step.request_ids, checked.lengths.tolist(), strict=True))
        return checked

    def wanted(self, requests: Sequence[Request], k: int) -> NDArray[np.int64]:
        """`[rows]`: the most drafts that each request asks for and has any use for, of at most k."""
        wanted = np.array([k if request.max_draft_tokens is None else min(request.max_draft_tokens, k) for request in requests])
        if self.lapsed:
            wanted[[request.request_id in self.lapsed for request in requests]] = 0
        return wanted

    def verified(self, tested: NDArray[np.int64]) -> None:
        """How many drafts of each row `[rows]` the host verified in the pass that is over."""
        self._tested = tested

    # -- control ---------------------------------------------------------------

    def asks_native(self, request_ids: Sequence[str]) -> bool:
        """Whether the host's own drafter is to run in this step; asked before the tokens of the step are known.

        Args:
            request_ids: `[rows]`.
        """
        if self.controller is None:
            return True
        if self._data_parallel:  # all ranks run their drafters, or none
            self._asked = True
            return True
        self._asked = self._same_on_all_ranks(self.controller.asks(request_ids))
        return self._asked

    def _same_on_all_ranks(self, asks: bool) -> bool:
        """The ranks' parts of a proposer work together, so either all are asked or none; but their clocks differ."""
        if self.host.tensor_parallel_size == 1 or self.guard.on_host_only:
            return asks
        group = get_tp_group()
        return bool(group.broadcast_object(asks if group.is_first_rank else None, src=0))

    def _asks(
        self,
        controller: Controller,
        request_ids: Sequence[str],
        committed_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        spent: float,
    ) -> bool:
        """Tell control what the pass that is over brought; whether the proposer is to be asked."""
        tested, self._tested = self._tested, None
        if tested is None:
            tested = np.zeros(len(request_ids), dtype=np.int64)
        controller.begin(request_ids, committed_ids, offsets, tested, spent)
        asked, self._asked = self._asked, None
        return self._same_on_all_ranks(controller.asks(request_ids)) if asked is None else asked

    def _without_drafts(self, controller: Controller, request_ids: Sequence[str], k: int) -> CheckedDrafts:
        """A step in which the proposer is not asked."""
        self._miss(request_ids)
        controller.end()
        rows = len(request_ids)
        return CheckedDrafts(np.zeros((rows, k), dtype=np.int64), np.zeros(rows, dtype=np.int64))

    def skip(self, request_ids: Sequence[str]) -> None:
        """A step that the engine core left the host's drafter out of."""
        self._miss(request_ids)
        self.lapsed.update(request_ids)

    def _miss(self, request_ids: Sequence[str]) -> None:
        self.guard.skip(request_ids)
        self.drafted.drop_all(request_ids)
        if self._drafted:
            for request_id in request_ids:
                self._drafted.pop(request_id, None)

    def _controlled(self, controller: Controller, checked: CheckedDrafts, step: Step, seconds: float) -> CheckedDrafts:
        """As many of the drafts as pay; asking for them took `seconds`."""
        lengths = controller.lengths(
            step.request_ids,
            checked.token_ids,
            checked.lengths,
            np.minimum(step.limits, self._left(step)),
            seconds,
            checked.sources,
            checked.expected,
            by_chance=checked.probabilities is not None or bool(checked.unreliable),
        )
        controller.end()
        if (lengths == checked.lengths).all():
            return checked
        token_ids = np.where(np.arange(step.k) < lengths[:, None], checked.token_ids, 0)
        return replace(checked, token_ids=token_ids, lengths=lengths)

    def _left(self, step: Step) -> NDArray[np.int64]:
        """`[rows]`: how many drafts can be emitted by each request's own max_tokens; verifying more pays for nothing.

        What a request has before the first token that is seen of it is taken for its prompt: after a preemption that is more
        than it was, and the figure too high, which does no harm.
        """
        left = np.full(len(step.requests), step.k)
        counts = np.diff(step.committed_offsets)
        for row, (request, count, length) in enumerate(zip(step.requests, counts.tolist(), step.lengths.tolist(), strict=True)):
            most = getattr(request.sampling, "max_tokens", None)
            if not count or most is None:
                continue
            end = self._ends.get(request.request_id)
            if end is None or end < length:  # a session of several turns goes on past the end of one
                end = self._ends[request.request_id] = length - count + most
            left[row] = min(max(end - length - 1, 0), step.k)  # a pass over d drafts can emit d + 1 tokens
        return left

    def observe(self, requests: Sequence[Request], tested: NDArray[np.int64], rows: Sequence[Sequence[int]]) -> None:
        """Tell the proposer what became of its drafts.

        Args:
            requests: `[rows]`.
            tested: `[rows]`, how many drafts the host verified; it may have filled a row up with ones that nobody made.
            rows: `[rows]`, the tokens each row emitted, the bonus or corrected token included.
        """
        if not self.wants_verdicts:
            return
        tested = np.minimum(tested, [self._drafted.get(request.request_id, 0) for request in requests])
        if not tested.any():
            return
        emitted = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        token_ids = np.full((len(rows), int(emitted.max())), -1, dtype=np.int64)
        token_ids[np.arange(token_ids.shape[1]) < emitted[:, None]] = list(chain.from_iterable(rows))
        self.guard.observe(
            Verdict(
                accepted=torch.from_numpy((emitted - 1).clip(min=0)),
                token_ids=torch.from_numpy(token_ids),
                tested=torch.from_numpy(np.ascontiguousarray(tested)),
                request_ids=[request.request_id for request in requests],
            )
        )
