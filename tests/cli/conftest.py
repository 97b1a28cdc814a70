"""A trained run, made once, of which each test gets a copy in a folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from banach.cli.app import main

SMALL = ["train", "--subset", "64", "--batch-size", "16", "--no-tensorboard", "--no-monitor", "--device", "cpu"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main([*SMALL, "--epochs", "1", "--out", str(path)]) == 0
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(trained: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """`run`, in the working directory: 64 images, one epoch."""
    capsys.readouterr()
    return Path(shutil.copytree(trained, "run"))
