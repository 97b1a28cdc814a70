"""What the paper leaves open: JFB at fixed points that are found by Anderson's and Broyden's methods.

Claim: "Combining JFB with Anderson accelerated fixed point iteration is a promising research direction we leave
for future work." No number is printed. Question: how many evaluations of T, and how much time, does it save?

Settings: (1) to the same tolerance: the network that was trained with Picard's iteration, eval mode, test
images, u* from 0 to several residuals in fp32, the solve alone. (2) to the same accuracy: three trainings with
the authors' settings that differ in the solver alone, until the validation accuracy first is at a level that all
of them reach. The same path for all: in (1) iterations run one by one; in (2), on a GPU, training steps are
captured, at a depth that is set by the residuals of earlier ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from banach.data import Images
from banach.paper import neumann
from banach.paper.common import Subject, curves_figure, percent, trained_on, unseen, warm
from banach.paper.jobs import Job
from banach.paper.records import Record, train
from banach.paper.study import Findings, Options, Row, Study
from banach.provenance import Summary
from banach.solve import Anderson, Broyden, Picard, Solution, Solver, Tolerance, solve
from banach.train.precision import arithmetic

CLAIM = "combining JFB with accelerated fixed-point iterations is promising (left for future work)"
SOLVERS: Mapping[str, Solver] = {"Picard": Picard(), "Anderson(5)": Anderson(5), "Broyden(10)": Broyden(10)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    subjects: tuple[Subject, ...]
    levels: tuple[float, ...] = (1e-1, 1e-2, 1e-4)  # residuals
    max_steps: int = 500
    batch: int = 400
    repeats: int = 20


FULL = Plan(
    subjects=(
        Subject(data="mnist", model="mnist", epochs=5, first=True),
        Subject(data="svhn", model="svhn", epochs=3, first=True),
    )
)
QUICK = Plan(subjects=(Subject(data="digits", model="digits", epochs=2, subset=256),), repeats=2)


def run(options: Options) -> Findings:
    plan = QUICK if options.quick else FULL
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for subject in plan.subjects:
        done = {name: train(_job(subject, name), options) for name in SOLVERS}
        net, test = done["Picard"].outcome.net, unseen(subject.data, options)
        with arithmetic("fp32", test.device):  # TF32 could not meet 1e-4
            rows += [row for level in plan.levels for row in _solve_rows(net, test, level, plan)]
        rows += _training_rows({name: one.record for name, one in done.items()})
        curves = {name: one.record.curve for name, one in done.items()}
        title = f"JFB with three solvers, {test.title}"
        figures[f"accelerate-{subject.data}"] = partial(curves_figure, title, curves)
        details |= {one.record.job.name: [e.to_dict() for e in one.record.epochs] for one in done.values()}
    notes = [*_notes(plan), trained_on(details, options)]
    return Findings("accelerate", CLAIM, rows, notes, figures, plan, details)


def trainings(options: Options) -> list[Job]:
    plan = QUICK if options.quick else FULL
    return [_job(subject, name) for subject in plan.subjects for name in SOLVERS]


STUDY = Study("accelerate", CLAIM, run, trainings=trainings)


def _job(subject: Subject, name: str) -> Job:
    word = name.partition("(")[0].lower()
    return subject.job(f"accelerate-{subject.data}-{word}", solver=SOLVERS[name], backward=neumann.mode(0))


@torch.no_grad()
def _solve_rows(net: Any, test: Images, level: float, plan: Plan) -> list[Row]:
    """u* of the first test images, by each solver, to one residual."""
    net.eval()
    v = net.Q(test.normalise(test.pixels[: plan.batch]))
    tolerance = Tolerance(atol=level, max_steps=plan.max_steps, norm=net.tolerance.norm)
    found, seconds = _timed(net.R, v, tolerance, plan.repeats)
    base, base_seconds = found["Picard"], seconds["Picard"].median
    return [
        {
            "data": test.title,
            "what": f"solve {len(v)} test images to {level:g}",
            "solver": name,
            "iterations": float(one.steps.double().mean()),
            "most": int(one.steps.max()),
            "against Picard": float(one.steps.double().mean() / base.steps.double().mean()),
            "seconds": seconds[name],
            "seconds against Picard": seconds[name].median / base_seconds,
            "converged": float(one.converged.double().mean()),
        }
        for name, one in found.items()
    ]


def _timed(
    R: Any, v: Tensor, tolerance: Tolerance, repeats: int
) -> tuple[dict[str, Solution], dict[str, Summary]]:
    """By each solver, in turn, after a round that warms up; reading the steps waits for the device."""
    found: dict[str, Solution] = {}
    seconds: dict[str, list[float]] = {name: [] for name in SOLVERS}
    for _ in range(repeats + 1):
        for name, solver in SOLVERS.items():
            begun = time.perf_counter()
            found[name] = solve(R, torch.zeros_like(v), solver, inputs=(v,), tolerance=tolerance)
            found[name].steps.tolist()
            seconds[name].append(time.perf_counter() - begun)
    return found, {name: Summary.of(some[1:]) for name, some in seconds.items()}


def _training_rows(done: Mapping[str, Record]) -> list[Row]:
    """Epochs, evaluations of T per image and seconds until the level that all three reach."""
    level = min(max(epoch.validated for epoch in one.epochs) for one in done.values())
    spent = {name: spent_until(level, one) for name, one in done.items()}
    return [
        {
            "data": one.title,
            "what": f"train to {100 * level:.2f} per cent on validation",
            "solver": name,
            "iterations": spent[name].iterations,
            "against Picard": spent[name].iterations / spent["Picard"].iterations,
            "seconds": spent[name].seconds,
            "seconds against Picard": spent[name].seconds / spent["Picard"].seconds,
            "converged": one.epochs[-1].converged,
            "epochs": spent[name].epochs,
            "clean %": percent([one.accuracy]),
        }
        for name, one in done.items()
    ]


@dataclass(frozen=True)
class Spent:
    """Up to and with one epoch: how many, evaluations of T per image, seconds."""

    epochs: int
    iterations: float
    seconds: float


def spent_until(level: float, one: Record) -> Spent:
    """The first epoch whose validation accuracy is at the level."""
    epochs = one.epochs
    reached = next(k for k, epoch in enumerate(epochs) if epoch.validated >= level)
    iterations = list(accumulate(epoch.depth or 0.0 for epoch in epochs))
    seconds = list(accumulate(warm(one.curve)))
    return Spent(reached + 1, iterations[reached], seconds[reached])


def _notes(plan: Plan) -> list[str]:
    return [
        "iterations: evaluations of T per image, the mean; in training summed over epochs, without recorded ones",
        "to the same tolerance: in the norm of the settings; seconds are of the solve, until the slowest is done",
        "solvers take turns at a solve; ratios are of medians",
        "to the same accuracy: on the validation split, since the test set chooses nothing",
        "trainings: one path for all solvers, on a GPU captured; Picard with JFB() has a faster one",
        "an epoch that warms up, the first or one resumed, counts as many seconds as the others on average",
        *(f"shortened: {s.data}: {s.lack()}, one seed" for s in plan.subjects if s.lack()),
    ]
