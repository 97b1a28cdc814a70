"""DataSet: what a data set is, where its files lie and how they are read; the registry that users extend."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from banach.data.error import DataError
from banach.data.split import SPLITS


class Arrays(NamedTuple):
    """What a reader returns: pixels uint8 (N, C, H, W), labels uint8 (N,) counted from 0."""

    pixels: np.ndarray
    labels: np.ndarray


Reader = Callable[[str, tuple[Path, ...]], Arrays]  # (part, its files) -> arrays; part is "train" or "test"


@dataclass(frozen=True)
class Download:
    """A file at its publisher's address, and its published MD5. An archive holds all of a layout's files."""

    url: str
    md5: str
    archive: bool = False

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Layout:
    """One way in which the files of a data set lie in a folder.

    `files` names those of each part; each may carry one of `endings`. A reader without files, for data that
    comes from elsewhere, gets an empty tuple. `md5`, by file name, tells which file is damaged.
    """

    read: Reader
    folders: tuple[str, ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    endings: tuple[str, ...] = ("",)
    md5: Mapping[str, str] = field(default_factory=dict)
    downloads: tuple[Download, ...] = ()

    def locate(self, folder: Path, part: str) -> tuple[Path | None, ...]:
        """The files of a part, in order; None for one that is not there."""
        candidates = ([folder / (name + ending) for ending in self.endings] for name in self.files.get(part, ()))
        return tuple(
            next((path for path in paths if path.is_file() or path.is_dir()), None) for paths in candidates
        )


@dataclass(frozen=True)
class Known:
    """Arrays that are known: their title, and by part their SHA-256 (bytes of the labels, then of the pixels)."""

    title: str
    sha256: Mapping[str, str]


@dataclass(frozen=True)
class DataSet:
    """A data set. `validation` images of the train part, stratified and fixed, are its validation split.

    With `known` arrays nothing else is accepted, except files that have their published MD5.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    counts: Mapping[str, int]
    validation: int
    layouts: tuple[Layout, ...]
    known: tuple[Known, ...] = ()

    def __post_init__(self) -> None:
        if not self.layouts:
            raise ValueError(f"data set {self.name!r} has no layout; give it layouts=(Layout(read=...),)")
        if set(self.counts) != {"train", "test"}:
            raise ValueError(f"counts must be given for 'train' and 'test', got {sorted(self.counts)}")
        if not 0 < self.validation < self.counts["train"]:
            raise ValueError(
                f"validation must lie between 1 and {self.counts['train'] - 1}, got {self.validation}"
            )
        if not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError(f"mean and std need {self.shape[0]} numbers each, got {self.mean} and {self.std}")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std must be positive, got {self.std}")

    def part(self, split: str) -> str:
        """The part of the files that a split is cut from."""
        if split not in SPLITS:
            raise DataError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)}")
        return "test" if split == "test" else "train"

    @property
    def remedy(self) -> str:
        """What to do about a file that is damaged or missing."""
        if any(layout.downloads for layout in self.layouts):
            return f"run `banach data fetch {self.name}`"
        return f"put a good copy of {self.name} there"


_registry: dict[str, DataSet] = {}


def register(dataset: DataSet, *, replace: bool = False) -> DataSet:
    """Make a data set known by its name. `replace=True` puts it in the place of another."""
    if not isinstance(dataset, DataSet):
        raise TypeError(f"register takes a DataSet, got {type(dataset).__name__}")
    if dataset.name in _registry and not replace:
        raise DataError(f"there is a data set {dataset.name!r} already; choose another name or say replace=True")
    _registry[dataset.name] = dataset
    return dataset


def get(name: str) -> DataSet:
    """The data set of that name."""
    if name not in _registry:
        near = difflib.get_close_matches(str(name), _registry, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(_registry)}"
        raise DataError(f"there is no data set {name!r}; {hint}")
    return _registry[name]


def names() -> tuple[str, ...]:
    """Every data set that is known, in the order of registration."""
    return tuple(_registry)
