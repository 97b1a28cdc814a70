"""Combining JFB with accelerated fixed-point iterations is promising (the paper leaves it for future work).

Two questions to Anderson's and Broyden's methods. Solve: how many evaluations of T and how much time to the same
residual, on test images, with the network that Picard's iteration trained, in fp32? Train: how many until the
validation accuracy first reaches a level that all three trainings reach? The test set chooses nothing. All
trainings take the same code path, captured on a GPU; Picard with JFB() has a faster one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from banach import Anderson, Broyden, Picard, Solver, Tolerance, data, solve
from banach.train.precision import arithmetic
from reproduction import neumann, rundir
from reproduction.jobs import Job, settings
from reproduction.study import Options, panels, store, table
from reproduction.table1 import TITLES
from reproduction.train import train
from reproduction.trainings import Training, trained

RECORDS = "accelerate.jsonl"
SOLVERS: Mapping[str, Solver] = {"Picard": Picard(), "Anderson(5)": Anderson(5), "Broyden(10)": Broyden(10)}
LEVELS, MAX_STEPS, BATCH = (1e-1, 1e-2, 1e-4), 500, 400


@dataclass(frozen=True, kw_only=True)
class Row:
    """One solver on one data set. `level`: the residual to solve to, or the validation accuracy to train to.

    `iterations`: evaluations of T per image, the mean; in training summed over epochs. `seconds`: median of
    repeated solves, or of training until the level.
    """

    data: str
    what: str  # "solve" or "train"
    level: float
    solver: str
    iterations: float
    seconds: float


def _job(data: str, solver: str, **changes: Any) -> Job:
    name, chosen = solver.partition("(")[0].lower(), settings(data, whole=False, **changes)
    name = f"accelerate-{data}-{name}-seed0"
    return Job(name=name, settings=chosen, solver=SOLVERS[solver], backward=neumann.mode(0))


QUICK = [_job("digits", solver, epochs=2, subset=256) for solver in SOLVERS]
LENGTHS = {"mnist": 5, "svhn": 3}
JOBS = [_job(data, s, epochs=n, recipe="released") for data, n in LENGTHS.items() for s in SOLVERS]


def run(options: Options) -> list[Row]:
    """Train what the records lack, and measure solves with the network that Picard trained."""
    rows: list[Row] = []
    jobs = QUICK if options.quick else JOBS
    for first in range(0, len(jobs), len(SOLVERS)):
        some = jobs[first : first + len(SOLVERS)]
        done = dict(zip(SOLVERS, trained(some, options), strict=True))
        level = min(max(epoch.validation_accuracy or 0.0 for epoch in one.epochs) for one in done.values())
        rows += _solves(some[0], options)
        rows += [spent(str(some[0].settings.data), solver, one, level) for solver, one in done.items()]
    store(options.records / RECORDS, rows, options.torch_device)
    return rows


def _solves(job: Job, options: Options) -> list[Row]:
    """Solve the first test images to several residuals, by each solver."""
    train([job], options)  # records have no weights; a finished run is not trained again
    net: Any = job.build().to(options.torch_device).eval()
    net.load_state_dict(load_file(rundir.snapshot(options.runs / job.name, job.settings.epochs)))
    test = data.load(str(job.settings.data), "test", options.data_dir, options.torch_device)
    limits = [Tolerance(atol=level, max_steps=MAX_STEPS, norm=net.tolerance.norm) for level in LEVELS]
    with torch.no_grad(), arithmetic("fp32", test.device):  # TF32 cannot meet 1e-4
        v = net.Q(test.normalise(test.pixels[:BATCH]))
        repeats = 2 if options.quick else 20
        return [
            timed(str(job.settings.data), s, net.R, v, tolerance, repeats) for tolerance in limits for s in SOLVERS
        ]


def timed(name: str, solver: str, R: Any, v: torch.Tensor, tolerance: Tolerance, repeats: int) -> Row:
    """Return evaluations of T and the median time of repeated solves."""
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        begun = time.perf_counter()
        steps = solve(R, torch.zeros_like(v), SOLVERS[solver], inputs=(v,), tolerance=tolerance).steps.tolist()
        times.append(time.perf_counter() - begun)  # reading the steps waited for the device
    found = {"iterations": statistics.fmean(steps), "seconds": statistics.median(times[1:])}
    return Row(data=name, what="solve", level=tolerance.atol, solver=solver, **found)


def spent(name: str, solver: str, one: Training, level: float) -> Row:
    """Return evaluations of T per image and seconds until an epoch whose validation accuracy is at the level."""
    reached = next(k for k, epoch in enumerate(one.epochs) if (epoch.validation_accuracy or 0.0) >= level)
    steps = sum(epoch.depth or 0.0 for epoch in one.epochs[: reached + 1])
    return Row(data=name, what="train", level=level, solver=solver, iterations=steps, seconds=one.elapsed[reached])


def values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return iterations and seconds relative to Picard by data set and solver, for training, and the table."""
    found: dict[str, Any] = {}
    lines = []
    base = {(row.data, row.what, row.level): row for row in rows if row.solver == "Picard"}
    for row in rows:
        picard = base[row.data, row.what, row.level]
        steps, seconds = row.iterations / picard.iterations, row.seconds / picard.seconds
        lines.append((row.data, row.what, row.level, row.solver, row.iterations, steps, row.seconds, seconds))
        if row.what == "train":
            key = f"{row.data}.{row.solver.partition('(')[0].lower()}"
            found |= {f"{key}.iterations": steps, f"{key}.seconds": seconds}
    columns = "data|what|level|solver|iterations|against Picard|seconds|against Picard"
    return found | {"table": table(lines, columns)}


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw evaluations of T against the residual, by solver."""
    names = list(dict.fromkeys(row.data for row in rows))
    figure, axes = panels(len(names), width=4.5)
    for one, name in zip(axes, names, strict=True):
        for solver in SOLVERS:
            mine = [row for row in rows if (row.data, row.what, row.solver) == (name, "solve", solver)]
            one.plot([row.level for row in mine], [row.iterations for row in mine], marker="o", label=solver)
        one.set(title=TITLES[name], xlabel="residual", xscale="log")
        one.invert_xaxis()
    axes[0].set_ylabel("evaluations of T per image")
    axes[0].legend(fontsize="small")
    return {"accelerate": figure}
