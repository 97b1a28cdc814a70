"""The benchmark of the solve for a latent runs to its end without a GPU, and sees a wrong answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import latent_bench


def quick(folder: Path) -> tuple[int, dict[str, Any]]:
    code = latent_bench.main(["--quick", "--out", str(folder)])
    return code, json.loads((folder / "latent.json").read_text())["found"]


def test_a_quick_run_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_bench, "LONG", 6)
    code, found = quick(tmp_path)
    assert code == 0
    assert sum(name.startswith("ok  ") for name in found) == 6
    assert found["svhn 2 train, at eps"]["converged"] == 1
    assert found["cifar10 2 eval, kernel"]["ms a solve"] > 0


def test_a_wrong_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = latent_bench.latent_solve

    def wrong(R: Any, v: Any, **settings: Any) -> Any:
        return right(R, 1.2 * v, **settings)

    monkeypatch.setattr(latent_bench, "latent_solve", wrong)
    monkeypatch.setattr(latent_bench, "timing", lambda *ignored, **also: None)
    monkeypatch.setattr(latent_bench, "CASES", latent_bench.CASES[:1])
    code, found = quick(tmp_path)
    assert code == 1
    assert "WRONG  mnist 2 eval" in found
