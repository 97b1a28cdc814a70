"""Gradients of captured and compiled steps against those of the network called as it is, and against float64.

All at the same number of steps of the solver, on the same images and weights, without dropout: what is left is the
rounding of the type. A captured step is to err from float64 by no more than the network itself does in that type.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import Tolerance, WorstPixel
from banach.fast import TrainStep, prefers_channels_last
from benchmarks.gpu.points import POINTS, Batch, Point, feed
from benchmarks.gpu.precision import autocast, switches
from benchmarks.gpu.step import Setting, fresh
from benchmarks.report import Result, Row, Target


@dataclass(frozen=True)
class Settings:
    point: str = "mnist100"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    depth: int = 10  # evaluations of R before the one that is differentiated
    most: float = 1.5  # times the error of the network itself
    compile: bool = True
    batch: int | None = None
    data_dir: str | None = None
    device: str = "cuda"


def run(settings: Settings = Settings()) -> Result:
    point = POINTS[settings.point]
    point = point if settings.batch is None else replace(point, batch=settings.batch)
    images = feed(point, torch.device(settings.device), settings.data_dir, many=1)
    rows = _rows(point, next(iter(images)), settings)
    targets = [
        Target(f"{row['point']}, {row['in']}: error over that of the network itself", row["ratio"], settings.most)
        for row in rows
    ]
    notes = [
        f"{images.title}, {point.batch} of them",
        f"relative errors of the gradient of all weights, {settings.depth} steps, fresh weights, no dropout",
        "exact: in float64, step by step; apart: captured against step by step, in one type",
    ]
    question = "have captured steps the gradients of the network itself?"
    return Result(f"gradients-{settings.point}", question, rows, targets, notes, settings, settings.device)


def _rows(point: Point, batch: Batch, settings: Settings) -> list[Row]:
    device = torch.device(settings.device)
    net: Any = fresh(Setting(point, "fp32", device))
    net.tolerance = Tolerance(atol=0.0, max_steps=settings.depth, norm=WorstPixel(), check_every=0)
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # masks would differ
    with switches("fp32", device):
        exact_loss, exact = _plainly(net.double(), batch, "fp32")
    net.float()
    rows = []
    for precision in settings.precisions:
        with switches(precision, device):
            plain_loss, plain = _plainly(net, batch, precision)
            loss, found = _captured(net, batch, precision, settings)
        error, usual = (_distance(one, exact) for one in (found, plain))
        rows.append(
            {
                "point": point.name,
                "in": precision,
                "captured": error,
                "step by step": usual,
                "ratio": error / usual,
                "apart": _distance(found, plain),
                "cosine": float(F.cosine_similarity(found, exact, dim=0)),
                "loss": loss / exact_loss - 1,
                "loss step by step": plain_loss / exact_loss - 1,
            }
        )
    return rows


def _plainly(net: Any, batch: Batch, precision: str) -> tuple[float, Tensor]:
    net, (d, y) = copy.deepcopy(net), batch
    with autocast(precision, d.device):
        output = net(d.to(next(net.parameters()).dtype))
    loss = F.cross_entropy(output.to(torch.promote_types(output.dtype, torch.float32)), y)
    loss.backward()
    return float(loss.detach()), _gradient(net)


def _captured(net: Any, batch: Batch, precision: str, settings: Settings) -> tuple[float, Tensor]:
    net = copy.deepcopy(net)
    if prefers_channels_last(net, precision):
        net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    step = TrainStep(net, optimizer, F.cross_entropy, bf16=precision == "bf16", compile=settings.compile)
    for _ in range(3):  # the last one is a replay
        loss = float(step(*batch))
    if step.reason is not None and batch[0].is_cuda:
        raise RuntimeError(f"the step was not captured: {step.reason}")
    return loss, _gradient(net)


def _gradient(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in net.parameters() if p.grad is not None])


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
