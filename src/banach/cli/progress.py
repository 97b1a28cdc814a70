"""Progress of training: a live bar over the run on a terminal, and one permanent line per epoch everywhere."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from banach.cli.console import console as standard
from banach.train import Epoch, Position

_EVERY = 0.1  # seconds between two updates of the bar
# Field of an Epoch: its name in the header, its format and its width. All columns fit into 80 characters.
_COLUMNS = {
    "loss": ("loss", ".4f", 7),
    "accuracy": ("train", ".2%", 7),
    "validation_accuracy": ("validation", ".2%", 10),
    "depth": ("depth", ".1f", 5),
    "residual": ("residual", ".1e", 8),
    "converged": ("converged", ".1%", 9),
    "sigma": ("sigma", ".3f", 6),
    "seconds": ("seconds", ".2f", 8),
}
HEADER = " ".join(["epoch".rjust(9), *(name.rjust(width) for name, _, width in _COLUMNS.values())])


class Progress:
    """Shows `epochs` epochs of `steps` steps each; use it in a `with`. `start` is where a resumed run begins.

    Pass `step` and `epoch` to the training loop. If the console is not a terminal there is no bar.
    """

    def __init__(
        self, epochs: int, steps: int, *, start: Position = Position(0, 0), console: Console = standard
    ) -> None:
        self._console, self._epochs, self._steps = console, epochs, steps
        self._clock = _Clock(epochs * steps)
        self._next = 0.0 if is_terminal(console) else math.inf  # when to update the bar again
        self._shown_header = False
        columns = [TextColumn("epoch {task.description}"), BarColumn(), TextColumn("{task.fields[place]}")]
        # transient: the bar disappears when training ends, and the lines stay.
        options = {
            "console": console,
            "refresh_per_second": 4,
            "transient": True,
            "disable": self._next == math.inf,
        }
        self._bars = Bars(*columns, self._clock, **options)  # type: ignore[arg-type]
        self._task = self._bars.add_task("", total=steps, place="")
        self._show(start, count=False)

    def step(self, position: Position) -> None:
        """Update the bar after a step of training. Most calls only compare times."""
        if self._next < math.inf and time.perf_counter() >= self._next:
            self._next = time.perf_counter() + _EVERY
            self._show(position)

    def epoch(self, epoch: Epoch) -> None:
        """Print the line of an epoch."""
        if not self._shown_header:
            self._console.print(HEADER, soft_wrap=True)
            self._shown_header = True
        self._console.print(line(epoch, self._epochs), soft_wrap=True)
        self._show(Position(epoch.epoch, 0))

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def _show(self, position: Position, *, count: bool = True) -> None:
        if count:
            self._clock.note(position.epoch * self._steps + position.step)
        name = f"{min(position.epoch + 1, self._epochs)}/{self._epochs}"
        place = f"{position.step}/{self._steps}"
        self._bars.update(self._task, description=name, completed=position.step, place=place)


class _Clock(ProgressColumn):
    """Time since the start, and time left at the pace so far. (rich's clocks stop when a bar is full.)"""

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total, self._done, self._start = total, 0, time.perf_counter()
        self._first: tuple[int, float] | None = None

    def note(self, done: int) -> None:
        """Count steps from the first call on: a resumed run did not make the earlier ones now."""
        self._done = done
        self._first = self._first or (done, time.perf_counter())

    def render(self, task: Task) -> Text:
        now = time.perf_counter()
        before, since = self._first or (0, now)
        made = self._done - before
        left = _duration((now - since) / made * (self._total - self._done)) if made > 0 else "-:--:--"
        return Text(f"{_duration(now - self._start)} elapsed, {left} left")


def line(epoch: Epoch, epochs: int) -> str:
    """Return one epoch in the columns of HEADER; "-" is a figure that it does not have."""
    cells = [f"{epoch.epoch}/{epochs}".rjust(9)]
    for field, (_, pattern, width) in _COLUMNS.items():
        value = getattr(epoch, field)
        cells.append(("-" if value is None else format(value, pattern)).rjust(width))
    return " ".join(cells)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def is_terminal(console: Console) -> bool:
    """Return True if the console can show a bar. With FORCE_COLOR rich would write control characters to a log."""
    return console.is_interactive and console.file.isatty()
