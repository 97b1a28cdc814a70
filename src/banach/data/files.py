"""load() and verify(): find the files of a data set, read them and check what they hold."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from banach.data.dataset import Arrays, Damaged, DataError, DataSet, get
from banach.data.images import Images, held_out, rest

Folder = str | os.PathLike[str]
PARTS = ("train", "test")


def load(
    name: str, split: str = "train", data_dir: Folder | None = None, device: torch.device | str = "cpu"
) -> Images:
    """Read a split of a data set.

    Shapes, counts and labels are checked, and arrays that have a known SHA-256 must have it.

    Args:
        name: the data set, see `names()`.
        split: "train", "validation", "test" or "train+validation".
        data_dir: where to look first; then BANACH_DATA and the cache.
        device: where the tensors go.
    Returns:
        The images, as uint8 tensors.
    Raises:
        DataError: if the files are missing or damaged.
    """
    dataset = get(name)
    part = dataset.part(split)
    (pixels, labels), title, _ = _read(dataset, part, find(dataset, part, roots(dataset, data_dir)))
    if split in ("train", "validation"):
        index = held_out(labels, dataset.validation)
        index = rest(len(labels), index) if split == "train" else index
        pixels, labels = pixels[index], labels[index]
    tensors = torch.from_numpy(pixels).to(device), torch.from_numpy(labels.astype(np.int64)).to(device)
    return dataset.images(*tensors, split=split, title=title)


def verify(dataset: DataSet, part: str, places: tuple[Path, ...]) -> str:
    """Read a part of a data set and compare it with its known SHA-256; return a sentence about it.

    Raises:
        DataError: if the files are missing or damaged.
    """
    arrays, title, digest = _read(dataset, part, find(dataset, part, places))
    verdict = "as expected" if dataset.known else "with no known value to compare it to"
    return f"{title}, {part}: {len(arrays.labels):,} images, SHA-256 {digest}, {verdict}"


def located(dataset: DataSet, places: tuple[Path, ...]) -> Path | None:
    """Return the folder of a data set, even of a part; None if nothing was found. Reads no file."""
    for folder, paths in (found for part in PARTS for found in _candidates(dataset, part, places)):
        if not paths or any(paths):
            return folder
    return None


def cache_dir() -> Path:
    """Return BANACH_CACHE, or `banach` in XDG_CACHE_HOME, in Windows' local folder, or in ~/.cache."""
    own = os.environ.get("BANACH_CACHE")
    if own:
        return Path(own).expanduser()
    windows = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else None
    shared = os.environ.get("XDG_CACHE_HOME") or windows or "~/.cache"
    return Path(shared).expanduser() / "banach"


def roots(dataset: DataSet, data_dir: Folder | None = None) -> tuple[Path, ...]:
    """Return the folders to look in, first to last. `data_dir` and BANACH_DATA must exist; the cache need not."""
    if not dataset.files:
        return (Path(),)  # such data comes inside a package, so a wrong folder does not matter
    named = (("the data folder", data_dir), ("BANACH_DATA", os.environ.get("BANACH_DATA")))
    given = [(what, Path(folder).expanduser()) for what, folder in named if folder]
    for what, folder in given:
        if not folder.is_dir():
            raise DataError(f"{what} {folder} is not a folder; pass an existing one")
    return (*(folder for _, folder in given), cache_dir())


def find(dataset: DataSet, part: str, places: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the files of a part, in the first place that has them all.

    Raises:
        DataError: if no place has them all; it names a missing file of the first place that has some.
    """
    incomplete = []
    for folder, paths in _candidates(dataset, part, places):
        present = tuple(path for path in paths if path is not None)
        if len(present) == len(paths):
            return present
        if present or (folder.is_dir() and folder not in places):
            missing = dataset.files[part][paths.index(None)] + dataset.endings[0]
            incomplete.append((not present, f"{folder} has no {missing}; {dataset.remedy}"))
    if incomplete:
        raise DataError(min(incomplete, key=lambda one: one[0])[1])
    looked = ", ".join(map(str, places))
    advice = "or pass its folder (--data-dir, BANACH_DATA)"
    raise DataError(f"{dataset.name} was not found in {looked}; {dataset.remedy}, {advice}")


def _candidates(
    dataset: DataSet, part: str, places: tuple[Path, ...]
) -> Iterator[tuple[Path, tuple[Path | None, ...]]]:
    """Yield each folder to look in, with the files of the part that are there."""
    for folder in (place / name for place in places for name in (*dataset.folders, ".")):
        yield folder, dataset.locate(folder, part)


def _read(dataset: DataSet, part: str, paths: tuple[Path, ...]) -> tuple[Arrays, str, str]:
    """Return the arrays of a part, their title and SHA-256; refuse wrong ones."""
    with _advice(dataset):
        arrays = dataset.read(part, paths)
        wrong, digest, known = _fault(dataset, part, arrays), _sha256(arrays), dataset.known.get(part)
        if not wrong and known not in (None, digest) and not _published(dataset, paths):
            wrong = f"the {part} arrays have SHA-256 {digest}, expected {known}"
        if wrong:
            first, *others = paths or (dataset.name,)
            one_of = "one of " if others else ""
            raise Damaged(one_of + ", ".join([str(first), *(path.name for path in others)]), wrong)
        title = dataset.known_title if digest == known else None
        return arrays, title or dataset.title, digest


def _published(dataset: DataSet, paths: tuple[Path, ...]) -> bool:
    """Return True if every file is one that is downloaded as it is, with its published digest."""
    digests = {url.rsplit("/", 1)[-1]: digest for url, digest in dataset.downloads.items()}
    return bool(paths) and all(path.name in digests and matches(path, digests[path.name]) for path in paths)


def matches(path: Path, digest: str) -> bool:
    """Return True if `path` is a file with this digest, "md5:..." or "sha256:..."."""
    if not path.is_file():
        return False
    name, _, expected = digest.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(name, usedforsecurity=False))
    return found.hexdigest() == expected


def _sha256(arrays: Arrays) -> str:
    """Return the SHA-256 of the bytes of the labels, then of the pixels."""
    digest = hashlib.sha256(np.ascontiguousarray(arrays.labels).data)
    digest.update(np.ascontiguousarray(arrays.pixels).data)
    return digest.hexdigest()


def _fault(dataset: DataSet, part: str, arrays: Arrays) -> str | None:
    """Return what is wrong with the arrays: types, shapes, the count or the labels."""
    pixels, labels = arrays
    if pixels.dtype != np.uint8 or labels.dtype != np.uint8 or pixels.shape[1:] != dataset.shape:
        got = f"{pixels.dtype} images of shape {pixels.shape[1:]} and {labels.dtype} labels"
        return f"it holds {got}, expected uint8 and {dataset.shape}"
    count, classes = dataset.counts[part], len(dataset.classes)
    if len(pixels) != count or labels.shape != (count,):
        return f"the {part} part has {len(pixels):,} images and {labels.size:,} labels, expected {count:,} of each"
    if count and labels.max() >= classes:
        return f"it has a label of {labels.max()}, expected 0 to {classes - 1}"
    return None


@contextmanager
def _advice(dataset: DataSet) -> Iterator[None]:
    """Add what to do to a reader's error, which names the file and the fault."""
    try:
        yield
    except Damaged as error:
        raise DataError(f"{error}; delete it and {dataset.remedy}") from error
    except OSError as error:
        where = error.filename or dataset.name
        raise DataError(f"{where} cannot be read ({error.strerror or error}); {dataset.remedy}") from error
