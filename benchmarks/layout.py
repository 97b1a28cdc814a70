"""channels_last weights on a CPU, as `banach train` sets them: how much faster is a step and a prediction?

Claim: never slower. Settings: the paper's networks and the digits one, random images, one thread, ratios of steps
taken in turn. Result: results/layout.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.contenders import Eager, Setting
from benchmarks.points import Point
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import Action, interleaved, ratio

CASES = (("digits", 100), ("mnist", 100), ("svhn", 100), ("cifar10", 16), ("mnist", 1), ("cifar10", 1))
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    cases: tuple[tuple[str, int], ...] = CASES  # network, batch
    repeats: int = 9
    least: float = 1.0


def run(settings: Settings) -> Report:
    rows: list[Row] = []
    for name, batch in settings.cases:
        for what, (default, other) in _actions(Point(name, name, batch, 1e-1, 50, "fp32")):
            seconds = interleaved({"default": default, "channels_last": other}, settings.repeats)
            gain = ratio(seconds["default"], seconds["channels_last"])
            rows.append({"network": name, "batch": batch, "what": what, "gain": gain})
    targets = [
        Target(f"{row['network']}, batch {row['batch']}, {row['what']}", row["gain"].median, settings.least, True)
        for row in rows
    ]
    return Report(rows, targets, ["random images; gain: time with the default format / time with channels_last"])


def _actions(point: Point) -> Iterator[tuple[str, list[Action]]]:
    """Yield a training step and a prediction, each in the default format and in channels_last."""
    draw = torch.Generator().manual_seed(0)
    d, y = point.inputs(point.batch, draw), torch.randint(10, (point.batch,), generator=draw)
    setting = Setting(point, "fp32", CPU)
    steps = [Eager(point.network(CPU), setting, tuned=channels_last) for channels_last in (False, True)]
    for step in steps:
        step.optimizer.param_groups[0]["lr"] = 0.0  # the same work at every repetition
    if point.batch > 1:  # batch norm has nothing to measure on one image
        yield "training step", [partial(step, d, y) for step in steps]
    yield "prediction", [torch.no_grad()(partial(step.net.eval(), d)) for step in steps]


QUICK = Settings(cases=(("digits", 4),), repeats=2, least=0.0)
BENCHMARKS = (Benchmark("layout", "channels_last: how much faster?", run, Settings(), QUICK),)
