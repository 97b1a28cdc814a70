"""CIFAR-10: the binary version, or the Python version, whose pickles are scanned and never unpickled."""

import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from banach.data.dataset import Arrays, Damaged, DataSet

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
RECORDS = 10_000  # at most, in one file
# Of a pickle: a batch has 31 million bytes, 46 million as protocol 2 of newer Pythons, and about 60,000 opcodes.
BYTES, OPCODES = 2**26, 2**18
NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_batches(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read and join batches: files of records (.bin) or pickles."""
    batches = [_read_records(path) if path.suffix == ".bin" else _read_pickle(path) for path in paths]
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Arrays(pixels.reshape(-1, *SHAPE), labels)


def _read_records(path: Path) -> Arrays:
    """Read records: one label byte, then the pixels."""
    size = path.stat().st_size
    if size == 0 or size % (1 + PIXELS) or size > RECORDS * (1 + PIXELS):
        expected = f"a whole number of records of {1 + PIXELS:,}, at most {RECORDS:,}"
        raise Damaged(path, f"its {size:,} bytes are not {expected}")
    records = np.fromfile(path, np.uint8).reshape(-1, 1 + PIXELS)
    return Arrays(records[:, 1:], records[:, 0])


def _read_pickle(path: Path) -> Arrays:
    """Read the array `data` and the list `labels` of a pickled dictionary."""
    if path.stat().st_size > BYTES:
        raise Damaged(path, f"it holds {path.stat().st_size:,} bytes, expected at most {BYTES:,}")
    try:
        data, labels = _scan(path.read_bytes())
    except Exception as error:  # a broken pickle can raise anything
        raise Damaged(path, f"it is not a readable pickle ({type(error).__name__}: {error})") from error
    if not labels or len(data) != PIXELS * len(labels):
        found = f"{len(data):,} bytes of images and {len(labels):,} labels"
        raise Damaged(path, f"it holds {found}, expected {PIXELS:,} bytes per label; nothing in it was run")
    return Arrays(np.frombuffer(data, np.uint8).reshape(-1, PIXELS), np.frombuffer(labels, np.uint8))


def _scan(content: bytes) -> tuple[bytes, bytes]:
    """Return the one long string of a pickle, and the numbers after the key "labels".

    `pickletools` lists opcodes and their arguments: no object is built, no name is imported.
    """
    data: Any = b""
    key, labels = None, list[int]()
    for count, (opcode, value, _) in enumerate(pickletools.genops(content)):
        if count == OPCODES:
            raise ValueError(f"more than {OPCODES:,} opcodes")
        if isinstance(value, (str, bytes, bytearray)):
            key, data = (value, data) if len(value) < PIXELS else (key, value)
        elif value is not None and opcode.name in NUMBERS and key in ("labels", b"labels"):
            labels.append(value)
    return data.encode("latin1") if isinstance(data, str) else data, bytes(labels)


CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10",
    shape=SHAPE,
    classes=CLASSES,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    counts={"train": 50_000, "test": 10_000},
    validation=5_000,
    read=read_batches,
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    files={"train": tuple(f"data_batch_{k}" for k in range(1, 6)), "test": ("test_batch",)},
    endings=(".bin", ""),
    downloads={"https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
    known={
        "train": "72271e0eaae021dd9568260927404c4fff87e7e0bfa04c843b94150b01b9bc26",
        "test": "ecc0a6ddb5cb58330ce4f06c1825ec8c68baeade5baaacbb3cbdf8f385599213",
    },
)
