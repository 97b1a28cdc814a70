"""The Triton kernels themselves, without a GPU: in Triton's interpreter, against float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from banach.kernels import has_triton

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_interpreted_kernels_agree_with_float64() -> None:
    environment = dict(os.environ)
    paths = [str(TESTS), str(TESTS.parent / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    program = [sys.executable, str(TESTS / "kernels" / "interpret_kernels.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    for name, errors in found.items():
        for kind, error in errors.items():
            assert error < (2e-6 if name.startswith("float32") else 6e-3), f"{name}: {kind}"
