"""Prediction: the implicit network against its explicit twin, both by banach.compile and called eagerly.

Claim: by banach.compile an implicit prediction takes at most 2.5 times as long as the explicit one at batch 1,
and 1.3 times at batch 1024. Settings: the CIFAR-10 network after 400 training steps, bf16, eval mode, median of
30 calls that are waited for. Result: results/gpu/inference.json.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import banach
from banach import ImplicitNetwork
from banach.train.precision import autocast
from benchmarks.contenders import CONTENDERS, Setting, as_twin
from benchmarks.points import POINTS, Point, feed
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import milliseconds_of, switches

WANTED = {1: 2.5, 1024: 1.3}


@dataclass(frozen=True)
class Settings:
    point: Point = POINTS["cifar512"]
    batches: tuple[int, ...] = (1, 32, 1024)
    repeats: int = 30
    train_steps: int = 400
    contender: str = "banach-captured"  # that trains the network
    compile: bool = True
    device: str = "cuda"
    data_dir: Path | None = None


def run(settings: Settings) -> Report:
    with switches(settings.point.precision or "fp32", torch.device(settings.device)):
        net, images, title = _trained(settings)
        rows = [row for size in settings.batches for row in _rows(net, images[:size], settings)]
    ms = {(row["batch"], row["path"]): row["ms"].median for row in rows}
    targets = [
        Target(
            f"implicit / explicit, batch {size}", ms[size, "implicit, fast"] / ms[size, "explicit, fast"], bound
        )
        for size, bound in WANTED.items()
        if size in settings.batches
    ]
    notes = [
        f"ms per call, median of {settings.repeats}; eval mode, {settings.train_steps} training steps; {title}",
        "fast: banach.compile(net, compile=True); eager: net(d) under autocast",
    ]
    return Report(rows, targets, notes)


def _trained(settings: Settings) -> tuple[ImplicitNetwork, Tensor, str]:
    """Return a network after some training steps, in eval mode, and training images."""
    point, device = settings.point, torch.device(settings.device)
    batches, title = feed(point, device, settings.data_dir)
    step = CONTENDERS[settings.contender].build(Setting(point, point.precision or "fp32", device))
    for batch in islice(batches, settings.train_steps):
        step(*batch)
    most = -(-max(settings.batches) // point.batch)
    images = torch.cat([d for d, _ in islice(batches, most)]).contiguous(memory_format=torch.channels_last)
    return step.net.eval(), images, title


@torch.no_grad()
def _rows(net: ImplicitNetwork, d: Tensor, settings: Settings) -> list[Row]:
    """Return one row per path, for one batch."""
    precision = settings.point.precision or "fp32"
    twin = as_twin(copy.deepcopy(net))
    fast = partial(banach.compile, bf16=precision == "bf16", compile=settings.compile)
    paths: dict[str, Any] = {
        "implicit, fast": fast(net),
        "explicit, fast": fast(twin),
        "implicit, eager": partial(_eager, net, precision),
        "explicit, eager": partial(_eager, twin, precision),
    }
    exact = _eager(net, "fp32", d).argmax(1)
    rows = []
    for name, path in paths.items():
        row: Row = {"batch": len(d), "path": name}
        row["ms"] = milliseconds_of(partial(path, d), d.device, settings.repeats)
        if name == "implicit, fast":
            output, found = path(d, solution=True)
            row["depth"] = float(found.steps.double().mean())
            row["converged"] = float(found.converged.double().mean())
            row["agrees with fp32"] = float((output.argmax(1) == exact).double().mean())
        rows.append(row)
    return rows


def _eager(net: ImplicitNetwork, precision: str, d: Tensor) -> Tensor:
    with autocast(precision, d.device):
        output: Tensor = net(d)
        return output


SIZES: dict[str, Any] = {"batches": (1, 3), "repeats": 2, "train_steps": 2, "compile": False, "device": "cpu"}
QUICK = Settings(POINTS["cifar512"].tiny(), contender="banach-eager", **SIZES)
BENCHMARKS = (Benchmark("inference", "what does prediction cost?", run, Settings(), QUICK, "gpu"),)
