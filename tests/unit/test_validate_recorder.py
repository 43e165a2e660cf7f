"""What the recorder writes down, by hand-computed examples; the model runners are stand-ins with the attributes it touches."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplugin.validate.passes import Context, Step, tokens_of
from vllm_specplugin.validate.recorder import RecorderExtension
from vllm_specplugin.validate.records import Kind, Tokens
from vllm_specplugin.validate.sampling import Sampling
from vllm_specplugin.validate.wire import unpack, unpack_tokens

P = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25, 0.15, 0.5, 0.1], [0.7, 0.1, 0.1, 0.1], [0.05, 0.6, 0.2, 0.15]])
"""Four rows over four tokens."""
SHIFT = torch.tensor([[0.5], [-2.0], [3.0], [0.0]])
LOGITS = P.log() + SHIFT  # logits are known up to a constant


def step(**changes: Any) -> Step:
    """Request a: drafts 3 and 1, of which the second was refused for a 2. Request b: no draft, a 1."""
    parts: dict[str, Any] = {
        "request_ids": ["a", "b"],
        "logits": LOGITS,
        "first_row": np.array([0, 3]),
        "draft_ids": np.array([[3, 1], [-1, -1]]),
        "drafts": np.array([2, 0]),
        "token_ids": np.array([[3, 2, -1], [1, -1, -1]]),
        "emitted": np.array([2, 1]),
        "draft_probs": {},
    }
    return Step(**(parts | changes))


def recorded(one: Step, sampling: Sampling | None = None, contexts: list[Context] | None = None, ties: Any = "keep") -> Tokens:
    numbers, positions = np.array([5, 7], dtype=np.int32), np.array([10, 0], dtype=np.int32)
    return tokens_of(one, sampling or Sampling(), ties, numbers, positions, contexts)[0]


def close(actual: Any, expected: list[float]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


NAN = float("nan")


def test_one_hot_drafts() -> None:
    tokens = recorded(step())
    assert tokens.request.tolist() == [5, 5, 7]
    assert tokens.position.tolist() == [10, 11, 0]
    assert tokens.token.tolist() == [3, 2, 1]
    assert tokens.kind.tolist() == [Kind.ACCEPTED, Kind.RESIDUAL, Kind.PLAIN]
    assert tokens.draft_position.tolist() == [1, 2, 0]
    close(tokens.logprob, np.log([0.4, 0.5, 0.6]).tolist())
    close(tokens.p_draft, [0.4, 0.15, NAN])  # the draft itself
    assert tokens.in_draft.tolist() == [True, False, False]
    close(tokens.p_residual, [0.3, 0.5, NAN])  # the likeliest other token
    assert tokens.in_residual.tolist() == [False, True, False]
    close(tokens.p_top, [NAN, NAN, 0.6])
    assert tokens.in_top.tolist() == [False, False, True]
    close(tokens.p_processed, [NAN] * 3)


def test_a_bonus_follows_when_all_drafts_stand() -> None:
    tokens = recorded(step(token_ids=np.array([[3, 1, 0], [1, -1, -1]]), emitted=np.array([3, 0])))
    assert tokens.kind.tolist() == [Kind.ACCEPTED, Kind.ACCEPTED, Kind.BONUS]
    assert tokens.draft_position.tolist() == [1, 2, 0]
    assert tokens.request.tolist() == [5, 5, 5]  # b is still reading its prompt
    close(tokens.p_top, [NAN, NAN, 0.7])
    assert tokens.in_draft.tolist() == [True, True, False]


def test_sampled_drafts_are_judged_by_what_they_were_drawn_from() -> None:
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.25, 0.05]])
    tokens = recorded(step(draft_probs={0: q}))
    close(tokens.p_draft, [0.1 + 0.2, 0.15, NAN])  # {0, 1}, then {1}
    assert tokens.in_draft.tolist() == [False, False, False]
    close(tokens.p_residual, [0.4, 0.5, NAN])  # p - q is largest at 3, then at 2
    assert tokens.in_residual.tolist() == [True, True, False]


def test_drafts_of_both_kinds_in_one_step() -> None:
    both = step(
        first_row=np.array([0, 2]),
        draft_ids=np.array([[3], [0]]),
        drafts=np.array([1, 1]),
        token_ids=np.array([[2, -1], [0, 1]]),
        emitted=np.array([1, 2]),
        draft_probs={1: torch.tensor([[0.1, 0.3, 0.3, 0.3]])},
    )
    tokens = recorded(both)
    close(tokens.p_draft, [0.4, 0.1 + 0.1 + 0.1, NAN])
    close(tokens.p_residual, [0.3, 0.7, NAN])
    assert tokens.kind.tolist() == [Kind.RESIDUAL, Kind.ACCEPTED, Kind.BONUS]


def test_where_q_is_p_there_is_no_set() -> None:
    tokens = recorded(step(draft_probs={0: P[:2].clone()}, logits=P.log()))
    assert np.isnan(tokens.p_draft[:2]).all() or (tokens.p_draft[:2] < 1).all()
    same = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    certain = torch.tensor([[-torch.inf, -torch.inf, -torch.inf, 0.0]])
    one = step(
        request_ids=["a"],
        logits=certain.expand(2, 4),
        first_row=np.array([0]),
        draft_ids=np.array([[3]]),
        drafts=np.array([1]),
        token_ids=np.array([[3, 3]]),
        emitted=np.array([2]),
        draft_probs={0: same},
    )
    tokens = tokens_of(one, Sampling(), "keep", np.zeros(1, np.int32), np.zeros(1, np.int32))[0]
    assert np.isnan(tokens.p_draft[0])


@pytest.mark.parametrize("chunk", [4, 8])
def test_large_steps_are_measured_in_parts(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [Context(prompt=[0], output=[2, 2]), Context(prompt=[1], output=[])]
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.25, 0.05]])
    sampling = Sampling(presence_penalty=0.5, repetition_penalty=1.5, temperature=0.7)
    whole = recorded(step(draft_probs={0: q}), sampling, contexts)
    monkeypatch.setattr("vllm_specplugin.validate.passes.CHUNK", chunk)
    parts = recorded(step(draft_probs={0: q}), sampling, contexts)
    for field in fields(Tokens):
        np.testing.assert_array_equal(getattr(whole, field.name), getattr(parts, field.name))


def test_an_impossible_token_is_a_hit_on_a_set_of_probability_zero() -> None:
    # top_k = 1 leaves token 3, then 2; the draft 1 of the second place was accepted all the same
    tokens = recorded(step(token_ids=np.array([[3, 1, 0], [1, -1, -1]]), emitted=np.array([3, 1])), Sampling(top_k=1))
    close(tokens.p_draft, [1.0, 0.0, NAN, NAN])
    assert tokens.in_draft.tolist() == [True, True, False, False]
    close(tokens.p_processed, [1.0] * 4)
    assert tokens.in_processed.tolist() == [True, False, True, True]


def test_sampling_parameters_apply_at_every_row() -> None:
    tokens = recorded(step(), Sampling(temperature=0.5))
    close(tokens.p_draft, [0.16 / 0.3, 0.0225 / 0.345, NAN])  # p squared, normalised
    close(tokens.p_top, [NAN, NAN, 0.36 / 0.425])
    close(tokens.p_processed, [0.16 / 0.3, 0.25 / 0.345, 0.36 / 0.425])  # what the lower temperature favours
    close(tokens.logprob, np.log([0.4, 0.5, 0.6]).tolist())  # still of the raw logits


def test_parameters_that_change_nothing_make_no_set() -> None:
    many = torch.randn(200, 50, generator=torch.Generator().manual_seed(1))
    one = step(
        request_ids=[str(row) for row in range(200)],
        logits=many,
        first_row=np.arange(200),
        draft_ids=np.zeros((200, 0), np.int64),
        drafts=np.zeros(200, np.int64),
        token_ids=np.zeros((200, 1), np.int64),
        emitted=np.ones(200, np.int64),
    )
    zeros = np.zeros(200, np.int32)
    tokens, unclear = tokens_of(one, Sampling(min_p=1e-6), "keep", zeros, zeros)
    assert unclear == 0
    assert np.isnan(tokens.p_processed).all()  # rounding alone makes no token likelier


def test_a_probability_of_nearly_one_is_not_one() -> None:
    tokens = recorded(step(logits=torch.tensor([0.0, -25.0, -25.0, -25.0]).expand(4, 4)))
    rest = 3 * np.exp(-25.0)
    np.testing.assert_allclose(1 - tokens.p_top[2], rest, rtol=1e-3)  # float32 would call it 1, and a miss impossible
    np.testing.assert_allclose(tokens.p_draft[0], np.exp(-25.0), rtol=1e-6)


def test_penalties_count_the_output_and_the_drafts_before_the_row() -> None:
    contexts = [Context(prompt=[0], output=[2, 2]), Context(prompt=[1], output=[])]
    tokens = recorded(step(logits=P.log()), Sampling(presence_penalty=0.5, frequency_penalty=0.25), contexts)

    def favoured(row: int, counts: list[int]) -> torch.Tensor:
        counted = torch.tensor(counts)
        return (P[row].log() - 0.25 * counted - 0.5 * (counted > 0)).softmax(0)

    close(tokens.p_draft[0], favoured(0, [0, 0, 2, 0])[3].item())
    close(tokens.p_draft[1], favoured(1, [0, 0, 2, 1])[1].item())  # 3 was emitted just before
    close(tokens.p_top[2], favoured(3, [0, 0, 0, 0])[1].item())
    tokens = recorded(step(logits=P.log()), Sampling(repetition_penalty=2.0), contexts)
    scaled = P[3].log()
    scaled[1] *= 2  # in the prompt, and negative
    close(tokens.p_top[2], scaled.softmax(0).max().item())


def test_ties_that_the_engine_may_cut_either_way_are_left_out_of_sets() -> None:
    tied = torch.tensor([0.4, 0.2, 0.2, 0.2]).log().expand(4, 4)
    for ties, p_draft in (("cut", 0.4 / 0.8), ("keep", 0.4), ("skip", NAN)):
        tokens = recorded(step(logits=tied, draft_ids=np.array([[0, 1], [-1, -1]])), Sampling(top_k=3), ties=ties)
        close(tokens.p_draft[0], p_draft)
    tokens = recorded(step(logits=tied, draft_ids=np.array([[0, 1], [-1, -1]])), Sampling(top_k=3), ties="cut")
    assert np.isnan(tokens.p_draft[1])  # whether 1 is allowed depends on the engine
    close(tokens.p_processed, [0.5] * 3)  # and so the favoured are {0} alone


# -- V1 ------------------------------------------------------------------------------------------------------


class Verification(torch.nn.Module):
    def __init__(self, runner: V1Runner) -> None:
        super().__init__()
        self.runner = runner

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        logits.zero_()
        return SimpleNamespace(sampled_token_ids=self.runner.says)


class V1Runner:
    """As much of V1's runner as the recorder sees."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.requests = {name: SimpleNamespace(prompt_token_ids=[0, 1]) for name in "ab"}
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, dtype=bool))
        self.rejection_sampler: Any = Verification(self)
        self.says = torch.tensor([[3, 2, -1], [1, -1, -1]], dtype=torch.int32)
        self.stock_probs: torch.Tensor | None = None

    def _sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        if metadata is None:
            logits.zero_()  # samplers change their logits
            return SimpleNamespace(sampled_token_ids=self.says)
        return self.rejection_sampler(metadata, self.stock_probs, logits, None)


