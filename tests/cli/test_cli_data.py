"""`banach data`: what is here, whether it is sound, and downloads from a server on this machine."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from banach.cli.app import main
from banach.cli.console import console
from banach.data import MNIST
from banach.data import dataset as registry
from data.parts_data import mnist_files, serving

Answer = tuple[int, list[str], str]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's data, and none leaves a data set registered."""
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BANACH_DATA", raising=False)
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(console, "_width", 200)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The exit code, the lines on standard output, and standard error."""

    def run(*arguments: str | Path) -> Answer:
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


def put(folder: Path, files: dict[str, bytes]) -> Path:
    (folder / "mnist").mkdir(parents=True)
    for name, content in files.items():
        (folder / "mnist" / name).write_bytes(content)
    return folder


def rows(lines: list[str]) -> dict[str, list[str]]:
    split = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    return {name: rest for name, *rest in split}


def test_list_says_what_is_known_and_what_is_here(
    ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines, error = ask("list")
    assert (code, error) == (0, "")
    assert rows(lines) == {
        "digits": ["digits (scikit-learn)", "1,257/180/360", "1x8x8", "10", "yes"],
        "mnist": ["MNIST", "55,000/5,000/10,000", "1x28x28", "10", "no"],
        "cifar10": ["CIFAR-10", "45,000/5,000/10,000", "3x32x32", "10", "no"],
        "svhn": ["SVHN", "68,257/5,000/26,032", "3x32x32", "10", "no"],
    }
    assert lines[-1] == "digits is inside a package"
    monkeypatch.setattr(console, "_width", 80)
    assert all(len(line) <= 80 and "…" not in line for line in ask("list")[1])


def test_list_says_where(ask: Callable[..., Answer], files: dict[str, bytes], tmp_path: Path) -> None:
    folder = put(tmp_path / ("a-long-name" * 10), files)
    code, lines, _ = ask("list", "--data-dir", folder)
    assert code == 0
    assert rows(lines)["mnist"][-1] == "yes"
    assert f"mnist is in {folder / 'mnist'}" in lines


def test_verify_all_that_is_here(ask: Callable[..., Answer], files: dict[str, bytes], tmp_path: Path) -> None:
    code, lines, error = ask("verify", "--data-dir", put(tmp_path / "data", files))
    assert (code, error) == (0, "")
    assert [line.split(",")[0] for line in lines] == [
        "ok: digits (scikit-learn)",
        "ok: digits (scikit-learn)",
        "ok: MNIST",
        "ok: MNIST",
        f"not here: cifar10 was not found in {tmp_path / 'data'}",
        f"not here: svhn was not found in {tmp_path / 'data'}",
    ]


def test_verify_names_what_is_wrong(ask: Callable[..., Answer], files: dict[str, bytes], tmp_path: Path) -> None:
    files["t10k-images-idx3-ubyte.gz"] = files["t10k-images-idx3-ubyte.gz"][:-100]
    folder = put(tmp_path / "data", files)
    for arguments in (["verify"], ["verify", "mnist"]):
        code, lines, error = ask(*arguments, "--data-dir", folder)
        assert (code, error) == (2, "")
        (wrong,) = (line for line in lines if line.startswith("wrong: "))
        assert "t10k-images-idx3-ubyte.gz cannot be used" in wrong
        assert sum(line.startswith("ok: MNIST, train: 40 images") for line in lines) == 1


def test_half_a_data_set_is_not_passed_by(
    ask: Callable[..., Answer], files: dict[str, bytes], tmp_path: Path
) -> None:
    del files["t10k-images-idx3-ubyte.gz"]
    code, lines, _ = ask("verify", "--data-dir", put(tmp_path / "data", files))
    assert code == 2
    assert sum("has no t10k-images-idx3-ubyte" in line for line in lines) == 1
    del files["train-labels-idx1-ubyte.gz"]  # no part is whole
    code, lines, _ = ask("verify", "--data-dir", put(tmp_path / "less", files))
    assert code == 2
    assert sum(line.startswith("wrong: ") for line in lines) == 2
    (tmp_path / "empty" / "mnist").mkdir(parents=True)  # of this there is nothing
    assert ask("verify", "--data-dir", tmp_path / "empty")[0] == 0
    (tmp_path / "less" / "MNIST").mkdir()
    (tmp_path / "less" / "mnist").rename(tmp_path / "less" / "MNIST" / "raw")
    (tmp_path / "less" / "mnist").mkdir()  # does not hide the other
    code, lines, _ = ask("verify", "--data-dir", tmp_path / "less")
    assert code == 2
    assert sum("raw has no" in line for line in lines) == 2


def test_verify_by_name(ask: Callable[..., Answer]) -> None:
    assert ask("verify", "digits")[0] == 0
    code, lines, _ = ask("verify", "digits", "svhn")
    assert code == 2
    assert sum(line.startswith("wrong: svhn was not found") for line in lines) == 1
    code, lines, error = ask("verify", "svnh")
    assert (code, lines) == (2, [])
    assert "did you mean 'svhn'?" in error


@pytest.mark.usefixtures("published")
def test_fetch_brings_and_verifies(ask: Callable[..., Answer], files: dict[str, bytes], tmp_path: Path) -> None:
    code, lines, error = ask("fetch", "mnist", "digits", "--data-dir", tmp_path / "new")
    assert (code, error) == (0, "")
    assert [line.split(" images")[0] for line in lines] == [
        "ok: MNIST, train: 40",
        "ok: MNIST, test: 20",
        "ok: digits (scikit-learn), train: 1,437",
        "ok: digits (scikit-learn), test: 360",
    ]
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "mnist").iterdir()} == files


def test_a_fetch_that_fails_is_one_sentence(
    ask: Callable[..., Answer], published: dict[str, bytes], tmp_path: Path
) -> None:
    del published["t10k-images-idx3-ubyte.gz"]
    code, lines, error = ask("fetch", "mnist", "--data-dir", tmp_path / "new")
    assert (code, lines, error.count("\n")) == (2, [], 1)
    assert "t10k-images-idx3-ubyte.gz cannot be reached" in error


def test_a_misspelt_name_is_refused_before_any_download(
    ask: Callable[..., Answer], published: dict[str, bytes], tmp_path: Path
) -> None:
    code, _, error = ask("fetch", "mnist", "cifra10", "--data-dir", tmp_path / "new")
    assert code == 2
    assert "did you mean 'cifar10'?" in error
    assert not (tmp_path / "new").exists()
    assert ask("fetch")[0] == 2
