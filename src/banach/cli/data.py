"""`banach data list | verify | fetch`: which data sets exist, whether they are sound, and how to get them."""

from typing import Annotated

import typer

from banach import data
from banach.cli.console import PLAIN, console, table, wrapped
from banach.cli.shared import DataDir, Imports, argument
from banach.data import DataError
from banach.data.dataset import PARTS, NotFound, find, roots, verify

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
COLUMNS = ("name", "title", "train/validation/test", "shape", "classes")


@data_app.command("list", epilog=EPILOG)
def list_(data_dir: DataDir = None, modules: Imports = None) -> None:
    """List the data sets, and where they are."""
    rows, places = [], []
    for one in map(data.get, data.names()):
        sizes = one.counts["train"] - one.validation, one.validation, one.counts["test"]
        counts, shape = "/".join(f"{size:,}" for size in sizes), "x".join(map(str, one.shape))
        rows.append((one.name, one.title, counts, shape, len(one.classes)))
        where = roots(one, data_dir)
        try:
            paths = [path for part in PARTS for path in find(one, part, where)]
            places += [f"{one.name} is in {paths[0].parent}"] if paths else []  # else inside a package
        except DataError as error:
            places.append(f"not here: {error}")
    console.print(table("", COLUMNS, rows))
    for place in places:
        console.print(wrapped(place))


@data_app.command("verify", epilog=EPILOG)
def verify_(
    names: Annotated[list[str] | None, argument("Data sets.  [all that are here]")] = None,
    data_dir: DataDir = None,
    modules: Imports = None,
) -> int:
    """Check the data that is here.

    Reads the files and compares their content with its known SHA-256. The exit code is 2 if anything is wrong.
    """
    wrong = False
    for dataset in map(data.get, names or data.names()):
        places, errors = roots(dataset, data_dir), list[DataError]()
        for part in PARTS:
            try:
                console.print(f"ok: {verify(dataset, part, places)}")
            except DataError as error:
                errors.append(error)
        # A set of which one part is here is incomplete; only one without any part was perhaps never fetched.
        absent = not names and len(errors) == len(PARTS) and all(isinstance(one, NotFound) for one in errors)
        for sentence in errors:
            console.print(f"{'not here' if absent else 'wrong'}: {sentence}")
        wrong |= bool(errors) and not absent
    return 2 if wrong else 0


@data_app.command(epilog=EPILOG)
def fetch(
    names: Annotated[list[str], argument("Data sets.")], data_dir: DataDir = None, modules: Imports = None
) -> None:
    """Download data sets, and verify them.

    They come from their publishers. Files that are here already, and sound, are not downloaded again.
    """
    for name in names:
        data.get(name)  # a misspelt name is refused before the first download
    for name in names:
        for sentence in data.fetch(name, data_dir):  # pooch logs each address to standard error
            console.print(f"ok: {sentence}")
