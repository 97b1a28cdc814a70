"""Damaged and hostile files: read, or refused in one sentence. `make fuzz` runs 100,000 cases."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from fuzz.__main__ import run
from fuzz.targets import Target, all_targets

ROOT = Path(__file__).parents[2]
with all_targets() as _made:
    NAMES = list(_made)


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with all_targets() as made:
        yield made


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_read_or_refused(targets: dict[str, Target], name: str) -> None:
    found = run(targets[name], 40)
    assert found["failure"] is None
    assert found["cases"] >= 30


def test_bombs_stay_below_1_gib(tmp_path: Path) -> None:
    """400,000 images in 1.2 MB took 2.4 GB. In its own process, whose peak memory is measured."""
    command = [sys.executable, "-m", "fuzz", "--cases", "0", "--out", str(tmp_path / "fuzz.json")]
    paths = os.pathsep.join(["src", "tests", os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "fuzz.json").read_text())
    assert found["bombs"] >= 8
    assert found["peak_bytes"] - found["at_start_bytes"] < 2**29
