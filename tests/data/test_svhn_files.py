"""SVHN's MATLAB files: axes, labels, damage, and what the data is called."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from banach.data import SVHN, Download, Known, load

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
        (lambda X, y: {"X": X.astype(np.float64), "y": y}, "X is double"),
        (lambda X, y: {"X": X.transpose(3, 2, 0, 1), "y": y}, "expected uint8 (32, 32, 3, N)"),
        (lambda X, y: {"X": X, "y": y[:-1]}, "y is uint8 of shape (39, 1) for 40 images"),
        (lambda X, y: {"X": X, "y": np.where(y == 10, 0, y).astype(np.uint8)}, "a label of 0, expected 1 to 10"),
        (lambda X, y: {"X": X, "y": np.where(y == 10, 11, y).astype(np.uint8)}, "a label of 11, expected 1 to 10"),
        (lambda X, y: {"X": X, "y": y.astype(np.float64)}, "y is double"),
        (lambda X, y: {"X": X[..., :30], "y": y[:30]}, "30 images and 30 labels, expected 40"),
    ],
)
def test_wrong_content_is_refused(
    matlab: dict, write: Callable, refusal: Callable, change: Callable, expected: str
) -> None:
    assert expected in refusal("svhn", write(**change(**matlab)), FILE)


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
    small(SVHN, known=(Known("SVHN re-cropped from the originals", digest, ""),))
    assert load("svhn", "train", write(**matlab)).title == "SVHN re-cropped from the originals"
    root = write(**matlab, compressed=True)
    assert load("svhn", "train", root).title == "SVHN re-cropped from the originals"
    published = Download(f"http://publisher/{FILE}", hashlib.md5((root / "svhn" / FILE).read_bytes()).hexdigest())
    small(SVHN, known=SVHN.known, layouts=(replace(SVHN.layouts[0], downloads=(published,)),))
    assert load("svhn", "train", root).title == "SVHN"


def test_other_arrays_are_refused_unless_unchecked(
    matlab: dict, write: Callable, small: Callable, refusal: Callable
) -> None:
    small(SVHN, known=SVHN.known)
    root = write(**matlab)
    assert "SHA-256" in refusal("svhn", root, FILE)
    assert load("svhn", "train", root, check=False).title == "SVHN (not checked)"
