"""Are these arrays what they are said to be? Shapes, counts, labels, SHA-256; and what to call them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from banach.data.dataset import Arrays, DataSet
from banach.data.error import Damaged, DataError
from banach.data.find import Found


def read_part(dataset: DataSet, part: str, found: Found) -> Arrays:
    """The arrays of "train" or "test", in the order of the files, with shapes, counts and labels checked."""
    with _advised(dataset):
        arrays = found.layout.read(part, found.paths)
        wrong = _fault(dataset, part, arrays)
        if wrong:
            raise Damaged(_culprit(dataset, found), wrong)
        return arrays


def identify(dataset: DataSet, part: str, digest: str, found: Found) -> str:
    """The title of arrays known by their SHA-256. Files with their published MD5 have the data set's own."""
    expected = {known.sha256[part]: known.title for known in dataset.known}
    if digest in expected or not expected:
        return expected.get(digest, dataset.title)
    with _advised(dataset):
        if found.paths and not _altered(found):
            return dataset.title
        what = f"the {part} arrays have SHA-256 {digest}, expected {' or '.join(expected)}"
        raise Damaged(_culprit(dataset, found), what)


def sha256(arrays: Arrays) -> str:
    """Of the bytes of the labels, then of the pixels."""
    digest = hashlib.sha256(np.ascontiguousarray(arrays.labels).data)
    digest.update(np.ascontiguousarray(arrays.pixels).data)
    return digest.hexdigest()


def md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fault(dataset: DataSet, part: str, arrays: Arrays) -> str | None:
    """What a wrong or a cut file gets wrong: types, shapes, the count, the labels."""
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


def _altered(found: Found) -> list[Path]:
    """The files that do not have their published MD5."""
    published = {download.file: download.md5 for download in found.layout.downloads} | dict(found.layout.md5)
    return [path for path in found.paths if md5(path) != published.get(path.name)]


def _culprit(dataset: DataSet, found: Found) -> Path:
    if not found.paths:
        return Path(dataset.name)
    return (_altered(found) or found.paths)[0]


@contextmanager
def _advised(dataset: DataSet) -> Iterator[None]:
    """Readers say which file and what is wrong with it; here is added what to do."""
    try:
        yield
    except Damaged as error:
        raise DataError(f"{error}; delete it and {dataset.remedy}") from error
    except OSError as error:
        where = error.filename or dataset.name
        raise DataError(f"{where} cannot be read ({error.strerror or error}); {dataset.remedy}") from error
