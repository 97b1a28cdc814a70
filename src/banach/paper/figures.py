"""The paper's figures of JFB against Jacobian-based backpropagation: test accuracy by epochs and by time.

Claim: "JFB is faster and gives better test accuracy" (CIFAR-10; the appendix says the same of MNIST
and SVHN).

Settings: the runs of the second table, by their names: what is there is read, what is not is trained. So JFB has
batch norm in R and Jacobian-based has none, as in the paper; a figure for each path, captured steps on all images
and steps one by one on some. Where the first table's JFB run is there, it is drawn beside the captured ones,
against epochs alone: JFB() has a faster path than CG, and trainings may have shared the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate, product
from typing import Any

from banach.paper import table2, table2_ways
from banach.paper.common import Point, Subject, curves_figure, device_of, percent, trained_on, warm
from banach.paper.jobs import Job
from banach.paper.kept import read, reading
from banach.paper.marks import MARKS
from banach.paper.records import Record, record_of
from banach.paper.study import Findings, Options, Row, Study
from banach.paper.table2_ways import Way

CLAIM = "JFB is faster than Jacobian-based backpropagation and gives better test accuracy"
PATHS: Mapping[str, tuple[Way, ...]] = {  # the last one sets the level
    "captured": (table2_ways.JFB_CAPTURED, table2_ways.CG_CAPTURED),
    "one by one": (table2_ways.JFB_PAPER, table2_ways.CG_ABSOLUTE, table2_ways.CG_RELATIVE),
}
LONG = "JFB, the run of the first table"


def run(options: Options) -> Findings:
    rows: list[Row] = []
    notes: list[str] = []
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for subject, (path, ways) in product(table2.subjects(options), PATHS.items()):
        done = {way.name: record_of(way.job(subject), options) for way in ways}
        rows += [
            {**_row(path, name, done), "device": device_of(one.job.name, options)} for name, one in done.items()
        ]
        curves: dict[str, Any] = {name: one.curve for name, one in done.items()}
        longer = long_run(subject, options) if path == "captured" else []
        curves |= {LONG: longer} if longer else {}
        title = f"JFB against Jacobian-based, {done['JFB'].title}, steps {path}"
        name = f"figures-{subject.data}-{path.replace(' ', '-')}"
        figures[name] = partial(curves_figure, title, curves, untimed=[LONG])
        details[name] = curves
        lack = ways[0].part(subject).lack()
        notes += [f"shortened: {subject.data}, steps {path}: {lack}, one seed"] if lack else []
    settings = {job.name: job.settings.to_dict() for job in trainings(options)}
    notes.append(trained_on(settings, options))
    told = [_LONG] if any(LONG in curves for curves in details.values()) else []
    return Findings("figures", CLAIM, rows, [_PROTOCOL, *told, *notes], figures, settings, details)


def trainings(options: Options) -> list[Job]:
    ways = [way for some in PATHS.values() for way in some]
    return [way.job(subject) for subject in table2.subjects(options) for way in ways]


STUDY = Study("figures", CLAIM, run, trainings=trainings)

_PROTOCOL = (
    "clean protocol after every epoch. The level is the accuracy that Jacobian-based ended with, one by one "
    "that with the relative tolerance; a dash says that it was not reached in these epochs. An epoch that "
    "warms up, the first or one resumed, counts as many seconds as the others. These are curves on test "
    "images, by which nothing is chosen"
)
_LONG = (
    f"{LONG}: longer, by JFB(), with its schedule shortened to its length where it has one, on CIFAR-10 in bf16"
)


def _row(path: str, name: str, done: Mapping[str, Record]) -> Row:
    one, level = done[name], list(done.values())[-1].accuracy
    return {
        "data": one.title,
        "method": name,
        "steps": path,
        "paper": "faster and better" if name == "JFB" else None,
        "clean %": percent([one.accuracy]),
        "epochs": len(one.epochs),
        "seconds per epoch": one.pace,
        "level %": 100 * level,
        "seconds to the level": seconds_to(level, one.curve),
    }


def seconds_to(level: float, curve: list[dict[str, float]]) -> float | None:
    """Seconds of training until an epoch ends at least at that accuracy."""
    spent = accumulate(warm(curve))
    return next((after for after, point in zip(spent, curve, strict=True) if point["clean"] >= level), None)


def long_run(subject: Subject, options: Options) -> list[Point]:
    """The curve of the first table's JFB run, if that was made."""
    path = options.runs / f"table1-{subject.data}-jfb-seed0" / MARKS  # of a training that came to its end
    if not path.exists():
        return []
    with reading(path):
        found: list[Point] = read(path)["marks"]["curve"]
        return found
