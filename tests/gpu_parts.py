"""What the tests of the training-step benchmark share: tiny points, a batch, contenders without dropout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from benchmarks import rival
from benchmarks.gpu.peers import contenders
from benchmarks.gpu.points import Batch, Point
from benchmarks.gpu.step import Setting, Step, fresh
from torch import nn

CPU = torch.device("cpu")
TIGHT = Point("tiny", "digits", 4, 1e-11, 400, "fp32")
LOOSE = dataclasses.replace(TIGHT, eps=1e-1, max_steps=50)

needs_torchdeq = pytest.mark.skipif(not rival.available(), reason="torchdeq is not installed")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(seed: int = 0, *, size: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 1, 8, 8, generator=draw, dtype=torch.float64)
    return images, torch.randint(0, 10, (size,), generator=draw)


def still(name: str, point: Point = TIGHT, depth: int = 60) -> Step:
    """A contender in float64 whose network drops nothing, so that all of them compute the same function."""
    setting = Setting(point, "fp32", CPU, depth)
    net = fresh(setting).double()
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return contenders()[name].make(net, setting)
