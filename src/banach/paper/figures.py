"""The paper's figures of JFB against Jacobian-based backpropagation: test accuracy by epochs and by time.

Claim: "JFB is faster and gives better test accuracy" (CIFAR-10; the appendix says the same of MNIST
and SVHN).

Settings: the runs of the second table, by their names: what is there is read, what is not is trained. So JFB has
batch norm in R and Jacobian-based has none, as in the paper; steps run one by one for both. Where the first
table's JFB run is there, it is drawn against epochs too; not against time, since its steps are captured.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import accumulate
from typing import Any

from banach.paper import table2
from banach.paper.common import Point, Subject, curves_figure, percent, trained_on, warm
from banach.paper.jobs import CURVE
from banach.paper.records import Record, record_of
from banach.paper.study import Findings, Options, Row, Study

CLAIM = "JFB is faster than Jacobian-based backpropagation and gives better test accuracy"
WAYS = {
    "JFB": table2.JFB_PAPER,
    table2.RELEASED: table2.CG_ABSOLUTE,
    table2.OURS: table2.CG_RELATIVE,
}
LONG = "JFB, the run of the first table"


def run(options: Options) -> Findings:
    rows: list[Row] = []
    notes: list[str] = []
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for subject in table2.subjects(options):
        done = {name: record_of(way.job(subject), options) for name, way in WAYS.items()}
        rows += [_row(name, done) for name in WAYS]
        curves: dict[str, Any] = {name: one.curve for name, one in done.items()}
        longer = long_run(subject, options)
        curves |= {LONG: longer} if longer else {}
        title = f"JFB against Jacobian-based, {done['JFB'].title}"
        figures[f"figures-{subject.data}"] = partial(curves_figure, title, curves, untimed=[LONG])
        details[subject.data] = curves
        notes += [f"shortened: {subject.data}: {subject.lack()}, one seed"] if subject.lack() else []
    settings = {job.name: job.settings.to_dict() for job in _jobs(options)}
    notes.append(trained_on(settings, options))
    return Findings("figures", CLAIM, rows, [_PROTOCOL, *notes], figures, settings, details)


STUDY = Study("figures", CLAIM, run)

_PROTOCOL = (
    "clean protocol after every epoch. The level is the accuracy that Jacobian-based with the relative tolerance "
    "ended with; a dash says that it was not reached in these epochs. The first epoch, which warms up, counts as "
    "many seconds as the others"
)


def _jobs(options: Options) -> list[Any]:
    return [way.job(subject) for subject in table2.subjects(options) for way in WAYS.values()]


def _row(name: str, done: dict[str, Record]) -> Row:
    one = done[name]
    level = done[table2.OURS].accuracy
    return {
        "data": one.title,
        "method": name,
        "paper": "faster and better" if name == "JFB" else None,
        "clean %": percent([one.accuracy]),
        "epochs": len(one.epochs),
        "seconds per epoch": done[name].pace,
        "level %": 100 * level,
        "seconds to the level": seconds_to(level, one.curve),
    }


def seconds_to(level: float, curve: list[dict[str, float]]) -> float | None:
    """Seconds of training until an epoch ends at least at that accuracy."""
    spent = accumulate(warm([point["seconds"] for point in curve]))
    return next((after for after, point in zip(spent, curve, strict=True) if point["clean"] >= level), None)


def long_run(subject: Subject, options: Options) -> list[Point]:
    """The curve of the first table's JFB run, if that was made."""
    path = options.runs / f"table1-{subject.data}-jfb-seed0" / CURVE
    found: list[Point] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found
