"""SVHN: its MATLAB 5 files, read in memory that is bounded by the shapes it has.

scipy.io reads many more kinds of file, but a forged type number crashes its compiled code (seen in 1.17), and a
forged size makes it decompress without a limit.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from banach.data.dataset import Arrays, Damaged, DataSet

URL = "http://ufldl.stanford.edu/housenumbers/"  # no https: the files have a pinned SHA-256
UINT8, MATRIX, COMPRESSED = 2, 14, 15  # type numbers of the format
COMPLEX = 0x800
SMALL = 64  # bytes: more than a part of an array's header needs


def read_svhn(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read X uint8 (32, 32, 3, N) and y (N, 1) with values 1 to 10, where 10 is the digit 0."""
    (path,) = paths
    found: dict[str, np.ndarray] = {}
    try:
        with open(path, "rb") as file:
            for stream in _variables(file):
                name, shape = _header(stream)
                if name in found:
                    raise ValueError(f"it holds {name} twice")
                if name in ("X", "y"):
                    found[name] = _array(stream, name, shape)
    except (ValueError, zlib.error, struct.error) as error:
        raise Damaged(path, f"it is not a MATLAB 5 file of X and y: {error}") from error
    if len(found) != 2:
        raise Damaged(path, f"it holds {' and '.join(found) or 'neither'}, expected X and y")
    labels = found["y"].reshape(-1)
    if labels.min() < 1 or labels.max() > 10:
        worst = labels.max() if labels.max() > 10 else labels.min()
        raise Damaged(path, f"it has a label of {worst}, expected 1 to 10 (10 is the digit 0)")
    return Arrays(np.ascontiguousarray(found["X"].transpose(3, 2, 0, 1)), labels % 10)


def _variables(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a stream at the start of each variable."""
    if file.read(128)[126:] != b"IM":
        raise ValueError("it does not start with a header of 128 bytes, little-endian")
    while tag := file.read(8):
        kind, size = struct.unpack("<II", tag)
        after, stream = file.tell() + size, file
        if kind == COMPRESSED:
            stream = io.BufferedReader(_Inflated(file, size))
            kind, _ = struct.unpack("<II", stream.read(8))
        if kind != MATRIX:
            raise ValueError(f"it has an element of type {kind}, expected {MATRIX}")
        yield stream
        file.seek(after)


def _header(stream: BinaryIO) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of an array."""
    (_, flags), (_, shape), (_, name) = (_element(stream, SMALL) for _ in range(3))
    if struct.unpack("<II", flags)[0] & COMPLEX:
        raise ValueError("it holds complex numbers")
    return name.decode("latin1"), struct.unpack(f"<{len(shape) // 4}i", shape)


def _array(stream: BinaryIO, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array. Its shape is checked before anything of that size is read."""
    most = max(SVHN.counts.values())
    rows, others = (shape[3:], shape[:3]) if name == "X" else (shape[:1], shape[1:])
    expected = {"X": (32, 32, 3), "y": (1,)}[name]
    if others != expected or len(rows) != 1 or not 0 < rows[0] <= most:
        wanted = "(32, 32, 3, N)" if name == "X" else "(N, 1)"
        raise ValueError(f"{name} has the shape {shape}, expected {wanted} with N at most {most:,}")
    kind, content = _element(stream, math.prod(shape))
    if kind != UINT8 or len(content) != math.prod(shape):
        got = f"{len(content):,} bytes of type {kind}"
        raise ValueError(f"{name} has {got}, expected {math.prod(shape):,} of type {UINT8} (uint8)")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F")


def _element(stream: BinaryIO, most: int) -> tuple[int, bytes]:
    """Return type and content of the next element; four bytes or fewer are inside its tag."""
    tag = stream.read(8)
    kind, size = struct.unpack("<II", tag)
    if kind >> 16:
        return kind & 0xFFFF, tag[4 : 4 + (kind >> 16)]
    if size > most:
        raise ValueError(f"it has an element of {size:,} bytes, expected at most {most:,}")
    return kind, stream.read(size + -size % 8)[:size]


class _Inflated(io.RawIOBase):
    """The decompressed content of the next `size` bytes of a file, as a stream."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left, self.inflate = file, size, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data, block = b"", b"start"
        while not data and block and not self.inflate.eof:
            block = self.inflate.unconsumed_tail or self.file.read(min(self.left, 2**16))
            self.left -= 0 if self.inflate.unconsumed_tail else len(block)
            data = self.inflate.decompress(block, len(buffer))
        buffer[: len(data)] = data
        return len(data)


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
