"""What the tests of data share: small data sets, refusals, and the real files where they are at hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from banach.data import DataError, DataSet, load
from banach.data import dataset as registry

PACKED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's data, and none leaves a data set registered."""
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BANACH_DATA", raising=False)
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


@pytest.fixture
def small() -> Callable[..., DataSet]:
    """The same data set with few images and no known SHA-256, registered in its place."""

    def make(dataset: DataSet, train: int = 40, test: int = 20, **changes: object) -> DataSet:
        options = {"counts": {"train": train, "test": test}, "validation": 10, "known": {}, **changes}
        return registry.register(replace(dataset, **options), replace=True)  # type: ignore[arg-type]

    return make


@pytest.fixture
def random_arrays() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Images that are all different, and labels in which every class occurs."""

    def make(count: int, shape: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed)
        pixels = generator.integers(0, 256, (count, *shape), dtype=np.uint8)
        return pixels, generator.permutation(np.arange(count) % 10).astype(np.uint8)

    return make


@pytest.fixture
def refusal() -> Callable[..., str]:
    """The sentence with which loading is refused; one line, and it names the file and what to do."""

    def ask(name: str, folder: Path, file: str, split: str = "train+validation") -> str:
        with pytest.raises(DataError) as caught:
            load(name, split, folder)
        sentence = str(caught.value)
        assert "\n" not in sentence
        assert file in sentence
        assert f"banach data fetch {name}" in sentence
        return sentence

    return ask


@pytest.fixture(scope="session")
def real_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the real files of a data set, unpacked once a session."""
    done: dict[str, Path] = {}

    def unpack(name: str) -> Path:
        if not (PACKED / "unpack.py").exists():
            pytest.skip(f"the packed data sets are not in {PACKED}")
        if name not in done:
            done[name] = tmp_path_factory.mktemp(name)
            subprocess.run(
                [sys.executable, PACKED / "unpack.py", done[name], name], check=True, capture_output=True
            )
        return done[name]

    return unpack
