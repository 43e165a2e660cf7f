"""Notices drafting that does not pay, and says so once, with what is probably wrong. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_DRAFTS = 200
"""Judged drafts of a proposer after which it is first looked at: soon, since wrong heads are wrong from the start."""

LATER_DRAFTS = 5_000
"""The same from then on: traffic changes, but one odd request is no reason for an alarm."""

LEAST_PASSES = 40
"""A pass stops at the first refusal, so many drafts in few passes say little."""

LEAST_GAIN = 0.05
"""Accepted drafts per pass with drafts below which it cannot pay: a pass over more rows costs at least so much more."""

HOT = 0.8
"""Mean temperature from which on it is named as a likely cause."""


@dataclass(slots=True)
class _Window:
    passes: int = 0
    drafts: int = 0
    accepted: int = 0
    heat: float = 0.0
    """Sum of the temperatures over the drafts."""
    verified: bool = True
    """All of it was verified by the target; else control has held drafts against the answers."""
    wanted: int = FIRST_DRAFTS


class Alarm:
    """Watches the acceptance of one engine's proposers."""

    def __init__(self, is_learned: Callable[[str], bool] = lambda source: False, adaptive: bool = False) -> None:
        self._is_learned, self._adaptive = is_learned, adaptive
        self._windows: dict[str, _Window] = {}
        self._said: set[str] = set()

    def saw(self, source: str, drafts: int, accepted: int, temperature: float) -> None:
        """A pass verified a proposer's drafts."""
        self._note(source, 1, drafts, accepted, temperature)

    def heard(self, source: str, passes: int, drafts: int, right: int, temperature: float) -> None:
        """Control has held drafts for so many passes against the answers, whether they were verified or not."""
        self._note(source, passes, drafts, right, temperature)
        self._windows[source].verified = False

    def _note(self, source: str, passes: int, drafts: int, accepted: int, temperature: float) -> None:
        window = self._windows.get(source)
        if window is None:
            window = self._windows[source] = _Window()
        window.passes += passes
        window.drafts += drafts
        window.accepted += accepted
        window.heat += temperature * drafts

    def due(self) -> list[str]:
        """What there is to say now: a line for each proposer that was found out, once."""
        lines = []
        for source, window in self._windows.items():
            if window.drafts < window.wanted or window.passes < LEAST_PASSES:
                continue
            self._windows[source] = _Window(wanted=LATER_DRAFTS)
            if window.accepted < LEAST_GAIN * window.passes and source not in self._said:
                self._said.add(source)
                lines.append(self._line(source, window))
        return lines

    def _line(self, source: str, window: _Window) -> str:
        passes, drafts, accepted = window.passes, window.drafts, window.accepted
        remedy = (
            "Adaptive control leaves off drafting where it does not pay."
            if self._adaptive
            else "'control': 'adaptive' leaves off drafting where it does not pay; or drop 'proposer' from --speculative-config."
        )
        tokens = 1 + accepted / passes
        found = (
            f"the target accepted {accepted} of {drafts} drafts by {source!r} ({accepted / drafts:.1%}), in {passes} passes over "
            f"them, so that such a pass gave {tokens:.2f} tokens and cost more than plain decoding"
            if window.verified
            else f"{accepted} of {drafts} drafts by {source!r} agreed with the answers ({accepted / drafts:.1%}), so that a pass "
            f"over them would have given {tokens:.2f} tokens and cost more than plain decoding"
        )
        causes = "; ".join(self._causes(source, window))
        return f"Drafting does not pay: {found}. Likely causes: {causes}. {remedy} Said once."

    def _causes(self, source: str, window: _Window) -> list[str]:
        mean = window.heat / window.drafts
        hot = [f"a high temperature ({mean:.1f} on average here)"] if mean >= HOT else []
        if self._is_learned(source):
            return [
                *hot,
                "heads or a draft model trained for another target than this one, or for another version of it",
                "prompts without the chat template that it was trained with",
                "text unlike what it was trained on",
            ]
        return [*hot, "answers that repeat neither the prompt nor themselves", "text that nobody can predict"]
