"""read_matlab(): read numeric arrays from an untrusted MATLAB 5 file, in memory bounded by the shapes it accepts.

scipy.io reads many more kinds of file, but a forged type number crashes its compiled code (seen in 1.17), and a
forged size makes it decompress without a limit.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from banach.data.dataset import Damaged

# Type numbers of the format, and NumPy's names.
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED, COMPLEX = 14, 15, 0x800
SMALL = 1024  # bytes: more than the header of an array needs

Wanted = Callable[[str, tuple[int, ...], str], bool]  # (name, shape, type) -> read it?


def read_matlab(path: Path, wanted: Wanted) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name.

    Args:
        path: a file in format 5, compressed or not.
        wanted: called with name, shape and NumPy type before the data of an array is read or decompressed.

    Raises:
        Damaged: if the file is not in that format, or has a name twice; and what `wanted` raises.
    """
    found: dict[str, np.ndarray] = {}
    try:
        with open(path, "rb") as file:
            for order, stream in _variables(file):
                name, shape = _header(order, stream)
                if name in found:
                    raise Damaged(path, f"it holds {name} twice")
                code, size, inside = _tag(order, stream)
                kind = _type(order, code)
                if wanted(name, shape, kind.newbyteorder("=").name):
                    found[name] = _array(stream if inside is None else io.BytesIO(inside), shape, kind, size)
    except (_Format, zlib.error, struct.error) as error:
        raise Damaged(path, f"it is not a MATLAB 5 file of arrays: {error}") from error
    return found


class _Format(Exception):
    """Bytes that the format does not allow, or that arrays do not need."""


def _variables(file: BinaryIO) -> Iterator[tuple[str, BinaryIO]]:
    """Yield the byte order, and a stream at the start of each variable."""
    head = file.read(128)
    if head[126:] not in (b"IM", b"MI"):
        raise _Format("it does not start with a header of 128 bytes")
    order = "<" if head[126:] == b"IM" else ">"
    while tag := file.read(8):
        kind, size = struct.unpack(f"{order}II", tag)
        after = file.tell() + size
        stream: BinaryIO = file
        if kind == COMPRESSED:
            stream = io.BufferedReader(_Inflated(file, size))
            kind, size = struct.unpack(f"{order}II", stream.read(8))
        if kind != MATRIX:
            raise _Format(f"it has an element of type {kind}, expected {MATRIX}")
        yield order, stream
        file.seek(after)


def _header(order: str, stream: BinaryIO) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of an array."""
    flags, shape, name = (_element(order, stream) for _ in range(3))
    if struct.unpack(f"{order}II", flags)[0] & COMPLEX:
        raise _Format("it holds complex numbers")
    sizes = struct.unpack(f"{order}{len(shape) // 4}i", shape)
    if min(sizes, default=-1) < 0:
        raise _Format(f"it holds an array of shape {sizes}")
    return name.decode("latin1"), sizes


def _element(order: str, stream: BinaryIO) -> bytes:
    """Return the bytes of a part of the header."""
    _, size, inside = _tag(order, stream)
    if inside is not None:
        return inside[:size]
    if size > SMALL:
        raise _Format(f"its header has a part of {size:,} bytes")
    return stream.read(size + -size % 8)[:size]


def _tag(order: str, stream: BinaryIO) -> tuple[int, int, bytes | None]:
    """Return type and size of what follows, and its bytes if they are inside the tag: four at most."""
    tag = stream.read(8)
    code, size = struct.unpack(f"{order}II", tag)
    return (code & 0xFFFF, code >> 16, tag[4:]) if code >> 16 else (code, size, None)


def _type(order: str, code: int) -> np.dtype:
    if code not in TYPES:
        raise _Format(f"it holds data of type {code}")
    return np.dtype(order + TYPES[code])


def _array(stream: BinaryIO, shape: tuple[int, ...], kind: np.dtype, size: int) -> np.ndarray:
    values = np.empty(math.prod(shape), kind)
    if values.nbytes != size or stream.readinto(values.view(np.uint8).data) != size:  # type: ignore[attr-defined]
        raise _Format(f"it has other than the {values.nbytes:,} bytes of an array of shape {shape}")
    return values.reshape(shape, order="F")


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
