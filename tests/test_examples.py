"""The examples run, and say what they promise; the code of the README runs too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", *command],  # every fixed point is found
        cwd=ROOT,
        env={"PYTHONPATH": "src", "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_special_cases() -> None:
    said = run("examples/special_cases.py")
    assert "equals S(R(0, Q(d))): True" in said
    assert "S(Q(d)): True" in said


def test_warm_starts_save_steps() -> None:
    for line in run("examples/warm_starts.py").splitlines():
        cold, warm = map(float, re.findall(r"\d+\.\d", line))
        assert warm < 0.75 * cold, line


def test_digits_ends_with_a_table_and_a_plot(tmp_path: Path) -> None:
    said = run("examples/digits.py", "--epochs", "2", "--out", str(tmp_path))
    accuracy = re.search(r"accuracy % +([\d.]+)", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 70
    assert (tmp_path / "training.png").stat().st_size > 5000
    assert f"plot: {tmp_path}" in said


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/convergence.md"])
def test_the_code_of_the_documents_runs(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    run(str(script))
