"""IDX files: read as published, gzipped or not, and refused when damaged."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from banach.data import MNIST, load
from data.parts_data import mnist_files, refusal, small, write

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.fixture
def files(tmp_path: Path) -> Path:
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


@pytest.mark.parametrize(("folder", "zipped"), [("mnist", (IMAGES,)), ("MNIST/raw", (IMAGES, LABELS)), (".", ())])
def test_layouts(files: Path, folder: str, zipped: tuple[str, ...]) -> None:
    expected = load("mnist", "train", files)
    for name in (IMAGES, LABELS):
        data = (files / "mnist" / name).read_bytes()
        write(files / "other" / folder, {f"{name}.gz": gzip.compress(data)} if name in zipped else {name: data})
    got = load("mnist", "train", files / "other")
    assert torch.equal(got.pixels, expected.pixels)
    assert torch.equal(got.labels, expected.labels)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (IMAGES, lambda b: b[:-1], "there are 31,359"),
        (IMAGES, lambda b: b + b"x", "asks for 31,360 bytes, and there are 31,361"),
        (IMAGES, lambda b: b"", "starts with nothing"),
        (IMAGES, lambda b: b[:9], "starts with 000008030000002800, expected 00000803 and 3 sizes"),
        (IMAGES, lambda b: struct.pack(">II", 0x801, 40) + bytes(40), "starts with 00000801"),
        (IMAGES, lambda b: struct.pack(">IIII", 0x803, 0, 28, 28), "0 images and 40 labels"),
        (IMAGES, lambda b: struct.pack(">IIII", 0x803, 2**32 - 1, 2**32 - 1, 28), ", and there are 0"),
        (IMAGES, lambda b: struct.pack(">IIII", 0x803, 40, 14, 56) + b[16:], "(1, 14, 56)"),
        (IMAGES, lambda b: struct.pack(">IIII", 0x803, 39, 28, 28) + b[16:-784], "39 images and 40 labels"),
        (LABELS, lambda b: b[:-1] + b"\x0a", "a label of 10, expected 0 to 9"),
    ],
)
def test_damage_is_refused(files: Path, name: str, change: Callable, expected: str) -> None:
    path = files / "mnist" / name
    path.write_bytes(change(path.read_bytes()))
    assert expected in refusal("mnist", files, name)


@pytest.mark.parametrize("change", [lambda z: z[:-9], lambda z: z[:40] + bytes(8) + z[48:], lambda z: b"no gzip"])
def test_broken_gzip_is_refused(files: Path, change: Callable[[bytes], bytes]) -> None:
    path = files / "mnist" / IMAGES
    path.with_name(IMAGES + ".gz").write_bytes(change(gzip.compress(path.read_bytes())))
    path.unlink()
    assert "cannot be decompressed" in refusal("mnist", files, IMAGES + ".gz")


def test_a_missing_file_and_a_folder_in_its_place_are_named(files: Path) -> None:
    (files / "mnist" / LABELS).unlink()
    assert f"has no {LABELS}" in refusal("mnist", files, LABELS)
    (files / "mnist" / LABELS).mkdir()
    assert "cannot be read" in refusal("mnist", files, LABELS)
