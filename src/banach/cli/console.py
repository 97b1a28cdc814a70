"""What the command line writes to: standard output for answers, standard error for warnings."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table


class Patient(Console):
    """A console that goes on where no one reads any more: `banach train | head` is still to train."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())


# No emoji, markup or highlighting: what is printed is what was measured, brackets and all.
console = Patient(markup=False, emoji=False, highlight=False, soft_wrap=True)
if console.width < 1:  # COLUMNS=0, by which some mean that they do not know
    console.width = 80


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of these rows; numbers stand to the right."""
    made = Table(title=title or None, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        side: Any = "right" if _are_numbers(row[index] for row in cells) else "left"
        made.add_column(column, justify=side, overflow="fold")
    for row in cells:
        made.add_row(*row)
    return made


def fits(made: Table) -> bool:
    """Has the console room for it, without a folded cell?"""
    return console.measure(made, options=console.options.update(width=10_000)).maximum <= console.width


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """Inside, a warning is one line on standard error, without the place in the code it came from."""
    with warnings.catch_warnings():
        warnings.showwarning = _say
        yield


def _say(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    text = " ".join(str(message).split())
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _are_numbers(cells: Iterable[str]) -> bool:
    return all(cell == "-" or cell[:1].isdigit() or cell[:2] in ("-0", "-1", "0.") for cell in cells)
