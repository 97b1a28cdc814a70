"""CIFAR-10: records and pickles are read as published; damaged ones are refused, and nothing in them is run."""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banach.data import CIFAR10, load
from data.parts_data import random_arrays, refusal, small, write

Writer = Callable[[np.ndarray, list[int]], bytes]


def records(data: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, data, strict=True))


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


def newer(protocol: int) -> Writer:
    def dump(data: np.ndarray, labels: list[int]) -> bytes:
        batch = {"batch_label": "x", "labels": labels, "data": data, "filenames": ["a.png"] * len(labels)}
        return pickle.dumps(batch, protocol=protocol)

    return dump


def batches(root: Path, writer: Writer = python_2) -> tuple[np.ndarray, np.ndarray]:
    """Write five batches and return their arrays."""
    small(CIFAR10)
    version, ending = ("bin", ".bin") if writer is records else ("py", "")
    pixels, labels = random_arrays(40, (3, 32, 32))
    for k, part in enumerate(np.split(np.arange(40), 5), 1):
        content = writer(pixels[part].reshape(8, -1), labels[part].tolist())
        write(root / f"cifar-10-batches-{version}", {f"data_batch_{k}{ending}": content})
    return pixels, labels


@pytest.mark.parametrize("writer", [records, python_2, *map(newer, (0, 2, 5))])
def test_every_version_is_read(tmp_path: Path, writer: Writer) -> None:
    pixels, labels = batches(tmp_path, writer)
    got = load("cifar10", "train+validation", tmp_path)
    assert np.array_equal(got.pixels.numpy(), pixels)
    assert np.array_equal(got.labels.numpy(), labels)
    assert got.classes[3] == "cat"
    data = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = pickle.loads(python_2(data, [3, 1, 2]), encoding="bytes")  # the handwritten one is a true pickle
    assert np.array_equal(content[b"data"], data)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b[:-1], "24,583 bytes are not a whole number of records"),
        (lambda b: b"", "0 bytes"),
        (lambda b: bytes(10_001 * 3073), "at most 10,000"),
        (lambda b: b"\x0a" + b[1:], "a label of 10, expected 0 to 9"),
        (lambda b: b[:-3073], "39 images"),  # between two records
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, change: Callable, expected: str) -> None:
    batches(tmp_path, records)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(change(path.read_bytes()))
    assert expected in refusal("cifar10", tmp_path, path.name)


class Touch:
    """Unpickled by Python's own unpickler, this makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


ONE = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"labels": [0]}, "0 bytes of images and 1 labels"),
        ({"data": ONE[:, 1:], "labels": [0]}, "expected 3,072 bytes per label"),
        ({"data": ONE}, "3,072 bytes of images and 0 labels"),
        ({"data": ONE, "labels": [0, 1]}, "2 labels"),
        ({"data": ONE, "labels": [-1]}, "not a readable pickle"),
        ({"data": "é" * 3071 + "€", "labels": [0]}, "not a readable pickle"),
        (b"\x80\x02](" + b"}" * 2**18 + b"e.", "more than 262,144 opcodes"),
        (python_2(ONE, [0])[:-9], "not a readable pickle"),
        (bytes(2**26 + 1), "at most 67,108,864"),
    ],
)
def test_damaged_pickles_are_refused(tmp_path: Path, content: Any, expected: str) -> None:
    batches(tmp_path)
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=4)
    (tmp_path / "cifar-10-batches-py" / "data_batch_5").write_bytes(data)
    assert expected in refusal("cifar10", tmp_path, "data_batch_5")


@pytest.mark.parametrize("protocol", [0, 5])
def test_a_call_in_a_pickle_is_not_made(tmp_path: Path, protocol: int) -> None:
    batches(tmp_path)
    marker = tmp_path / "marker"
    for content in (Touch(marker), {"labels": [0, {"x": (1, [Touch(marker)])}]}):
        data = pickle.dumps(content, protocol=protocol)
        (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(data)
        assert "nothing in it was run" in refusal("cifar10", tmp_path, "data_batch_2")
        assert not marker.exists()
        pickle.loads(data)
        marker.rmdir()  # it was made, so the attack was a real one
