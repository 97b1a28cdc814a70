"""`banach data list | verify | fetch`: which data sets exist, whether they are sound, and how to get them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from banach import data
from banach.cli.console import PLAIN, console, table
from banach.cli.opened import DataDir
from banach.cli.plugins import Imports
from banach.data import DataSet, Report
from banach.data.files import INSIDE, located

EPILOG = """\b
Examples:
  banach data list
  banach data fetch mnist cifar10 --data-dir ~/data
  banach data verify --data-dir ~/data"""

data_app = typer.Typer(
    help="List data sets, verify those that are here, fetch those that are not.",
    epilog=EPILOG,
    no_args_is_help=True,
    **PLAIN,
)
COLUMNS = ("name", "title", "train/validation/test", "shape", "classes", "found")


@data_app.command("list", epilog=EPILOG)
def list_(data_dir: DataDir = None, modules: Imports = None) -> None:
    """List the data sets, and where they are."""
    places = {name: located(data.get(name), data_dir) for name in data.names()}
    console.print(table("", COLUMNS, [_row(data.get(name), place) for name, place in places.items()]))
    for name, place in places.items():
        if place is not None:
            console.print(f"{name} is {place}" if place == INSIDE else f"{name} is in {place}")


@data_app.command(epilog=EPILOG)
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets.  [all that are here]", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    modules: Imports = None,
) -> int:
    """Check the data that is here.

    Reads the files and compares their content with its known SHA-256. The exit code is 2 if anything is wrong.
    """
    wrong = 0
    for name in names or data.names():
        reports = data.verify(name, data_dir)
        if not names and not any(report.ok or report.files for report in reports):
            console.print(f"not here: {reports[0].message}")
            continue
        wrong += sum(not report.ok for report in reports)
        _print(reports)
    return 2 if wrong else 0


@data_app.command(epilog=EPILOG)
def fetch(
    names: Annotated[list[str], typer.Argument(help="Data sets.", show_default=False)],
    data_dir: DataDir = None,
) -> None:
    """Download data sets, and verify them.

    They come from their publishers. Files that are here already, and sound, are not downloaded again.
    """
    for name in names:
        data.get(name)  # a misspelt name is refused before the first download
    for name in names:
        _print(data.fetch(name, data_dir))  # pooch logs each address to standard error


def _row(dataset: DataSet, place: str | None) -> tuple[Any, ...]:
    train = dataset.counts["train"] - dataset.validation
    counts = "/".join(f"{number:,}" for number in (train, dataset.validation, dataset.counts["test"]))
    shape = "x".join(str(size) for size in dataset.shape)
    return (dataset.name, dataset.title, counts, shape, len(dataset.classes), "no" if place is None else "yes")


def _print(reports: tuple[Report, ...]) -> None:
    """Print one line per report; a sentence about both parts once."""
    for line in dict.fromkeys(f"{'ok' if report.ok else 'wrong'}: {report.message}" for report in reports):
        console.print(line)
