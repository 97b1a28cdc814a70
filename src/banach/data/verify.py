"""verify() and listing(): what data is here, and whether it is what it should be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from banach.data.check import identify, read_part, sha256
from banach.data.dataset import DataSet, get, names
from banach.data.error import DataError, Incomplete
from banach.data.find import Folder, Found, find, roots

PARTS = ("train", "test")


@dataclass(frozen=True)
class Report:
    """One part of a data set, looked at. `message` is a sentence; `files` are those that are here, none for data
    inside a package."""

    name: str
    part: str
    ok: bool
    message: str
    title: str | None = None
    count: int = 0
    sha256: str | None = None
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Listing:
    """A data set that is known, and the folder it lies in: None if it is not here, or comes inside a package."""

    dataset: DataSet
    here: bool
    folder: Path | None


def verify(name: str, data_dir: Folder | None = None) -> tuple[Report, ...]:
    """Read every part and compare its SHA-256 with the known one: one report a part, whatever is wrong with it."""
    dataset = get(name)
    return verify_in(dataset, roots(dataset, data_dir))


def verify_in(dataset: DataSet, places: tuple[Path, ...]) -> tuple[Report, ...]:
    return tuple(_report(dataset, part, places) for part in PARTS)


def listing(data_dir: Folder | None = None) -> tuple[Listing, ...]:
    """Every known data set and where it is. Looks for the files and reads none."""
    return tuple(_listed(get(name), data_dir) for name in names())


def _report(dataset: DataSet, part: str, places: tuple[Path, ...]) -> Report:
    found: Found | None = None
    try:
        found = find(dataset, part, places)
        arrays = read_part(dataset, part, found)
        digest = sha256(arrays)
        title = identify(dataset, part, digest, found)
    except DataError as error:
        present = error.present if isinstance(error, Incomplete) else ()
        return Report(dataset.name, part, False, str(error), files=found.paths if found else present)
    verdict = "as expected" if dataset.known else "with no known value to compare it to"
    message = f"{title}, {part}: {len(arrays.labels):,} images, SHA-256 {digest}, {verdict}"
    return Report(dataset.name, part, True, message, title, len(arrays.labels), digest, found.paths)


def _listed(dataset: DataSet, data_dir: Folder | None) -> Listing:
    places = roots(dataset, data_dir)
    try:
        folders = [find(dataset, part, places).folder for part in PARTS]
    except DataError:
        return Listing(dataset, False, None)
    return Listing(dataset, True, folders[0])