def metadata(drafts: list[list[int]]) -> Any:
    flat = torch.tensor([token for row in drafts for token in row], dtype=torch.int32)
    return SimpleNamespace(num_draft_tokens=[len(row) for row in drafts], draft_token_ids=flat)


def worker(runner: Any, sampling: dict[str, Any] | None = None) -> tuple[RecorderExtension, Any]:
    extended = RecorderExtension()
    extended.model_runner = runner
    facts = extended.specplugin_watch()
    extended.specplugin_record(sampling or {}, "keep")
    return extended, facts


def taken(extended: RecorderExtension) -> Tokens:
    return unpack_tokens(extended.specplugin_take()[1])


def test_v1_with_and_without_drafts() -> None:
    runner = V1Runner()
    extended, facts = worker(runner)
    assert facts == {"model_runner": "V1", "verifier": "", "lossless": True}
    output = runner._sample(LOGITS.clone(), metadata([[3, 1], []]))
    assert output.sampled_token_ids is runner.says
    runner.says = torch.tensor([[0], [2]], dtype=torch.int32)
    runner._sample(LOGITS[:2].clone(), None)
    runner._sample(LOGITS[2:].clone(), None)
    tokens = taken(extended)
    assert tokens.request.tolist() == [0, 0, 1, 0, 1, 0, 1]
    assert tokens.position.tolist() == [0, 1, 0, 2, 1, 3, 2]
    assert tokens.kind.tolist() == [Kind.ACCEPTED, Kind.RESIDUAL] + [Kind.PLAIN] * 5
    close(tokens.p_draft, [0.4, 0.15] + [NAN] * 5)
    close(tokens.p_top, [NAN, NAN, 0.6, 0.4, 0.5, 0.7, 0.6])
    assert tokens.in_top.tolist() == [False, False, True, False, True, True, False]
    runner._sample(LOGITS[:2].clone(), None)  # not recorded: nobody asked
    assert len(taken(extended)) == 0
    extended.specplugin_record({}, "keep")
    runner._sample(LOGITS[:2].clone(), None)
    assert taken(extended).position.tolist() == [0, 0]  # a recording begins anew


