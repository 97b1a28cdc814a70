"""SVHN's MATLAB files: axes, labels, damage, and what the data is called."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from banach.data import SVHN, load

FILE = "train_32x32.mat"


@pytest.fixture
def content(small: Callable, random_arrays: Callable) -> dict[str, np.ndarray]:
    small(SVHN)
    pixels, labels = random_arrays(40, (3, 32, 32))
    return {"pixels": pixels, "labels": labels}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def save(**variables: object) -> Path:
        (tmp_path / "svhn").mkdir(exist_ok=True)
        compressed = bool(variables.pop("compressed", False))
        savemat(tmp_path / "svhn" / FILE, variables, do_compression=compressed)
        return tmp_path

    return save


@pytest.fixture
def matlab(content: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """X and y as published: (32, 32, 3, N), and 10 for the digit 0."""
    X = np.stack([content["pixels"][i].transpose(1, 2, 0) for i in range(40)], axis=3)
    y = np.array([[10 if label == 0 else label] for label in content["labels"]], np.uint8)
    return {"X": X, "y": y}


@pytest.mark.parametrize("compressed", [False, True])
def test_values(content: dict, matlab: dict, write: Callable, compressed: bool) -> None:
    got = load("svhn", "train+validation", write(**matlab, compressed=compressed))
    assert np.array_equal(got.pixels.numpy(), content["pixels"])
    assert np.array_equal(got.labels.numpy(), content["labels"])
    assert (got.labels == 0).any()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda X, y: {"X": X}, "expected X and y"),
        (lambda X, y: {"X": X.astype(np.float64), "y": y}, "983,040 bytes, expected at most 122,880"),
        (lambda X, y: {"X": X.transpose(3, 2, 0, 1), "y": y}, "expected (32, 32, 3, N)"),
        (lambda X, y: {"X": X, "y": y[:-1]}, "40 images and 39 labels"),
        (lambda X, y: {"X": X, "y": np.where(y == 10, 0, y).astype(np.uint8)}, "a label of 0, expected 1 to 10"),
        (lambda X, y: {"X": X, "y": np.where(y == 10, 11, y).astype(np.uint8)}, "a label of 11, expected 1 to 10"),
        (lambda X, y: {"X": X, "y": y.T}, "expected (N, 1)"),
        (lambda X, y: {"X": X[..., :30], "y": y[:30]}, "30 images and 30 labels, expected 40"),
    ],
)
def test_wrong_content_is_refused(
    matlab: dict, write: Callable, refusal: Callable, change: Callable, expected: str
) -> None:
    assert expected in refusal("svhn", write(**change(**matlab)), FILE)


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(name: str, shape: tuple[int, ...], data: bytes, stored: int = 2, flags: int = 9) -> bytes:
    """A variable of a MATLAB file, by hand: class uint8 (9), stored as uint8 (2) or another type."""
    head = element(6, struct.pack("<II", flags, 0)) + element(5, struct.pack(f"<{len(shape)}i", *shape))
    return element(14, head + element(1, name.encode()) + element(stored, data))


def compressed(content: bytes) -> bytes:
    packed = zlib.compress(content, 9)
    return struct.pack("<II", 15, len(packed)) + packed


def test_hostile_variables_are_refused(tmp_path: Path, refusal: Callable, content: dict) -> None:
    """A small file may hold gigabytes, twice the same name, or another type than it says."""
    X, y = matrix("X", (32, 32, 3, 1), bytes(3072)), matrix("y", (1, 1), b"\1")
    path = tmp_path / "svhn" / FILE
    path.parent.mkdir()
    many = compressed(matrix("X", (32, 32, 3, 90_000), bytes(10_000)))
    for variables, expected in {
        many + y: "with N at most 73,257",
        compressed(matrix("X", (32, 32, 3, 1), bytes(2**24))) + y: "16,777,216 bytes, expected at most 3,072",
        X + compressed(matrix("X", (32, 32, 3, 2), bytes(6144))) + y: "it holds X twice",
        matrix("X", (32, 32, 3, 1), bytes(3072 * 8), 9) + y: "24,576 bytes, expected at most 3,072",
        matrix("X", (32, 32, 3, 1), bytes(3072), 99) + y: "3,072 bytes of type 99",  # crashed scipy
        matrix("X", (32, 32, 3, 1), bytes(3072), flags=0x809) + y: "complex",
        matrix("X", (32, 32, 3, 1), bytes(3071)) + y: "3,071 bytes of type 2",
        X + matrix("y", (1,) * 100, b"\1"): "an element of 400 bytes",
        X + matrix("\x1b[2J" * 10, (1, 1), b"\1"): "it holds X, expected X and y",
        X + matrix("n" * 2000, (1, 1), b"\1"): "an element of 2,000 bytes, expected at most 64",
        X + compressed(b""): "unpack requires",
        X + struct.pack("<II", 15, 50) + b"not compressed": "incorrect header check",
        X + element(3, bytes(8)): "an element of type 3, expected 14",
    }.items():
        path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + variables)
        sentence = refusal("svhn", tmp_path, FILE)
        assert expected in sentence
        assert len(sentence) < 700


def test_published_files_have_a_pinned_sha256() -> None:
    """They come over http, and no arrays are known."""
    assert all(digest.startswith("sha256:") for digest in SVHN.downloads.values())


@pytest.mark.parametrize("compressed", [False, True])
def test_truncated_or_another_file_is_refused(
    matlab: dict, write: Callable, refusal: Callable, compressed: bool
) -> None:
    path = write(**matlab, compressed=compressed) / "svhn" / FILE
    data = path.read_bytes()
    cut = [data[:size] for size in (0, 100, 200, len(data) // 2, len(data) - 40)]
    for content in (*cut, b"\x89HDF\r\n\x1a\n" + bytes(4000)):
        path.write_bytes(content)
        refusal("svhn", path.parents[1], FILE)


def test_arrays_have_the_title_of_what_they_are(
    content: dict, matlab: dict, write: Callable, small: Callable
) -> None:
    digest = hashlib.sha256(content["labels"].tobytes() + content["pixels"].tobytes()).hexdigest()
    small(SVHN, known={"train": digest})
    assert load("svhn", "train", write(**matlab)).title == "SVHN re-cropped from the originals"
    root = write(**matlab, compressed=True)
    assert load("svhn", "train", root).title == "SVHN re-cropped from the originals"
    md5 = hashlib.md5((root / "svhn" / FILE).read_bytes()).hexdigest()
    small(SVHN, known=SVHN.known, downloads={f"http://publisher/{FILE}": f"md5:{md5}"})
    assert load("svhn", "train", root).title == "SVHN"


def test_other_arrays_are_refused(matlab: dict, write: Callable, small: Callable, refusal: Callable) -> None:
    small(SVHN, known=SVHN.known)
    root = write(**matlab)
    assert "SHA-256" in refusal("svhn", root, FILE)
