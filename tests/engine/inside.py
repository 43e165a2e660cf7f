"""What engine tests run inside a worker (`EngineWorker.call("tests.engine.inside:name")`): a look at the live plugin."""

from __future__ import annotations

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
    model_runner = runner(llm)
    holder = getattr(model_runner, "drafter", None) or model_runner.speculator
    return holder.runtime


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
        "steps": it.steps,
        "busy": it._worker is not None and it._worker.busy,
    }


def known_requests(llm: Any) -> list[str]:
    """The ids that the plugin still keeps something for."""
    return sorted(runtime(llm)._requests)


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
