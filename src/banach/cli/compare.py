"""banach compare: runs side by side in a table, and on top of each other in a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from banach.cli.console import console, fits, table
from banach.train import Epoch, Run
from banach.train.plot import PlotError, plot_comparison
from banach.train.run import SETTINGS as SETTINGS_FILE

EPILOG = """\b
Examples:
  banach compare runs/digits-1 runs/digits-2
  banach compare runs/* --out jfb-and-its-rivals.png"""

PNG = b"\x89PNG\r\n\x1a\n"
SETTINGS = ("run", "data", "model", "backward", "solver", "eps", "epochs")
FIGURES = ("validation", "test", "depth", "residual", "J-products", "seconds", "s/epoch")


@dataclass(frozen=True)
class Compared:
    """A run, what it measured, and what its test file says, if it has one."""

    name: str
    run: Run
    epochs: tuple[Epoch, ...]
    test: float | None
    title: str | None


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where the plot goes, a PNG.")] = Path("comparison.png"),
) -> None:
    """Compare runs: a table with one row per run, and a plot of all of them.

    Validation accuracy, depth and residual are those of the last epoch; the residual and the depth were seen in
    training. Test accuracy is what the run wrote when it ended ("-" before that): nothing is computed again.
    """
    _check_out(out)
    compared = _read(runs)
    _print_table(compared)
    for sentence in _remarks(compared):
        console.print(sentence)
    try:
        plot_comparison({one.name: one.epochs for one in compared}, out)
    except PlotError as error:
        console.print(f"no plot: {error}")
    else:
        console.print(f"plot: {out}")


def _check_out(out: Path) -> None:
    """Refuse what would overwrite something else than a plot."""
    if out.suffix.lower() != ".png":
        raise ValueError(f"the plot is a PNG, got --out {out}; give it a name that ends in .png")
    if not out.exists():
        return
    with out.open("rb") as file:  # of a folder this is an OSError, which says so
        if file.read(len(PNG)) != PNG:
            raise ValueError(f"{out} is there and is no PNG; choose another --out, it will not be overwritten")


def _read(paths: Sequence[Path]) -> list[Compared]:
    """The runs in the order given, each once; by the names of their folders where those tell them apart."""
    unique: dict[Path, Path] = {}
    for path in _runs_among(paths):
        unique.setdefault(path.resolve(), path)
    names = [whole.name for whole in unique]
    return [
        _read_one(path, whole.name if names.count(whole.name) == 1 else str(path))
        for whole, path in unique.items()
    ]


def _runs_among(paths: Sequence[Path]) -> Sequence[Path]:
    """A pattern may name other folders beside runs: they are passed by, unless there is no run at all."""
    runs = [path for path in paths if (path / SETTINGS_FILE).exists()]
    others = [path for path in paths if path not in runs and path.is_dir()]
    if not runs or len(runs) + len(others) < len(paths):
        return paths  # what is wrong is said when it is opened
    if others:
        console.print("no run, passed by: " + ", ".join(map(str, others)))
    return runs


def _read_one(path: Path, name: str) -> Compared:
    run = Run.open(path)
    told = run.test()
    accuracy = None if told is None else float(told["totals"]["accuracy"])
    return Compared(name, run, run.metrics(), accuracy, None if told is None else told.get("title"))


def _print_table(compared: Sequence[Compared]) -> None:
    """One table; two where it is wider than the console."""
    settings, figures = [_settings(one) for one in compared], [_figures(one) for one in compared]
    whole = table("", SETTINGS + FIGURES, [a + b for a, b in zip(settings, figures, strict=True)])
    if fits(whole):
        console.print(whole)
        return
    named = [(one.name, *row) for one, row in zip(compared, figures, strict=True)]
    console.print(_narrow(table("", SETTINGS, settings)))
    console.print()
    console.print(_narrow(table("", ("run", *FIGURES), named)))


def _narrow(made: Table) -> Table:
    """Where there is little room the names are folded, and figures stay whole."""
    for column in made.columns:
        column.no_wrap = True
    made.columns[0].no_wrap, made.columns[0].overflow = False, "fold"
    return made


def _settings(one: Compared) -> tuple[Any, ...]:
    asked = one.run.settings
    fixed_point = asked.max_steps != 0
    return (
        one.name,
        asked.data,
        asked.model,
        asked.backward if fixed_point else None,
        asked.solver if fixed_point else "explicit",
        _number(asked.eps, "{:g}") if fixed_point else None,
        f"{len(one.epochs)}/{asked.epochs}",
    )


def _figures(one: Compared) -> tuple[Any, ...]:
    last = one.epochs[-1] if one.epochs else None
    seconds = sum(epoch.seconds for epoch in one.epochs)
    test = _number(one.test, "{:.2%}")
    if last is None:
        return (None, test, *[None] * 5)
    return (
        _number(last.validation_accuracy, "{:.2%}"),
        test,
        _number(last.depth, "{:.1f}"),
        _number(last.residual, "{:.1e}"),
        f"{sum(epoch.products for epoch in one.epochs):,}",
        f"{seconds:,.1f}",
        f"{seconds / len(one.epochs):,.2f}",
    )


def _remarks(compared: Sequence[Compared]) -> list[str]:
    """What the table cannot say: which data it was, and that accuracies on different data do not compare."""
    titles = dict.fromkeys(one.title for one in compared if one.title is not None)
    said = [f"data: {', '.join(titles)}"] if titles else []
    if len(titles) > 1 or len({one.run.settings.data for one in compared}) > 1:
        said.append("The runs are of different data: their accuracies are not comparable.")
    return said


def _number(value: float | None, pattern: str) -> str | None:
    return None if value is None else pattern.format(value)
