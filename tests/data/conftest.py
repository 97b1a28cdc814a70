"""What the tests of data share: places of their own, and the real files where they are at hand."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from banach.data import dataset as registry

PACKED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's data, and none leaves a data set registered."""
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BANACH_DATA", raising=False)
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


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
