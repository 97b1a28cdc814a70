"""The gradients of captured steps.

Claim: a captured step errs from float64 by at most 1.5 times what the network itself does in that precision.
Settings: gradients of all weights after the same ten solver steps, no dropout, real images.
Result: results/gpu/gradients-POINT.json.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import Tolerance, WorstPixel
from banach.fast import TrainStep
from banach.train.precision import autocast
from benchmarks.contenders import solution_of
from benchmarks.points import ONE_EACH, POINTS, Batch, Point, feed
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import switches


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


EXACT = "do captured steps have the gradients of the network itself?"
TINY: dict[str, Any] = {"depth": 2, "compile": False, "device": "cpu"}
BENCHMARKS = (
    *(
        Benchmark(f"gradients-{one.name}", EXACT, gradients, Gradients(one), Gradients(one.tiny(), **TINY), "gpu")
        for one in (POINTS[name] for name in ONE_EACH)
    ),
)
