"""Downloads, from a server on this machine: checked, whole or not at all."""

import gzip
import io
import sys
import tarfile
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banach.data import CIFAR10, MNIST, DataError, cache_dir, fetch, load
from data.parts_data import Server, mnist_files, random_arrays, serving, small

pytest.importorskip("pooch", reason="downloads need pooch")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture
def mnist(server: Server) -> np.ndarray:
    """MNIST, small, at the server; returns the images of its test part."""
    files = mnist_files()
    small(MNIST, downloads=ChainMap(*(server.offer(name, content) for name, content in files.items())))
    content = gzip.decompress(files["t10k-images-idx3-ubyte.gz"])
    return np.frombuffer(content[16:], np.uint8).reshape(20, 28, 28)


def tar(files: dict[str, bytes], link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name == link:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def cifar(server: Server) -> dict[str, bytes]:
    """The files of a small CIFAR-10, binary version."""
    pixels, labels = random_arrays(60, (3, 32, 32))
    records = np.concatenate([labels[:, None], pixels.reshape(60, -1)], 1)
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    parts = np.split(records, [8, 16, 24, 32, 40])
    files = {f"cifar-10-batches-bin/{n}": p.tobytes() for n, p in zip(names, parts, strict=True)}
    files["cifar-10-batches-bin/readme.html"] = b"not needed"
    files["../escape"] = b"hostile"
    return files


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")} if root.exists() else set()


def test_files_go_to_the_cache_and_load(mnist: np.ndarray, server: Server) -> None:
    assert [said.split(" images")[0] for said in fetch("mnist")] == ["MNIST, train: 40", "MNIST, test: 20"]
    assert np.array_equal(load("mnist", "test").pixels[:, 0].numpy(), mnist)
    assert everything(cache_dir()) == {"mnist", *(f"mnist/{name}" for name in server.files)}


@pytest.mark.usefixtures("mnist")
def test_what_is_there_is_not_asked_for_again(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("BANACH_DATA", str(tmp_path / "new"))  # the place, if it is set
    fetch("mnist")
    assert sorted(server.asked) == sorted(server.files)
    fetch("mnist", tmp_path / "new")
    assert len(server.asked) == 4
    (tmp_path / "new" / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"broken")
    fetch("mnist", tmp_path / "new")
    assert server.asked[4:] == ["t10k-labels-idx1-ubyte.gz"]


def test_what_goes_wrong_leaves_whole_files_only(mnist: np.ndarray, server: Server, cifar: dict) -> None:
    server.files["t10k-images-idx3-ubyte.gz"] += b"x"
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz does not have its published md5:"):
        fetch("mnist")
    missing = {f"{server.address}/missing.tar.gz": "md5:0"}
    for download, words in (
        (server.offer("cut-cifar.tar.gz", tar(cifar)), r"cut-cifar.tar.gz cannot be reached|md5"),
        (server.offer("no-tar.tar.gz", b"nothing"), "no-tar.tar.gz is not an archive"),
        (missing, r"missing.tar.gz cannot be reached \(HTTPError: 404"),
    ):
        small(CIFAR10, downloads=download)
        with pytest.raises(DataError, match=words):
            fetch("cifar10")
    whole = {f"mnist/{name}" for name in server.files if name != "t10k-images-idx3-ubyte.gz"}
    assert everything(cache_dir()) <= {"mnist", "cifar-10-batches-bin", *whole}


@pytest.mark.parametrize("place", [".", "cifar-10-batches-bin"])
def test_an_archive_that_is_there_is_unpacked(place: str, server: Server, cifar: dict, tmp_path: Path) -> None:
    """It was skipped, and then the files were reported missing."""
    content = tar(cifar)
    small(CIFAR10, downloads=server.offer("cifar.tar.gz", content))
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "cifar.tar.gz").write_bytes(content)
    fetch("cifar10", tmp_path)
    assert server.asked == []
    assert (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").exists()


def test_an_archive_gives_its_named_plain_files_only(server: Server, cifar: dict, tmp_path: Path) -> None:
    small(CIFAR10, downloads=server.offer("cifar.tar.gz", tar(cifar)))
    fetch("cifar10", tmp_path / "new")
    named = {name: content for name, content in cifar.items() if name.endswith(".bin")}
    assert everything(tmp_path / "new") == {"cifar-10-batches-bin", *named}
    assert all((tmp_path / "new" / name).read_bytes() == content for name, content in named.items())
    content = tar(cifar, link="cifar-10-batches-bin/data_batch_3.bin")
    small(CIFAR10, downloads=server.offer("cifar.tar.gz", content))
    with pytest.raises(DataError, match=r"no plain file cifar-10-batches-bin/data_batch_3.bin"):
        fetch("cifar10")
    assert everything(cache_dir()) == {"cifar-10-batches-bin"}


def test_a_damaged_file_that_hides_the_download_is_named(mnist: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(b"damaged, and preferred to the .gz")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte cannot be used.*delete it"):
        fetch("mnist", tmp_path)


@pytest.mark.usefixtures("mnist")
def test_a_folder_that_cannot_be_written_and_a_full_disk(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written to"):
        fetch("mnist", tmp_path / "file")

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pooch.retrieve", full)
    with pytest.raises(DataError, match="No space left on device"):
        fetch("mnist")
    assert everything(cache_dir()) == {"mnist"}


def test_without_pooch(mnist: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match=r"a download needs pooch.*banach\[app\]"):
        fetch("mnist")
    assert len(fetch("digits")) == 2  # they come inside a package
