"""`banach data list | verify | fetch`: which data sets exist, whether they are sound, and how to get them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from banach import data
from banach.cli.console import PLAIN, console, table
from banach.cli.opened import DataDir
from banach.cli.plugins import Imports
from banach.data import DataError, DataSet
from banach.data.files import PARTS, find, located, roots, verify

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
    places = [(one, roots(one, data_dir)) for one in map(data.get, data.names())]
    console.print(table("", COLUMNS, [_row(one, among) for one, among in places]))
    for one, among in places:
        if one.files and (folder := located(one, among)):
            console.print(f"{one.name} is in {folder}")


@data_app.command("verify", epilog=EPILOG)
def verify_(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets.  [all that are here]", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    modules: Imports = None,
) -> int:
    """Check the data that is here.

    Reads the files and compares their content with its known SHA-256. The exit code is 2 if anything is wrong.
    """
    wrong = dict[str, None]()  # a sentence about both parts is said once
    for one in map(data.get, names or data.names()):
        places = roots(one, data_dir)
        if not names and located(one, places) is None:
            console.print(f"not here: {one.name}")
            continue
        for part in PARTS:
            try:
                console.print(f"ok: {verify(one, part, places)}")
            except DataError as error:
                wrong[str(error)] = None
    for sentence in wrong:
        console.print(f"wrong: {sentence}")
    return 2 if wrong else 0


@data_app.command(epilog=EPILOG)
def fetch(
    names: Annotated[list[str], typer.Argument(help="Data sets.", show_default=False)],
    data_dir: DataDir = None,
    modules: Imports = None,
) -> None:
    """Download data sets, and verify them.

    They come from their publishers. Files that are here already, and sound, are not downloaded again.
    """
    for name in names:
        data.get(name)  # a misspelt name is refused before the first download
    for name in names:
        for sentence in data.fetch(name, data_dir):  # pooch logs each address to standard error
            console.print(f"ok: {sentence}")


def _row(dataset: DataSet, places: tuple[Path, ...]) -> tuple[Any, ...]:
    train = dataset.counts["train"] - dataset.validation
    counts = "/".join(f"{number:,}" for number in (train, dataset.validation, dataset.counts["test"]))
    shape = "x".join(str(size) for size in dataset.shape)
    return (dataset.name, dataset.title, counts, shape, len(dataset.classes), _found(dataset, places))


def _found(dataset: DataSet, places: tuple[Path, ...]) -> str:
    try:
        for part in PARTS:
            find(dataset, part, places)
    except DataError:
        return "no" if located(dataset, places) is None else "in part"
    return "yes"
