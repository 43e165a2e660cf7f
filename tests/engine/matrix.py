"""What becomes of each sampling parameter with drafts: parameter x model runner x verifier, and the tests that say so.

Data only. `scripts/sampling_matrix.py` writes docs/sampling-parameters.md from it; tests/unit/test_sampling_matrix.py checks that
the page is up to date, that every named test exists, and that no parameter of vLLM is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

RUNNERS = ("v1", "v2")
VERIFIERS = ("one_hot", "token", "block", "typical")


class Answer(str, Enum):
    """What a request that asks for the parameter gets, and how a cell of the table says it."""

    SAME = "="
    """Plain decoding's answer, token by token."""
    EXACT = "exact"
    """Of the tokens that are emitted it makes what plain decoding makes of the same tokens."""
    DISTRIBUTION = "= ≈"
    """The same where the request is greedy or has a seed; where it has none, plain decoding's distribution."""
    LOSSY = "= lossy"
    """The same where it is greedy; otherwise the parameter is applied at every row, and a lossy verifier judges by that."""
    REFUSED = "refused"
    """An error that names the parameter."""
    NOT_APPLICABLE = "n/a"
    """Nothing that drafts could change: the parameter is dealt with elsewhere."""


@dataclass(frozen=True)
class Cell:
    answer: Answer
    tests: tuple[str, ...]
    """Node ids."""


@dataclass(frozen=True)
class Row:
    """One parameter."""

    name: str
    fields: tuple[str, ...]
    """Of `vllm.SamplingParams`."""
    cells: dict[tuple[str, str], Cell]
    """By runner and verifier."""
    note: str = ""


# -- tests -------------------------------------------------------------------------------------------------

ENGINE = "tests/engine/"


def walked(runner: str, case: str) -> tuple[str, ...]:
    """`one_hot`: the host's own sampler at every row."""
    return tuple(f"{ENGINE}test_parameters.py::test_as_plain_decoding[{runner}-{case}-{how}]" for how in ("greedy", "seeded"))


def judged(runner: str, verifier: str, case: str) -> tuple[str, ...]:
    """Exactly where the answer can be told, and what the verifier is given where it cannot."""
    return (
        f"{ENGINE}test_verifiers.py::test_as_plain_decoding[{verifier}-{runner}-{case}]",
        f"{ENGINE}test_judged_rows.py::test_in_a_batch[{runner}-{case}]",
    )


def other(runner: str, verifier: str, case: str) -> tuple[str, ...]:
    """Walked and judged in one batch."""
    return (f"{ENGINE}test_other_parameters.py::test_as_plain_decoding[{verifier}-{runner}-{case}]",)


def sampled(runner: str, verifier: str) -> str:
    """Samples of requests without a seed, against the distribution of plain decoding."""
    if verifier == "typical":
        return f"{ENGINE}test_statistics.py::test_a_lossy_verifier_is_found[{runner}]"
    return f"{ENGINE}test_statistics.py::test_drafts_drawn_by_chance_leave_the_distribution_alone[{runner}-{verifier}]"


# -- kinds of rows -----------------------------------------------------------------------------------------


def shaping(name: str, fields: Sequence[str], cases: Sequence[str], note: str = "", bars: bool = False) -> Row:
    """A parameter that changes what tokens are drawn from, by the names of its cases in test_parameters."""
    cells = {}
    for runner, verifier in places():
        tests = [sampled(runner, verifier)]
        for case in cases:
            tests += walked(runner, case) if verifier == "one_hot" else judged(runner, verifier, case)
        if bars and runner == "v1" and verifier in ("token", "block"):
            tests.append(f"{ENGINE}test_verified_samples.py::test_what_is_barred_never_appears[{verifier}-v1]")
        cells[runner, verifier] = Cell(Answer.LOSSY if verifier == "typical" else Answer.DISTRIBUTION, tuple(tests))
    return Row(name, tuple(fields), cells, note)


def grammar(kind: str, note: str = "") -> Row:
    """A kind of structured output."""
    cells = {}
    for runner, verifier in places():
        tests: tuple[str, ...] = judged(runner, verifier, kind)
        if kind not in ("regex", "json"):
            tests = other(runner, verifier, kind)
        elif verifier == "one_hot":
            tests = tuple(f"{ENGINE}test_parameters.py::test_grammar[{runner}-{kind}-{how}]" for how in ("greedy", "seeded"))
        cells[runner, verifier] = Cell(Answer.LOSSY if verifier == "typical" else Answer.DISTRIBUTION, tests)
    return Row(f"structured_outputs: {kind}", ("structured_outputs",), cells, note)


def form(name: str, fields: Sequence[str], cases: Sequence[str], note: str = "") -> Row:
    """A parameter of what is returned with the tokens."""
    cells = {}
    for runner, verifier in places():
        tests: list[str] = []
        for case in cases:
            if not case.startswith(("logprobs", "prompt_logprobs")):
                tests += other(runner, verifier, case)
            elif verifier == "one_hot":
                tests += walked(runner, case)
            else:
                tests += judged(runner, verifier, case)[:1]
        cells[runner, verifier] = Cell(Answer.EXACT, tuple(tests))
    return Row(name, tuple(fields), cells, note)


