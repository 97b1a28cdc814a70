"""Small files that ask for much memory, and the reader that must refuse each."""

import gzip
import io
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from banach.data import CIFAR10, MNIST, SVHN, DataSet, load
from banach.data.pictures import read_image
from banach.train.settings import read_toml


def run_bombs() -> int:
    """Read every bomb and return their number.

    Raises:
        AssertionError: if one is read rather than refused.
    """
    made = list(_bombs())
    with tempfile.TemporaryDirectory() as folder:
        for name, content, read in made:
            path = Path(folder) / name
            path.write_bytes(content)
            try:
                read(path)
            except ValueError:
                path.unlink()
            else:
                raise AssertionError(f"{name} was read, expected a refusal")
    return len(made)


def _bombs() -> Iterator[tuple[str, bytes, Callable[[Path], object]]]:
    zeros = 2**29
    yield "header.mat", _svhn((32, 32, 3, 400_000), zeros), _reader(SVHN)
    yield "data.mat", _svhn((32, 32, 3, 1), zeros), _reader(SVHN)
    yield (
        "images-idx3.gz",
        gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 2**31 // 784, 28, 28) + bytes(2**20)),
        _reader(MNIST),
    )
    yield "test_batch.bin", bytes(3073 * 10_001), _reader(CIFAR10)
    yield "dictionaries", b"\x80\x02](" + b"}" * 2**25 + b"e.", _reader(CIFAR10)
    yield "memo", b"\x80\x02]r\xff\xff\xff\x7f.", _reader(CIFAR10)
    for size in ((1, 80_000_000), (9_000, 9_000), (70_000, 1), (40_000, 40_000)):
        yield f"{size[0]}.png", _png(*size), lambda path: read_image(path, CIFAR10.shape)
    yield "arrays.npz", _npz(), lambda path: load(str(path))
    yield "deep.toml", b"a = " + b"[" * 5_000 + b"]" * 5_000, read_toml
    yield "tables.toml", b"epochs" + b".a" * 5_000 + b" = 1", read_toml


def _npz() -> bytes:
    """A .npz file whose header asks for 16 GiB."""
    file, header = io.BytesIO(), io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": (2**24, 32, 32)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in ("images", "labels"):
            packed.writestr(f"{name}.npy", header.getvalue() + bytes(2**24))
    return file.getvalue()


def _reader(dataset: DataSet) -> Callable[[Path], object]:
    return lambda path: dataset.read("test", (path, path)[: len(dataset.files["test"])])


def _svhn(shape: tuple[int, ...], size: int) -> bytes:
    """A MATLAB file with X of `size` zeros, compressed in parts so that this process stays small, too."""
    head = struct.pack("<6I", 6, 8, 9, 0, 5, 16) + struct.pack("<4i", *shape) + struct.pack("<HHI", 1, 1, ord("X"))
    pack = zlib.compressobj(1)
    parts = [pack.compress(struct.pack("<II", 14, 2**31) + head + struct.pack("<II", 2, size))]
    parts += [pack.compress(bytes(2**20)) for _ in range(size // 2**20)]
    packed = b"".join([*parts, pack.flush()])
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + struct.pack("<II", 15, len(packed)) + packed


def _png(width: int, height: int) -> bytes:
    """A PNG of one bit per pixel: only its header is large."""
    file = io.BytesIO()
    Image.new("1", (1, 1)).save(file, "PNG")
    content = file.getvalue()
    header = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]
