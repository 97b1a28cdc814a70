"""Two data sets of digits: scikit-learn's (inside a package) and MNIST (IDX files)."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from banach.data.dataset import Arrays, Damaged, DataSet, need
from banach.data.images import parted

TEST = 360  # images of scikit-learn's digits that we hold out
LIMIT = 2**26  # bytes that are read of an IDX file; the largest one of MNIST has 47 million
URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"


def read_digits(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read scikit-learn's images. Values 0 to 16 become 0 to 240, without loss; the test part is stratified."""
    both = need("sklearn.datasets", "digits").load_digits()
    pixels, labels = (both.images * 15).astype(np.uint8)[:, None], both.target.astype(np.uint8)
    index = parted(labels, TEST)[part == "test"]
    return Arrays(pixels[index], labels[index])


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an IDX file: two zero bytes, the type 8 (uint8), the number of sizes, the sizes, the values."""
    first, begin = struct.pack(">HBB", 0, 8, dimensions), 4 + 4 * dimensions
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            content = bytearray(file.read(LIMIT))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Damaged(path, f"it cannot be decompressed ({error})") from error
    if content[:4] != first or len(content) < begin:
        found = content[:begin].hex() or "nothing"
        raise Damaged(path, f"it starts with {found}, expected {first.hex()} and {dimensions} sizes")
    sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    if math.prod(sizes) != len(content) - begin:
        asks = f"its header {sizes} asks for {math.prod(sizes):,} bytes"
        raise Damaged(path, f"{asks}, and there are {len(content) - begin:,}")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(sizes)


DIGITS = DataSet(
    name="digits",
    title="digits (scikit-learn)",
    shape=(1, 8, 8),
    classes=tuple("0123456789"),
    mean=(0.2871,),  # of the train split, as stored
    std=(0.3539,),
    counts={"train": 1_437, "test": TEST},
    validation=180,
    read=read_digits,
    known={
        "train": "52aca2b41aa123dcab3862a834bbd556507087696bc1bba645a0118ee0208e14",
        "test": "dddbb1c6c41dda5d0a05754d76f4e142135ef8b64381136c0892420a638b1906",
    },
)

MNIST = DataSet(
    name="mnist",
    title="MNIST",
    shape=(1, 28, 28),
    classes=tuple("0123456789"),
    mean=(0.1307,),
    std=(0.3081,),
    counts={"train": 60_000, "test": 10_000},
    validation=5_000,
    read=lambda part, paths: Arrays(_read_idx(paths[0], 3)[:, None], _read_idx(paths[1], 1)),
    folders=("mnist", "MNIST/raw"),
    files={
        "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    },
    endings=("", ".gz"),
    downloads={
        URL + "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
        URL + "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
        URL + "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
        URL + "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
    },
    known={
        "train": "a454de301763d749ccfd1ebb5add77d549bcd2125320df72efaa88e014fca0f0",
        "test": "103f79bf9cce53f71a186484ee3992e7b298fffa37132ee5660752b8b02ea8e1",
    },
)
