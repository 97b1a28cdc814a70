"""JFB is faster than Jacobian-based backpropagation and gives better test accuracy.

The paper's figures of test accuracy against epochs and against time, from the runs of the second table. JFB has
batch norm in R and Jacobian-based has none, as in the paper; the like-for-like curve of JFB without it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduction import table2
from reproduction.study import table
from reproduction.trainings import Training, accuracy_figure

RECORDS, Row, run = table2.RECORDS, Training, table2.run
CURVES = {  # rows of the second table; the last one sets the level
    "pair": ("jfb-pair", "cg-pair"),
    "captured": ("jfb-captured-bn", "jfb-captured-plain", "cg-captured-plain"),
    "eager": ("jfb-bn", "jfb-plain", "cg-absolute-plain", "cg-relative-plain"),
}


def curves(rows: Sequence[Training]) -> dict[str, dict[str, Training]]:
    """Return for each data set and path the first run of every row, if there are two."""
    found = {}
    for data in table2.DATA:
        for path, tags in CURVES.items():
            runs = {tag: table2.runs_of(rows, data, tag) for tag in tags}
            found[f"{data}-{path}"] = {tag: some[0] for tag, some in runs.items() if some}
    return {name: some for name, some in found.items() if len(some) > 1}


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return the table: accuracy, and time to the accuracy that Jacobian-based training ends with."""
    lines = []
    for name, some in curves(rows).items():
        level = list(some.values())[-1].test[-1].clean.accuracy
        for tag, one in some.items():
            reached = seconds_to(level, one)
            lines.append((name, tag, f"{one.clean:.2f}", one.seconds, f"{100 * level:.2f}", reached))
    return {"table": table(lines, ("figure", "row", "clean %", "s per epoch", "level %", "s to the level"))}


def seconds_to(level: float, one: Training) -> float | None:
    """Return the seconds of training until an epoch ends with at least that accuracy, None if none does."""
    ends = zip(one.elapsed, one.test, strict=False)
    return next((seconds for seconds, point in ends if point.clean.accuracy >= level), None)


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw accuracy against epochs and seconds, one figure per data set and path."""
    return {f"figures-{name}": accuracy_figure(some) for name, some in curves(rows).items()}