def everywhere(
    name: str, fields: Sequence[str], answer: Answer, tests: str, note: str = "", v1: Answer | None = None, v1_tests: str = ""
) -> Row:
    """The same for every verifier, perhaps not on V1; `tests` are node ids with `{runner}`, `{verifier}` in them."""
    cells = {}
    for runner, verifier in places():
        own = v1 if runner == "v1" else None
        named = (v1_tests if own else tests).format(runner=runner, verifier=verifier).split()
        given = Answer.LOSSY if answer is Answer.DISTRIBUTION and verifier == "typical" else answer
        cells[runner, verifier] = Cell(own or given, tuple(ENGINE + test for test in named))
    return Row(name, tuple(fields), cells, note)


def places() -> Iterator[tuple[str, str]]:
    return ((runner, verifier) for runner in RUNNERS for verifier in VERIFIERS)


def ending(name: str, fields: Sequence[str], one_hot: str, case: str, note: str = "") -> Row:
    """What ends a request, perhaps among accepted drafts. `one_hot` are node ids with `{runner}`, `case` is for the others."""
    cells = {}
    for runner, verifier in places():
        tests = tuple(ENGINE + test for test in one_hot.format(runner=runner).split())
        if verifier != "one_hot":
            ends = f"{ENGINE}test_verifiers.py::test_the_end_inside_the_drafts[{runner}-{verifier}]"
            tests = (ends, judged(runner, verifier, case)[0])
        cells[runner, verifier] = Cell(Answer.EXACT, tests)
    return Row(name, tuple(fields), cells, note)


def seeds() -> Row:
    cells = {}
    for runner, verifier in places():
        situations = [
            each for each in ("alone", "in_a_batch", "preempted", "cached", "chunked") if (runner, each) != ("v1", "chunked")
        ]
        tests = [
            f"{ENGINE}test_verifiers.py::test_the_situation_does_not_matter[{runner}-{verifier}-{each}]" for each in situations
        ]
        if verifier == "typical":
            tests = [f"{ENGINE}test_judged_rows.py::test_in_a_batch[{runner}-temperature]"]
        cells[runner, verifier] = Cell(Answer.LOSSY if verifier == "typical" else Answer.SAME, tuple(tests))
    note = (
        "With a lossless verifier a request with a seed is walked: it repeats plain decoding's tokens alone, in a batch, after "
        "preemption, with and without prefix-cache hits. (Stock V1 on the CPU dies of a seed beside a prompt that is read in "
        "chunks, with or without drafts.) A lossy verifier judges it; the seed keys its noise."
    )
    return Row("seed", ("seed",), cells, note)


def several() -> Row:
    cells = {}
    for runner, verifier in places():
        test = "test_parameters.py::test_several_completions"
        if verifier != "one_hot":
            test = "test_verifiers.py::test_completions_of_one_request_differ"
        answer = Answer.LOSSY if verifier == "typical" else Answer.DISTRIBUTION
        tests = [f"{ENGINE}{test}[{runner}]"]
        if verifier == "typical":
            tests += judged(runner, verifier, "temperature")
        cells[runner, verifier] = Cell(answer, tuple(tests))
    return Row("n", ("n",), cells, "Each completion is a request of its own, with noise of its own.")


def processed() -> Row:
    cells = {}
    for runner, verifier in places():
        tests = (f"{ENGINE}test_verifiers.py::test_processed_log_probabilities[{runner}-{verifier}]",)
        cells[runner, verifier] = Cell(Answer.EXACT, tests)
    note = "An option of the engine: log-probabilities of what was drawn from; plain decoding's, for judged tokens, too."
    return Row("logprobs_mode", (), cells, note)


# -- the matrix --------------------------------------------------------------------------------------------

