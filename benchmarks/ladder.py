"""Depths that captured steps choose for an R that no kernel knows: do the steps meet the tolerance?

Claim: at least 95% of the steps meet eps, from fresh weights, where the depth that is needed rises most.
Settings: the paper's networks with their kernels hidden, 600 training steps, two seeds, real images. Result:
results/gpu/gpu-ladder.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.contenders import Captured, Setting, hide_form
from benchmarks.points import ONE_EACH, POINTS, Point, feed
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import switches


@dataclass(frozen=True)
class Settings:
    points: tuple[Point, ...] = tuple(POINTS[name] for name in ONE_EACH)
    steps: int = 600
    seeds: tuple[int, ...] = (0, 1)
    share: float = 0.95
    device: str = "cuda"
    data_dir: Path | None = None


def run(settings: Settings) -> Report:
    rows: list[Row] = []
    notes = ["met: the share of steps whose residual was at most eps; first, last: of the first and last quarter"]
    targets = []
    for point in settings.points:
        made = [_row(point, seed, settings, notes) for seed in settings.seeds]
        share = fmean(row["met"] for row in made)
        targets.append(Target(f"{point.name}, share of steps that meet eps", share, settings.share, at_least=True))
        rows += made
    return Report(rows, targets, list(dict.fromkeys(notes)))


def _row(point: Point, seed: int, settings: Settings, notes: list[str]) -> Row:
    """Train from fresh weights. Nothing is read before the last step."""
    device, precision = torch.device(settings.device), point.precision or "fp32"
    batches, title = feed(point, device, settings.data_dir, many=100)
    notes.append(f"{point.name}: {title}, {precision}")
    with switches(precision, device):
        setting = Setting(point, precision, device, seed=seed)
        step, seen = Captured(hide_form(point.network(device, seed)), setting), []
        for batch in islice(batches, settings.steps):
            step(*batch)
            seen.append(step.seen)
        depths, excess = zip(*(one.read() for one in seen), strict=True)
    met = [one <= 1 for one in excess]
    part = max(1, len(met) // 4)
    return {
        "point": point.name,
        "eps": point.eps,
        "seed": seed,
        "steps": len(met),
        "met": fmean(met),
        "first": fmean(met[:part]),
        "last": fmean(met[-part:]),
        "depth": fmean(depths),
        "largest": max(depths),
    }


QUICK = Settings((POINTS["mnist100"].tiny(),), steps=8, seeds=(0, 1), device="cpu")
BENCHMARKS = (
    Benchmark("gpu-ladder", "do captured steps at chosen depths meet eps?", run, Settings(), QUICK, "gpu"),
)
