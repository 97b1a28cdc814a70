"""A trained run, made once, of which each test gets a copy in a folder of its own; and tables read back."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from banach.cli.app import main
from banach.cli.console import console
from banach.data import dataset
from banach.models import registry

SMALL = ["train", "--subset", "64", "--batch-size", "16", "--no-tensorboard", "--no-monitor", "--device", "cpu"]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the tables in a text."""
    return [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]


def refused(arguments: list[str], capsys: Any, *words: str) -> str:
    """Check that a command exits with code 2 and a sentence with these words; return what else it printed."""
    capsys.readouterr()
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    *warnings, said = error.splitlines()
    assert said.startswith("banach: ")
    assert all(word in said for word in words), said
    return "\n".join([*warnings, out])


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main([*SMALL, "--epochs", "1", "--out", str(path)]) == 0
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and a wide console; no other data, and what a test registers is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BANACH_DATA", raising=False)
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path / "no-cache"))
    monkeypatch.setattr(console, "_width", 240)
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    monkeypatch.setattr(dataset, "_registry", dict(dataset._registry))
    return tmp_path


@pytest.fixture
def run(trained: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """`run`, in the working directory: 64 images, one epoch."""
    capsys.readouterr()
    return Path(shutil.copytree(trained, "run"))
