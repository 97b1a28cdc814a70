"""What does it bring on a CPU that channels lie side by side, as `banach train` lays them?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from banach import Tolerance, WorstPixel, models
from banach.fast import channels_side_by_side
from benchmarks.report import Result, Row, Target
from benchmarks.timing import interleaved, ratio


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    eps: float = 1e-1
    max_steps: int = 50


@dataclass(frozen=True)
class Settings:
    cases: tuple[Case, ...] = (
        Case("digits", 100),
        Case("mnist", 100),
        Case("svhn", 100),
        Case("cifar10", 16),
        Case("mnist", 1),
        Case("cifar10", 1),
    )
    repeats: int = 9
    least: float = 1.0


QUICK = Settings(cases=(Case("digits", 4),), repeats=2, least=0.0)


def run(settings: Settings = Settings()) -> Result:
    rows = [row for case in settings.cases for row in _rows(case, settings.repeats)]
    targets = [
        Target(f"{row['network']}, batch {row['batch']}, {row['what']}", row["gain"].median, settings.least, True)
        for row in rows
    ]
    notes = ["on a CPU, random images; gain: time with weights as torch lays them, over that side by side"]
    question = "channels side by side: how much faster?"
    return Result("layout", question, rows, targets, notes, settings)


def _rows(case: Case, repeats: int) -> list[Row]:
    model = models.get(case.name)
    draw = torch.Generator().manual_seed(0)
    d = torch.randn(case.batch, *model.image, generator=draw)
    y = torch.randint(model.classes, (case.batch,), generator=draw)
    made: list[Row] = []
    for what, action in (("training step", _training), ("prediction", _prediction)):
        if case.batch == 1 and what == "training step":  # batch norm has nothing to measure
            continue
        before, after = (action(_network(case, lay), d, y) for lay in (False, True))
        seconds = interleaved({"as is": before, "side by side": after}, repeats)
        gain = ratio(seconds["as is"], seconds["side by side"])
        made.append({"network": case.name, "batch": case.batch, "what": what, "gain": gain})
    return made


def _network(case: Case, side_by_side: bool) -> Any:
    torch.manual_seed(0)
    tolerance = Tolerance(atol=case.eps, max_steps=case.max_steps, norm=WorstPixel())
    net = models.build(case.name, tolerance=tolerance)
    return channels_side_by_side(net) if side_by_side else net


def _training(net: Any, d: Tensor, y: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.Adam(net.train().parameters(), lr=0.0)  # the same work at every repetition

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(d), y).backward()
        optimizer.step()

    return step


def _prediction(net: Any, d: Tensor, y: Tensor) -> Callable[[], object]:
    net.eval()
    return torch.no_grad()(lambda: net(d))
