"""channels_last weights on a CPU, as `banach train` sets them: how much faster is a step and a prediction?

Claim: never slower. Settings: the paper's networks and the digits one, random images, one thread, ratios of steps
taken in turn. Result: results/layout.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from banach import Tolerance, WorstPixel, models
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import interleaved, ratio

CASES = (("digits", 100), ("mnist", 100), ("svhn", 100), ("cifar10", 16), ("mnist", 1), ("cifar10", 1))
TOLERANCE = Tolerance(atol=1e-1, max_steps=50, norm=WorstPixel())


@dataclass(frozen=True)
class Settings:
    cases: tuple[tuple[str, int], ...] = CASES  # network, batch
    repeats: int = 9
    least: float = 1.0


def run(settings: Settings) -> Report:
    rows = [row for name, batch in settings.cases for row in _rows(name, batch, settings.repeats)]
    targets = [
        Target(f"{row['network']}, batch {row['batch']}, {row['what']}", row["gain"].median, settings.least, True)
        for row in rows
    ]
    return Report(rows, targets, ["random images; gain: time with the default format / time with channels_last"])


def _rows(name: str, batch: int, repeats: int) -> list[Row]:
    model = models.get(name)
    draw = torch.Generator().manual_seed(0)
    d = torch.randn(batch, *model.image, generator=draw)
    y = torch.randint(model.classes, (batch,), generator=draw)
    made: list[Row] = []
    for what, action in (("training step", _training), ("prediction", _prediction)):
        if batch == 1 and what == "training step":  # batch norm has nothing to measure
            continue
        actions = {"default": action(_network(name), d, y)}
        actions["channels_last"] = action(_network(name).to(memory_format=torch.channels_last), d, y)
        seconds = interleaved(actions, repeats)
        gain = ratio(seconds["default"], seconds["channels_last"])
        made.append({"network": name, "batch": batch, "what": what, "gain": gain})
    return made


def _network(name: str) -> Any:
    torch.manual_seed(0)
    return models.build(name, tolerance=TOLERANCE)


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


QUICK = Settings(cases=(("digits", 4),), repeats=2, least=0.0)
BENCHMARKS = (Benchmark("layout", "channels_last: how much faster?", run, Settings(), QUICK),)
