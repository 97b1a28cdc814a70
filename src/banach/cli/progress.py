"""Training as it is seen: a live bar over the steps on a terminal, and one lasting line per epoch everywhere."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from banach.cli.console import console as standard
from banach.train import Epoch, Position

_EVERY = 0.1  # seconds between two updates of the bar; in between, a step costs a look at the clock
HEADER = "    epoch    loss   train validation depth residual converged  sigma  seconds"  # fits 80 columns


class Progress:
    """Shows `epochs` epochs of `steps` steps each; use it in a `with`. `start` is where a resumed run goes on.

    Pass `step` and `epoch` to the training loop. Where the console is no terminal there is no bar: lines alone.
    """

    def __init__(
        self, epochs: int, steps: int, *, start: Position = Position(0, 0), console: Console = standard
    ) -> None:
        self._console, self._epochs, self._steps = console, epochs, steps
        self._clock = _Clock(epochs * steps)
        self._bars = self._make_bars(start) if is_terminal(console) else None
        self._next = 0.0 if self._bars is not None else math.inf  # when the bar is to be updated again
        self._told = False

    def step(self, position: Position) -> None:
        """After every step of training. Cheap: most calls only look at the clock, if there is a bar at all."""
        if self._next == math.inf:
            return
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + _EVERY
            self._show(position)

    def epoch(self, epoch: Epoch) -> None:
        """After every epoch: its line."""
        if not self._told:
            self._console.print(HEADER, soft_wrap=True)
            self._told = True
        self._console.print(line(epoch, self._epochs), soft_wrap=True)
        if self._bars is not None:
            self._show(Position(epoch.epoch, 0))

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _make_bars(self, start: Position) -> Bars:
        columns = [TextColumn("epoch {task.description}"), BarColumn(), TextColumn("{task.fields[place]}")]
        # transient: when training ends the bar goes, and the lines stay.
        bars = Bars(*columns, self._clock, console=self._console, refresh_per_second=4, transient=True)
        self._task = bars.add_task(self._name(start), total=self._steps, place=self._place(start))
        bars.update(self._task, completed=start.step)
        return bars

    def _show(self, position: Position) -> None:
        assert self._bars is not None
        self._clock.note(position.epoch * self._steps + position.step)
        self._bars.update(
            self._task,
            description=self._name(position),
            completed=position.step,
            place=self._place(position),
        )

    def _name(self, position: Position) -> str:
        return f"{min(position.epoch + 1, self._epochs)}/{self._epochs}"

    def _place(self, position: Position) -> str:
        return f"{position.step}/{self._steps}"


class _Clock(ProgressColumn):
    """Time since the start, and the time that is left if the steps to come take as long as those that were made.

    rich's own clocks stop when a bar is full, and ours is full after every epoch.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total, self._start = total, time.perf_counter()
        self._first: tuple[int, float] | None = None
        self._done = 0

    def note(self, done: int) -> None:
        """`done` steps are made. The first time counts for nothing: a resumed run did not make them now."""
        self._done = done
        if self._first is None:
            self._first = done, time.perf_counter()

    def render(self, task: Task) -> Text:
        now = time.perf_counter()
        return Text(f"{_duration(now - self._start)} elapsed, {self._left(now)} left")

    def _left(self, now: float) -> str:
        before, since = self._first or (0, now)
        made = self._done - before
        return _duration((now - since) / made * (self._total - self._done)) if made > 0 else "-:--:--"


def line(epoch: Epoch, epochs: int) -> str:
    """One epoch in the columns of HEADER; "-" is a figure that it does not have."""
    cells = (
        f"{epoch.epoch}/{epochs}".rjust(9),
        _cell(epoch.loss, "{:.4f}", 7),
        _cell(epoch.accuracy, "{:.2%}", 7),
        _cell(epoch.validation_accuracy, "{:.2%}", 10),
        _cell(epoch.depth, "{:.1f}", 5),
        _cell(epoch.residual, "{:.1e}", 8),
        _cell(epoch.converged, "{:.1%}", 9),
        _cell(epoch.sigma, "{:.3f}", 6),
        _cell(epoch.seconds, "{:.2f}", 8),
    )
    return " ".join(cells)


def _cell(value: float | None, pattern: str, width: int) -> str:
    return ("-" if value is None else pattern.format(value)).rjust(width)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def is_terminal(console: Console) -> bool:
    """Can the console show a bar? FORCE_COLOR does for rich; in a log that would be control characters."""
    return console.is_interactive and console.file.isatty()
