"""What engine tests run inside a worker (`EngineWorker.call("tests.engine.inside:name")`): a look at the live plugin."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle
from typing import Any

JUDGED: list[tuple[str, int, int]] = []
"""Request id, how many of its tokens were known, and how many drafts it had; row by row."""
CHUNKS: list[Any] = []
"""vLLM's own function, while it is replaced."""


def runner(llm: Any) -> Any:
    """vLLM's model runner."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def runtime(llm: Any) -> Any:
    """The plugin's `Runtime`."""
    return runner(llm).rejection_sampler.runtime


def use_the_hosts_kernels(llm: Any) -> None:
    """What V2 does on CUDA for the token rule; each step that they verify is noted."""
    verification = runner(llm).rejection_sampler
    verification.fused = True
    stock = verification._by_host_kernels

    def noted(*args: Any) -> Any:
        HOST_KERNEL_STEPS.append(len(args[1]))
        return stock(*args)

    verification._by_host_kernels = noted


HOST_KERNEL_STEPS: list[int] = []
"""How many requests each step had that the host's kernels verified."""


def host_kernel_steps(llm: Any) -> list[int]:
    return HOST_KERNEL_STEPS


def scheduler(llm: Any) -> str:
    return type(llm.llm_engine.engine_core.engine_core.scheduler).__name__


def guard(llm: Any) -> dict[str, Any]:
    """The guard's counters, and whether the proposer has been switched off."""
    it = runtime(llm).guard
    return {
        "faults": {str(kind): count for kind, count in it.faults.items()},
        "switched_off": it.switched_off,
        "plain": len(it._plain),
        "busy": it._worker is not None and it._worker.busy,
    }


def fail_native_steps(llm: Any, steps: list[int]) -> None:
    """Have `failing_native` raise in these steps, by number from now on."""
    import scripted_parts

    scripted_parts.reset()
    scripted_parts.SEEN["fail"] = set(steps)


def forbid_steps_on_the_host(llm: Any) -> None:
    """From now on it is an error to ask a proposer, for which what was sampled has to be copied to the host."""

    def forbidden(*arguments: Any, **named: Any) -> None:
        raise AssertionError("the proposer was asked on the host")

    runtime(llm).propose = forbidden


NATIVE_SEEDS: list[int] = []
"""What the first request's drafts were keyed by, step by step since `watch_native_seeds`."""


def watch_native_seeds(llm: Any) -> None:
    """Keep the seeds that V2's own speculator draws with."""
    speculator = runner(llm).speculator
    stock = speculator.sample_draft
    NATIVE_SEEDS.clear()

    def sample_draft(hidden_states: Any, positions: Any, slots: Any, temperature: Any, seeds: Any, step: Any, *more: Any) -> Any:
        if int(step) == 0 and int(slots[0]) >= 0:
            NATIVE_SEEDS.append(int(seeds[slots[0]]))
        return stock(hidden_states, positions, slots, temperature, seeds, step, *more)

    speculator.sample_draft = sample_draft


def native_seeds(llm: Any) -> list[int]:
    return NATIVE_SEEDS


def native_draws(llm: Any, draws: int) -> tuple[list[list[int]], list[list[float]]]:
    """Drafts as V2's speculators draw them, two requests over 16 tokens with one law each; and the laws as we take them to be.

    How often each token was drawn, and its probability: `[requests][vocab]` both.
    """
    from types import SimpleNamespace

    import torch
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from vllm_specplugin.runtime.native_v2 import _Overlay

    logits = (torch.randn(2, 16, generator=torch.Generator().manual_seed(1)) * 2).bfloat16()
    temperature, seeds = torch.tensor([0.7, 1.6]), torch.tensor([3, 4])
    kept = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    slots = torch.arange(2).repeat(draws)
    column = {"logits_cache": kept, "logits_cache_col": torch.tensor(0)}
    tokens = gumbel_sample(logits[slots], slots, temperature, seeds, torch.arange(2 * draws), True, True, **column)
    runtime = SimpleNamespace(request=lambda *_: SimpleNamespace(temperature=1.0), host=SimpleNamespace(vocab_size=16))
    overlay: Any = SimpleNamespace(speculator=SimpleNamespace(draft_logits=kept), drafting=SimpleNamespace(runtime=runtime))
    batch: Any = SimpleNamespace(idx_mapping=torch.arange(2), req_ids=["a", "b"], num_reqs=2)
    drawn_from = _Overlay._drawn_from(overlay, batch, temperature, 1)
    assert drawn_from is not None
    laws = drawn_from.probabilities([0, 1])
    counts = [torch.bincount(tokens[slots == slot], minlength=16).tolist() for slot in range(2)]
    return counts, laws[:, 0].tolist()


