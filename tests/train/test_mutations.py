"""Damaged and forged checkpoints are refused in one sentence or recovered; they never change the weights."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from banach.train import CheckpointError, Run, fit
from banach.train.checkpoint import checkpoints
from train.mutations import mutate
from train.parts_train import images, plain_network, same_weights, settings

MADE = settings(checkpoint_every=1, ema=0.9)
SAMPLE, ALL = 40, 2000


def resume(path: Path) -> nn.Module:
    net = plain_network(seed=9)
    fit(net, images(32), images(20, "validation"), MADE, run=Run.open(path))
    return net


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: Any) -> tuple[Path, nn.Module]:
    """A run that stopped in its second epoch, and the network that it becomes."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    run = Run.create(path, MADE)
    fit(plain_network(), images(32), images(20, "validation"), MADE, run=run)
    shutil.rmtree(checkpoints(path / "checkpoints")[-1])
    assert len(checkpoints(path / "checkpoints")) == 2  # the best one, of the first epoch, and the newest
    shutil.copytree(path, path.with_name("copy"))
    return path, resume(path.with_name("copy"))


def outcome(path: Path, whole: nn.Module) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # which names the checkpoint that is skipped
        try:
            net = resume(path)
        except CheckpointError as error:
            return "refused" if len(str(error).splitlines()) == 1 else "refused in several lines"
    return "recovered" if same_weights(net, whole) else "changed"


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.slow)])
def test_a_mutated_checkpoint_changes_no_weights(count: int, stopped: Any, tmp_path: Path) -> None:
    """A missing average was accepted and changed the weights; 38 forged files gave tracebacks."""
    seen: dict[str, int] = {}
    for number in range(count):
        path = tmp_path / str(number)
        shutil.copytree(stopped[0], path)
        change = mutate(checkpoints(path / "checkpoints")[-1], number)
        try:
            ended = outcome(path, stopped[1])
        except Exception as error:
            ended = repr(error)
        seen[ended] = seen.get(ended, 0) + 1
        assert ended in ("refused", "recovered"), f"mutation {number}, {change}: {ended}"
        shutil.rmtree(path)
    assert len(seen) == 2
    print(f"{count} mutations: {seen}")
