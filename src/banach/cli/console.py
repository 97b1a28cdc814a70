"""Output of the command line: tables on standard output, warnings on standard error."""

import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

NUMBER = re.compile(r"\d|-\d|-$")  # how a cell of a right-aligned column starts
# How typer shows help: plain text.
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}


class Patient(Console):
    """A console that survives a closed pipe: `banach train | head` continues to train."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# No emoji, markup or highlighting: brackets in names are printed as they are.
console = Patient(markup=False, emoji=False, highlight=False, soft_wrap=True)
if console.width < 1:  # COLUMNS=0, which some systems set for "unknown"
    console.width = 80


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table | str:
    """Return a table of these rows, numbers right-aligned; or one block per row if the console is too narrow.

    Words are never cut: a column is at least as wide as its longest word. None is "-".
    """
    number = lambda value: f"{value:g}" if isinstance(value, float) else str(value)  # noqa: E731
    cells = [["-" if value is None else number(value) for value in row] for row in rows]
    texts = [[column, *(row[index] for row in cells)] for index, column in enumerate(columns)]
    least = [max(cell_len(word) for text in column for word in text.split() or [""]) for column in texts]
    spare = console.width - sum(least) - 3 * (len(columns) - 1)
    if spare < 0:
        return _blocks(title, columns, cells)
    made = Table(title=title or None, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for column, width in zip(texts, least, strict=True):
        more = min(spare, max(map(cell_len, column)) - width)
        spare -= more
        numbers = all(NUMBER.match(cell) for cell in column[1:])
        made.add_column(column[0], justify="right" if numbers else "left", width=width + more)
    for row in cells:
        made.add_row(*row)
    return made


def _blocks(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a paragraph per row: its first cell, then name and value of each other column."""
    lines, width = [title] if title else [], max(map(len, columns[1:]))
    for row in rows:
        lines.append(row[0])
        for column, cell in zip(columns[1:], row[1:], strict=True):
            lines.append(wrapped(cell, f"  {column.ljust(width)}  ", " " * (width + 4)))
    return "\n".join(lines)


def wrapped(text: str, first: str = "", then: str = "") -> str:
    """Return a text as lines of the width of the console; no word is cut."""
    wrapper = textwrap.TextWrapper(console.width, first, then, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def complain(text: str) -> None:
    """Print a line on standard error; closed pipes or full disks lose it: `banach train 2>&1 | head` trains on."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


# Advice for callers of the library, and its replacements on the command line, by words of the cause.
_LIBRARY = "pass solution=True and print Solution.summary()"
_HERE = {
    "max_steps": "try more --max-steps, a larger --eps or another --solver",
    "stalled": "try a larger --eps, or --precision fp32 if it is another",
    "NaN": "look for NaN in the data, and see `banach diagnose RUN`: R may not contract",
}


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """Print each warning in the block once, as one line on standard error without a source line.

    Python's filter shows a warning again whenever any code changes the filters.
    """
    said: set[str] = set()

    def say(message: Any, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        text = text.replace(_LIBRARY, "; ".join(advice for words, advice in _HERE.items() if words in text))
        if text not in said:
            said.add(text)
            complain(f"warning: {text}")

    with warnings.catch_warnings():
        warnings.showwarning = say
        yield
