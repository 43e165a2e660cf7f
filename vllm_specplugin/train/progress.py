"""What a training run shows while it runs: bars on stderr where someone watches, and a line per evaluation everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

from vllm_specplugin.train.objective import acceptance_length
from vllm_specplugin.train.state import Progress as RunProgress
from vllm_specplugin.train.tally import Tally

SMOOTHING = 0.9
"""Weight of what was shown before, in the live figures."""


class Screen:
    """The only place of training that prints."""

    def __init__(self, enabled: bool = True) -> None:
        self.console = Console(stderr=True, highlight=False, emoji=False, quiet=not enabled)
        self._bars: Progress | None = None
        self._task = TaskID(0)
        self._shown: list[float] = []
        self._seen = Tally()
        self._since = (0, 0.0)

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, soft_wrap=True)

    @contextmanager
    def states(self) -> Iterator[Callable[[int, str], Callable[[int], None]]]:
        """A bar for the pass over the data, which appears if there is one."""
        with _bars(self.console, "{task.description}") as bars:

            def begin(total: int, description: str) -> Callable[[int], None]:
                self.say(description)
                task = bars.add_task("running the target", total=total)
                return lambda done: bars.update(task, completed=done)

            yield begin

    @contextmanager
    def training(self, begun: RunProgress, length: str) -> Iterator[None]:
        """The bar of the loop; `length` says what it runs for."""
        self.say(f"training for {length}" + (f", going on from step {begun.step}" if begun.step else ""))
        self._since = (begun.tokens, begun.seconds)
        with _bars(self.console, "{task.description}") as self._bars:
            self._task = self._bars.add_task("starting", total=1.0)
            yield

    def step(self, progress: RunProgress, share: float, tally: Tally) -> None:
        """After each optimiser step; `tally` is of its batches alone."""
        figures = [tally.figures()["loss"], *tally.rates]
        pairs = zip(self._shown, figures, strict=True) if self._shown else zip(figures, figures, strict=True)
        self._shown = [SMOOTHING * old + (1 - SMOOTHING) * new for old, new in pairs]
        tokens, seconds = progress.tokens - self._since[0], progress.seconds - self._since[1]
        if self._bars is not None:
            rates, speed = self._shown[1:], f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
            text = f"step {progress.step}  loss {self._shown[0]:.2f}  accepted {_percent(rates)}  length"
            self._bars.update(self._task, completed=share, description=f"{text} {acceptance_length(rates):.2f}  {speed}")

    def evaluated(self, progress: RunProgress, tally: Tally) -> None:
        """After each look at the held-out examples."""
        training = f"loss {self._shown[0]:.3f}" if self._shown else ""
        self.say(
            f"step {progress.step}: {training}, held-out {tally.figures()['loss']:.3f}, accepted {_percent(tally.rates)}, "
            f"acceptance length {tally.length:.2f} ({progress.tokens:,} tokens, {progress.seconds / 60:.1f} min)"
        )


def _percent(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.0%}" for rate in rates)


def _bars(console: Console, text: str) -> Progress:
    columns = (SpinnerColumn(), TextColumn(text), BarColumn(bar_width=12), TimeRemainingColumn(compact=True))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
