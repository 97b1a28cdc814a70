"""`banach compare`: one table and one plot of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from banach.cli.console import console, fits, table
from banach.train import Epoch, Run
from banach.train.plot import PlotError, plot_comparison
from banach.train.run import SETTINGS as SETTINGS_FILE

EPILOG = """\b
Examples:
  banach compare runs/digits-1 runs/digits-2
  banach compare runs/* --out jfb-and-others.png"""

PNG = b"\x89PNG\r\n\x1a\n"
SETTINGS = ("run", "data", "model", "backward", "solver", "eps", "epochs")
FIGURES = ("validation", "test", "depth", "residual", "J-products", "seconds", "s/epoch")


@dataclass(frozen=True)
class Compared:
    """A run, its epochs, and the figures of its test file, if it has one."""

    name: str
    run: Run
    epochs: tuple[Epoch, ...]
    test: float | None
    title: str | None


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The plot, a PNG.")] = Path("comparison.png"),
) -> None:
    """Compare runs: a table with one row per run, and a plot of all of them.

    Validation accuracy, depth and residual are those of the last epoch; depth and residual are of the training
    solves. Test accuracy is what the run wrote when it ended ("-" before that): nothing is computed again.
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
    """Refuse to overwrite anything but a plot."""
    if out.suffix.lower() != ".png":
        raise ValueError(f"the plot is a PNG, got --out {out}; use a name that ends in .png")
    if not out.exists():
        return
    with out.open("rb") as file:  # for a folder this raises an OSError
        if file.read(len(PNG)) != PNG:
            raise ValueError(f"{out} exists and is not a PNG; choose another --out, it will not be overwritten")


def _read(paths: Sequence[Path]) -> list[Compared]:
    """Return the runs in the order given, each once; named by their folders where those names are unique."""
    unique: dict[Path, Path] = {}
    for path in _runs_among(paths):
        unique.setdefault(path.resolve(), path)
    names = [whole.name for whole in unique]
    return [
        _read_one(path, whole.name if names.count(whole.name) == 1 else str(path))
        for whole, path in unique.items()
    ]


def _runs_among(paths: Sequence[Path]) -> Sequence[Path]:
    """Skip folders that are not runs, as a pattern may match some; but refuse if there is no run at all."""
    runs = [path for path in paths if (path / SETTINGS_FILE).exists()]
    others = [path for path in paths if path not in runs and path.is_dir()]
    if not runs or len(runs) + len(others) < len(paths):
        return paths  # opening them says what is wrong
    if others:
        console.print("not a run, skipped: " + ", ".join(map(str, others)))
    return runs


def _read_one(path: Path, name: str) -> Compared:
    run = Run.open(path)
    test = run.test()
    accuracy = None if test is None else float(test["totals"]["accuracy"])
    return Compared(name, run, run.metrics(), accuracy, None if test is None else test.get("title"))


def _print_table(compared: Sequence[Compared]) -> None:
    """Print one table, or two if it is wider than the console."""
    settings, figures = [_settings(one) for one in compared], [_figures(one) for one in compared]
    whole = table("", SETTINGS + FIGURES, [a + b for a, b in zip(settings, figures, strict=True)])
    if fits(whole):
        console.print(whole)
        return
    named = [(one.name, *row) for one, row in zip(compared, figures, strict=True)]
    for number, made in enumerate((table("", SETTINGS, settings), table("", ("run", *FIGURES), named))):
        for column in made.columns[1:]:
            column.no_wrap = True  # only names are folded
        if number:
            console.print()
        console.print(made)


def _settings(one: Compared) -> tuple[Any, ...]:
    chosen = one.run.settings
    fixed_point = chosen.max_steps != 0
    return (
        one.name,
        chosen.data,
        chosen.model,
        chosen.backward if fixed_point else None,
        chosen.solver if fixed_point else "explicit",
        _number(chosen.eps, "{:g}") if fixed_point else None,
        f"{len(one.epochs)}/{chosen.epochs}",
    )


def _figures(one: Compared) -> tuple[Any, ...]:
    test = _number(one.test, "{:.2%}")
    if not one.epochs:
        return (None, test, *[None] * 5)
    last, seconds = one.epochs[-1], sum(epoch.seconds for epoch in one.epochs)
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
    """Return the titles of the data, and a warning if accuracies cannot be compared."""
    titles = dict.fromkeys(one.title for one in compared if one.title is not None)
    said = [f"data: {', '.join(titles)}"] if titles else []
    if len(titles) > 1 or len({one.run.settings.data for one in compared}) > 1:
        said.append("The runs use different data: their accuracies are not comparable.")
    return said


def _number(value: float | None, pattern: str) -> str | None:
    return None if value is None else pattern.format(value)
