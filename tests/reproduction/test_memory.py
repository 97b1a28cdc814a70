"""Memory against depth: what autograd keeps is counted by hand, and the study must find it."""

from dataclasses import replace
from pathlib import Path

import pytest

from reproduction import memory, study
from reproduction.study import Options


def test_one_more_step_keeps_what_autograd_saves(tmp_path: Path) -> None:
    """Unrolled: the inputs of two convolutions and of two activations. Checkpointed: u. The others: nothing."""
    rows = memory.run(Options(quick=True, device="cpu", records=tmp_path))
    assert study.read(memory.Row, tmp_path / memory.RECORDS) == rows
    latent = 16 * 24 * 4 * 4 * 4  # a batch of 16, 24x4x4 floats
    peak = {(row.scheme, row.depth): row.peak_bytes for row in rows}
    growth = {name: (peak[name, 16] - peak[name, 8]) / 8 for name in memory.SCHEMES}
    assert growth["unrolled"] == pytest.approx(4 * latent, rel=1e-3)
    assert growth["unrolled, checkpointed"] == pytest.approx(latent, rel=1e-3)
    assert growth["JFB"] == pytest.approx(0, abs=0.01 * latent)
    assert growth["Jacobian-based"] == pytest.approx(0, abs=0.01 * latent)
    products = {row.scheme: row.products for row in rows}
    assert products["JFB"] == 0
    assert products["unrolled"] is None
    assert (products["Jacobian-based"] or 0) >= 4
    found = memory.values(rows)
    assert found["unrolled.growth"] == peak["unrolled", 16] / peak["unrolled", 1]
    assert found["claim"].verdict == "reproduced"
    grown = [replace(row, peak_bytes=row.peak_bytes * 11 // 10) if row.depth == 16 else row for row in rows]
    assert str(memory.values(grown)["claim"]) == "1 | 1.10 | 1 | one step | not reproduced"
