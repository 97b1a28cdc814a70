"""Captured steps checked: their gradients, and the depths they choose for an R that no kernel knows.

Claims: a captured step errs from float64 by at most 1.5 times what the network itself does in that precision. At
least 95% of the steps meet eps, from fresh weights, where the depth that is needed rises most. Settings: gradients
of all weights after the same ten solver steps, no dropout; depths with kernels hidden, 600 training steps, two
seeds, real images. Result: results/gpu/gradients-POINT.json, results/gpu/gpu-ladder.json.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import Tolerance, WorstPixel
from banach.fast import TrainStep
from benchmarks.contenders import Captured, Setting, hide_form, solution_of
from benchmarks.points import ONE_EACH, POINTS, Batch, Point, feed
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import autocast, switches


@dataclass(frozen=True)
class Gradients:
    point: Point
    precisions: tuple[str, ...] = ("fp32", "bf16")
    depth: int = 10  # evaluations of R before the one that is differentiated
    most: float = 1.5  # times the error of the network itself
    compile: bool = True
    device: str = "cuda"
    data_dir: Path | None = None


def gradients(settings: Gradients) -> Report:
    batches, title = feed(settings.point, torch.device(settings.device), settings.data_dir, many=1)
    rows = _errors(next(batches), settings)
    targets = [
        Target(f"{row['point']}, {row['in']}: error over that of the network itself", row["ratio"], settings.most)
        for row in rows
    ]
    notes = [
        f"{title}, {settings.point.batch} of them",
        f"relative errors of the gradient of all weights, {settings.depth} steps, fresh weights, no dropout",
        "exact: in float64, eager; apart: captured against eager, in one precision",
    ]
    return Report(rows, targets, notes)


def _errors(batch: Batch, settings: Gradients) -> list[Row]:
    """Return, for each precision, how far the gradients of an eager and of a captured step are from float64's."""
    device = batch[0].device
    net: Any = settings.point.network(device)
    net.tolerance = Tolerance(atol=0.0, max_steps=settings.depth, norm=WorstPixel(), check_every=0)
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # masks would differ
    with switches("fp32", device):
        exact_loss, exact = _eager(net.double(), batch, "fp32")
    net.float()
    rows = []
    for precision in settings.precisions:
        with switches(precision, device):
            plain_loss, plain = _eager(net, batch, precision)
            loss, found = _captured(net, batch, precision, settings)
        row: Row = {"point": settings.point.name, "in": precision}
        row |= {"captured": _distance(found, exact), "eager": _distance(plain, exact)}
        row |= {"ratio": row["captured"] / row["eager"], "apart": _distance(found, plain)}
        row["cosine"] = float(F.cosine_similarity(found, exact, dim=0))
        rows.append(row | {"loss": loss / exact_loss - 1, "loss, eager": plain_loss / exact_loss - 1})
    return rows


def _eager(net: Any, batch: Batch, precision: str) -> tuple[float, Tensor]:
    net, (d, y) = copy.deepcopy(net), batch
    with autocast(precision, d.device):
        output = net(d.to(next(net.parameters()).dtype))
    loss = F.cross_entropy(output.to(torch.promote_types(output.dtype, torch.float32)), y)
    loss.backward()
    return float(loss.detach()), _gradient(net)


def _captured(net: Any, batch: Batch, precision: str, settings: Gradients) -> tuple[float, Tensor]:
    net = copy.deepcopy(net).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    step = TrainStep(net, optimizer, F.cross_entropy, bf16=precision == "bf16", compile=settings.compile)
    for _ in range(3):  # the last one is a replay
        loss = float(step(*batch))
    solution_of(step, batch[0])  # raises if it was not captured
    return loss, _gradient(net)


def _gradient(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in net.parameters() if p.grad is not None])


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@dataclass(frozen=True)
class Depths:
    points: tuple[Point, ...] = tuple(POINTS[name] for name in ONE_EACH)
    steps: int = 600
    seeds: tuple[int, ...] = (0, 1)
    share: float = 0.95
    device: str = "cuda"
    data_dir: Path | None = None


def ladder(settings: Depths) -> Report:
    rows = [_trained(point, seed, settings) for point in settings.points for seed in settings.seeds]
    targets = []
    for point in settings.points:
        share = fmean(row["met"] for row in rows if row["point"] == point.name)
        targets.append(Target(f"{point.name}, share of steps that meet eps", share, settings.share, at_least=True))
    note = "met: the share of steps whose residual was at most eps; first, last: of the first and last quarter"
    return Report(rows, targets, [note])


def _trained(point: Point, seed: int, settings: Depths) -> Row:
    """Train from fresh weights. Nothing is read before the last step."""
    device, precision = torch.device(settings.device), point.precision or "fp32"
    batches, title = feed(point, device, settings.data_dir, many=100)
    with switches(precision, device):
        setting = Setting(point, precision, device, seed=seed)
        step, seen = Captured(hide_form(point.network(device, seed)), setting), []
        for batch in islice(batches, settings.steps):
            step(*batch)
            seen.append(step.seen)
        depths, excess = zip(*(one.read() for one in seen), strict=True)
    met = [one <= 1 for one in excess]
    part = max(1, len(met) // 4)
    row: Row = {"point": point.name, "data": title, "in": precision, "eps": point.eps, "seed": seed}
    row |= {"steps": len(met), "met": fmean(met), "first": fmean(met[:part]), "last": fmean(met[-part:])}
    return row | {"depth": fmean(depths), "largest": max(depths)}


EXACT, MET = "do captured steps have the gradients of the network itself?", "do steps at chosen depths meet eps?"
TINY: dict[str, Any] = {"depth": 2, "compile": False, "device": "cpu"}
FEW = Depths((POINTS["mnist100"].tiny(),), steps=8, seeds=(0, 1), device="cpu")
BENCHMARKS = (
    *(
        Benchmark(f"gradients-{one.name}", EXACT, gradients, Gradients(one), Gradients(one.tiny(), **TINY), "gpu")
        for one in (POINTS[name] for name in ONE_EACH)
    ),
    Benchmark("gpu-ladder", MET, ladder, Depths(), FEW, "gpu"),
)