def known_requests(llm: Any) -> list[str]:
    """The ids that the plugin still keeps something for."""
    return sorted(runtime(llm)._requests)


def emitted_after_the_end(llm: Any, source: str, tokens: int) -> list[int]:
    """How many passes emitted so many tokens, where the only one gave `tokens` to a request that the front end has ended."""
    from types import SimpleNamespace

    from vllm.v1.engine import EngineCoreOutput

    from vllm_specplugin.counts import SequenceCounts, SourceCounts
    from vllm_specplugin.runtime.frontend_metrics import KEY, attach_outputs

    counts = SequenceCounts(1, tokens, [0, 1], {source: SourceCounts(1, 1, 1, 1, tokens)}, (source, tokens))
    output = EngineCoreOutput("gone", list(range(tokens)), kv_transfer_params={KEY: counts.dump()})
    totals = {"lengths": {source: {"emitted": [0] * tokens + [1]}}}

    def nothing(*_: Any) -> None:
        """What vLLM does with either is not looked at."""

    processor: Any = SimpleNamespace(request_states={}, log_stats=True, process_outputs=nothing, update_scheduler_stats=nothing)
    attach_outputs(processor)
    processor.process_outputs([output])
    processor.update_scheduler_stats(SimpleNamespace(kv_connector_stats={KEY: totals}))
    return totals["lengths"][source]["emitted"]


def counted_requests(llm: Any) -> list[str]:
    """The ids that the metrics still keep counts for."""
    hook = llm.llm_engine.engine_core.engine_core.scheduler.update_from_output.__self__
    return sorted(hook.counts._requests)


def seen(llm: Any) -> dict[str, Any]:
    """What the scripted proposers saw since the last `forget_seen`."""
    import scripted_parts

    return dict(scripted_parts.SEEN)


def forget_seen(llm: Any) -> None:
    import scripted_parts

    scripted_parts.reset()


def watch_the_judge(llm: Any) -> int:
    """Keep from now on which requests are judged by probabilities, and how much was known of them before the pass.

    Returns the number that the next request gets, with which its id begins.
    """
    import scripted_parts

    scripted_parts.reset()
    JUDGED.clear()
    judge = runner(llm).rejection_sampler.judge
    stock = type(judge).verify.__get__(judge)

    def verify(judged: Any, target_probs: Any, draft_ids: Any, lengths: Any, passes: Any) -> Any:
        names = [request.request_id for request in judged.requests]
        JUDGED.extend(zip(names, passes.tolist(), lengths.tolist(), strict=True))
        return stock(judged, target_probs, draft_ids, lengths, passes)

    judge.verify = verify
    number: int = llm.request_counter.counter
    return number


def judged(llm: Any) -> list[tuple[str, int]]:
    """Request id and number of known tokens, for each row with drafts that was judged since `watch_the_judge`."""
    return [(name, known) for name, known, drafts in JUDGED if drafts]


def judged_rows(llm: Any) -> list[dict[str, Any]]:
    """The same with what the verifier `recording` was asked about each of them; rows without drafts, too."""
    import scripted_parts

    pairs = zip(JUDGED, scripted_parts.SEEN["judged"], strict=True)
    return [{"request": name, "known": known, **asked} for (name, known, _), asked in pairs]


