"""`banach data`: what is here, whether it is sound, and downloads from a server on this machine."""

from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from banach.cli.app import main
from banach.data import MNIST
from banach.data import dataset as registry
from cli.conftest import rows
from data.parts_data import mnist_files, serving, write

Ask = Callable[..., tuple[int, list[str], str]]
CUT = "t10k-images-idx3-ubyte.gz"


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """The exit code, the lines on standard output, and standard error."""

    def run(*arguments: str | Path) -> tuple[int, list[str], str]:
        code = main(["data", *map(str, arguments)])
        out, error = capsys.readouterr()
        return code, out.splitlines(), error

    return run


@pytest.fixture
def files() -> dict[str, bytes]:
    """The four files of an MNIST of 40 and 20 images, which replaces the real one."""
    small = replace(MNIST, counts={"train": 40, "test": 20}, validation=10, known={})
    registry.register(small, replace=True)
    return mnist_files()


@pytest.fixture
def published(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The same files at an address on this machine; what is removed from the dictionary is not found there."""
    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(pooch.get_logger(), "disabled", True)  # else it writes each address to standard error
    with serving() as server:
        downloads = ChainMap(*(server.offer(name, content) for name, content in files.items()))
        registry.register(replace(registry.get("mnist"), downloads=downloads), replace=True)
        yield server.files


def test_list(ask: Ask, files: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / ("a-long-name" * 10) / "mnist"
    write(folder, files)
    code, lines, error = ask("list", "--data-dir", folder.parent)
    assert (code, error) == (0, "")
    assert rows("\n".join(lines)) == [
        ["digits", "digits (scikit-learn)", "1,257/180/360", "1x8x8", "10"],
        ["mnist", "MNIST", "30/10/20", "1x28x28", "10"],
        ["cifar10", "CIFAR-10", "45,000/5,000/10,000", "3x32x32", "10"],
        ["svhn", "SVHN", "68,257/5,000/26,032", "3x32x32", "10"],
    ]
    assert f"mnist is in {folder}" in lines
    assert any(line.startswith("not here: cifar10 (train part) was not found in") for line in lines)
    (folder / CUT).unlink()
    said = " ".join(ask("list", "--data-dir", folder.parent)[1])
    assert f"not here: {folder} has no t10k-images-idx3-ubyte; run" in said


def test_verify_names_what_is_wrong(ask: Ask, files: dict[str, bytes], tmp_path: Path) -> None:
    write(tmp_path / "mnist", files)
    code, lines, error = ask("verify", "--data-dir", tmp_path)
    assert (code, error) == (0, "")
    assert [line.split(",")[0] for line in lines[:4]] == ["ok: digits (scikit-learn)"] * 2 + ["ok: MNIST"] * 2
    missing = [f"not here: {name} ({part} part)" for name in ("cifar10", "svhn") for part in ("train", "test")]
    assert [line.split(" was")[0] for line in lines[4:]] == missing
    (tmp_path / "mnist" / CUT).write_bytes(files[CUT][:-100])
    for arguments in (["verify"], ["verify", "mnist"]):
        code, lines, error = ask(*arguments, "--data-dir", tmp_path)
        assert (code, error) == (2, "")
        (wrong,) = (line for line in lines if line.startswith("wrong: "))
        assert f"{CUT} cannot be used" in wrong
        assert sum(line.startswith("ok: MNIST, train: 40 images") for line in lines) == 1


def test_half_a_data_set_is_not_passed_by(ask: Ask, files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()  # of this there is nothing
    assert ask("verify", "--data-dir", tmp_path)[0] == 0
    del files[CUT], files["train-labels-idx1-ubyte.gz"]
    write(tmp_path / "MNIST" / "raw", files)  # the empty folder does not hide the other
    code, lines, _ = ask("verify", "--data-dir", tmp_path)
    assert code == 2
    assert sum("raw has no" in line for line in lines) == 2
    write(tmp_path / "MNIST" / "raw", {name: mnist_files()[name] for name in (CUT, "t10k-labels-idx1-ubyte.gz")})
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").unlink()
    code, lines, _ = ask("verify", "--data-dir", tmp_path)  # all of one part, and no file of the other
    assert (code, sum(line.startswith("wrong: mnist (train part) was not found") for line in lines)) == (2, 1)
    code, lines, _ = ask("verify", "digits", "svhn")
    assert code == 2
    assert sum(line.startswith("wrong: svhn (") for line in lines) == 2


def test_fetch(ask: Ask, published: dict[str, bytes], files: dict[str, bytes], tmp_path: Path) -> None:
    code, _, error = ask("fetch", "mnist", "cifra10", "--data-dir", tmp_path / "new")
    assert code == 2
    assert "did you mean 'cifar10'?" in error
    assert not (tmp_path / "new").exists()  # refused before any download
    code, lines, error = ask("fetch", "mnist", "digits", "--data-dir", tmp_path / "new")
    assert (code, error) == (0, "")
    parts = ["MNIST, train: 40", "MNIST, test: 20", "digits (scikit-learn), train: 1,437"]
    assert [line.split(" images")[0] for line in lines[:3]] == [f"ok: {part}" for part in parts]
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "mnist").iterdir()} == files
    del published[CUT]
    code, lines, error = ask("fetch", "mnist", "--data-dir", tmp_path / "other")
    assert (code, lines, error.count("\n")) == (2, [], 1)
    assert f"{CUT} cannot be reached" in error
