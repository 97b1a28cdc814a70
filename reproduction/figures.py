"""JFB is faster than Jacobian-based backpropagation and gives better test accuracy.

The paper's figures of test accuracy against epochs and against time, from the runs of the second table. JFB has
batch norm in R and Jacobian-based has none, as in the paper; the like-for-like curve of JFB without it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduction import table2
from reproduction.study import Options, table
from reproduction.trainings import Training, accuracy_figure

RECORDS = table2.RECORDS
Row = Training
CURVES = {  # path -> label -> row of the second table; the last one sets the level
    "pair": {"JFB": "jfb-pair", "Jacobian-based, CG to 1e-3": "cg-pair"},
    "captured": {
        "JFB, batch norm in R": "jfb-captured-bn",
        "JFB": "jfb-captured-plain",
        "Jacobian-based, 20 steps of CG": "cg-captured-plain",
    },
    "eager": {
        "JFB, batch norm in R": "jfb-bn",
        "JFB": "jfb-plain",
        "Jacobian-based, CG as released": "cg-absolute-plain",
        "Jacobian-based, CG to 1e-3": "cg-relative-plain",
    },
}


def run(options: Options) -> list[Training]:
    """Train what the records lack: the runs of the second table."""
    return table2.run(options)


def curves(rows: Sequence[Training], data: str, path: str) -> dict[str, Training]:
    """Return the first run of every row that a figure shows."""
    found = {label: table2.runs_of(rows, data, tag) for label, tag in CURVES[path].items()}
    return {label: runs[0] for label, runs in found.items() if runs}


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return the table: accuracy, and time to the accuracy that Jacobian-based training ends with."""
    lines = []
    for data in table2.DATA:
        for path in CURVES:
            shown = curves(rows, data, path)
            for label, one in shown.items():
                level = list(shown.values())[-1].test[-1].clean.accuracy
                reached = seconds_to(level, one)
                lines.append((data, path, label, f"{one.clean:.2f}", one.seconds, f"{100 * level:.2f}", reached))
    columns = ("data", "path", "method", "clean %", "s per epoch", "level %", "s to the level")
    return {"table": table(lines, columns)}


def seconds_to(level: float, one: Training) -> float | None:
    """Return the seconds of training until an epoch ends with at least that accuracy, None if none does."""
    ends = zip(one.elapsed, one.test, strict=False)
    return next((seconds for seconds, point in ends if point.clean.accuracy >= level), None)


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw accuracy against epochs and seconds, one figure per data set and path."""
    found = {}
    for data in table2.DATA:
        for path in CURVES:
            shown = curves(rows, data, path)
            if len(shown) > 1:
                found[f"figures-{data}-{path}"] = accuracy_figure(shown)
    return found
