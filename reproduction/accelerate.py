"""Combining JFB with accelerated fixed-point iterations is promising (the paper leaves it for future work).

How many evaluations of T and how many seconds do trainings with Anderson's and Broyden's methods take until the
validation accuracy first reaches a level that all three trainings reach? The test set chooses nothing. All
trainings take the same code path, captured on a GPU; Picard with JFB() has a faster one.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from banach import Anderson, Broyden, Picard, Solver
from reproduction.jobs import Job, neumann, settings
from reproduction.study import table
from reproduction.table1 import TITLES
from reproduction.trainings import Training, learning_curves, of_groups, trained

SOLVERS: Mapping[str, Solver] = {"picard": Picard(), "anderson": Anderson(5), "broyden": Broyden(10)}


def _job(data: str, solver: str, **changes: Any) -> Job:
    chosen = settings(data, whole=False, **changes)
    name = f"accelerate-{data}-{solver}-seed0"
    return Job(name=name, settings=chosen, solver=SOLVERS[solver], backward=neumann(0))


QUICK = [_job("digits", solver, epochs=2, subset=256) for solver in SOLVERS]
LENGTHS = {"mnist": 5, "svhn": 3}
JOBS = [_job(data, s, epochs=n, recipe="released") for data, n in LENGTHS.items() for s in SOLVERS]
RECORDS, Row, run = "trainings.jsonl", Training, partial(trained, JOBS, QUICK)


def _runs(rows: Sequence[Training]) -> dict[str, dict[str, list[Training]]]:
    """Return by data set the training by each solver, where all are known."""
    found = {data: of_groups(rows, {s: f"accelerate-{data}-{s}" for s in SOLVERS}) for data in TITLES}
    return {data: runs for data, runs in found.items() if len(runs) == len(SOLVERS)}


def spent(one: Training, level: float) -> tuple[float, float]:
    """Return evaluations of T per image and seconds until an epoch whose validation accuracy is at the level."""
    reached = next(k for k, epoch in enumerate(one.epochs) if (epoch.validation_accuracy or 0.0) >= level)
    return sum(epoch.depth or 0.0 for epoch in one.epochs[: reached + 1]), one.elapsed[reached]


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return iterations and seconds relative to Picard by data set and solver, NaN if not trained; the table."""
    names = (
        f"{data}.{solver}.{what}" for data in LENGTHS for solver in SOLVERS for what in ("iterations", "seconds")
    )
    found: dict[str, Any] = dict.fromkeys(names, math.nan)
    lines = []
    for data, runs in _runs(rows).items():
        level = min(max(epoch.validation_accuracy or 0.0 for epoch in one.epochs) for (one,) in runs.values())
        base = spent(runs["picard"][0], level)
        for solver, (one,) in runs.items():
            iterations, seconds = spent(one, level)
            fewer, faster = iterations / base[0], seconds / base[1]
            lines.append((TITLES[data], solver.capitalize(), level, iterations, fewer, seconds, faster))
            found |= {f"{data}.{solver}.iterations": fewer, f"{data}.{solver}.seconds": faster}
    columns = "data|solver|validation accuracy|evaluations of T|against Picard|seconds|against Picard"
    return found | {"table": table(lines, columns)}


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw test accuracy against seconds of training, by solver."""
    known = {TITLES[d]: {s.capitalize(): one for s, one in runs.items()} for d, runs in _runs(rows).items()}
    return {"accelerate": learning_curves(known)} if known else {}
