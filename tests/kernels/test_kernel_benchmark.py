"""The kernels' benchmark runs to its end without a GPU, and says so when a part of it fails."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_kernels
from benchmarks.kernel_bench import Bench


def test_a_quick_run_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_kernels.main(["--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "kernels.json").read_text())["found"]
    assert sum(name.startswith("ok  ") for name in found) == 19
    assert found["body of a step, 10 evaluations of R and one with gradient"]["ms"] > 0
    assert "0 wrong or failed" in capsys.readouterr().out


def test_what_fails_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Bench, side: int, channels: int) -> dict[str, float]:
        raise RuntimeError("no such algorithm")

    monkeypatch.setattr(gpu_kernels, "_cudnn", broken)
    monkeypatch.setattr(gpu_kernels, "candidates", lambda bench, sides: None)
    assert gpu_kernels.main(["--quick", "--out", str(tmp_path)]) == 1
    assert "FAILED: RuntimeError: no such algorithm" in capsys.readouterr().out
    assert (
        "eager, 2 blocks padded to 64, 4x4, both ways"
        in json.loads((tmp_path / "kernels.json").read_text())["found"]
    )


def test_nothing_begins_after_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(torch.device("cpu"), seconds=-1.0)
    assert bench.line("late", lambda: {"ms": 1.0}) == {}
    assert "late: left out" in capsys.readouterr().out
