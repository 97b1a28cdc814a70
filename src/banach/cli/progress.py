"""Progress of training: a live bar over the run on a terminal, and one permanent line per epoch everywhere."""

import math

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from banach.cli.console import console as standard
from banach.train import Epoch, Position

# Field of an Epoch: the two lines of its header, its format and its width. All columns fit into 80 characters.
_COLUMNS = {
    "loss": (("train", "loss"), ".4f", 7),
    "accuracy": (("train", "accuracy"), ".2%", 8),
    "validation_accuracy": (("validation", "accuracy"), ".2%", 10),
    "depth": (("solver", "steps"), ".1f", 6),
    "residual": (("mean", "residual"), ".1e", 8),
    "converged": (("samples", "converged"), ".1%", 9),
    "sigma": (("", "sigma"), ".3f", 6),
    "seconds": (("", "seconds"), ".2f", 8),
}
HEADER = "\n".join(
    " ".join([first.rjust(9), *(names[line].rjust(width) for names, _, width in _COLUMNS.values())])
    for line, first in enumerate(("", "epoch"))
)


class Progress(rich.progress.Progress):
    """Shows `epochs` epochs of `steps` steps each; use it in a `with`.

    Pass `step` and `epoch` to the training loop. If the console is not a terminal there is no bar.
    """

    def __init__(self, epochs: int, steps: int, *, console: Console = standard) -> None:
        super().__init__(
            *(TextColumn("epoch {task.description}"), BarColumn(), TextColumn("{task.fields[place]}")),
            *(TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")),
            console=console,
            refresh_per_second=4,
            speed_estimate_period=math.inf,  # rich would give no estimate for steps of more than 30 seconds
            transient=True,  # the bar disappears when training ends, and the lines stay
            disable=not is_terminal(console),
        )
        self._epochs, self._steps, self._header = epochs, steps, f"{HEADER}\n"
        # The first step sets where a resumed run begins: rich measures the speed from there on.
        self._task = self.add_task("", total=epochs * steps, place="")

    def step(self, position: Position) -> None:
        """Update the bar after a step of training; another thread draws it."""
        done = position.epoch * self._steps + position.step
        name = f"{min(position.epoch + 1, self._epochs)}/{self._epochs}"
        self.update(self._task, description=name, completed=done, place=f"{position.step}/{self._steps}")

    def epoch(self, epoch: Epoch) -> None:
        """Print the line of an epoch, the first one below the header."""
        self.console.print(self._header + line(epoch, self._epochs), soft_wrap=True)
        self._header = ""
        self.step(Position(epoch.epoch, 0))


def line(epoch: Epoch, epochs: int) -> str:
    """Return one epoch in the columns of HEADER; "-" is a figure that it does not have."""
    cells = [f"{epoch.epoch}/{epochs}".rjust(9)]
    for field, (_, pattern, width) in _COLUMNS.items():
        value = getattr(epoch, field)
        cells.append(("-" if value is None else format(value, pattern)).rjust(width))
    return " ".join(cells)


def is_terminal(console: Console) -> bool:
    """Return True if the console can show a bar. With FORCE_COLOR rich would write control characters to a log."""
    return console.is_interactive and console.file.isatty()
