"""Where data is looked for, and what is said when it is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from banach.data import MNIST, DataError, cache_dir, load
from data.parts_data import idx, mnist_files, write


@pytest.fixture
def place(small: Callable) -> Callable[[Path, int], Path]:
    """Writes a tiny MNIST whose every pixel is `value`, so that one sees which was read."""
    small(MNIST)

    def place_in(root: Path, value: int) -> Path:
        files = mnist_files(zipped=False)
        for name, count in (("train-images-idx3-ubyte", 40), ("t10k-images-idx3-ubyte", 20)):
            files[name] = idx(np.full((count, 28, 28), value, np.uint8))
        write(root / "mnist", files)
        return root

    return place_in


def value(data_dir: Path | str | None = None) -> int:
    return int(load("mnist", "test", data_dir).pixels[0, 0, 0, 0])


def test_the_order(tmp_path: Path, place: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    place(cache_dir(), 3)
    assert value() == 3
    monkeypatch.setenv("BANACH_DATA", str(place(tmp_path / "environment", 2)))
    assert value() == 2
    assert value(place(tmp_path / "argument", 1)) == 1
    (tmp_path / "empty").mkdir()
    assert value(str(tmp_path / "empty")) == 2


def test_not_found_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load("svhn", "test", tmp_path)
    for part in (f"{tmp_path},", str(cache_dir()), "`banach data fetch svhn`", "--data-dir", "BANACH_DATA"):
        assert part in str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"the data folder .*nowhere is not a folder"):
        load("mnist", "test", tmp_path / "nowhere")
    monkeypatch.setenv("BANACH_DATA", str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"BANACH_DATA .*gone is not a folder"):
        load("mnist", "test")


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("BANACH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "banach"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "banach"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_dir() == tmp_path / "local" / "banach"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"digits needs sci.*pip install 'banach\[app\]'"):
        load("digits", "test", tmp_path)


def test_a_folder_of_the_data_set_without_a_file_of_a_part_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"")
    for split, missing in (("train", "data_batch_2.bin"), ("test", "test_batch.bin")):
        with pytest.raises(DataError, match=f"cifar-10-batches-bin has no {missing}; "):
            load("cifar10", split, tmp_path)
