"""mnist: IDX files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from banach.data.dataset import Arrays, DataSet, Download, Known, Layout
from banach.data.error import Damaged

ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist/"
LIMIT = 2**31  # bytes: a header that claims more is no image file of this kind


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The uint8 array of an IDX file: two zero bytes, the type 8, the number of sizes, the sizes, the values."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            sizes = _header(path, file.read(4 + 4 * dimensions), dimensions)
            values = np.empty(sizes, np.uint8)
            count = file.readinto(values.data.cast("B")) + len(
                file.read(1)
            )  # one more, to see whether it ends there
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Damaged(path, f"it cannot be decompressed ({error})") from error
    if count != values.size:
        there = "there are more" if count > values.size else f"there are {count:,}"
        raise Damaged(path, f"its header {sizes} asks for {values.size:,} bytes, and {there}")
    return values


def _header(path: Path, head: bytes, dimensions: int) -> tuple[int, ...]:
    magic = struct.pack(">HBB", 0, 8, dimensions)
    if head[:4] != magic:
        raise Damaged(path, f"it starts with {head[:4].hex() or 'nothing'}, expected {magic.hex()}")
    if len(head) < 4 + 4 * dimensions:
        raise Damaged(path, f"it ends inside its header, after {len(head)} bytes")
    sizes = struct.unpack(f">{dimensions}I", head[4:])
    if not 0 < math.prod(sizes) <= LIMIT:
        raise Damaged(path, f"its header {sizes} asks for {math.prod(sizes):,} bytes, expected 1 to {LIMIT:,}")
    return sizes


def read_mnist(part: str, paths: tuple[Path, ...]) -> Arrays:
    pixels, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if len(pixels) != len(labels):
        raise Damaged(paths[1], f"it holds {len(labels):,} labels, and {paths[0].name} {len(pixels):,} images")
    if len(labels) and labels.max() > 9:
        raise Damaged(paths[1], f"it has a label of {labels.max()}, expected 0 to 9")
    return Arrays(pixels[:, None], labels)


MNIST = DataSet(
    name="mnist",
    title="MNIST",
    shape=(1, 28, 28),
    classes=tuple("0123456789"),
    mean=(0.1307,),
    std=(0.3081,),
    counts={"train": 60_000, "test": 10_000},
    validation=5_000,
    layouts=(
        Layout(
            read=read_mnist,
            folders=("mnist", "MNIST/raw"),
            files={
                "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
                "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
            },
            endings=("", ".gz"),
            md5={
                "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
                "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
                "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
                "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
            },
            downloads=(
                Download(ADDRESS + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                Download(ADDRESS + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
                Download(ADDRESS + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
                Download(ADDRESS + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
            ),
        ),
    ),
    known=(
        Known(
            "MNIST",
            {
                "train": "a454de301763d749ccfd1ebb5add77d549bcd2125320df72efaa88e014fca0f0",
                "test": "103f79bf9cce53f71a186484ee3992e7b298fffa37132ee5660752b8b02ea8e1",
            },
        ),
    ),
)
