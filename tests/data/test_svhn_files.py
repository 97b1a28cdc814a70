"""SVHN's MATLAB files: axes, labels, damage, and what the data is called."""

import hashlib
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from banach.data import SVHN, load
from data.parts_data import random_arrays, refusal, small

FILE = "train_32x32.mat"


@pytest.fixture
def content() -> tuple[np.ndarray, np.ndarray]:
    small(SVHN)
    return random_arrays(40, (3, 32, 32))


def saved(root: Path, *, packed: bool = False, **variables: object) -> Path:
    (root / "svhn").mkdir(exist_ok=True)
    savemat(root / "svhn" / FILE, variables, do_compression=packed)
    return root


@pytest.fixture
def matlab(content: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    """X and y as published: (32, 32, 3, N), and 10 for the digit 0."""
    pixels, labels = content
    X = np.stack([image.transpose(1, 2, 0) for image in pixels], axis=3)
    return {"X": X, "y": np.array([[10 if label == 0 else label] for label in labels], np.uint8)}


@pytest.mark.parametrize("packed", [False, True])
def test_values(content: tuple, matlab: dict, packed: bool, tmp_path: Path) -> None:
    got = load("svhn", "train+validation", saved(tmp_path, **matlab, packed=packed))
    assert np.array_equal(got.pixels.numpy(), content[0])
    assert np.array_equal(got.labels.numpy(), content[1])
    assert (got.labels == 0).any()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda X, y: {"X": X}, "not a MATLAB 5 file of X and y: it holds X"),
        (lambda X, y: {"X": X.transpose(3, 2, 0, 1), "y": y}, "images of shape (32, 40, 3)"),
        (lambda X, y: {"X": X.reshape(-1, 40), "y": y}, "axes don't match array"),
        (lambda X, y: {"X": X, "y": y[:-1]}, "40 images and 39 labels"),
        (lambda X, y: {"X": X, "y": np.where(y == 10, 11, y).astype(np.uint8)}, "a label of 11, expected 0 to 9"),
        (lambda X, y: {"X": X[..., :30], "y": y[:30]}, "30 images and 30 labels, expected 40"),
    ],
)
def test_wrong_content_is_refused(matlab: dict, tmp_path: Path, change: Callable, expected: str) -> None:
    assert expected in refusal("svhn", saved(tmp_path, **change(**matlab)), FILE)


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(name: str, shape: tuple[int, ...], data: bytes, stored: int = 2) -> bytes:
    """A variable of a MATLAB file, by hand: class uint8 (9), stored as uint8 (2) or another type."""
    head = element(6, struct.pack("<II", 9, 0)) + element(5, struct.pack(f"<{len(shape)}i", *shape))
    return element(14, head + element(1, name.encode()) + element(stored, data))


def compressed(content: bytes) -> bytes:
    packed = zlib.compress(content, 9)
    return struct.pack("<II", 15, len(packed)) + packed


def test_hostile_variables_are_refused(tmp_path: Path, content: tuple) -> None:
    """A small file may hold gigabytes, twice the same name, or another type than it says."""
    X, y = matrix("X", (32, 32, 3, 1), bytes(3072)), matrix("y", (1, 1), b"\1")
    path = tmp_path / "svhn" / FILE
    path.parent.mkdir()
    many = compressed(matrix("X", (32, 32, 3, 90_000), bytes(10_000)))
    for variables, expected in {
        many + y: "cannot reshape array of size 10000",
        compressed(matrix("X", (32, 32, 3, 1), bytes(2**24))) + y: "cannot reshape array of size 16777216",
        X + compressed(matrix("X", (32, 32, 3, 2), bytes(6144))) + y: "2 images and 1 labels, expected 40",
        matrix("X", (32, 32, 3, 1), bytes(3072 * 8), 9) + y: "X has the type 9, expected 2",
        matrix("X", (32, 32, 3, 1), bytes(3072), 99) + y: "X has the type 99",  # crashed scipy
        matrix("X", (32, 32, 3, 1), bytes(3071)) + y: "cannot reshape array of size 3071",
        X + matrix("y", (1,) * 100, b"\1"): "maximum supported dimension",
        X + matrix("\x1b[2J" * 10, (1, 1), b"\1"): "it holds ?[2J?",
        X + matrix("n" * 2000, (1, 1), b"\1"): "it holds nnn",
        X + matrix("y", (), b"\1"): "1 images and 1 labels, expected 40",
        X + compressed(b""): "not enough values to unpack",
        X + struct.pack("<II", 15, 50) + b"not compressed": "incorrect header check",
        X + element(3, bytes(8)): "an element of type 3, expected 14",
    }.items():
        path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + variables)
        sentence = refusal("svhn", tmp_path, FILE)
        assert expected in sentence
        assert len(sentence) < 700


@pytest.mark.parametrize("packed", [False, True])
def test_truncated_or_another_file_is_refused(matlab: dict, packed: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, **matlab, packed=packed) / "svhn" / FILE
    data = path.read_bytes()
    cut = [data[:size] for size in (0, 100, 200, len(data) // 2, len(data) - 40)]
    for content in (*cut, b"\x89HDF\r\n\x1a\n" + bytes(4000)):
        path.write_bytes(content)
        refusal("svhn", path.parents[1], FILE)


def test_arrays_have_their_title_and_others_are_refused(content: tuple, matlab: dict, tmp_path: Path) -> None:
    assert all(pinned.startswith("sha256:") for pinned in SVHN.downloads.values())  # they come over http
    digest = hashlib.sha256(content[1].tobytes() + content[0].tobytes()).hexdigest()
    small(SVHN, known={"train": digest})
    root = saved(tmp_path, **matlab, packed=True)
    assert load("svhn", "train", root).title == "SVHN re-cropped from the originals"
    published = hashlib.sha256((root / "svhn" / FILE).read_bytes()).hexdigest()
    small(SVHN, known=SVHN.known, downloads={f"http://publisher/{FILE}": f"sha256:{published}"})
    assert load("svhn", "train", root).title == "SVHN"
    small(SVHN, known=SVHN.known)
    assert "SHA-256" in refusal("svhn", root, FILE)
