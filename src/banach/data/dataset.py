"""DataSet: what a data set is, which files it has and how they are read; the registry that users extend."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from banach import checks
from banach.data.images import Images


class DataError(ValueError):
    """Data that cannot be used. The message is one sentence: what is wrong, and what to do."""


class NotFound(DataError):
    """No file of a part of a data set is there."""


class Damaged(DataError):
    """A file that is not what its publisher wrote. Readers raise it; `load` adds what to do."""

    def __init__(self, path: Path | str, what: str) -> None:
        super().__init__(f"{path} cannot be used: {printable(what)}")


def printable(text: object) -> str:
    """Return text that a hostile file may have chosen: 400 characters at most, none that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(text)[:2000].split()))[:400]


class Arrays(NamedTuple):
    """What a reader returns: pixels uint8 (N, C, H, W), labels uint8 (N,) counted from 0."""

    pixels: np.ndarray
    labels: np.ndarray


Reader = Callable[[str, tuple[Path, ...]], Arrays]  # (part, its files) -> arrays; part is "train" or "test"


@dataclass(frozen=True)
class DataSet:
    """A data set. `validation` images of the train part, stratified and fixed, are its validation split.

    `read` gets the files of a part; data without files, such as data inside a package, needs nothing else. `files`
    names those of each part: they are looked for in the `folders` of a data folder, and may have one of `endings`.
    `downloads` are addresses with their published digest, "md5:..." or "sha256:..."; a .tar.gz holds all files.

    `known` is the SHA-256 of each part (bytes of the labels, then of the pixels). Other arrays are refused, except
    from files that have their published digest. `known_title` is the title of the known arrays, if it is another.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    counts: Mapping[str, int]
    validation: int
    read: Reader
    folders: tuple[str, ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    endings: tuple[str, ...] = ("",)
    downloads: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    known_title: str | None = None

    def __post_init__(self) -> None:
        if set(self.counts) != {"train", "test"}:
            raise ValueError(f"counts must be given for 'train' and 'test', got {sorted(self.counts)}")
        checks.whole("validation", self.validation, 1, self.counts["train"] - 1)
        if not len(self.mean) == len(self.std) == self.shape[0] or not all(value > 0 for value in self.std):
            got = f"{self.mean} and {self.std}"
            raise ValueError(f"mean and std need {self.shape[0]} numbers each, those of std positive, got {got}")

    def images(self, pixels: Tensor, labels: Tensor, *, split: str, title: str | None = None) -> Images:
        """Return tensors as images of this data set."""
        about = (self.name, title or self.title, split, self.classes, self.mean, self.std)
        return Images(pixels, labels, *about)

    @property
    def remedy(self) -> str:
        """What to do about a damaged or missing file."""
        if self.downloads:
            return f"run `banach data fetch {self.name}`"
        return f"provide a good copy of {self.name}"


_registry: dict[str, DataSet] = {}


def register(dataset: DataSet, *, replace: bool = False) -> DataSet:
    """Make a data set known by its name, and return it.

    Args:
        dataset: the data set.
        replace: allow a name that is registered already.

    Raises:
        DataError: if the name is taken and `replace` is False.
    """
    if dataset.name in _registry and not replace:
        raise DataError(
            f"data set {dataset.name!r} is registered already; choose another name or pass replace=True"
        )
    _registry[dataset.name] = dataset
    return dataset


def get(name: str) -> DataSet:
    """Return the data set of that name.

    Args:
        name: of a registered data set; "package.module:name", if that module has been imported; or your data:
            "folder:PATH", "folder:PATH@SIZE", "npz:PATH", "PATH.npz".
    Raises:
        DataError: if there is none; the message suggests the closest name.
    """
    from banach.data.own import own

    if found := own(name):
        return found
    try:
        return _registry[checks.nearest("data set", checks.own_name(name), _registry)]
    except ValueError as error:
        raise DataError(str(error)) from None


def names() -> tuple[str, ...]:
    """Return the names of all data sets, in the order of registration."""
    return tuple(_registry)


def need(module: str, purpose: str) -> Any:
    """Import an optional module when it is first needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        package = {"sklearn": "scikit-learn", "PIL": "pillow"}.get(top, top)
        raise DataError(f"{purpose} needs {package}, which is missing; run: pip install 'banach[app]'") from error
