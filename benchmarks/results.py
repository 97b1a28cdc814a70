"""What a benchmark is and what it returns: rows, targets, a table of at most 120 columns and one JSON file."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from banach.provenance import provenance, write_json

Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A measured quantity: mean, sample standard deviation (None for one value), count, median and range."""

    mean: float
    spread: float | None
    count: int
    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Iterable[float]) -> "Figure":
        numbers = [float(value) for value in values]
        mean = sum(numbers) / len(numbers)
        squares = sum((number - mean) ** 2 for number in numbers)  # statistics.stdev refuses infinity
        spread = math.sqrt(squares / (len(numbers) - 1)) if len(numbers) > 1 else None
        return Figure(mean, spread, len(numbers), statistics.median(numbers), min(numbers), max(numbers))


@dataclass(frozen=True)
class Target:
    """A promised figure and the measured one. NaN misses every target."""

    what: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def sentence(self, before: float | None = None) -> str:
        """Return the target in words; `before` is the figure of an earlier run."""
        side = "at least" if self.at_least else "at most"
        words = f"{self.what}: {cell(self.measured)}, {side} {cell(self.bound)}"
        if before is not None:
            words += f"; before: {cell(before)}" + (", worse" if self.is_worse(before) else "")
        return words

    def is_worse(self, before: float) -> bool:
        """Return True if an earlier figure was better by more than 3%."""
        low, high = (self.measured, before) if self.at_least else (before, self.measured)
        return high > 1.03 * low


@dataclass(frozen=True)
class Report:
    """What one run measured. The keys of `rows` are the columns of the table."""

    rows: list[Row]
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Benchmark:
    """A named question, the function that answers it, and its two sizes."""

    name: str
    question: str
    run: Callable[[Any], Report]
    full: Any
    quick: Any
    group: str = "cpu"  # or gpu

    def settings(self, *, quick: bool, **changes: Any) -> Any:
        """Return the settings of one of the sizes, with those `changes` that they have a field for."""
        size = self.quick if quick else self.full
        known = {key: value for key, value in changes.items() if value is not None and hasattr(size, key)}
        return replace(size, **known)

    def write(self, report: Report, settings: Any, folder: Path) -> Path:
        """Write a report and where it comes from as JSON."""
        content = {"name": self.name, "question": self.question, **asdict(report)}
        content["targets"] = [{**asdict(target), "met": target.met} for target in report.targets]
        content["provenance"] = provenance(asdict(settings), device=getattr(settings, "device", "cpu"))
        return write_json(folder / f"{self.name}.json", content)

    def show(self, report: Report, before: Mapping[str, float], file: Any = None) -> None:
        """Print table, targets and notes of a report, to stdout if no file is given; `before`: see `earlier`."""
        from rich.console import Console

        console, title = Console(width=120, file=file), f"{self.name}: {self.question}"
        console.print(table(title, report.rows) if report.rows else title, highlight=False)
        for target in report.targets:
            mark = "[green]met[/]    " if target.met else "[bold red]missed[/] "
            console.print(f"  {mark}{target.sentence(before.get(target.what))}")
        for note in report.notes:
            console.print(f"  {note}", style="dim", highlight=False, markup=False)
        console.print()


def earlier(path: Path) -> dict[str, float]:
    """Return the figures in a file of results by the names of their targets, none if there is no file."""
    targets = json.loads(path.read_text("utf-8"))["targets"] if path.exists() else []
    return {one["what"]: float(one["measured"]) for one in targets}


def table(title: str, rows: list[Row]) -> Any:
    """Return the rows as a table of rich: words to the left, numbers to the right."""
    from rich.table import Table  # not needed where processes only measure

    made = Table(title=title, title_justify="left", header_style="bold")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        words = any(isinstance(row.get(column), str) for row in rows)
        made.add_column(column, justify="left" if words else "right", overflow="fold")
    for row in rows:
        made.add_row(*(cell(row.get(column)) for column in columns))
    return made


def cell(value: Any) -> str:
    """Return a value as a table shows it: three digits, no exponent where a plain number is short."""
    if value is None:
        return ""
    if isinstance(value, Figure):
        return cell(value.mean) if value.spread is None else f"{cell(value.mean)} ± {cell(value.spread)}"
    if not isinstance(value, float):
        return str(value)
    if abs(value) < 1e6 and value.is_integer():
        return f"{int(value)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"
