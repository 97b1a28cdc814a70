"""CIFAR-10: the binary version, or the Python version through an unpickler that can only build arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from banach.data.dataset import Arrays, Damaged, DataSet, Download, Known, Layout
from banach.data.pickles import load_arrays

ADDRESS = "https://www.cs.toronto.edu/~kriz/"
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
RECORDS = 10_000  # at most, in one file
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_batches(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Read and join batches: files of records (.bin) or pickles."""
    batches = [_read_records(path) if path.suffix == ".bin" else _read_pickle(path) for path in paths]
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Arrays(pixels.reshape(-1, *SHAPE), labels.astype(np.uint8))


def _read_records(path: Path) -> Arrays:
    """Read records: one label byte, then the pixels."""
    size = path.stat().st_size
    if size == 0 or size % (1 + PIXELS) or size > RECORDS * (1 + PIXELS):
        expected = f"a whole number of records of {1 + PIXELS:,}, at most {RECORDS:,}"
        raise Damaged(path, f"its {size:,} bytes are not {expected}")
    records = np.fromfile(path, np.uint8).reshape(-1, 1 + PIXELS)
    return Arrays(records[:, 1:], _checked(path, records[:, 0].tolist()))


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
    return Arrays(data, _checked(path, labels))


def _checked(path: Path, labels: list[int]) -> np.ndarray:
    wrong = [label for label in labels if not 0 <= label < len(CLASSES)]
    if wrong:  # refused here, where the file is known
        raise Damaged(path, f"it has a label of {wrong[0]}, expected 0 to {len(CLASSES) - 1}")
    return np.array(labels, np.uint8)


def _layout(version: str, ending: str, md5: str) -> Layout:
    archive = {"bin": "binary", "py": "python"}[version]
    train = tuple(f"data_batch_{k}{ending}" for k in range(1, 6))
    return Layout(
        read=read_batches,
        folders=(f"cifar-10-batches-{version}",),
        files={"train": train, "test": (f"test_batch{ending}",)},
        downloads=(Download(f"{ADDRESS}cifar-10-{archive}.tar.gz", md5, archive=True),),
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
    layouts=(
        _layout("bin", ".bin", "c32a1d4ab5d03f1284b67883e8d87530"),
        _layout("py", "", "c58f30108f718f92721af3b95e74349a"),
    ),
    known=(
        Known(
            "CIFAR-10",
            train="72271e0eaae021dd9568260927404c4fff87e7e0bfa04c843b94150b01b9bc26",
            test="ecc0a6ddb5cb58330ce4f06c1825ec8c68baeade5baaacbb3cbdf8f385599213",
        ),
    ),
)
