"""Three data sets of digits: scikit-learn's (inside a package), MNIST (IDX files) and SVHN (MATLAB files)."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from banach.data.dataset import Arrays, Damaged, DataSet, Download, Known, Layout, need
from banach.data.images import held_out, rest
from banach.data.matlab import read_matlab

TEST = 360  # images of scikit-learn's digits that we hold out
LIMIT = 2**26  # bytes: an IDX header that asks for more is damaged; MNIST's has 47 million
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SVHN_URL = "http://ufldl.stanford.edu/housenumbers/"  # no https: the files have a pinned SHA-256


def read_digits(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read scikit-learn's images. Values 0 to 16 become 0 to 240, without loss; the test part is stratified."""
    both = need("sklearn.datasets", "digits").load_digits()
    pixels, labels = (both.images * 15).astype(np.uint8)[:, None], both.target.astype(np.uint8)
    test = held_out(labels, TEST)
    index = test if part == "test" else rest(len(labels), test)
    return Arrays(pixels[index], labels[index])


def read_mnist(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read a file of images and a file of labels."""
    pixels, labels = _read_idx(paths[0], 3), _read_idx(paths[1], 1)
    if len(pixels) != len(labels):
        raise Damaged(paths[1], f"it holds {len(labels):,} labels, and {paths[0].name} {len(pixels):,} images")
    if len(labels) and labels.max() > 9:
        raise Damaged(paths[1], f"it has a label of {labels.max()}, expected 0 to 9")
    return Arrays(pixels[:, None], labels)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an IDX file: two zero bytes, the type 8 (uint8), the number of sizes, the sizes, the values."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            sizes = _idx_sizes(path, file.read(4 + 4 * dimensions), dimensions)
            values = np.empty(sizes, np.uint8)
            count = file.readinto(values.data.cast("B"))
            count += len(file.read(1))  # one more byte, to see whether the file ends there
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Damaged(path, f"it cannot be decompressed ({error})") from error
    if count != values.size:
        there = "there are more" if count > values.size else f"there are {count:,}"
        raise Damaged(path, f"its header {sizes} asks for {values.size:,} bytes, and {there}")
    return values


def _idx_sizes(path: Path, head: bytes, dimensions: int) -> tuple[int, ...]:
    magic = struct.pack(">HBB", 0, 8, dimensions)
    if head[:4] != magic:
        raise Damaged(path, f"it starts with {head[:4].hex() or 'nothing'}, expected {magic.hex()}")
    if len(head) < 4 + 4 * dimensions:
        raise Damaged(path, f"it ends inside its header, after {len(head)} bytes")
    sizes = struct.unpack(f">{dimensions}I", head[4:])
    if not 0 < math.prod(sizes) <= LIMIT:
        raise Damaged(path, f"its header {sizes} asks for {math.prod(sizes):,} bytes, expected 1 to {LIMIT:,}")
    return sizes


def read_svhn(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read X uint8 (32, 32, 3, N) and y (N, 1) with values 1 to 10, where 10 is the digit 0."""
    (path,) = paths
    content = read_matlab(path, partial(_wanted, path))
    if len(content) != 2:
        raise Damaged(path, f"it holds {' and '.join(content) or 'neither'}, expected X and y")
    pixels, labels = content["X"], content["y"].reshape(-1)
    if len(labels) != pixels.shape[3]:
        raise Damaged(
            path, f"y has the shape {content['y'].shape} for {pixels.shape[3]:,} images, expected (N, 1)"
        )
    if labels.min() < 1 or labels.max() > 10:
        worst = labels.max() if labels.max() > 10 else labels.min()
        raise Damaged(path, f"it has a label of {worst}, expected 1 to 10 (10 is the digit 0)")
    return Arrays(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)), (labels % 10).astype(np.uint8))


def _wanted(path: Path, name: str, shape: tuple[int, ...], kind: str) -> bool:
    """Return True for X and y. Checks shape and type, before anything of that size is read."""
    most = max(SVHN.counts.values())
    if name == "X" and (kind != "uint8" or shape[:3] != (32, 32, 3) or not _is_count(shape[3:], most)):
        expected = f"uint8 (32, 32, 3, N) with N at most {most:,}"
        raise Damaged(path, f"X is {kind} of shape {shape}, expected {expected}")
    kinds = ("uint8", "int8", "uint16", "int16", "int32")
    if name == "y" and (kind not in kinds or not (_is_count(shape[:1], most) and shape[1:] == (1,))):
        raise Damaged(path, f"y is {kind} of shape {shape}, expected uint8 (N, 1) with N at most {most:,}")
    return name in ("X", "y")


def _is_count(sizes: tuple[int, ...], most: int) -> bool:
    return len(sizes) == 1 and 0 < sizes[0] <= most


DIGITS = DataSet(
    name="digits",
    title="digits (scikit-learn)",
    shape=(1, 8, 8),
    classes=tuple("0123456789"),
    mean=(0.2871,),  # of the train split, as stored
    std=(0.3539,),
    counts={"train": 1_437, "test": TEST},
    validation=180,
    layouts=(Layout(read=read_digits),),
    known=(
        Known(
            "digits (scikit-learn)",
            train="52aca2b41aa123dcab3862a834bbd556507087696bc1bba645a0118ee0208e14",
            test="dddbb1c6c41dda5d0a05754d76f4e142135ef8b64381136c0892420a638b1906",
        ),
    ),
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
    layouts=(
        Layout(
            read=read_mnist,
            folders=("mnist", "MNIST/raw"),
            files={
                "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
                "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
            },
            endings=("", ".gz"),
            downloads=(
                Download(MNIST_URL + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                Download(MNIST_URL + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
                Download(MNIST_URL + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
                Download(MNIST_URL + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
            ),
        ),
    ),
    known=(
        Known(
            "MNIST",
            train="a454de301763d749ccfd1ebb5add77d549bcd2125320df72efaa88e014fca0f0",
            test="103f79bf9cce53f71a186484ee3992e7b298fffa37132ee5660752b8b02ea8e1",
        ),
    ),
)

SVHN = DataSet(
    name="svhn",
    title="SVHN",  # of the published files; the known arrays below were cropped again and have another title
    shape=(3, 32, 32),
    classes=tuple("0123456789"),
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    counts={"train": 73_257, "test": 26_032},
    validation=5_000,
    layouts=(
        Layout(
            read=read_svhn,
            folders=("svhn",),
            files={"train": ("train_32x32.mat",), "test": ("test_32x32.mat",)},
            downloads=(
                Download(
                    SVHN_URL + "train_32x32.mat",
                    md5="e26dedcc434d2e4c54c9b2d4a06d8373",
                    sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                ),
                Download(
                    SVHN_URL + "test_32x32.mat",
                    md5="eb5a983be6a315427106f1b164d9cef3",
                    sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                ),
            ),
        ),
    ),
    known=(
        Known(
            "SVHN re-cropped from the originals",
            train="847c5c27e330ee98e8f913482bf91b9a0a3761c8ad3583ad8fc82435a03ef70e",
            test="16a1e315de7f3215f1c75780bddd7877b7743c523a1ba8bdfc104f184403ccb0",
        ),
    ),
)
