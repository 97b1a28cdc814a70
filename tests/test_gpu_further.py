"""The benchmarks of gradients and of the ladder, at tiny sizes on a CPU: what they count and report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu import gradients, ladder
from benchmarks.gpu.fast import hide_form
from benchmarks.gpu.step import Seen

from banach import models
from banach.kernels import describe


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Random images, wherever the data sets may lie."""
    monkeypatch.setenv("BANACH_DATA", str(tmp_path))


@pytest.mark.usefixtures("no_data")
@pytest.mark.filterwarnings("ignore:training steps run as they are:UserWarning")
def test_gradients_of_steps_are_those_of_the_network() -> None:
    """On a CPU a step is the network itself, so both err alike from float64."""
    small = gradients.Settings("mnist100", ("fp32",), depth=3, compile=False, batch=4, device="cpu")
    result = gradients.run(small)
    (row,) = result.rows
    assert row["apart"] == 0
    assert row["ratio"] == 1
    assert 0 < row["captured"] < 1e-4
    assert row["cosine"] == pytest.approx(1)
    assert result.met
    assert any(note.endswith(", 4 of them") for note in result.notes)


class Steps:
    """Of four steps three meet eps, at depths that grow."""

    def __init__(self, net: Any, setting: Any) -> None:
        self.taken, self.step = 0, SimpleNamespace(programs=SimpleNamespace(captured={1: None, 2: None}))

    def __call__(self, d: torch.Tensor, y: torch.Tensor) -> None:
        self.taken += 1
        self.seen = Seen(self.taken, residual=torch.tensor(0.2 if self.taken % 4 == 1 else 0.05))


@pytest.mark.usefixtures("no_data")
def test_the_ladder_counts_steps_that_meet_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "PlainLadder", Steps)
    settings = ladder.Settings(points=("mnist100",), steps=8, seeds=(0,), batch=2, device="cpu")
    result = ladder.run(settings)
    (row,) = result.rows
    assert (row["met"], row["first"], row["last"]) == (0.75, 0.5, 1.0)
    assert (row["depth"], row["largest"], row["depths captured"]) == (4.5, 8, 2)
    assert not result.met


def test_an_r_whose_form_is_hidden_computes_the_same() -> None:
    net: Any = models.build("mnist")
    u, v = torch.randn(2, 32, 9, 9), torch.randn(2, 32, 9, 9)
    net.R.eval()
    before = net.R(u, v)
    assert describe(net.R) is not None
    hide_form(net.R)
    assert describe(net.R) is None
    torch.testing.assert_close(net.R(u, v), before)
