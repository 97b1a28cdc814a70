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
DATA = ("mnist", "svhn", "digits")


def mode(order: int) -> Mode:
    """Return the gradient of `Neumann(order)`, by products with J' instead of evaluations of T under autograd."""
    return Implicit(Picard(), Tolerance(atol=0, rtol=0, max_steps=order, check_every=0))


def _job(name: str, order: int, seed: int, **fields: Any) -> Job:
    job = f"neumann-{name}-k{order}-seed{seed}"
    return Job(name=job, data=name, model=name, seed=seed, backward=partial(mode, order), **fields)


QUICK = [_job("digits", order, 0, epochs=2, subset=256) for order in ORDERS]
JOBS = [_job("mnist", order, seed, epochs=10, recipe="released") for order in ORDERS for seed in range(3)]
JOBS += [_job("svhn", order, 0, epochs=6, recipe="released") for order in ORDERS]


def run(options: Options) -> list[Training]:
    """Train what the records lack."""
    return trained(QUICK if options.quick else JOBS, options)


def _runs(rows: Sequence[Training], name: str) -> dict[int, list[Training]]:
    """Return the runs on a data set by order k."""
    found = {order: [row for row in rows if row.group == f"neumann-{name}-k{order}"] for order in ORDERS}
    return {order: some for order, some in found.items() if some}


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return times relative to k = 0 and accuracies by data set and order, verdicts and the table."""
    found: dict[str, Any] = {}
    lines = []
    for name in DATA:
        runs, verdicts = _runs(rows, name), [REPRODUCED]
        for order, some in runs.items():
            ratio = Interval.of(a.seconds / b.seconds for a, b in zip(some, runs[0], strict=False))
            clean = Interval.of(run.clean for run in some)
            verdicts += [verdict(ratio, 1.0)] if order > 0 else []
            length = f"{len(some[0].epochs)} epochs, {some[0].images:,} images"
            found |= {f"{name}.k{order}.ratio": ratio, f"{name}.n": ratio.count, f"{name}.length": length}
            last, seconds = [run.epochs[-1] for run in some], fmean(run.seconds for run in some)
            losses, depth = fmean(one.loss for one in last), fmean(one.depth or 0.0 for one in last)
            lines.append((name, order, length, clean, seconds, ratio, losses, depth))
        found[f"{name}.verdict"] = next((one for one in verdicts if one != REPRODUCED), REPRODUCED)
    columns = ("data", "order k", "length", "clean %", "s per epoch", "time against k = 0", "loss", "depth")
    return found | {"table": table(lines, columns)}


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw test accuracy against epochs and against seconds of training, by order."""
    runs = {name: _runs(rows, name) for name in DATA}
    return {
        f"neumann-{name}": accuracy_figure({f"k = {order}": one[0] for order, one in some.items()})
        for name, some in runs.items()
        if some
    }
