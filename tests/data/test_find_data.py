"""Where data is looked for, and what is said when it is not there."""

import sys
from pathlib import Path

import numpy as np
import pytest

from banach.data import MNIST, DataError, cache_dir, load
from data.parts_data import idx, mnist_files, small, write


def place(root: Path, value: int) -> Path:
    """Write a tiny MNIST whose every pixel is `value`, so that one sees which was read."""
    pixels = idx(np.full((20, 28, 28), value, np.uint8))
    write(root / "mnist", {**mnist_files(zipped=False), "t10k-images-idx3-ubyte": pixels})
    return root


def value(data_dir: Path | str | None = None) -> int:
    return int(load("mnist", "test", data_dir).pixels[0, 0, 0, 0])


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(MNIST)
    place(cache_dir(), 3)
    assert value() == 3
    monkeypatch.setenv("BANACH_DATA", str(place(tmp_path / "environment", 2)))
    assert value() == 2
    assert value(place(tmp_path / "argument", 1)) == 1
    (tmp_path / "empty").mkdir()
    assert value(str(tmp_path / "empty")) == 2


def test_what_is_not_found_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as caught:
        load("svhn", "test", tmp_path)
    for part in (f"{tmp_path},", str(cache_dir()), "`banach data fetch svhn`", "--data-dir", "BANACH_DATA"):
        assert part in str(caught.value)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"cifar-10-batches-bin has no data_batch_2.bin; "):
        load("cifar10", "train", tmp_path)
    with pytest.raises(DataError, match=r"cifar10 \(test part\) was not found in"):
        load("cifar10", "test", tmp_path)
    with pytest.raises(DataError, match=r"the data folder .*nowhere is not a folder"):
        load("mnist", "test", tmp_path / "nowhere")
    monkeypatch.setenv("BANACH_DATA", str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"BANACH_DATA .*gone is not a folder"):
        load("mnist", "test")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"digits needs sci.*pip install 'banach\[app\]'"):
        load("digits", "test", tmp_path)


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("BANACH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "banach"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "banach"
