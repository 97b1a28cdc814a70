"""Evaluations of T until a sample converges: Anderson and Broyden against Picard, where they help and where not.

Claim: on a symmetric map of contraction .95, Anderson(5) needs at most 0.3 of Picard's steps; on a rotation of
many angles no combination of iterates beats Picard. Settings: n = 512, float64, RMS residual 1e-8, mean over 16
samples. Result: results/steps.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from benchmarks import maps
from benchmarks.libraries import Method, has_torchdeq, methods, notes
from benchmarks.results import Benchmark, Figure, Report, Row, Target


@dataclass(frozen=True)
class Settings:
    n: int = 512
    batch: int = 16
    tolerance: float = 1e-8  # RMS
    max_steps: int = 2000


def run(settings: Settings) -> Report:
    size = settings.n, settings.batch
    problems = [maps.symmetric(*size), maps.rotation(*size), maps.rotation(*size, planes=2)]
    rows = [row for problem in problems for row in _rows(problem, settings)]
    by = {(row["map"], row["library"], row["method"]): row["against Picard"] for row in rows}
    target = Target("symmetric, Anderson(5) against Picard", by["symmetric", "banach", "Anderson(5)"], 0.3)
    seen = by[problems[1].name, "banach", "Anderson(5)"]
    about = [
        f"rotation of many angles: no combination of iterates beats Picard on a circle; seen: {seen:.3g}",
        "steps: evaluations of T until a sample's own residual meets the tolerance, watched from outside",
    ]
    if has_torchdeq():
        about.append("TorchDEQ's Anderson adds 1e-4 to its Gram matrix, which dominates once residuals are small")
    return Report(rows, [target], notes(*about))


def _rows(problem: maps.Problem, settings: Settings) -> list[Row]:
    found = {method: _steps(problem, method, settings) for method in methods()}
    base = next(iter(found.values())).mean()  # banach's Picard
    return [
        {
            "map": problem.name,
            "library": method.library,
            "method": method.name,
            "steps": Figure.of(steps.tolist()) if steps.isfinite().all() else "not reached",
            "against Picard": float(steps.mean() / base),
        }
        for method, steps in found.items()
    ]


def _steps(problem: maps.Problem, method: Method, settings: Settings) -> Tensor:
    seen = maps.Recorder(problem.T)
    method(seen, problem.z0, problem.inputs, rms=settings.tolerance, max_steps=settings.max_steps)
    return seen.first_below(settings.tolerance)


QUICK = Settings(n=96, batch=2, tolerance=1e-6, max_steps=300)
BENCHMARKS = (Benchmark("steps", "how many evaluations of T does it take?", run, Settings(), QUICK),)
