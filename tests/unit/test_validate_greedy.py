"""Greedy outputs compared: equal, parted by rounding, or parted by a bug."""

from __future__ import annotations

import pytest

from vllm_specplugin.validate.greedy import NOISE_FLOOR, NOISE_LIMITS, Cause, Greedy, Mismatch, Output, compare


def output(*rows: tuple[int, dict[int, float]]) -> Output:
    return Output([token for token, _ in rows], [row for _, row in rows])


def clear(token: int, moved: float = 0.0) -> tuple[int, dict[int, float]]:
    """A place where `token` is far ahead; every log-probability is moved."""
    return token, {token: -0.1 + moved, token + 1: -2.5 + moved}


def near(token: int, other: int, margin: float) -> tuple[int, dict[int, float]]:
    return token, {token: -0.7, other: -0.7 - margin}


def only(greedy: Greedy) -> Mismatch:
    assert len(greedy.mismatches) == 1
    return greedy.mismatches[0][1]


def test_equal_outputs() -> None:
    greedy = compare([("a", output(clear(1), clear(2)), output(clear(1), clear(2))), ("b", output(), output())])
    assert (greedy.equal, greedy.bugs, greedy.mismatches) == (2, 0, ())
    assert [prompt.tokens for prompt in greedy.prompts] == [2, 0]
    assert greedy.noise == NOISE_FLOOR
    assert greedy.compared == 4


def test_the_spread_is_the_root_mean_square() -> None:
    greedy = compare([("a", output(clear(1), clear(2)), output(clear(1, moved=0.03), clear(2, moved=-0.01)))])
    assert greedy.noise == pytest.approx(0.03)
    assert greedy.spread == pytest.approx(((2 * 0.03**2 + 2 * 0.01**2) / 4) ** 0.5)
    assert compare([]).spread == 0


def test_a_margin_within_twice_the_noise_is_a_tie() -> None:
    plain, tested = output(clear(1), near(5, 6, 0.0199)), output(clear(1, moved=0.01), near(6, 5, 0.3))
    mismatch = only(compare([("a", plain, tested)]))
    assert mismatch.cause is Cause.TIE
    assert (mismatch.position, mismatch.plain_token, mismatch.tested_token) == (1, 5, 6)
    assert mismatch.margin == pytest.approx(0.0199)
    assert mismatch.noise == pytest.approx(0.01)
    assert "a tie: 0.02 nats apart, rounding moves them by up to 0.02" in mismatch.explanation


def test_a_margin_beyond_is_a_bug() -> None:
    plain, tested = output(clear(1), near(5, 6, 0.0201)), output(clear(1, moved=-0.01), near(6, 5, 0.3))
    greedy = compare([("a", plain, tested)])
    assert only(greedy).cause is Cause.BUG
    assert only(greedy).explanation.startswith("no tie:")
    assert (greedy.bugs, greedy.equal) == (1, 0)


def test_the_noise_is_that_of_all_prompts() -> None:
    parted = ("a", output(clear(1), near(5, 6, 0.05)), output(clear(1), near(6, 5, 0.05)))
    assert compare([parted]).bugs == 1
    noisy = ("b", output(clear(1), clear(2)), output(clear(1), clear(2, moved=0.03)))
    greedy = compare([parted, noisy])
    assert greedy.bugs == 0
    assert [prompt.noise for prompt in greedy.prompts] == pytest.approx([0, 0.03])
    assert greedy.noise == pytest.approx(0.03)


def test_neither_the_mismatch_nor_what_follows_it_counts_as_noise() -> None:
    plain = output(clear(1), near(5, 6, 0.5), clear(7))
    tested = output(clear(1), near(6, 5, 0.5), clear(7, moved=0.9))
    greedy = compare([("a", plain, tested)])
    assert greedy.noise == NOISE_FLOOR
    assert greedy.compared == 2
    assert greedy.bugs == 1
    assert greedy.prompts[0].tokens == 1


@pytest.mark.parametrize(("dtype", "cause"), [("float32", Cause.BUG), ("float16", Cause.BUG), ("bfloat16", Cause.TIE)])
def test_a_bug_in_the_logits_is_no_noise(dtype: str, cause: Cause) -> None:
    plain, tested = output(clear(1), near(5, 6, 0.8)), output(clear(1, moved=0.7), near(6, 5, 0.8))
    greedy = compare([("a", plain, tested)], dtype)
    assert only(greedy).cause is cause
    assert only(greedy).noise == pytest.approx(min(0.7, NOISE_LIMITS[dtype]))
    assert (greedy.noise, greedy.noise_limit) == (pytest.approx(0.7), NOISE_LIMITS[dtype])


def test_an_unknown_dtype_has_the_widest_limit() -> None:
    assert compare([], "float8_e4m3").noise_limit == 1.0


def test_a_token_that_plain_decoding_did_not_report_is_at_least_so_far() -> None:
    plain = output(clear(1), (5, {5: -0.1, 6: -1.0, 7: -3.0}))
    tested = output(clear(1), (9, {9: -0.1, 5: -0.2}))
    mismatch = only(compare([("a", plain, tested)]))
    assert mismatch.margin_is_bound
    assert mismatch.margin == pytest.approx(2.9)
    assert mismatch.cause is Cause.BUG
    assert "at least 2.9 nats" in mismatch.explanation


@pytest.mark.parametrize(("plain", "tested", "says"), [(2, 1, "output under test ended"), (1, 2, "plain output ended")])
def test_an_output_that_ends_early_is_a_bug(plain: int, tested: int, says: str) -> None:
    rows = [clear(1), clear(2)]
    mismatch = only(compare([("a", output(*rows[:plain]), output(*rows[:tested]))]))
    assert mismatch.cause is Cause.BUG
    assert mismatch.margin is None
    assert (mismatch.position, "end" in (mismatch.plain_text, mismatch.tested_text)) == (1, True)
    assert says in mismatch.explanation


def test_tokens_are_spelt_where_their_text_is_known() -> None:
    mismatch = only(compare([("a", output(near(5, 6, 0.3)), output(near(6, 5, 0.3)))], texts={5: " yes"}))
    assert (mismatch.plain_text, mismatch.tested_text) == (" yes", "6")
