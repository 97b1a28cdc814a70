"""Fewer Neumann terms train faster, fastest with JFB (k = 0), at a competitive test accuracy.

The paper's figures on Neumann series: training with w = g + J'g + ... + (J')^k g for several orders k. MNIST and
SVHN with the released settings, all training images, the first epochs. A term is one product with J' at the fixed
point. All orders take the same code path, captured on a GPU; JFB() itself has a faster one. A backward pass
with k > 0 evaluates T once more for its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from banach import Implicit, Mode, Picard, Tolerance
from reproduction.intervals import REPRODUCED, Interval, verdict
from reproduction.jobs import Job
from reproduction.study import Options, table
from reproduction.trainings import Training, accuracy_figure, trained

RECORDS = "neumann.jsonl"
Row = Training
ORDERS = (0, 1, 2, 5, 10)
EPOCHS = {"mnist": 10, "svhn": 6, "digits": 2}


def mode(order: int) -> Mode:
    """Return the gradient of `Neumann(order)`, by products with J' instead of evaluations of T under autograd."""
    return Implicit(Picard(), Tolerance(atol=0, rtol=0, max_steps=order, check_every=0))


def _jobs(name: str, seeds: int, **fields: Any) -> list[Job]:
    return [
        Job(name=f"neumann-{name}-k{order}-seed{seed}", data=name, model=name, seed=seed, epochs=EPOCHS[name],
            backward=partial(mode, order), **fields)
        for order in ORDERS for seed in range(seeds)
    ]  # fmt: skip


QUICK = _jobs("digits", 1, subset=256)
JOBS = [*_jobs("mnist", 3, recipe="released"), *_jobs("svhn", 1, recipe="released")]


def run(options: Options) -> list[Training]:
    """Train what the records lack."""
    return trained(QUICK if options.quick else JOBS, options)


def by_order(rows: Sequence[Training], name: str) -> dict[int, list[Training]]:
    """Return the runs on a data set by order k."""
    found: dict[int, list[Training]] = {}
    for order in ORDERS:
        mine = [row for row in rows if row.group == f"neumann-{name}-k{order}"]
        found |= {order: mine} if mine else {}
    return found


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return times relative to k = 0 and accuracies by data set and order, verdicts and the table."""
    found: dict[str, Any] = {}
    lines = []
    for name, epochs in EPOCHS.items():
        runs = by_order(rows, name)
        for order, some in runs.items():
            ratio = _ratio(some, runs[0])
            clean = Interval.of(run.clean for run in some)
            found |= {f"{name}.k{order}.ratio": ratio, f"{name}.k{order}.clean": clean}
            depth = fmean(run.epochs[-1].depth or 0.0 for run in some)
            seconds = fmean(run.seconds for run in some)
            loss = fmean(run.epochs[-1].loss for run in some)
            lines.append((name, order, len(some), epochs, f"{clean:.2f}", seconds, f"{ratio:.2f}", loss, depth))
        if runs:
            found |= _claim(name, runs)
    columns = ("data", "order k", "n", "epochs", "clean %", "s per epoch", "time against k = 0", "loss", "depth")
    return found | {"table": table(lines, columns)}


def _claim(name: str, runs: dict[int, list[Training]]) -> dict[str, Any]:
    """Return the verdict: every order takes at least the time of k = 0."""
    verdicts = [verdict(_ratio(some, runs[0]), 1.0) for order, some in runs.items() if order > 0]
    worst = next((one for one in verdicts if one != REPRODUCED), REPRODUCED)
    n, length = min(len(some) for some in runs.values()), f"{EPOCHS[name]} epochs, {runs[0][0].images:,} images"
    return {f"{name}.verdict": worst, f"{name}.n": n, f"{name}.length": length}


def _ratio(some: Sequence[Training], base: Sequence[Training]) -> Interval:
    return Interval.of(a.seconds / b.seconds for a, b in zip(some, base, strict=False))


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw test accuracy against epochs and against seconds of training, by order."""
    found = {}
    for name in EPOCHS:
        curves = {f"k = {order}" + " (JFB)" * (not order): some[0] for order, some in by_order(rows, name).items()}
        if curves:
            found[f"neumann-{name}"] = accuracy_figure(curves)
    return found
