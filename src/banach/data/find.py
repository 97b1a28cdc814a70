"""Where data lies: the folder that was named, then BANACH_DATA, then the cache."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from banach.data.dataset import DataSet, Layout
from banach.data.error import DataError, Incomplete

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Found:
    """The files of one part of a data set, and the layout they are in."""

    layout: Layout
    paths: tuple[Path, ...]

    @property
    def folder(self) -> Path | None:
        return self.paths[0].parent if self.paths else None


def cache_dir() -> Path:
    """BANACH_CACHE, or `banach` in XDG_CACHE_HOME, in Windows' local folder, or in ~/.cache."""
    own = os.environ.get("BANACH_CACHE")
    if own:
        return Path(own).expanduser()
    windows = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else None
    shared = os.environ.get("XDG_CACHE_HOME") or windows or "~/.cache"
    return Path(shared).expanduser() / "banach"


def roots(dataset: DataSet, data_dir: Folder | None = None) -> tuple[Path, ...]:
    """The folders to look in, first to last. One that was named must be there; the cache need not."""
    if not any(layout.files for layout in dataset.layouts):
        return (Path(),)  # such data comes with a package: a wrong folder is no reason to refuse it
    named = (("the data folder", data_dir), ("BANACH_DATA", os.environ.get("BANACH_DATA")))
    found = [(what, Path(folder).expanduser()) for what, folder in named if folder]
    for what, folder in found:
        if not folder.is_dir():
            raise DataError(f"{what} {folder} is not a folder; name one that is there")
    return (*(folder for _, folder in found), cache_dir())


def home(data_dir: Folder | None = None) -> Path:
    """The folder that downloads go to: the first of those above, made if need be."""
    return Path(data_dir or os.environ.get("BANACH_DATA") or cache_dir()).expanduser()


def find(dataset: DataSet, part: str, places: tuple[Path, ...]) -> Found:
    """The files of a part, in the first place that has them all. If none has, the first with some is told of."""
    incomplete: Incomplete | None = None
    for place, layout in product(places, dataset.layouts):
        for folder in (*layout.folders, "."):
            paths = layout.locate(place / folder, part)
            present = tuple(path for path in paths if path is not None)
            if len(present) == len(paths):
                return Found(layout, present)
            is_its_own = folder != "." and (place / folder).is_dir()
            tells_more = incomplete is None or bool(present and not incomplete.present)
            if (present or is_its_own) and tells_more:
                missing = layout.files[part][paths.index(None)]
                incomplete = Incomplete(f"{place / folder} has no {missing}; {dataset.remedy}", present)
    raise incomplete or _not_found(dataset, places)


def _not_found(dataset: DataSet, places: tuple[Path, ...]) -> DataError:
    looked = ", ".join(str(place) for place in places)
    return DataError(
        f"{dataset.name} was not found in {looked}; {dataset.remedy}, or name its folder (--data-dir, BANACH_DATA)"
    )
