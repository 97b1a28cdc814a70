"""CIFAR-10: the binary version and the Python version give the same arrays; damage is refused by file name."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banach.data import CIFAR10, DataError, cifar10, load


@pytest.fixture
def arrays(small: Callable, random_arrays: Callable) -> tuple[np.ndarray, np.ndarray]:
    small(CIFAR10)
    return random_arrays(40, (3, 32, 32))


@pytest.fixture
def binary(tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray]) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    pixels, labels = arrays
    for k in range(5):
        records = [bytes([labels[i]]) + pixels[i].tobytes() for i in range(8 * k, 8 * k + 8)]
        (folder / f"data_batch_{k + 1}.bin").write_bytes(b"".join(records))
    return tmp_path


def python_2(data: np.ndarray, labels: list[int]) -> bytes:
    """The bytes Python 2 wrote for {'data': array, 'labels': list}: protocol 2, byte strings, numpy.core."""
    text = lambda s: b"U" + bytes([len(s)]) + s.encode()  # noqa: E731
    shape = b"".join(b"J" + struct.pack("<i", n) for n in data.shape) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    raw = b"T" + struct.pack("<i", data.size) + data.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    return b"\x80\x02}(" + text("data") + array + text("labels") + numbers + b"u."


def write_python(root: Path, arrays: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write pickled batches, with MD5 sums that make them the published ones."""
    folder, sums = root / "cifar-10-batches-py", {}
    folder.mkdir()
    pixels, labels = arrays
    for k in range(5):
        part = slice(8 * k, 8 * k + 8)
        content = python_2(pixels[part].reshape(8, -1), labels[part].tolist())
        (folder / f"data_batch_{k + 1}").write_bytes(content)
        sums[f"data_batch_{k + 1}"] = md5(content).hexdigest()
    monkeypatch.setattr(cifar10, "PYTHON", replace(cifar10.PYTHON, md5=sums))
    return folder


def test_binary_version(binary: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    (binary / "cifar-10-batches-py").mkdir()  # which is not looked into if both are there
    for k in range(5):
        (binary / "cifar-10-batches-py" / f"data_batch_{k + 1}").write_bytes(b"not even a pickle")
    got = load("cifar10", "train+validation", binary)
    assert np.array_equal(got.pixels.numpy(), arrays[0])
    assert np.array_equal(got.labels.numpy(), arrays[1])
    assert got.classes[3] == "cat"


def test_python_version(
    tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_python(tmp_path, arrays, monkeypatch)
    got = load("cifar10", "train+validation", tmp_path)
    assert np.array_equal(got.pixels.numpy(), arrays[0])
    assert np.array_equal(got.labels.numpy(), arrays[1])


class Touch:
    """Unpickled, this makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("check", [True, False])
def test_a_hostile_pickle_is_not_opened(
    tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    hostile = pickle.dumps({"data": Touch(tmp_path / "marker")}, protocol=2)
    (write_python(tmp_path, arrays, monkeypatch) / "data_batch_4").write_bytes(hostile)
    with pytest.raises(DataError, match=r"data_batch_4 cannot be used: it has the MD5 .* not unpickled; delete"):
        load("cifar10", "train", tmp_path, check=check)
    assert not (tmp_path / "marker").exists()
    pickle.loads(hostile)
    assert (tmp_path / "marker").exists()  # so the attack was a real one


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b[:-1], "24,583 bytes are not a whole number of records"),
        (lambda b: b"", "0 bytes"),
        (lambda b: b[:-3073], "39 images"),
        (lambda b: b"\x0a" + b[1:], "a label of 10, expected 0 to 9"),
    ],
)
def test_the_damaged_batch_is_named(
    binary: Path, refusal: Callable, small: Callable, change: Callable[[bytes], bytes], expected: str
) -> None:
    folder = binary / "cifar-10-batches-bin"
    sums = {path.name: md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    small(CIFAR10, layouts=(replace(CIFAR10.layouts[0], md5=sums),))
    path = folder / "data_batch_4.bin"
    path.write_bytes(change(path.read_bytes()))
    assert expected in refusal("cifar10", binary, "data_batch_4.bin")


def test_a_missing_batch_is_named(binary: Path, refusal: Callable) -> None:
    (binary / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    refusal("cifar10", binary, "data_batch_2.bin")