def test_v1_probabilities_of_stock_drafters_and_of_the_plugins() -> None:
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.25, 0.05]])
    stock = V1Runner()
    stock.stock_probs = torch.cat([q, torch.tensor([[0.1, 0.5, 0.3, 0.1]])])
    stock.says = torch.tensor([[3, 2, -1], [1, 0, -1]], dtype=torch.int32)
    extended, _ = worker(stock)
    stock._sample(torch.cat([LOGITS, LOGITS[:1]]), metadata([[3, 1], [1]]))
    close(taken(extended).p_draft, [0.3, 0.15, 0.05 + 0.2, NAN])  # the last but one by the third row of probabilities
    ours = V1Runner()
    resolved = SimpleNamespace(verifier_name="token")
    ours.rejection_sampler.runtime = SimpleNamespace(
        drafted={"a": q}, resolved=resolved, verifier=SimpleNamespace(lossless=False)
    )
    extended, facts = worker(ours)
    assert facts == {"model_runner": "V1", "verifier": "token", "lossless": False}
    ours._sample(LOGITS.clone(), metadata([[3, 1], []]))
    close(taken(extended).p_draft, [0.3, 0.15, NAN])


def test_v1_requests_that_still_read_their_prompt_emit_nothing() -> None:
    runner = V1Runner()
    extended, _ = worker(runner)
    runner.discard_request_mask.np[0] = True
    runner.says = torch.tensor([[0], [2]], dtype=torch.int32)
    runner._sample(LOGITS[:2].clone(), None)
    tokens = taken(extended)
    assert tokens.token.tolist() == [2]
    close(tokens.p_top, [0.5])


