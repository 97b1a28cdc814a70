"""Every `banach` command in the documents and in --help runs, at a tiny size; every make target exists."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banach import data
from banach.cli.app import _SHORT, main
from banach.data import CIFAR10, MNIST, SVHN, dataset
from banach.models.registry import _MODELS
from data.parts_data import mnist_files, write

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("docs/reference/*.md"))
QUICK = "--subset 8 --batch-size 8 --device cpu --no-tensorboard --no-monitor --no-compile --threads 1"
DEVICES = re.compile(r"--device \S+")


def texts() -> Iterator[str]:
    """Lines of blocks and `code` in sentences that start with banach, without their comments."""
    pages = [page.read_text() for page in PAGES]
    pages += [import_module(f"banach.cli.{name}").EPILOG for name in _SHORT]
    for page in pages:
        for line in re.findall(r"^ *(banach .*)$|`(banach [^`]*)`", page, re.MULTILINE):
            yield re.split(r" {2,}| # ", line[0] or line[1])[0].strip()


def commands() -> list[str]:
    """The commands in full: alternatives are taken one by one, and options in brackets are given."""
    made: dict[str, None] = {}
    for text in texts():
        first, *others = re.sub(r"[\[\]]|\.\.\.", "", text).split(" | ")
        stem = first.rsplit(" ", 1)[0] if others else first
        for one in [first, *(f"{stem} {other}" for other in others)]:
            name = one.split()[1] if len(one.split()) > 1 else ""
            if name in _SHORT:
                made[f"{one} --help" if one == f"banach {name}" and name not in ("train", "models") else one] = (
                    None
                )
    return list(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with small data sets, two runs and images."""
    from PIL import Image
    from scipy.io import savemat

    kept, kept_models, here = dict(dataset._registry), dict(_MODELS), tmp_path_factory.mktemp("commands")
    pixels, labels = np.random.default_rng(0).integers(0, 256, (40, 3072), dtype=np.uint8), np.arange(40) % 10
    for one in (MNIST, CIFAR10, SVHN):
        counts = {"train": 40, "test": 5}
        dataset.register(replace(one, counts=counts, validation=5, known={}), replace=True)
    write(here / "data" / "mnist", mnist_files(40, 5))
    records = np.concatenate([labels[:, None].astype(np.uint8), pixels], 1)
    files = {f"data_batch_{k + 1}.bin": records[8 * k : 8 * k + 8].tobytes() for k in range(5)}
    write(here / "data" / "cifar-10-batches-bin", {**files, "test_batch.bin": records[:5].tobytes()})
    (here / "data" / "svhn").mkdir()
    for part, count in (("train", 40), ("test", 5)):
        images, digits = (
            pixels[:count].reshape(count, 3, 32, 32).transpose(2, 3, 1, 0),
            (labels[:count] + 1)[:, None],
        )
        savemat(here / "data" / "svhn" / f"{part}_32x32.mat", {"X": images, "y": digits.astype(np.uint8)})
    for name in ("photo.png", "cat.jpg", "dog.jpg", "scan.png", "seven.png"):
        Image.fromarray(pixels[0, :1024].reshape(32, 32)).save(here / name)
    for place in ("scans", "photos/a", "photos/b"):
        (here / place).mkdir(parents=True)
        for number in range(12):
            Image.fromarray(pixels[number, :1024].reshape(32, 32)).save(here / place / f"{number}.png")
    np.savez(here / "arrays.npz", images=pixels[:, :784].reshape(40, 28, 28), labels=labels)
    code = "from banach.models import get, register\n"
    code += "register('mine', get('mnist').builder, description='', image=(1, 28, 28))\n"
    write(here / "my_package", {"my_module.py": code.encode()})
    yield here
    dataset._registry.clear()
    dataset._registry.update(kept)
    _MODELS.clear()
    _MODELS.update(kept_models)


@pytest.fixture
def places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("BANACH_DATA", str(folder / "data"))
    monkeypatch.setattr(data, "fetch", lambda *_, **__: ())  # tests/data/test_fetch.py downloads from this machine
    for run in ("digits-1", "digits-2", "mnist-1", "cifar10-1"):
        if not (folder / "runs" / run).exists():
            name = run.rsplit("-", 1)[0]
            assert main(shlex.split(f"train --data {name} {QUICK} --epochs 0 --max-steps 2 --out runs/{run}")) == 0
    return folder


def quick(command: str) -> list[str]:
    """The arguments of a command with real names and a tiny size."""
    words = shlex.split(DEVICES.sub("--device cpu", command.replace("~", str(Path.home()))))[1:]
    words = ["runs/digits-1" if word in ("RUN", "runs/mine") else word for word in words]
    words = ["digits" if word == "NAME" else word for word in words]
    words = [found for word in words for found in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    if words[0] == "train" and not {"--resume", "--help"} & set(words):
        epochs = "0" if "--data" in words else "1"  # larger networks are built, planned and tested, not trained
        words += [*QUICK.split(), "--epochs", epochs, *([] if "anode" in words else ["--max-steps", "2"])]
    if words[0] in ("diagnose", "report") and "--help" not in words:
        words += ["--device", "cpu", "--samples", "2"]
    return [*words, "digits"] if words == ["data", "fetch"] else words


@pytest.mark.filterwarnings("default")  # two steps do not converge
@pytest.mark.parametrize("command", commands())
def test_command(command: str, places: Path, capsys: Any) -> None:
    assert main(quick(command)) == 0, capsys.readouterr().err


def test_the_documents_have_commands() -> None:
    assert len(commands()) > 20
    assert {command.split()[1] for command in commands()} == set(_SHORT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert target in targets
