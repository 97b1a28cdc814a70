"""DataSet: what a data set is, which files it has and how they are read; the registry that users extend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from banach import checks
from banach.data.images import SPLITS, Images


class DataError(ValueError):
    """Data that cannot be used. The message is one sentence: what is wrong, and what to do."""


class Damaged(DataError):
    """A file that is not what its publisher wrote. Readers raise it; `load` adds what to do."""

    def __init__(self, path: Path | str, what: str) -> None:
        # A hostile file may put text into `what`: at most 400 characters, and none that control a terminal.
        clean = "".join(c if c.isprintable() else "?" for c in " ".join(what[:2000].split()))
        super().__init__(f"{path} cannot be used: {clean[:400]}")


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

    def locate(self, folder: Path, part: str) -> tuple[Path | None, ...]:
        """Return the files of a part in a folder, in order; None for a missing one."""
        candidates = ([folder / (name + ending) for ending in self.endings] for name in self.files.get(part, ()))
        return tuple(next(filter(Path.exists, paths), None) for paths in candidates)

    def part(self, split: str) -> str:
        """Return the part of the files that a split is taken from."""
        if split not in SPLITS:
            raise DataError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)}")
        return "test" if split == "test" else "train"

    def images(self, pixels: Tensor, labels: Tensor, *, split: str, title: str | None = None) -> Images:
        """Return tensors as images of this data set."""
        about = {"name": self.name, "title": title or self.title, "classes": self.classes}
        return Images(pixels, labels, split=split, mean=self.mean, std=self.std, **about)  # type: ignore[arg-type]

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
    if not isinstance(dataset, DataSet):
        raise TypeError(f"register takes a DataSet, got {type(dataset).__name__}")
    if dataset.name in _registry and not replace:
        raise DataError(
            f"data set {dataset.name!r} is registered already; choose another name or pass replace=True"
        )
    _registry[dataset.name] = dataset
    return dataset


def get(name: str) -> DataSet:
    """Return the data set of that name.

    Args:
        name: of a registered data set; "package.module:name", which imports the module that registers it; or
            your data: "folder:PATH", "folder:PATH@SIZE", "npz:PATH", "PATH.npz".
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
