"""What engine tests run inside a worker (`EngineWorker.call("tests.engine.inside:name")`): a look at the live plugin."""

from __future__ import annotations

from typing import Any


def runner(llm: Any) -> Any:
    """vLLM's model runner."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def runtime(llm: Any) -> Any:
    """The plugin's `Runtime`."""
    model_runner = runner(llm)
    holder = getattr(model_runner, "drafter", None) or model_runner.speculator
    return holder.runtime


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
