"""Plain decoding against `copycat`: confirmations of four orders, one after another, greedy; a minute on two idle cores.

    python try_it.py [MODEL]      (default: the demo's model, SmolLM2-135M-Instruct)

What counts is the passes of the target, since plain decoding takes one per token. The first answer is new to copycat; the
later ones share phrases with it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process: one start, one log
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

ORDERS = ("3 ceramic bowls for Maria", "an oak table for Jonas", "12 cotton towels for Amina", "a desk lamp for Ruth")


def start(model: str, speculative_config: dict[str, Any] | None) -> Any:
    from vllm import LLM

    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "disable_log_stats": False}
    return LLM(model, speculative_config=speculative_config, **arguments)


def answer(llm: Any, orders: tuple[str, ...]) -> list[Any]:
    from vllm import SamplingParams

    asked = [[{"role": "user", "content": f"Write a short e-mail that confirms an order: {order}."}] for order in orders]
    return [output.outputs[0] for output in llm.chat(asked, SamplingParams(temperature=0, max_tokens=80), use_tqdm=False)]


def accepted(llm: Any) -> int:
    """How many drafted tokens the target has accepted so far."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


def main(model: str) -> None:
    llm = start(model, None)
    plain = answer(llm, ORDERS)  # in one batch: each takes a pass per token all the same
    llm.llm_engine.engine_core.shutdown()
    llm = start(model, {"proposer": "copycat", "control": "fixed"})  # else draft lengths depend on the clock
    for order, expected in zip(ORDERS, plain, strict=True):
        before = accepted(llm)
        (output,) = answer(llm, (order,))
        tokens = len(output.token_ids)
        same = "same" if output.token_ids == expected.token_ids else "ANOTHER"
        print(f"{order:28} {tokens} tokens in {tokens - (accepted(llm) - before)} passes, {same} answer as plain decoding")
        print(f"    {' '.join(output.text.split())[:110]}", flush=True)


if __name__ == "__main__":  # vLLM may start processes, which import this file again
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        from vllm_specplugin.demo import demo_model

        main(str(demo_model()))
