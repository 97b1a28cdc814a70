"""Data that is damaged, hostile or not what it says: `banach train` refuses it and runs none of it."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from banach import data
from banach.cli.app import main
from banach.train import Settings


class Touch:
    """Unpickled by Python's own unpickler, this makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def refused(folder: Path, name: str, capsys: Any, *words: str) -> None:
    assert main(["train", "--data", name, "--data-dir", str(folder), "--out", str(folder / "run")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err
    assert not (folder / "run").exists()


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + content


@pytest.fixture(autouse=True)
def no_other_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BANACH_DATA", raising=False)
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path / "no-cache"))


def test_a_hostile_pickle_is_not_run(tmp_path: Path, capsys: Any) -> None:
    folder, marker = tmp_path / "cifar-10-batches-py", tmp_path / "marker"
    folder.mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": Touch(marker)}, protocol=2))
    refused(tmp_path, "cifar10", capsys, "data_batch_1", "mkdir")
    assert not marker.exists()


def test_other_content_of_the_right_shape_is_refused(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte").write_bytes(idx((60000, 28, 28), bytes(60000 * 784)))
    labels = bytes(k % 10 for k in range(60000))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx((60000,), labels), 1))
    refused(tmp_path, "mnist", capsys, "SHA-256")


def test_test_images_are_missed_before_the_training(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mnist").mkdir()
    digits = data.load("digits")
    monkeypatch.setattr(Settings, "load", lambda *_: digits)  # as if those to train with were sound
    refused(tmp_path, "mnist", capsys, "mnist has no t10k-images-idx3-ubyte; ")
