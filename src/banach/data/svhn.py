"""SVHN: its MATLAB 5 files, read in memory that is bounded by the shapes it has.

scipy.io reads many more kinds of file, but a forged type number crashes its compiled code (seen in 1.17), and a
forged size makes it decompress without a limit.
"""

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from banach.data.dataset import Arrays, Damaged, DataSet

URL = "http://ufldl.stanford.edu/housenumbers/"  # no https: the files have a pinned SHA-256
UINT8, MATRIX, COMPRESSED = 2, 14, 15  # type numbers of the format
LIMIT = 2**28  # bytes of a variable that are read or decompressed; the largest X has 225 million


def read_svhn(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read X uint8 (32, 32, 3, N) and y (N, 1) with values 1 to 10, where 10 is the digit 0."""
    (path,) = paths
    try:
        with open(path, "rb") as file:
            found = dict(_array(content) for content in _variables(file))
        if len(found) != 2:
            raise ValueError(f"it holds {' and '.join(found) or 'neither'}")
        pixels, labels = found["X"].transpose(3, 2, 0, 1), found["y"].reshape(-1)
    except (ValueError, zlib.error, struct.error) as error:
        raise Damaged(path, f"it is not a MATLAB 5 file of X and y: {error}") from error
    return Arrays(np.ascontiguousarray(pixels), labels * (labels != 10))


def _variables(file: BinaryIO) -> Iterator[memoryview]:
    """Yield the content of each variable of the first LIMIT bytes, at most LIMIT bytes of it."""
    content = memoryview(file.read(LIMIT))
    if content[126:128] != b"IM":
        raise ValueError("it does not start with a header of 128 bytes, little-endian")
    for kind, variable in _elements(content[128:]):
        if kind == COMPRESSED:
            packed = zlib.decompressobj().decompress(variable, LIMIT)
            ((kind, variable),) = islice(_elements(memoryview(packed)), 1)
        if kind != MATRIX:
            raise ValueError(f"it has an element of type {kind}, expected {MATRIX}")
        yield variable


def _array(content: memoryview) -> tuple[str, np.ndarray]:
    """Return name and values of a variable."""
    _, (_, sizes), (_, letters), (kind, values) = islice(_elements(content), 4)
    name, shape = bytes(letters).decode("latin1"), struct.unpack(f"<{len(sizes) // 4}i", sizes)
    if name not in ("X", "y"):  # others are not kept: there could be many
        raise ValueError(f"it holds {name}")
    if kind != UINT8:
        raise ValueError(f"{name} has the type {kind}, expected {UINT8} (uint8)")
    return name, np.frombuffer(values, np.uint8).reshape(shape, order="F")


def _elements(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield type and content of each element; four bytes or fewer are inside its tag, others padded to eight."""
    place = 0
    while place < len(content):
        kind, size = struct.unpack_from("<II", content, place)
        if kind >> 16:
            yield kind & 0xFFFF, content[place + 4 : place + 4 + (kind >> 16)]
            place += 8
        else:
            yield kind, content[place + 8 : place + 8 + size]
            place += 8 + size + (-size % 8 if kind != COMPRESSED else 0)


SVHN = DataSet(
    name="svhn",
    title="SVHN",  # of the published files
    shape=(3, 32, 32),
    classes=tuple("0123456789"),
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    counts={"train": 73_257, "test": 26_032},
    validation=5_000,
    read=read_svhn,
    folders=("svhn",),
    files={"train": ("train_32x32.mat",), "test": ("test_32x32.mat",)},
    downloads={
        URL + "train_32x32.mat": "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        URL + "test_32x32.mat": "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    },
    known={
        "train": "847c5c27e330ee98e8f913482bf91b9a0a3761c8ad3583ad8fc82435a03ef70e",
        "test": "16a1e315de7f3215f1c75780bddd7877b7743c523a1ba8bdfc104f184403ccb0",
    },
    known_title="SVHN re-cropped from the originals",
)
