"""How many evaluations of T it takes: Anderson and Broyden against Picard, where they help and where not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from banach import Anderson, Broyden, Picard, Solver, Tolerance, solve
from banach.provenance import Summary
from benchmarks import maps, rival
from benchmarks.report import Result, Row, Target


@dataclass(frozen=True)
class Settings:
    n: int = 512
    batch: int = 16
    tolerance: float = 1e-8  # RMS
    max_steps: int = 2000


QUICK = Settings(n=512, batch=4)

_SOLVERS: dict[str, Solver] = {"Picard": Picard(), "Anderson(5)": Anderson(5), "Broyden(10)": Broyden(10)}


def run(settings: Settings = Settings()) -> Result:
    problems = [
        maps.symmetric(settings.n, settings.batch),
        maps.rotation(settings.n, settings.batch),
        maps.rotation(settings.n, settings.batch, planes=2),
    ]
    rows = [row for problem in problems for row in _problem(problem, settings)]
    by = {(row["map"], row["library"], row["method"]): row["against Picard"] for row in rows}
    target = Target("symmetric, Anderson(5) against Picard", by["symmetric", "banach", "Anderson(5)"], 0.3)
    spread = by[problems[1].name, "banach", "Anderson(5)"]
    notes = [
        f"rotation of many angles: no combination of iterates beats Picard on a circle; seen: {spread:.3g}",
        "steps: evaluations of T until a sample's own residual meets the tolerance, watched from outside",
    ]
    if rival.available():
        notes.append("TorchDEQ's Anderson adds 1e-4 to its Gram matrix, which rules once residuals are small")
    return Result(
        "steps",
        "how many evaluations of T does it take?",
        rows,
        [target],
        notes if rival.available() else [rival.ABSENT, *notes],
        settings,
    )


def _problem(problem: maps.Problem, settings: Settings) -> list[Row]:
    found = {("banach", name): _banach(problem, solver, settings) for name, solver in _SOLVERS.items()}
    if rival.available():
        found |= {("TorchDEQ", name): _torchdeq(problem, key, settings) for key, name in rival.NAMES.items()}
    base = found["banach", "Picard"].mean()
    return [
        {
            "map": problem.name,
            "library": library,
            "method": method,
            "steps": Summary.of(steps.tolist()) if steps.isfinite().all() else "not reached",
            "against Picard": float(steps.mean() / base),
        }
        for (library, method), steps in found.items()
    ]


def _banach(problem: maps.Problem, solver: Solver, settings: Settings) -> torch.Tensor:
    tolerance = Tolerance(atol=settings.tolerance, max_steps=settings.max_steps)
    return _watch(
        lambda T: solve(T, problem.z0, solver, inputs=problem.inputs, tolerance=tolerance), problem.T, settings
    )


def _torchdeq(problem: maps.Problem, method: str, settings: Settings) -> torch.Tensor:
    return _watch(
        lambda T: rival.solve(T, problem.z0, method, rms=settings.tolerance, max_steps=settings.max_steps),
        problem.closed(),
        settings,
    )


def _watch(
    go: Callable[[maps.Recorder], object], T: Callable[..., torch.Tensor], settings: Settings
) -> torch.Tensor:
    seen = maps.Recorder(T)
    go(seen)
    return seen.first_below(settings.tolerance)
