"""The examples for Lightning and accelerate run with the real packages and learn; skipped where one is missing."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("package", "example"), [("lightning", "lightning_module"), ("accelerate", "accelerate_loop")]
)
def test_an_implicit_network_trains_in(package: str, example: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; run: pip install {package}")
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", f"examples/{example}.py"],  # every fixed point is found
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loss = re.search(r"loss: ([\d.]+)", done.stdout.splitlines()[-1])
    assert loss is not None
    assert float(loss[1]) < 0.03  # a straight line has 0.17
