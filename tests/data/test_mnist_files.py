"""IDX files: read as published, gzipped or not, and refused when damaged."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from banach.data import MNIST, load
from data.parts_data import mnist_files, write

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.fixture
def files(tmp_path: Path, small: Callable) -> Path:
    small(MNIST)
    write(tmp_path / "mnist", mnist_files(zipped=False))
    return tmp_path


def test_values_are_those_written(files: Path) -> None:
    written = mnist_files(zipped=False)
    for split, prefix, count in (("train+validation", "train", 40), ("test", "t10k", 20)):
        got = load("mnist", split, files)
        assert (got.pixels.dtype, got.labels.dtype) == (torch.uint8, torch.int64)
        assert got.pixels.shape == (count, 1, 28, 28)
        assert got.pixels.numpy().tobytes() == written[f"{prefix}-images-idx3-ubyte"][16:]
        assert got.labels.to(torch.uint8).numpy().tobytes() == written[f"{prefix}-labels-idx1-ubyte"][8:]
        assert (got.name, got.title, got.split, len(got.classes)) == ("mnist", "MNIST", split, 10)


@pytest.mark.parametrize(
    ("folder", "zipped"), [("mnist", (IMAGES,)), ("MNIST/raw", (IMAGES, LABELS)), (".", ()), (".", (LABELS,))]
)
def test_layouts(files: Path, folder: str, zipped: tuple[str, ...]) -> None:
    expected = load("mnist", "train", files)
    other = files / "other" / folder
    for name in (IMAGES, LABELS):
        data = (files / "mnist" / name).read_bytes()
        write(other, {f"{name}.gz": gzip.compress(data)} if name in zipped else {name: data})
    got = load("mnist", "train", files / "other")
    assert torch.equal(got.pixels, expected.pixels)
    assert torch.equal(got.labels, expected.labels)


def image_bytes(folder: Path) -> bytes:
    return (folder / IMAGES).read_bytes()


def label_bytes(folder: Path) -> bytes:
    return (folder / LABELS).read_bytes()


DAMAGE: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "truncated": (IMAGES, lambda f: image_bytes(f)[:-1], "there are 31,359"),
    "too long": (IMAGES, lambda f: image_bytes(f) + b"x", "there are more"),
    "empty": (IMAGES, lambda f: b"", "starts with nothing"),
    "cut in the header": (IMAGES, lambda f: image_bytes(f)[:9], "inside its header"),
    "labels in place of images": (IMAGES, lambda f: label_bytes(f), "starts with 00000801, expected 00000803"),
    "another magic": (IMAGES, lambda f: b"\x00\x00\x0d\x03" + image_bytes(f)[4:], "expected 00000803"),
    "no images": (IMAGES, lambda f: struct.pack(">IIII", 0x803, 0, 28, 28), "asks for 0 bytes"),
    "a header that asks for all memory": (
        IMAGES,
        lambda f: struct.pack(">IIII", 0x803, 2**32 - 1, 2**32 - 1, 28),
        "asks for",
    ),
    "another size": (
        IMAGES,
        lambda f: struct.pack(">IIII", 0x803, 40, 14, 56) + image_bytes(f)[16:],
        "(1, 14, 56)",
    ),
    "a label out of range": (LABELS, lambda f: label_bytes(f)[:-1] + b"\x0a", "a label of 10, expected 0 to 9"),
    "fewer labels than images": (
        LABELS,
        lambda f: struct.pack(">II", 0x801, 39) + label_bytes(f)[8:-1],
        "40 images and 39 labels",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(files: Path, refusal: Callable, damage: str) -> None:
    name, change, expected = DAMAGE[damage]
    (files / "mnist" / name).write_bytes(change(files / "mnist"))
    assert expected in refusal("mnist", files, name)


def test_wrong_count_is_refused(files: Path, refusal: Callable, small: Callable) -> None:
    small(MNIST, train=41)
    assert "40 images and 40 labels, expected 41 of each" in refusal("mnist", files, IMAGES)


@pytest.mark.parametrize("change", [lambda z: z[:-9], lambda z: z[:40] + bytes(8) + z[48:], lambda z: b"no gzip"])
def test_broken_gzip_is_refused(files: Path, refusal: Callable, change: Callable[[bytes], bytes]) -> None:
    path = files / "mnist" / IMAGES
    path.with_name(IMAGES + ".gz").write_bytes(change(gzip.compress(path.read_bytes())))
    path.unlink()
    assert "cannot be decompressed" in refusal("mnist", files, IMAGES + ".gz")


def test_a_missing_file_and_a_folder_in_its_place_are_named(files: Path, refusal: Callable) -> None:
    (files / "mnist" / LABELS).unlink()
    assert f"has no {LABELS}" in refusal("mnist", files, LABELS)
    (files / "mnist" / LABELS).mkdir()
    assert "cannot be read" in refusal("mnist", files, LABELS)
