"""The paper's figures on Neumann series: training with w = g + J'g + ... + (J')^k g for several orders k.

Claim: "Plots show faster training with fewer terms (fastest with JFB, i.e. k = 0) and competitive test accuracy."

Settings: MNIST and SVHN with the authors' networks and settings, k = 0, 1, 2, 5, 10, one seed, all training
images, the first epochs. A term is one product with J' at the fixed point, as in the paper, which is the iteration
w <- g + J'w from w = g, k times. All orders take the same path, which asks the host nothing, so on a GPU steps are
captured. Order 0 is JFB's gradient by that path, too: JFB() itself has a faster one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from banach.backward import Implicit, Mode
from banach.paper.common import Subject, curves_figure, device_of, percent, trained_on
from banach.paper.jobs import Job
from banach.paper.records import Record, cold, record_of
from banach.paper.study import Findings, Options, Row, Study
from banach.solve import Picard, Tolerance

CLAIM = "fewer Neumann terms train faster, fastest with JFB (k = 0), at a competitive test accuracy"
ORDERS = (0, 1, 2, 5, 10)
FULL = (
    Subject(data="mnist", model="mnist", epochs=10, whole=True, first=True),
    Subject(data="svhn", model="svhn", epochs=6, whole=True, first=True),
)
QUICK = (Subject(data="digits", model="digits", epochs=2, subset=256, whole=True),)


def mode(order: int) -> Mode:
    """The gradient of `Neumann(order)`, which is plain autograd and so evaluates T once more for every term."""
    return Implicit(Picard(), Tolerance(atol=0, rtol=0, max_steps=order, check_every=0))


def job(subject: Subject, order: int) -> Job:
    return subject.job(f"neumann-{subject.data}-k{order}", backward=mode(order))


def run(options: Options) -> Findings:
    subjects = QUICK if options.quick else FULL
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    slow: list[str] = []
    for subject in subjects:
        done = {order: record_of(job(subject, order), options) for order in ORDERS}
        rows += [
            {**_row(subject, order, done), "device": device_of(one.job.name, options)}
            for order, one in done.items()
        ]
        curves = {f"k = {order}" + " (JFB)" * (not order): one.curve for order, one in done.items()}
        figures[f"neumann-{subject.data}"] = partial(curves_figure, f"Neumann series, {_title(done)}", curves)
        details |= {one.job.name: one.curve for one in done.values()}
        slow += cold(done.values())
    settings = {job(subject, 0).name: job(subject, 0).settings.to_dict() for subject in subjects}
    notes = [*_notes(subjects), *slow, trained_on(details, options)]
    return Findings("neumann", CLAIM, rows, notes, figures, settings, details)


def trainings(options: Options) -> list[Job]:
    return [job(subject, order) for subject in (QUICK if options.quick else FULL) for order in ORDERS]


STUDY = Study("neumann", CLAIM, run, trainings=trainings)


def _title(done: Mapping[int, Record]) -> str:
    return done[0].title


def _row(subject: Subject, order: int, done: Mapping[int, Record]) -> Row:
    one, last = done[order], done[order].epochs[-1]
    return {
        "data": _title(done),
        "order k": order,
        "paper": "a figure: fastest with k = 0" if not order else None,
        "clean %": percent([one.accuracy]),
        "J-products per image": order,
        "seconds per epoch": one.pace,
        "seconds against k = 0": one.seconds / done[0].seconds,
        "training loss": last.loss,
        "forward steps": last.depth,
        "forward converged": last.converged,
        "epochs": f"{subject.epochs} of {subject.recipe().epochs}",
    }


def _notes(subjects: Sequence[Subject]) -> list[str]:
    return [
        "clean protocol: eval mode, clean test images, after every epoch",
        "seconds are of training alone, without epochs that warm up, first or resumed, if there are others",
        "one path for all orders, on a GPU captured: k = 0 is JFB's gradient by it; JFB() itself has a faster one",
        "a backward pass with k > 0 evaluates T once more, for its products",
        "seconds grow with the forward steps, too, which an order changes by the weights it leads to",
        *(f"shortened: {s.data}: {s.lack()}, one seed" for s in subjects if s.lack()),
    ]
