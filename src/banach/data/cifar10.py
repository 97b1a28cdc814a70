"""CIFAR-10: the binary version, or the Python version, whose pickles are opened only with their published MD5."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from pathlib import Path

import numpy as np

from banach.data.dataset import Arrays, Damaged, DataSet, Download, Known, Layout

ADDRESS = "https://www.cs.toronto.edu/~kriz/"
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_binary(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read and join files of records: one label byte, then the pixels."""
    for path in paths:
        size = path.stat().st_size
        if size == 0 or size % (1 + PIXELS):
            raise Damaged(path, f"its {size:,} bytes are not a whole number of records of {1 + PIXELS:,}")
    records = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, 1 + PIXELS)
    return Arrays(records[:, 1:].reshape(-1, *SHAPE), records[:, 0])


def read_python(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read and join pickled dictionaries with an array `data` (N, 3072) and a list `labels`."""
    batches = [_unpickled(path) for path in paths]
    pixels, labels = (np.concatenate([batch[key] for batch in batches]) for key in (b"data", b"labels"))
    return Arrays(pixels.reshape(-1, *SHAPE), labels.astype(np.uint8))


def _unpickled(path: Path) -> dict[bytes, np.ndarray]:
    """Open the publisher's own file only: another pickle could run any code."""
    content = path.read_bytes()
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != PYTHON.md5[path.name]:
        raise Damaged(path, f"it has the MD5 {digest}, expected {PYTHON.md5[path.name]}, so it was not unpickled")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy deprecates what Python 2 wrote
        batch: dict[bytes, np.ndarray] = pickle.loads(content, encoding="bytes")
    return batch


BINARY = Layout(
    read=read_binary,
    folders=("cifar-10-batches-bin",),
    files={"train": tuple(f"data_batch_{k}.bin" for k in range(1, 6)), "test": ("test_batch.bin",)},
    md5={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    downloads=(Download(ADDRESS + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", archive=True),),
)

PYTHON = Layout(
    read=read_python,
    folders=("cifar-10-batches-py",),
    files={"train": tuple(f"data_batch_{k}" for k in range(1, 6)), "test": ("test_batch",)},
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    downloads=(Download(ADDRESS + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", archive=True),),
)

CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10",
    shape=SHAPE,
    classes=CLASSES,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    counts={"train": 50_000, "test": 10_000},
    validation=5_000,
    layouts=(BINARY, PYTHON),
    known=(
        Known(
            "CIFAR-10",
            {
                "train": "72271e0eaae021dd9568260927404c4fff87e7e0bfa04c843b94150b01b9bc26",
                "test": "ecc0a6ddb5cb58330ce4f06c1825ec8c68baeade5baaacbb3cbdf8f385599213",
            },
        ),
    ),
)
