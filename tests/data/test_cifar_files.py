"""CIFAR-10's binary version: read as published, preferred to the Python version; damage is refused."""

from __future__ import annotations

from collections.abc import Callable
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


def test_values_are_those_written(binary: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    folder = binary / "cifar-10-batches-py"
    folder.mkdir()
    for k in range(1, 6):
        (folder / f"data_batch_{k}").write_bytes(b"not even a pickle")
    got = load("cifar10", "train+validation", binary)
    assert np.array_equal(got.pixels.numpy(), arrays[0])
    assert np.array_equal(got.labels.numpy(), arrays[1])
    assert got.classes[3] == "cat"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b[:-1], "24,583 bytes are not a whole number of records"),
        (lambda b: b"", "0 bytes"),
        (lambda b: bytes(10_001 * 3073), "at most 10,000"),
        (lambda b: b"\x0a" + b[1:], "a label of 10, expected 0 to 9"),
    ],
)
def test_damaged_binary_is_refused(
    binary: Path, refusal: Callable, change: Callable[[bytes], bytes], expected: str
) -> None:
    path = binary / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(change(path.read_bytes()))
    assert expected in refusal("cifar10", binary, "data_batch_4.bin")


def test_a_batch_that_is_cut_or_missing_is_named(binary: Path, refusal: Callable) -> None:
    path = binary / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-3073])  # between two records
    sentence = refusal("cifar10", binary, "one of ")
    assert "data_batch_3.bin" in sentence
    assert "39 images" in sentence
    path.unlink()
    refusal("cifar10", binary, "data_batch_3.bin")