def verify_in_chunks(llm: Any, rows: int | None) -> None:
    """Have V2 verify a batch in parts of at most so many rows, as it does where the vocabulary is large; None: as ever."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

    if not CHUNKS:
        CHUNKS.append(module.get_max_chunk_logits)
    module.get_max_chunk_logits = CHUNKS[0] if rows is None else lambda vocabulary: rows


def known_on_every_rank(llm: Any) -> list[dict[str, list[int]]]:
    """What each tensor-parallel rank of V1 takes for the output of each request so far."""
    return llm.collective_rpc(outputs_of_worker)


def outputs_of_worker(worker: Any) -> dict[str, list[int]]:
    requests = getattr(worker, "worker", worker).model_runner.requests
    return {request_id.partition("-")[0]: list(state.output_token_ids) for request_id, state in requests.items()}


def until_it_repeats_itself(
    llm: Any, prompts: list[list[int]], params: list[dict[str, Any]], detection: dict[str, int]
) -> list[tuple[tuple[int, ...], str | None, Any]]:
    """Tokens, finish reason and stop reason with `repetition_detection`, which has a type of its own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams

    asked = [SamplingParams(**each, repetition_detection=RepetitionDetectionParams(**detection)) for each in params]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    completions = [output.outputs[0] for output in llm.generate(inputs, asked, use_tqdm=False)]
    return [(tuple(each.token_ids), each.finish_reason, each.stop_reason) for each in completions]


def scores_of_prompt(llm: Any, prompt: list[int], params: dict[str, Any]) -> list[list[float]]:
    """What comes of `prompt_logprob_token_ids`."""
    from vllm import SamplingParams

    (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(**params), use_tqdm=False)
    scores: list[list[float]] = output.prompt_token_id_logprobs.tolist()
    return scores


def step_once(llm: Any) -> list[str]:
    """One engine step with whatever is running; the ids of the requests that finished."""
    return [output.request_id for output in llm.llm_engine.step() if output.finished]


def add(llm: Any, request_id: str, prompt: list[int], params: dict[str, Any]) -> None:
    """A request that runs beside others, step by step."""
    from vllm import SamplingParams

    llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, SamplingParams(**params))


def abort(llm: Any, request_id: str) -> None:
    llm.llm_engine.abort_request([request_id])


def run_to_the_end(llm: Any) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """Step until nothing runs: the tokens and the finish reason of each request, by its id."""
    finished = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                completion = output.outputs[0]
                finished[output.request_id] = (tuple(completion.token_ids), completion.finish_reason)
    return finished


BY_SOURCE: dict[str, list[int]] = {}
"""Drafts verified and accepted, by the part of a hybrid that drafted them, since `watch_sources`."""


def watch_sources(llm: Any) -> None:
    """Count from now on what becomes of each part's drafts."""
    it = runtime(llm)
    propose, verified = type(it).propose.__get__(it), type(it).verified.__get__(it)
    last: dict[str, str] = {}
    BY_SOURCE.clear()

    pending: list[Any] = []

    def counted(tested: Any) -> None:
        pending.append(tested)
        verified(tested)

    def noted(requests: Any, k: int, committed_ids: Any, committed_counts: Any, *arguments: Any, **named: Any) -> Any:
        while pending:
            for request, drafts, tokens in zip(requests, pending.pop().tolist(), committed_counts.tolist(), strict=True):
                if drafts and last.get(request.request_id):
                    tally = BY_SOURCE.setdefault(last[request.request_id], [0, 0])
                    tally[0] += drafts
                    tally[1] += max(tokens - 1, 0)
        checked = propose(requests, k, committed_ids, committed_counts, *arguments, **named)
        last.update(zip((request.request_id for request in requests), checked.sources or [""] * len(requests), strict=True))
        return checked

    it.propose, it.verified = noted, counted


def by_source(llm: Any) -> dict[str, list[int]]:
    return BY_SOURCE


def pretend_costs(llm: Any, sizes: list[int], seconds: list[float], asking: float) -> None:
    """A new control that takes passes over so many rows to take so long, and asking likewise, whatever this machine does."""
    it = runtime(llm)
    it.controller = it._control(runner(llm).vllm_config)
    change_costs(llm, sizes, seconds, asking)


