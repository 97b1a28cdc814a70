"""An epoch of CIFAR-10 training, batches and augmentation included; and the memory that depth costs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from banach import ImplicitNetwork, Tolerance, models
from banach.cli.choose import choose
from banach.provenance import Summary
from benchmarks.gpu.clock import synchronise
from benchmarks.gpu.trained import steps_of, work_of
from benchmarks.report import Result, Row, Target


@dataclass(frozen=True)
class Settings:
    batch: int = 512
    epochs: int = 4
    compile: bool = True
    data_dir: str | None = None
    model: str = "cifar10"
    device: str = "cuda"


def run(settings: Settings = Settings()) -> Result:
    device = torch.device(settings.device)
    flags = {"data": settings.model, "precision": "bf16", "batch_size": settings.batch, "device": settings.device}
    work = work_of(choose({**flags, "compile": settings.compile}), settings.data_dir)
    rows: list[Row] = []
    with steps_of(work) as steps:
        for number in range(settings.epochs):
            work.epoch = number
            work.tally.reset()
            synchronise(device)
            started = time.perf_counter()
            for step in range(len(work.batches)):
                work.step = step
                steps.take()
            synchronise(device)
            seconds, seen = time.perf_counter() - started, work.tally.read()
            rows.append(
                {
                    "epoch": work.epoch + 1,
                    "seconds": seconds,
                    "ms per step": 1000 * seconds / len(work.batches),
                    "loss": seen.loss,
                    "depth": seen.depth,
                    "met": seen.converged,
                }
            )
    later = Summary.of(row["seconds"] for row in rows[1:])
    targets = [
        Target("an epoch of CIFAR-10, seconds (median, but the first)", later.median, 2.5),
        Target("share of steps meeting eps, but the first epoch", min(row["met"] for row in rows[1:]), 0.95, True),
    ]
    notes = [
        f"batch {settings.batch}, {work.batches.images.title}, flip, crop and erasing",
        f"captured: {steps.reason is None}",
    ]
    return Result("epoch", "an epoch of CIFAR-10 training", rows, targets, notes, settings, settings.device)


@dataclass(frozen=True)
class MemorySettings:
    model: str = "cifar10"
    batch: int = 512
    depth: int = 50


def memory(settings: MemorySettings = MemorySettings()) -> Result:
    """Peak memory of a JFB step at depth 50 against the explicit twin's."""
    rows = [_peak(settings, depth) for depth in (0, settings.depth)]
    ratio = rows[1]["peak MB"] / rows[0]["peak MB"]
    target = Target(f"peak memory, depth {settings.depth} / explicit twin", ratio, 1.05)
    return Result("depth-memory", "what memory does depth cost?", rows, [target], [], settings, "cuda")


def _peak(settings: MemorySettings, depth: int) -> Row:
    torch.manual_seed(0)
    model = models.get(settings.model)
    fixed = Tolerance(atol=0.0, max_steps=depth, check_every=0)
    net = models.build(settings.model, tolerance=fixed).cuda().train()
    assert isinstance(net, ImplicitNetwork)
    d = torch.randn(settings.batch, *model.image, device="cuda")
    y = torch.randint(model.classes, (settings.batch,), device="cuda")
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        F.cross_entropy(net(d), y).backward()
        optimizer.step()
    return {"depth": depth, "peak MB": torch.cuda.max_memory_allocated() / 2**20}
