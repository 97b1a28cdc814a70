"""Combining JFB with accelerated fixed-point iterations is promising (the paper leaves it for future work).

Two questions to Anderson's and Broyden's methods. Solve: how many evaluations of T and how much time to the same
residual, on test images, with the network that Picard's iteration trained, in fp32? Train: how many until the
validation accuracy first reaches a level that all three trainings reach? The test set chooses nothing. All
trainings take the same code path, captured on a GPU; Picard with JFB() has a faster one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from banach import Anderson, Broyden, Picard, Solver, Tolerance, data, solve
from banach.train import RunError
from banach.train.precision import arithmetic
from reproduction import neumann, rundir
from reproduction.jobs import Job
from reproduction.study import Options, panels, store, table
from reproduction.train import train
from reproduction.trainings import Training, trained

RECORDS = "accelerate.jsonl"
SOLVERS: Mapping[str, Solver] = {"Picard": Picard(), "Anderson(5)": Anderson(5), "Broyden(10)": Broyden(10)}
LEVELS, MAX_STEPS, BATCH = (1e-1, 1e-2, 1e-4), 500, 400
EPOCHS = {"mnist": 5, "svhn": 3, "digits": 2}


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
    converged: float | None


def _job(name: str, solver: str) -> Job:
    word = solver.partition("(")[0].lower()
    return Job(
        name=f"accelerate-{name}-{word}-seed0",
        data=name,
        model=name,
        recipe=None if name == "digits" else "released",
        solver=SOLVERS[solver],
        backward=partial(neumann.mode, 0),
        epochs=EPOCHS[name],
        subset=256 if name == "digits" else None,
        whole=False,
    )


QUICK = [_job("digits", solver) for solver in SOLVERS]
JOBS = [_job(name, solver) for name in ("mnist", "svhn") for solver in SOLVERS]


def run(options: Options) -> list[Row]:
    """Train what the records lack, and measure solves with the network that Picard trained."""
    rows: list[Row] = []
    for name in ("digits",) if options.quick else ("mnist", "svhn"):
        done = dict(zip(SOLVERS, trained([_job(name, solver) for solver in SOLVERS], options), strict=True))
        rows += _solves(name, options) + _trainings(name, done)
    store(options.records / RECORDS, rows, options.torch_device)
    return rows


def _solves(name: str, options: Options) -> list[Row]:
    """Solve the first test images to several residuals, by each solver in turn."""
    job = _job(name, "Picard")
    net: Any = job.build().to(options.torch_device).eval()
    if not train([job], options):  # records have no weights; a run that is there is not trained again
        raise RunError(f"{job.name} stopped before its end; run the same command again to resume it")
    net.load_state_dict(rundir.read_snapshot(options.runs / job.name, job.settings.epochs))
    test = data.load(name, "test", options.data_dir, options.torch_device)
    with torch.no_grad():
        v = net.Q(test.normalise(test.pixels[:BATCH]))
    with arithmetic("fp32", v.device):  # TF32 cannot meet 1e-4
        found = []
        for level in LEVELS:
            tolerance = Tolerance(atol=level, max_steps=MAX_STEPS, norm=net.tolerance.norm)
            for solver in SOLVERS:
                found.append(_timed(name, solver, net.R, v, tolerance, repeats=2 if options.quick else 20))
    return found


def _timed(name: str, solver: str, R: Any, v: torch.Tensor, tolerance: Tolerance, *, repeats: int) -> Row:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        begun = time.perf_counter()
        found = solve(R, torch.zeros_like(v), SOLVERS[solver], inputs=(v,), tolerance=tolerance)
        found.steps.tolist()  # waits for the device
        times.append(time.perf_counter() - begun)
    return Row(
        data=name,
        what="solve",
        level=tolerance.atol,
        solver=solver,
        iterations=float(found.steps.double().mean()),
        seconds=sorted(times[1:])[repeats // 2],
        converged=float(found.converged.double().mean()),
    )


def _trainings(name: str, done: Mapping[str, Training]) -> list[Row]:
    """Return what each training spent until the validation accuracy that all three reach."""
    level = min(max(epoch.validation_accuracy or 0.0 for epoch in one.epochs) for one in done.values())
    return [spent(name, solver, one, level) for solver, one in done.items()]


def spent(name: str, solver: str, one: Training, level: float) -> Row:
    """Return evaluations of T per image and seconds until an epoch whose validation accuracy is at the level."""
    reached = next(k for k, epoch in enumerate(one.epochs) if (epoch.validation_accuracy or 0.0) >= level)
    steps = list(accumulate(epoch.depth or 0.0 for epoch in one.epochs))
    last = one.epochs[-1].converged
    spent = {"iterations": steps[reached], "seconds": one.elapsed[reached], "converged": last}
    return Row(data=name, what="train", level=level, solver=solver, **spent)  # type: ignore[arg-type]


def values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return iterations and seconds relative to Picard by data set and solver, for training, and the table."""
    found: dict[str, Any] = {}
    lines = []
    for row in rows:
        (base,) = (
            r for r in rows if (r.data, r.what, r.level, r.solver) == (row.data, row.what, row.level, "Picard")
        )
        steps, seconds = row.iterations / base.iterations, row.seconds / base.seconds
        level = f"{100 * row.level:.2f}% validation" if row.what == "train" else f"residual {row.level:g}"
        lines.append((row.data, row.what, level, row.solver, row.iterations, steps, row.seconds, seconds))
        word = row.solver.partition("(")[0].lower()
        if row.what == "train":
            found |= {f"{row.data}.{word}.iterations": steps, f"{row.data}.{word}.seconds": seconds}
    columns = ("data", "what", "level", "solver", "iterations", "against Picard", "seconds", "against Picard")
    return found | {"table": table(lines, columns)}


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw evaluations of T against the residual, by solver."""
    solves = [row for row in rows if row.what == "solve"]
    names = list(dict.fromkeys(row.data for row in solves))
    if not names:
        return {}
    figure, axes = panels(len(names), width=4.5)
    for one, name in zip(axes, names, strict=True):
        for solver in SOLVERS:
            mine = [row for row in solves if (row.data, row.solver) == (name, solver)]
            one.plot([row.level for row in mine], [row.iterations for row in mine], marker="o", label=solver)
        one.set(title=name, xlabel="residual", xscale="log")
        one.invert_xaxis()
    axes[0].set_ylabel("evaluations of T per image")
    axes[0].legend(fontsize="small")
    return {"accelerate": figure}
