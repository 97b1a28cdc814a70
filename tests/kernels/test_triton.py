"""The Triton kernels without a GPU: interpreted, against float64, `solve` or plain torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from banach.kernels import has_triton
from kernels.cases import CASES

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
TESTS = Path(__file__).resolve().parent.parent


def run_program(*words: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(TESTS), str(TESTS.parent / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    program = [sys.executable, str(TESTS / "kernels" / words[0]), *words[1:]]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_stack_agrees_with_float64() -> None:
    found = run_program("interpret.py", "stack")
    assert len(found) == 4
    for name, errors in found.items():
        for kind, error in errors.items():
            # A bf16 value may round to the other side of zero, where the leaky ReLU has another slope.
            assert error < (2e-6 if "float32" in name else 1e-2 if kind == "output" else 2e-1), f"{name}: {kind}"


@pytest.mark.slow
def test_convolutions_agree_with_float64() -> None:
    found = run_program("interpret.py", "window")
    assert len(found) == 2 * len(CASES)
    for name, error in found.items():
        assert error < (1e-6 if "float32" in name else 6e-3), name


@pytest.mark.slow
def test_inverses_agree_with_float64() -> None:
    found = run_program("interpret.py", "inverse")
    assert len(found) == 5
    assert max(found.values()) < 1e-5


@pytest.mark.slow
def test_a_latent_solve_agrees_with_solve() -> None:
    found = run_program("interpret.py", "latent")
    assert found.pop("alone") == {"first": -1, "nan": 1, "ok": 0}
    assert found.pop("eval, too large")["ends"] == 0  # in two float16 parts it is not finite somewhat earlier
    assert found.pop("of size 2e+06")["ends"] > 0  # infinite there, and not in float32
    assert found.pop("of size 1e-06")["value"] < 1e-3  # float16 does not reach as low as float32
    assert len(found) == 19
    for name, errors in found.items():
        assert errors["steps"] == errors["ends"] == 0, name
        assert errors["value"] < 1e-6, name
        assert errors["residual"] < 1e-3, name  # of a difference of iterates, which is small itself
    assert found["three programs, train"]["least steps"] > 5


def test_fused_steps_are_those_of_the_solvers() -> None:
    """Also of nests, of halved batches, and where samples diverge or Anderson falls back to Picard."""
    found = run_program("interpret.py", "steps")
    assert max(found["errors"]) < 1e-5
    kept_in_bf16, kept_in_fp32 = found["bf16"]
    assert kept_in_bf16 <= kept_in_fp32 + 1


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["90", "89"])  # an H200; an RTX 4090, with less shared memory
def test_the_kernels_compile_for_a_gpu_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = run_program("compile_only.py", capability)
    assert {"gauss_jordan", "convolve", "iterate"} <= set(found), sorted(found)
    spilled = {name: max(stack for _, stack, _ in versions) for name, versions in found.items()}
    assert spilled["gauss_jordan"] == 0
    assert max(spilled.values()) <= 512, spilled  # bytes per thread
