"""Do captured steps meet the tolerance at depths chosen from late residuals? From fresh weights, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

import torch

from benchmarks.gpu.fast import PlainLadder
from benchmarks.gpu.points import ONE_EACH, POINTS, Feed, feed
from benchmarks.gpu.precision import switches
from benchmarks.gpu.step import Setting, fresh
from benchmarks.report import Result, Row, Target


@dataclass(frozen=True)
class Settings:
    points: tuple[str, ...] = ONE_EACH
    steps: int = 600
    seeds: tuple[int, ...] = (0, 1)
    share: float = 0.95
    batch: int | None = None
    data_dir: str | None = None
    device: str = "cuda"


def run(settings: Settings = Settings()) -> Result:
    device = torch.device(settings.device)
    rows: list[Row] = []
    notes = [
        "an R that no kernel knows; met: the share of steps whose residual was at most eps",
        "first, last: of the first and the last quarter",
    ]
    targets = []
    for name in settings.points:
        point = POINTS[name] if settings.batch is None else replace(POINTS[name], batch=settings.batch)
        images = feed(point, device, settings.data_dir, many=100)
        of_seeds = [Setting(point, point.precision, device, seed=seed) for seed in settings.seeds]
        made = [_row(images, settings.steps, setting) for setting in of_seeds]
        notes.append(f"{name}: {images.title}, {point.precision}")
        share = fmean(row["met"] for row in made)
        targets.append(Target(f"{name}, share of steps that meet eps", share, settings.share, at_least=True))
        rows += made
    question = "do captured steps at depths from late residuals meet eps?"
    return Result("gpu-ladder", question, rows, targets, notes, settings, settings.device)


def _row(images: Feed, steps: int, setting: Setting) -> Row:
    """Training steps from fresh weights. Nothing is read before the last of them."""
    point = setting.point
    with switches(setting.precision, setting.device):
        step = PlainLadder(fresh(setting), setting)
        seen = []
        for batch in islice(iter(images), steps):
            step(*batch)
            seen.append(step.seen)
        depths, residuals = zip(*(one.read() for one in seen), strict=True)
    met = [residual <= point.eps for residual in residuals]
    part = max(1, len(met) // 4)
    return {
        "point": point.name,
        "eps": point.eps,
        "seed": setting.seed,
        "steps": len(met),
        "met": fmean(met),
        "first": fmean(met[:part]),
        "last": fmean(met[-part:]),
        "depth": fmean(depths),
        "largest": max(depths),
        "depths captured": len(step.step.programs.captured) if step.step.programs is not None else 0,
    }
