"""What a benchmark returns: rows, targets met or missed, and a table that fits in 100 columns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from banach.provenance import Summary, provenance, write_json

Row = dict[str, Any]


def is_here(device: str) -> bool:
    """Is it the name of a device that tensors can be made on?"""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # the latter where torch was built without CUDA
        return False
    return True


@dataclass(frozen=True)
class Target:
    """A figure that was promised, and the one that was measured."""

    what: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def sentence(self) -> str:
        side = "at least" if self.at_least else "at most"
        return f"{self.what}: {number(self.measured)}, {side} {number(self.bound)}"


@dataclass(frozen=True)
class Result:
    """One benchmark's answer. `rows` share their keys where they can: the keys are the columns."""

    name: str
    question: str
    rows: list[Row]
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: Any = None
    device: str = "cpu"
    details: Any = None  # what belongs in the file and would burst a table

    @property
    def met(self) -> bool:
        return all(target.met for target in self.targets)

    def as_dict(self) -> Row:
        targets = [{**asdict(target), "met": target.met} for target in self.targets]
        return {
            "name": self.name,
            "question": self.question,
            "targets": targets,
            "rows": self.rows,
            "notes": self.notes,
            **({} if self.details is None else {"details": self.details}),
            "provenance": provenance({} if self.settings is None else asdict(self.settings), device=self.device),
        }

    def write(self, folder: Path) -> Path:
        return write_json(folder / f"{self.name}.json", self.as_dict())

    def show(self, console: Console) -> None:
        # A table without rows would not show its title.
        console.print(self._table() if self.rows else f"{self.name}: {self.question}", highlight=False)
        for target in self.targets:
            console.print(f"  [green]met[/]    {target.sentence()}" if target.met else _missed(target))
        for note in self.notes:
            console.print(f"  {note}", style="dim", highlight=False)
        console.print()

    def _table(self) -> Table:
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        table = Table(title=f"{self.name}: {self.question}", title_justify="left", header_style="bold")
        for column in columns:
            words = any(isinstance(row.get(column), str) for row in self.rows)
            table.add_column(column, justify="left" if words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(cell(row.get(column)) for column in columns))
        return table


def _missed(target: Target) -> str:
    return f"  [bold red]missed[/] {target.sentence()}"


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Summary):
        return number(value.median) if value.spread is None else f"{number(value.mean)} ± {number(value.spread)}"
    return number(value) if isinstance(value, (int, float)) else str(value)


def number(value: float) -> str:
    """Three digits, and no exponent where a plain number is short."""
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"
