"""Whole trainings: an epoch on a GPU, and runs of the command line.

Claims: an epoch of CIFAR-10 at batch 512 takes at most 2.5 s on one H200, augmentation included. `banach train`
reaches 98% on digits in 90 s and 98.5% on MNIST after 3 epochs on a CPU.
Settings: the recipes of the networks. Result: results/gpu/epoch.json, results/training/*.json.
"""

from __future__ import annotations

import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from banach import data, models
from banach.cli.app import main
from banach.train import History, Run, fit
from banach.train import Settings as Training
from benchmarks.results import Benchmark, Figure, Report, Row, Target


@dataclass(frozen=True)
class Fit:
    """A call of fit() with a network's recipe and what differs from it."""

    model: str = "cifar10"
    epochs: int = 4
    batch_size: int | None = 512
    subset: int | None = None
    seeds: tuple[int, ...] = (0,)
    precision: str = "bf16"
    compile: bool = True
    device: str = "cuda"
    data_dir: Path | None = None


def _fit(settings: Fit, seed: int = 0, **changes: Any) -> History:
    recipe = models.recipe(settings.model)
    given: dict[str, Any] = {"batch_size": settings.batch_size} if settings.batch_size else {}
    given |= {name: getattr(settings, name) for name in ("epochs", "precision", "device")}
    how = Training.of_recipe(recipe, data=settings.model, seed=seed, monitor=False, **given, **changes)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        net = models.build(settings.model, tolerance=recipe.tolerance)
    train, held = (data.load(settings.model, split, settings.data_dir) for split in ("train", "validation"))
    train = train if settings.subset is None else train.subset(settings.subset)
    return fit(net, train, held, how, augment=data.paper_cifar10() if settings.model == "cifar10" else None)


def epoch(settings: Fit) -> Report:
    epochs = _fit(settings, compile=settings.compile).epochs
    names = ("epoch", "seconds", "loss", "depth", "converged")
    rows: list[Row] = [{name: getattr(one, name) for name in names} for one in epochs]
    later = Figure.of(row["seconds"] for row in rows[1:])
    met = min(row["converged"] for row in rows[1:])
    targets = [
        Target("an epoch, seconds (median, except the first)", later.median, 2.5),
        Target("share of samples meeting eps, except the first epoch", met, 0.95, True),
    ]
    return Report(rows, targets, [f"{settings.model} by fit, batch {settings.batch_size}, augmented for CIFAR-10"])


@dataclass(frozen=True)
class Command:
    """`banach train` with these flags, once per seed. The bounds are on test accuracy and seconds."""

    flags: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    accuracy: float = 0.0
    seconds: float | None = None
    device: str = "cpu"
    data_dir: Path | None = None
    runs: Path = Path("runs/benchmarks")


def command(settings: Command) -> Report:
    """Train by the command line in fresh run directories and read what it wrote there."""
    rows, details = zip(*(_command(settings, seed) for seed in settings.seeds), strict=True)
    targets = [Target("least test accuracy", min(row["test"] for row in rows), settings.accuracy, at_least=True)]
    if settings.seconds is not None:
        targets.append(Target("longest run in seconds", max(row["seconds"] for row in rows), settings.seconds))
    return Report([*rows], targets, ["test accuracy of the last epoch, clean images, eval mode"], [*details])


def _command(settings: Command, seed: int) -> tuple[Row, Row]:
    """Return what one run reached, and its epochs and settings."""
    path = settings.runs / f"{'-'.join((*settings.flags, str(seed))).replace('--', '')}"
    shutil.rmtree(path, ignore_errors=True)
    line = ["train", *settings.flags, "--seed", str(seed), "--device", settings.device, "--out", str(path)]
    line += [] if settings.data_dir is None else ["--data-dir", str(settings.data_dir)]
    started = time.perf_counter()
    if (code := main(line)) != 0:
        raise SystemExit(f"banach {shlex.join(line)} ended with exit code {code}")
    seconds = time.perf_counter() - started
    run = Run.open(path)
    tested, epochs = run.test(), run.metrics()
    assert tested is not None
    totals = tested["totals"]
    row: Row = {"command": shlex.join(["banach", *line]), "data": tested["title"], "test": totals["accuracy"]}
    row["validation"] = epochs[-1].validation_accuracy
    row |= {f"test {key}": totals[key] for key in ("residual", "converged", "depth")}
    row |= {"seconds": seconds, "seconds per epoch": sum(one.seconds for one in epochs) / len(epochs)}
    return row, {"epochs": [one.to_dict() for one in epochs], "settings": run.settings.to_dict()}


QUICK = Fit("digits", 2, 256, 300, (0, 1), "fp32", compile=False, device="cpu")
SHORT = Command(("--epochs", "1"))
DIGITS = Command(seeds=(0, 1, 2), accuracy=0.98, seconds=90)
THREE_EPOCHS = Command(("--data", "mnist", "--epochs", "3"), accuracy=0.985)
BENCHMARKS = (
    Benchmark("epoch", "an epoch of CIFAR-10 training", epoch, Fit(), QUICK, "gpu"),
    Benchmark("digits", "how good are the default settings?", command, DIGITS, SHORT, "training"),
    Benchmark("mnist", "the paper's MNIST network on a CPU", command, THREE_EPOCHS, SHORT, "training"),
)