def test_v1_drafts_that_only_fill_up_a_row_are_none() -> None:
    runner = V1Runner()
    extended, _ = worker(runner)
    runner.says = torch.tensor([[3, 2, -1]], dtype=torch.int32)
    runner.input_batch.req_ids = ["a"]
    runner._sample(LOGITS[:3].clone(), metadata([[3, -1]]))
    tokens = taken(extended)
    assert tokens.kind.tolist() == [Kind.ACCEPTED, Kind.BONUS]
    assert tokens.draft_position.tolist() == [1, 0]


def test_v1_penalties_follow_what_the_engine_emitted() -> None:
    runner = V1Runner()
    extended, _ = worker(runner, {"repetition_penalty": 2.0, "presence_penalty": 1.0})
    runner._sample(P.log(), metadata([[3, 1], []]))  # a emits 3, 2
    runner.says = torch.tensor([[0], [2]], dtype=torch.int32)
    runner._sample(P[:2].log(), None)
    scaled = 2 * P[0].log()  # 0 and 1 are in the prompt, 2 and 3 in the output
    scaled[2:] -= 1
    close(taken(extended).p_top[3], scaled.softmax(0).max().item())


def test_the_likeliest_tokens_with_their_logits() -> None:
    runner = V1Runner()
    extended, _ = worker(runner)
    extended.specplugin_record_likeliest(2)
    runner._sample(LOGITS.clone(), metadata([[3, 1], []]))
    kept = unpack(extended.specplugin_take()[1])
    assert kept["names"][kept["request"]].tolist() == ["a", "a", "b"]
    assert kept["ids"].tolist() == [[3, 2], [2, 0], [1, 2]]
    close(np.exp(kept["logits"] - kept["normaliser"][:, None]), [[0.4, 0.3], [0.5, 0.25], [0.6, 0.2]])  # type: ignore[list-item]


# -- V2 ------------------------------------------------------------------------------------------------------


