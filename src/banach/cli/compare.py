"""`banach compare`: settings, figures and one plot of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from banach.cli.console import console, table
from banach.train import Epoch, Run
from banach.train.plot import PlotError, plot_comparison
from banach.train.run import SETTINGS as SETTINGS_FILE

EPILOG = """\b
Examples:
  banach compare runs/digits-1 runs/digits-2
  banach compare runs/* --out jfb-and-others.png"""

PNG = b"\x89PNG\r\n\x1a\n"
SETTINGS = ("run", "data", "model", "backward", "solver", "eps", "epochs")
FIGURES = ("run", "validation", "test", "depth", "residual", "J-products", "seconds", "s/epoch")


@dataclass(frozen=True)
class Compared:
    """A run, its epochs, and what it wrote of the test set when it ended."""

    name: str
    run: Run
    epochs: tuple[Epoch, ...]
    test: dict[str, Any]

    def settings(self) -> list[str | None]:
        """Return the cells of SETTINGS."""
        chosen = self.run.settings
        how: list[str | None] = [None, "explicit", None]
        if chosen.max_steps != 0:
            how = [chosen.backward, chosen.solver, _number(chosen.eps, "{:g}")]
        return [self.name, chosen.data, chosen.model, *how, f"{len(self.epochs)}/{chosen.epochs}"]

    def figures(self) -> list[str | None]:
        """Return the cells of FIGURES."""
        test = _number(self.test.get("totals", {}).get("accuracy"), "{:.2%}")
        if not self.epochs:
            return [self.name, None, test, *[None] * 5]
        last, seconds = self.epochs[-1], sum(epoch.seconds for epoch in self.epochs)
        return [
            self.name,
            _number(last.validation_accuracy, "{:.2%}"),
            test,
            _number(last.depth, "{:.1f}"),
            _number(last.residual, "{:.1e}"),
            f"{sum(epoch.products for epoch in self.epochs):,}",
            f"{seconds:,.1f}",
            f"{seconds / len(self.epochs):,.2f}",
        ]


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The plot, a PNG.")] = Path("comparison.png"),
) -> None:
    """Compare runs: their settings, their figures, and a plot of all of them.

    Validation accuracy, depth and residual are those of the last epoch; depth and residual are of the training
    solves. Test accuracy is what the run wrote when it ended ("-" before that): nothing is computed again.
    """
    _check_out(out)
    compared = _read(runs)
    settings = table("", SETTINGS, [one.settings() for one in compared])
    figures = table("", FIGURES, [one.figures() for one in compared])
    for column in (*settings.columns[1:], *figures.columns[1:]):
        column.no_wrap = True  # only names are folded
    console.print(settings)
    console.print()
    console.print(figures)
    titles = dict.fromkeys(one.test["title"] for one in compared if one.test)
    if titles:
        console.print(f"data: {', '.join(titles)}")
    if len(titles) > 1 or len({one.run.settings.data for one in compared}) > 1:
        console.print("The runs use different data: their accuracies are not comparable.")
    try:
        console.print(f"plot: {plot_comparison({one.name: one.epochs for one in compared}, out)}")
    except PlotError as error:
        console.print(f"no plot: {error}")


def _check_out(out: Path) -> None:
    """Refuse to overwrite anything but a plot."""
    if out.suffix.lower() != ".png":
        raise ValueError(f"the plot is a PNG, got --out {out}; use a name that ends in .png")
    if not out.exists():
        return
    with out.open("rb") as file:  # for a folder this raises an OSError
        if file.read(len(PNG)) != PNG:
            raise ValueError(f"{out} exists and is not a PNG; choose another --out, it will not be overwritten")


def _read(paths: Sequence[Path]) -> list[Compared]:
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
    names, found = [whole.name for whole in unique], []
    for whole, path in unique.items():
        run = Run.open(path)
        name = whole.name if names.count(whole.name) == 1 else str(path)
        found.append(Compared(name, run, run.metrics(), run.test() or {}))
    return found


def _number(value: float | None, pattern: str) -> str | None:
    return None if value is None else pattern.format(value)
