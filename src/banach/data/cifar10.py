"""CIFAR-10: the binary version, or the Python version through an unpickler that can only build arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from banach.data.dataset import Arrays, Damaged, DataSet, Download, Known, Layout
from banach.data.pickles import load_arrays

ADDRESS = "https://www.cs.toronto.edu/~kriz/"
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_binary(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read and join files of records."""
    return _joined([_read_records(path) for path in paths])


def read_python(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read and join pickled batches."""
    return _joined([_read_pickle(path) for path in paths])


def _read_records(path: Path) -> Arrays:
    """Read records: one label byte, then the pixels."""
    size = path.stat().st_size
    if size == 0 or size % (1 + PIXELS):
        raise Damaged(path, f"its {size:,} bytes are not a whole number of records of {1 + PIXELS:,}")
    records = np.fromfile(path, np.uint8).reshape(-1, 1 + PIXELS)
    return _checked(path, records[:, 1:], records[:, 0])


def _read_pickle(path: Path) -> Arrays:
    """Read a dictionary with an array `data` (N, 3072) and a list `labels`."""
    batch = load_arrays(path)
    data, labels = batch.get("data"), batch.get("labels")
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS:
        raise Damaged(path, f"it has no array 'data' of shape (N, {PIXELS})")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise Damaged(path, "it has no list 'labels' of whole numbers")
    if len(labels) != len(data):
        raise Damaged(path, f"it holds {len(labels):,} labels and {len(data):,} images")
    return _checked(path, data, np.clip(np.array(labels, dtype=object), -1, 255).astype(np.int16))


def _checked(path: Path, pixels: np.ndarray, labels: np.ndarray) -> Arrays:
    # Checked here, where the file is known.
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(CLASSES)):
        worst = labels.max() if labels.max() >= len(CLASSES) else labels.min()
        raise Damaged(path, f"it has a label of {worst}, expected 0 to {len(CLASSES) - 1}")
    return Arrays(pixels, labels.astype(np.uint8))


def _joined(batches: list[Arrays]) -> Arrays:
    pixels = np.concatenate([batch.pixels for batch in batches])
    return Arrays(pixels.reshape(-1, *SHAPE), np.concatenate([batch.labels for batch in batches]))


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
