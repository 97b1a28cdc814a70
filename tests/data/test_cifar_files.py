"""CIFAR-10: the binary version and the Python version give the same arrays; damage is refused by file name."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from hashlib import md5
from pathlib import Path

import numpy as np
import pytest

from banach.data import CIFAR10, load


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


def newer(protocol: int) -> Callable[[np.ndarray, list[int]], bytes]:
    return lambda data, labels: pickle.dumps(
        {"data": data, "labels": labels, "batch_label": "x"}, protocol=protocol
    )


WRITERS = {"Python 2": python_2, **{f"protocol {p}": newer(p) for p in (0, 1, 2, 3, 4, 5)}}


def write_python(root: Path, arrays: tuple[np.ndarray, np.ndarray], write: Callable) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    pixels, labels = arrays
    for k in range(5):
        part = slice(8 * k, 8 * k + 8)
        (folder / f"data_batch_{k + 1}").write_bytes(write(pixels[part].reshape(8, -1), labels[part].tolist()))
    return root


def test_binary_version(binary: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    got = load("cifar10", "train+validation", binary)
    assert np.array_equal(got.pixels.numpy(), arrays[0])
    assert np.array_equal(got.labels.numpy(), arrays[1])
    assert got.classes[3] == "cat"


@pytest.mark.parametrize("version", WRITERS)
def test_python_version(tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray], version: str) -> None:
    write_python(tmp_path, arrays, WRITERS[version])
    got = load("cifar10", "train+validation", tmp_path)
    assert np.array_equal(got.pixels.numpy(), arrays[0])
    assert np.array_equal(got.labels.numpy(), arrays[1])


def test_the_handwritten_python_2_pickle_is_a_true_one() -> None:
    data = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = pickle.loads(python_2(data, [3, 1, 2]), encoding="bytes")
    assert np.array_equal(content[b"data"], data)
    assert content[b"labels"] == [3, 1, 2]


def test_fortran_order_is_kept(tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    write_python(tmp_path, arrays, lambda data, labels: newer(4)(np.asfortranarray(data), labels))
    assert np.array_equal(load("cifar10", "train+validation", tmp_path).pixels.numpy(), arrays[0])


def test_the_binary_version_is_preferred(binary: Path) -> None:
    (binary / "cifar-10-batches-py").mkdir()
    for k in range(5):
        (binary / "cifar-10-batches-py" / f"data_batch_{k + 1}").write_bytes(b"not even a pickle")
    assert len(load("cifar10", "train", binary)) == 30


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b[:-1], "24,583 bytes are not a whole number of records"),
        (lambda b: b"", "0 bytes"),
        (lambda b: b"\x0a" + b[1:], "a label of 10, expected 0 to 9"),
    ],
)
def test_damaged_binary_is_refused(
    binary: Path, refusal: Callable, change: Callable[[bytes], bytes], expected: str
) -> None:
    path = binary / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(change(path.read_bytes()))
    assert expected in refusal("cifar10", binary, "data_batch_4.bin")


def test_a_batch_cut_between_records_is_named(binary: Path, refusal: Callable, small: Callable) -> None:
    folder = binary / "cifar-10-batches-bin"
    sums = {path.name: md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    small(CIFAR10, layouts=(replace(CIFAR10.layouts[0], md5=sums),))
    (folder / "data_batch_3.bin").write_bytes((folder / "data_batch_3.bin").read_bytes()[:-3073])
    assert "39 images" in refusal("cifar10", binary, "data_batch_3.bin")


def test_a_missing_batch_is_named(binary: Path, refusal: Callable) -> None:
    (binary / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    refusal("cifar10", binary, "data_batch_2.bin")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"labels": [0]}, "no array 'data'"),
        ({"data": np.zeros((1, 3071), np.uint8), "labels": [0]}, "no array 'data'"),
        ({"data": np.zeros((1, 3072), np.int8), "labels": [0]}, "array of type 'i1'"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "no list 'labels'"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["cat"]}, "no list 'labels'"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [0, 1]}, "2 labels and 1 images"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "a label of 10"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [-1]}, "a label of -1"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10**30]}, "expected 0 to 9"),
        ([1, 2], "a list, expected a dictionary"),
    ],
)
def test_wrong_pickles_are_refused(
    tmp_path: Path, arrays: tuple, refusal: Callable, content: object, expected: str
) -> None:
    write_python(tmp_path, arrays, python_2)
    (tmp_path / "cifar-10-batches-py" / "data_batch_5").write_bytes(pickle.dumps(content, protocol=4))
    assert expected in refusal("cifar10", tmp_path, "data_batch_5")
