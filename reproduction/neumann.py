"""Fewer Neumann terms train faster, fastest with JFB (k = 0), at a competitive test accuracy.

The paper's figures on Neumann series: training with w = g + J'g + ... + (J')^k g for several orders k. MNIST and
SVHN with the released settings, all training images, the first epochs. A term is one product with J' at the fixed
point. All orders take the same code path, captured on a GPU; JFB() itself has a faster one. A backward pass
with k > 0 evaluates T once more for its products.
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from reproduction.jobs import Job, neumann, settings
from reproduction.study import REPRODUCED, UNTESTED, Claim, Interval, table, verdict
from reproduction.table1 import TITLES
from reproduction.table2 import pairs, ratios
from reproduction.trainings import Training, learning_curves, of_groups, trained

ORDERS = (0, 1, 2, 5, 10)
DATA = ("mnist", "svhn", "digits")


def _job(data: str, order: int, seed: int, **changes: Any) -> Job:
    chosen = settings(data, seed=seed, **changes)
    return Job(name=f"neumann-{data}-k{order}-seed{seed}", settings=chosen, backward=neumann(order))


QUICK = [_job("digits", order, 0, epochs=2, subset=256) for order in ORDERS]
JOBS = [_job("mnist", order, seed, epochs=10, recipe="released") for order in ORDERS for seed in range(3)]
JOBS += [_job("svhn", order, 0, epochs=6, recipe="released") for order in ORDERS]
RECORDS, Row, run = "neumann.jsonl", Training, partial(trained, JOBS, QUICK)


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return by data set the claim on the time of the highest order against k = 0, and the table."""
    found: dict[str, Any] = {}
    lines = []
    for data in DATA:
        runs, verdicts = of_groups(rows, {order: f"neumann-{data}-k{order}" for order in ORDERS}), []
        found[data] = Claim("> 1")
        for order, some in runs.items():
            against = pairs(rows, f"neumann-{data}-k{order}", f"neumann-{data}-k0")
            ratio, last = Interval.of(ratios(against)), [run.epochs[-1] for run in some]
            verdicts += [verdict(ratio, 1.0, strict=True)] if order else []
            judged = next((one for one in verdicts if one != REPRODUCED), REPRODUCED if verdicts else UNTESTED)
            found[data] = Claim("> 1", f"{ratio:.2f}", ratio.count, some[0].length, judged)
            figures = fmean(one.loss for one in last), fmean(one.depth or 0.0 for one in last)
            clean, seconds = Interval.of(run.clean for run in some), fmean(run.seconds for run in some)
            lines.append((TITLES[data], order, some[0].length, clean, seconds, ratio, *figures))
    columns = "data|order k|length|clean %|s per epoch|time against k = 0|loss|depth"
    return found | {"table": table(lines, columns)}


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw test accuracy against seconds of training, by order."""
    known = {TITLES[data]: of_groups(rows, {f"k = {k}": f"neumann-{data}-k{k}" for k in ORDERS}) for data in DATA}
    return {"neumann": learning_curves({title: runs for title, runs in known.items() if runs})}
