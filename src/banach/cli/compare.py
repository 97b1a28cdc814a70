"""`banach compare`: the settings in which runs differ, their figures, and one plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from banach.cli.console import console, table
from banach.cli.opened import show_plot
from banach.train import Epoch, Run
from banach.train.plot import plot_comparison
from banach.train.run import SETTINGS as SETTINGS_FILE

EPILOG = """\b
Examples:
  banach compare runs/digits-1 runs/digits-2
  banach compare runs/* --out jfb-and-others.png"""

PNG = b"\x89PNG\r\n\x1a\n"
ALWAYS = ("data", "model", "solver", "backward", "eps")  # settings that are shown even if they are the same


@dataclass(frozen=True)
class Compared:
    """A run, its epochs, and what it wrote of the test set when it ended."""

    run: Run
    epochs: tuple[Epoch, ...]
    test: Mapping[str, Any]

    def last(self, field: str) -> Any:
        """Return a figure of the last epoch, None before the first."""
        return getattr(self.epochs[-1], field) if self.epochs else None

    def total(self, field: str) -> Any:
        """Return the sum of a figure over the epochs, None before the first."""
        return sum(getattr(epoch, field) for epoch in self.epochs) if self.epochs else None


# What is shown of every run, and how it is written.
FIGURES: dict[str, tuple[str, Callable[[Compared], Any]]] = {
    "epochs done": ("{}", lambda one: f"{len(one.epochs)}/{one.run.settings.epochs}"),
    "validation accuracy": ("{:.2%}", lambda one: one.last("validation_accuracy")),
    "test accuracy": ("{:.2%}", lambda one: one.test.get("totals", {}).get("accuracy")),
    "mean solver steps": ("{:.1f}", lambda one: one.last("depth")),
    "mean residual": ("{:.1e}", lambda one: one.last("residual")),
    "J-products": ("{:,}", lambda one: one.total("products")),
    "seconds": ("{:,.1f}", lambda one: one.total("seconds")),
    "seconds per epoch": ("{:,.2f}", lambda one: one.total("seconds") / len(one.epochs) if one.epochs else None),
}


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The plot, a PNG.")] = Path("comparison.png"),
) -> None:
    """Compare runs: every setting that differs, their figures, and a plot of all of them.

    Validation accuracy, steps and residual are those of the last epoch; steps and residual are of the training
    solves. Test accuracy is what the run wrote when it ended ("-" before that): nothing is computed again.
    """
    _check_out(out)
    compared = _read(runs)
    console.print(table("", ("setting", *compared), _settings(compared)))
    console.print()
    console.print(table("", ("figure", *compared), _figures(compared)))
    titles = dict.fromkeys(one.test["title"] for one in compared.values() if one.test)
    if titles:
        console.print(f"data: {', '.join(titles)}")
    if len(titles) > 1 or len({one.run.settings.data for one in compared.values()}) > 1:
        console.print("The runs use different data: their accuracies are not comparable.")
    show_plot(plot_comparison, {name: one.epochs for name, one in compared.items()}, out)


def _settings(compared: Mapping[str, Compared]) -> list[list[Any]]:
    """Return the rows of the settings in ALWAYS, then of those that differ."""
    chosen = [one.run.settings.to_dict() for one in compared.values()]
    rows = {key: [settings[key] for settings in chosen] for key in (*ALWAYS, *chosen[0])}
    shown = {key: row for key, row in rows.items() if key in ALWAYS or any(value != row[0] for value in row)}
    return [[key.replace("_", "-"), *map(_word, row)] for key, row in shown.items()]


def _word(value: Any) -> Any:
    if isinstance(value, dict):  # a schedule
        return " ".join(str(part) for part in value.values())
    return f"{value:g}" if isinstance(value, float) else value


def _figures(compared: Mapping[str, Compared]) -> list[list[Any]]:
    def cell(pattern: str, value: Any) -> str | None:
        return None if value is None else pattern.format(value)

    return [
        [name, *(cell(pattern, read(one)) for one in compared.values())]
        for name, (pattern, read) in FIGURES.items()
    ]


def _check_out(out: Path) -> None:
    """Refuse to overwrite anything but a plot."""
    if out.suffix.lower() != ".png":
        raise ValueError(f"the plot is a PNG, got --out {out}; use a name that ends in .png")
    if not out.exists():
        return
    with out.open("rb") as file:  # for a folder this raises an OSError
        if file.read(len(PNG)) != PNG:
            raise ValueError(f"{out} exists and is not a PNG; choose another --out, it will not be overwritten")


def _read(paths: Sequence[Path]) -> dict[str, Compared]:
    """Return the runs in the order given, each once; named by their folders where those names are unique.

    Folders that are not runs are skipped, as a pattern may match some, unless there is no run at all.
    """
    others = [path for path in paths if path.is_dir() and not (path / SETTINGS_FILE).exists()]
    if others and len(others) < len(paths):
        console.print("not a run, skipped: " + ", ".join(map(str, others)))
        paths = [path for path in paths if path not in others]
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    names, found = [whole.name for whole in unique], dict[str, Compared]()
    for whole, path in unique.items():
        run = Run.open(path)
        name = whole.name if names.count(whole.name) == 1 else str(path)
        found[name] = Compared(run, run.metrics(), run.test() or {})
    return found
