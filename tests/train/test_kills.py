"""A run that was killed at any of its file operations ends bit by bit as if it had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("first", "stride"), [(5, 17), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_a_kill_at_a_file_operation_loses_nothing(first: int, stride: int, tmp_path: Path) -> None:
    """The sample is every 17th operation; all of them are marked slow."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/train/kills.py"), str(tmp_path), str(first), str(stride)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["operations"] > 60