def change_costs(llm: Any, sizes: list[int], seconds: list[float], asking: float) -> None:
    """From now on passes take so long, and asking likewise."""
    from types import SimpleNamespace

    controller = runtime(llm).controller
    controller.calibrate(sizes, seconds)
    controller.costs.observe(1, 0, seconds[0])
    controller.costs.observe = lambda *_: None
    controller._steps_in_regime = 1 << 20  # as if it had been so for long
    controller._asking = controller._resuming = SimpleNamespace(seconds=lambda requests: asking, observe=lambda *_: None)


def costs_in_turns(llm: Any, costs: list[tuple[list[int], list[float]]], asking: float, steps: int) -> None:
    """`pretend_costs`, but every so many steps the next of these, and after the last one the first again."""
    pretend_costs(llm, *costs[0], asking)
    controller = runtime(llm).controller
    controller.begin = in_turns(controller.begin, steps, costs, lambda cost: change_costs(llm, *cost, asking))


def in_turns(step: Callable[..., Any], steps: int, values: list[Any], change: Callable[[Any], None]) -> Callable[..., Any]:
    """What is called once in a step, and before every so many of its calls a change to the next value, round and round."""
    turns = cycle(values)
    taken = count()

    def changed(*args: Any, **named: Any) -> Any:
        if next(taken) % steps == 0:
            change(next(turns))
        return step(*args, **named)

    return changed


def choose_by_what_was_drawn(llm: Any) -> None:
    """From now on a row's drafts end before the first one that is an odd number, which no lossless control may do."""
    controller = runtime(llm).controller
    stock = controller.lengths

    def lengths(request_ids: Any, token_ids: Any, *args: Any, **named: Any) -> Any:
        even = (token_ids % 2 == 0).cumprod(axis=1).sum(axis=1)
        return stock(request_ids, token_ids, *args, **named).clip(max=even)

    controller.lengths = lengths


def take_drafts_for_uniform(llm: Any) -> None:
    """From now on drafts that were drawn by chance are verified as if each token had been as probable as any other."""
    drafted = runtime(llm).drafted
    stock = drafted.stacked

    def stacked(*args: Any) -> Any:
        probabilities = stock(*args)
        return None if probabilities is None else probabilities.new_full(probabilities.shape, 1 / probabilities.shape[-1])

    drafted.stacked = stacked


def judge_grammars(llm: Any) -> None:
    """From now on requests with a grammar are judged like any others."""
    from vllm_specplugin.runtime import judging

    judging._has_grammar = lambda request: False


def control(llm: Any) -> Any:
    """Where control is at; None where draft lengths are fixed."""
    controller = runtime(llm).controller
    return None if controller is None else controller.state


def control_in_data_parallel(llm: Any) -> tuple[bool, bool, bool | None]:
    """With several data-parallel ranks: whether requests can lapse, whether the host's drafter is asked although control has
    paused, and what control takes that for. It spoils the engine for other tests."""
    it = runtime(llm)
    it._data_parallel = True
    it.controller = it._control(runner(llm).vllm_config)
    it.controller._paused = True
    return it.controller.stateful, it.asks_native(["a"]), it._asked


def plan_control(llm: Any) -> Any:
    """Control of the steps that are planned ahead."""
    return llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup.control


def plan_by(llm: Any, sizes: list[int], seconds: list[float]) -> None:
    """From now on the steps that are planned ahead take passes over so many rows to take so long, and try nothing else."""
    planned = plan_control(llm)
    type(planned).calibrate(planned, sizes, seconds)
    planned.costs.observe = planned.calibrate = lambda *_: None
    planned.costs.knows = lambda level: True
    planned._spared.seconds = lambda requests: 0.0
    planned._level_to_try = lambda usual, *_: usual
    planned._left = 0


def plan_in_turns(llm: Any, costs: list[tuple[list[int], list[float]]], steps: int) -> None:
    """`plan_by`, but every so many steps the next of these, and after the last one the first again."""
    planned = plan_control(llm)
    planned.plan = in_turns(planned.plan, steps, costs, lambda cost: plan_by(llm, *cost))


