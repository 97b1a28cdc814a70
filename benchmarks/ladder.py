"""Does the depth that is chosen from late residuals meet the tolerance? From fresh weights, where needs rise most.

On a CPU, with the network, the control and the lag of captured steps: only the graphs are missing.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from banach import Tolerance, WorstPixel, data, models
from banach.data import DataError, Images
from banach.fast import FixedDepth, first_control
from banach.fast.depth import LAG
from benchmarks.report import Result, Row, Target


@dataclass(frozen=True)
class Case:
    """A network from fresh weights, at eps in the worst-pixel norm."""

    name: str
    eps: float
    lr: float
    steps: int
    max_steps: int = 200


@dataclass(frozen=True)
class Settings:
    cases: tuple[Case, ...] = (
        Case("digits", 1e-1, 1e-3, 400),
        Case("digits", 1e-2, 1e-3, 400),
        Case("digits", 1e-4, 1e-3, 400),
        Case("digits", 1e-4, 5e-3, 400),
        Case("mnist", 1e-1, 2e-4, 250, max_steps=50),
    )
    seeds: int = 3
    batch: int = 100
    share: float = 0.95


QUICK = Settings(cases=(Case("digits", 1e-2, 1e-3, 60),), seeds=1)


def run(settings: Settings = Settings()) -> Result:
    rows: list[Row] = []
    notes = ["met: the share of steps whose whole batch met eps; of all, and of the first and last quarter"]
    for case in settings.cases:
        try:
            train = data.load(case.name, "train")
        except DataError as error:
            notes.append(f"not measured: {error}")
            continue
        rows += [_row(case, train, settings.batch, seed) for seed in range(settings.seeds)]
    targets = [
        Target(
            f"{case.name} at {case.eps:g}, rate {case.lr:g}, share of steps",
            fmean(_of(case, rows)),
            settings.share,
            at_least=True,
        )
        for case in settings.cases
        if _of(case, rows)
    ]
    return Result("ladder", "do depths chosen from late residuals meet eps?", rows, targets, notes, settings)


def _of(case: Case, rows: list[Row]) -> list[float]:
    named = (case.name, case.eps, case.lr)
    return [row["met"] for row in rows if (row["data"], row["eps"], row["rate"]) == named]


def _row(case: Case, train: Images, batch: int, seed: int) -> Row:
    met, depths = _train(case, train, batch, seed)
    part = max(1, len(met) // 4)
    return {
        "data": case.name,
        "eps": case.eps,
        "rate": case.lr,
        "seed": seed,
        "met": fmean(met),
        "met, first": fmean(met[:part]),
        "met, last": fmean(met[-part:]),
        "depth": fmean(depths),
        "largest": max(depths),
    }


def _train(case: Case, train: Images, batch: int, seed: int) -> tuple[list[bool], list[int]]:
    """Steps at the depths of the control: whether each met eps, and its depth."""
    torch.manual_seed(seed)
    tolerance = Tolerance(atol=case.eps, max_steps=case.max_steps, norm=WorstPixel())
    net: Any = models.build(case.name, tolerance=tolerance).train()
    optimizer, network = torch.optim.Adam(net.parameters(), lr=case.lr), FixedDepth(net)
    told: deque[tuple[int, float, float]] = deque()
    met, depths, control = list[bool](), list[int](), None
    for _ in range(case.steps):
        some = torch.randint(len(train), (batch,))
        d, y = train.normalise(train.pixels[some]), train.labels[some]
        control = control or first_control(network, d, nullcontext)
        assert control is not None, "a network whose depth a kernel finds has no ladder"
        output, reached = network(d, control.depth)
        optimizer.zero_grad()
        F.cross_entropy(output, y).backward()
        optimizer.step()
        depths.append(control.depth)
        met.append(bool(reached.converged.all()))
        assert reached.excess is not None
        excess, onward = reached.excess.tolist()
        told.append((control.depth, excess, onward))
        if len(told) > LAG:
            control.observe(*told.popleft())
    return met, depths