ROWS: tuple[Row, ...] = (
    shaping("temperature", ["temperature"], ["temperature", "hot"], "0 is greedy: walked, whatever the verifier."),
    shaping("top_k", ["top_k"], ["top_k", "top_k_top_p"]),
    shaping("top_p", ["top_p"], ["top_p", "top_k_top_p"]),
    shaping("min_p", ["min_p"], ["min_p"], "Stock vLLM refuses it with speculation.", bars=True),
    shaping("presence_penalty", ["presence_penalty"], ["presence_penalty", "all_penalties"]),
    shaping("frequency_penalty", ["frequency_penalty"], ["frequency_penalty_down", "frequency_penalty_up"]),
    shaping("repetition_penalty", ["repetition_penalty"], ["repetition_penalty", "all_penalties"]),
    shaping("logit_bias", ["logit_bias"], ["logit_bias"], "Stock vLLM refuses it with speculation.", bars=True),
    shaping("allowed_token_ids", ["allowed_token_ids"], ["allowed_token_ids"]),
    shaping("bad_words", ["bad_words"], ["bad_words"]),
    shaping("min_tokens", ["min_tokens"], ["min_tokens"]),
    shaping("all of these together", [], ["everything"]),
    grammar(
        "regex",
        "Drafts that the grammar forbids are cut off before they are verified, and not counted as refused. `token` and `block` "
        "would have to know what was cut off, and so such requests are walked.",
    ),
    grammar("json"),
    grammar("choice"),
    grammar("grammar"),
    grammar("json_object"),
    seeds(),
    several(),
    everywhere(
        "thinking_token_budget",
        ["thinking_token_budget"],
        Answer.DISTRIBUTION,
        "test_other_parameters.py::test_thinking_token_budget[{verifier}-v2]",
        "V2 serves it at every row; V1 cannot at rows that drafts precede, so there it is refused.",
        v1=Answer.REFUSED,
        v1_tests="test_parameters.py::test_thinking_token_budget[v1]",
    ),
    ending("max_tokens", ["max_tokens"], "test_parameters.py::test_max_tokens_inside_the_drafts[{runner}-2]", "max_tokens"),
    ending("EOS, ignore_eos", ["ignore_eos"], "test_parameters.py::test_eos_inside_the_drafts[{runner}-3]", "eos"),
    ending(
        "stop_token_ids",
        ["stop_token_ids"],
        "test_parameters.py::test_a_stop_token_inside_the_drafts[{runner}-3]",
        "everything",
    ),
    form(
        "stop, include_stop_str_in_output",
        ["stop", "include_stop_str_in_output"],
        ["stop", "include_stop_str_in_output"],
        "vLLM looks for stop strings in the text of what a pass emitted, whoever verified it.",
    ),
    everywhere(
        "repetition_detection",
        ["repetition_detection"],
        Answer.EXACT,
        "test_other_parameters.py::test_repetition_detection[{runner}-{verifier}]",
    ),
    form(
        "logprobs, prompt_logprobs",
        ["logprobs", "prompt_logprobs"],
        ["logprobs", "logprobs_of_the_token_alone", "prompt_logprobs", "logprobs_after_penalties"],
        "One entry for each emitted token, those of the model at its place; of judged tokens, too "
        "(`test_log_probabilities_are_the_models`).",
    ),
    processed(),
    form(
        "logprob_token_ids",
        ["logprob_token_ids"],
        ["logprob_token_ids", "logprob_token_ids_and_logprobs"],
        "Stock V2 leaves it out where it verifies drafts. V1, with or without drafts, gives its columns to all in the batch.",
    ),
    everywhere(
        "prompt_logprob_token_ids, prompt_logprob_start",
        ["prompt_logprob_token_ids", "prompt_logprob_start"],
        Answer.NOT_APPLICABLE,
        "test_other_parameters.py::test_prompt_logprob_token_ids[v2]",
        "Read from the prompt, where nothing is drafted. V1 refuses it with or without drafts.",
        v1=Answer.REFUSED,
        v1_tests="test_other_parameters.py::test_what_is_refused[v1]",
    ),
    form("flat_logprobs", ["flat_logprobs"], ["flat_logprobs"]),
    form("detokenize", ["detokenize"], ["detokenize"]),
    form("skip_special_tokens", ["skip_special_tokens"], ["skip_special_tokens"]),
    form("spaces_between_special_tokens", ["spaces_between_special_tokens"], ["spaces_between_special_tokens"]),
    form("stream_interval", ["stream_interval"], ["stream_interval"]),
    form("skip_reading_prefix_cache", ["skip_reading_prefix_cache"], ["skip_reading_prefix_cache"]),
    everywhere(
        "watermarking",
        ["watermarking"],
        Answer.REFUSED,
        "test_other_parameters.py::test_an_engine_that_marks_its_text[{runner}] "
        "test_other_parameters.py::test_as_plain_decoding[{verifier}-{runner}-watermarking]",
        "It needs an engine that is started with a watermark, and with one of our proposers none is: that is refused at start. "
        "In another engine the parameter has no effect, and vLLM says so once.",
    ),
    everywhere(
        "trace_decode_token_ids",
        ["trace_decode_token_ids"],
        Answer.REFUSED,
        "test_other_parameters.py::test_what_is_refused[{runner}]",
        "By vLLM, with any speculation.",
    ),
)

NOT_SAMPLING: dict[str, str] = {
    "extra_args": "where a request speaks to the plugin (see configuration.md)",
    "output_kind": "how outputs are streamed: the whole, what is new, or the end",
    "routed_experts_prompt_start": "which routing data of the prompt comes back, for training",
    "skip_clone": "vLLM's own: the object need not be copied",
    "output_text_buffer_length": "vLLM's own, derived from `stop`",
    "_all_stop_token_ids": "vLLM's own, derived from `stop_token_ids`",
    "_bad_words_token_ids": "vLLM's own, derived from `bad_words`",
    "_eos_token_id": "vLLM's own, of the model",
    "_watermarking_skipped": "vLLM's own, derived from `watermarking`",
}
"""Fields of `vllm.SamplingParams` that have no row, and why."""
