"""What TensorBoard reads back is what the epochs said, each epoch once, also after an interruption."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from banach.train import Epoch
from banach.train.board import Board, tag
from train.parts_train import NO_FIXED_POINT, epoch

pytest.importorskip("tensorboard", reason="needs tensorboard")

FIRST = epoch(1, loss=1.5, residual=2.0**-14, max_residual=2.0**-12, converged=0.75, sigma=0.375, memory=2**30)


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, as TensorBoard itself reads the folder."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_figure_of_an_epoch_is_there(tmp_path: Path) -> None:
    second = replace(FIRST, epoch=2, loss=0.75, products=8192)
    with Board(tmp_path) as board:
        board.write(FIRST)
        board.write(second)
    named = {field.name for field in fields(Epoch)} - {"epoch", "warm_up", "metrics", "validation_metrics"}
    # All these values are exact in float32, which is what an event file holds.
    assert read(tmp_path) == {tag(name): [(1, getattr(FIRST, name)), (2, getattr(second, name))] for name in named}


def test_what_an_epoch_has_not_is_left_out(tmp_path: Path) -> None:
    with Board(tmp_path) as board:
        board.write(epoch(1, **NO_FIXED_POINT))
    kept = ("loss", "accuracy", "validation_loss", "validation_accuracy", "lr", "products", "seconds")
    assert set(read(tmp_path)) == {tag(name) for name in kept}


def test_after_a_resume_each_epoch_occurs_once(tmp_path: Path) -> None:
    with Board(tmp_path) as board:
        for number in (1, 2, 3, 4):
            board.write(replace(FIRST, epoch=number, loss=10.0 * number))
    with Board(tmp_path) as board:  # the first file holds later epochs than the last checkpoint
        board.write(replace(FIRST, epoch=3, loss=-1.0))
    assert read(tmp_path)["loss/train"] == [(1, 10.0), (2, 20.0), (3, -1.0)]


def test_nothing_is_written_before_an_epoch_or_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Board(tmp_path / "board"):
        pass
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RuntimeError, match="tensorboard is missing; run: pip install"):
        Board(tmp_path / "board")
    assert not (tmp_path / "board").exists()