def plan_lengths(llm: Any, lengths: list[int]) -> None:
    """From now on the steps that are planned ahead have so many drafts for each request, in turns."""
    planned = plan_control(llm)
    levels = cycle([planned.levels.tolist().index(length) for length in lengths])
    planned._decide = lambda *_: next(levels)
    planned._run_length = lambda: 1
    planned._is_inconclusive = lambda: False
    planned._left = 0


def leave_drafter_out(llm: Any) -> None:
    """As control does once drafting has not paid for long: until it is thought to pay again."""
    planned = plan_control(llm)
    planned._paused, planned._length, planned._chosen = True, 0.0, 0


def drafted_for(llm: Any) -> dict[str, int]:
    """How many drafts each running request was given so far, as it is counted for the metrics."""
    counts = llm.llm_engine.engine_core.engine_core.scheduler.update_draft_token_ids.__self__.counts
    return {
        request_id.partition("-")[0]: sum(part.drafted for part in request.counts.by_source.values())
        for request_id, request in counts._requests.items()
    }


def planned_with(llm: Any, control: str | None = "adaptive", asynchronous: bool = True, **parallel: int) -> Any:
    """The schedule that vLLM is told of in a configuration like the engine's, but for this; None where nothing is planned."""
    from copy import copy

    from vllm_specplugin.runtime import planning

    config = copy(llm.llm_engine.vllm_config)
    config.scheduler_config, config.parallel_config = copy(config.scheduler_config), copy(config.parallel_config)
    config.scheduler_config.async_scheduling = asynchronous
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    spec = config.speculative_config = copy(config.speculative_config)
    spec.plans_ahead, spec.num_speculative_tokens_per_batch_size = False, None
    spec.plugin = {**spec.plugin, "control": control}
    planning.prepare(config)
    assert spec.plans_ahead == (spec.num_speculative_tokens_per_batch_size is not None)
    return spec.num_speculative_tokens_per_batch_size


def timed_before_planning(llm: Any) -> list[int]:
    """The numbers of rows whose passes were timed at start-up, as control of planned steps knows them."""
    costs = plan_control(llm).costs
    sizes: list[int] = costs._curve.__self__._sizes.astype(int).tolist()
    return sizes


def plan_state(llm: Any) -> Any:
    """Where control of the steps that are planned ahead is at."""
    return plan_control(llm).state


DRAFTER_RUNS: list[int] = []
"""How often V2's drafter ran in each step, since `watch_drafter_runs`."""


def watch_drafter_runs(llm: Any) -> None:
    speculator = runner(llm).speculator
    run, propose = speculator._run_model, speculator.propose

    def counted(*args: Any, **kwargs: Any) -> Any:
        DRAFTER_RUNS[-1] += 1
        return run(*args, **kwargs)

    def proposed(*args: Any, **kwargs: Any) -> Any:
        DRAFTER_RUNS.append(0)
        return propose(*args, **kwargs)

    speculator._run_model, speculator.propose = counted, proposed


def drafter_runs(llm: Any) -> list[int]:
    """Those since the last time this was asked."""
    runs = DRAFTER_RUNS.copy()
    DRAFTER_RUNS.clear()
    return runs


NATIVE_PASSES: list[int] = []
"""How many requests each step had in which the host's own drafter ran."""


def watch_native_passes(llm: Any) -> None:
    it = runner(llm)
    overlay = (it.drafter.load_model if hasattr(it, "drafter") else it.speculator.load_draft_model).__self__
    stock = overlay._stock_propose

    def noted(*args: Any, **kwargs: Any) -> Any:
        NATIVE_PASSES.append(1)
        return stock(*args, **kwargs)

    overlay._stock_propose = noted


def native_passes(llm: Any) -> int:
    """How many since the last time this was asked."""
    passes = len(NATIVE_PASSES)
    NATIVE_PASSES.clear()
    return passes


def start_up_curve(llm: Any) -> dict[int, float]:
    """Rows, and the seconds that control found a pass over them to take at start-up."""
    costs = runtime(llm).controller.costs
    return {int(size): float(costs.curve(int(size))) for size in costs._sizes}