class V2Runner:
    """As much of V2's runner as the recorder sees."""

    def __init__(self, says: list[list[int]], emitted: list[int]) -> None:
        output = SimpleNamespace(sampled_token_ids=torch.tensor(says), num_sampled=torch.tensor(emitted))

        class Sampler:
            sampling_states = SimpleNamespace(temperature=SimpleNamespace(gpu=torch.tensor([1.0, 1.0, 2.0])))

            def __call__(self, logits: torch.Tensor, *arguments: Any) -> Any:
                logits.zero_()
                return output

        self.sampler: Any = Sampler()
        self.rejection_sampler: Any = Sampler()
        self.req_states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.tensor([[0, 0, 0], [0, 1, 3], [2, 2, 2]])),
            prompt_len=SimpleNamespace(np=np.array([0, 2, 1])),
        )


V2Runner.__module__ = "vllm.v1.worker.gpu.model_runner"


def batch() -> Any:
    """Request a in slot 2 with drafts 3 and 1, request b in slot 1 without."""
    return SimpleNamespace(
        req_ids=["a", "b"],
        num_reqs=2,
        cu_num_logits_np=np.array([0, 3, 4], dtype=np.int32),
        input_ids=torch.tensor([9, 0, 3, 1, 9, 2]),
        logits_indices=torch.tensor([1, 2, 3, 5]),
        idx_mapping=torch.tensor([2, 1]),
        idx_mapping_np=np.array([2, 1]),
    )


def test_v2_with_one_hot_drafts() -> None:
    runner = V2Runner([[3, 2, 0], [1, 0, 0]], [2, 1])
    extended, facts = worker(runner)
    assert facts["model_runner"] == "V2"
    runner.rejection_sampler(LOGITS.clone(), batch(), None, None)
    tokens = taken(extended)
    assert tokens.token.tolist() == [3, 2, 1]
    assert tokens.kind.tolist() == [Kind.ACCEPTED, Kind.RESIDUAL, Kind.PLAIN]
    close(tokens.p_draft, [0.4, 0.15, NAN])
    close(tokens.p_residual, [0.3, 0.5, NAN])
    close(tokens.p_top, [NAN, NAN, 0.6])


def test_v2_plain_steps_and_prompts_still_read() -> None:
    runner = V2Runner([[3], [1]], [0, 1])
    extended, _ = worker(runner)
    plain = batch()
    plain.cu_num_logits_np, plain.logits_indices = np.array([0, 1, 2]), torch.tensor([3, 5])
    runner.sampler(LOGITS[2:].clone(), plain)
    tokens = taken(extended)
    assert (tokens.token.tolist(), tokens.kind.tolist(), tokens.request.tolist()) == ([1], [Kind.PLAIN], [1])
    close(tokens.p_top, [0.6])
    assert runner.sampler.sampling_states.temperature.gpu[2] == 2  # the runner still reaches what it knows


def test_v2_draft_logits_are_before_temperature() -> None:
    runner = V2Runner([[3, 2, 0], [1, 0, 0]], [2, 1])
    extended, _ = worker(runner)
    drawn = torch.zeros(3, 2, 4)
    drawn[2] = 2 * torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.28, 0.12, 0.55, 0.05]]).log()  # slot 2 has temperature 2
    runner.rejection_sampler(LOGITS.clone(), batch(), drawn, None)
    close(taken(extended).p_draft, [0.3, 0.75, NAN])


@pytest.mark.parametrize("how", ["lengths", "void"])
def test_v2_drafts_that_do_not_count(how: str) -> None:
    runner = V2Runner([[3, 2, 0], [1, 0, 0]], [2, 1])
    void = None
    if how == "lengths":
        runner.rejection_sampler.draft_lengths = torch.tensor([0, 0, 1])
    else:
        void = torch.tensor([False, False, True, False])
    extended, _ = worker(runner)
    runner.rejection_sampler(LOGITS.clone(), batch(), None, void)
    tokens = taken(extended)
    assert tokens.kind.tolist() == [Kind.ACCEPTED, Kind.BONUS, Kind.PLAIN]
    close(tokens.p_draft, [0.4, NAN, NAN])
    close(tokens.p_top, [NAN, 0.5, 0.6])


def test_v2_prompts_for_the_repetition_penalty() -> None:
    runner = V2Runner([[3, 2, 0], [1, 0, 0]], [2, 1])
    extended, _ = worker(runner, {"repetition_penalty": 2.0})
    runner.rejection_sampler(P.log(), batch(), None, None)
    scaled = P[3].log()
    scaled[:2] *= 2  # the prompt of b
    close(taken(extended).p_top[2], scaled.softmax(0).max().item())
