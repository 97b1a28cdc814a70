"""The solver loop: what a step costs beside T, and how many steps it takes until a sample converges.

Claims: Picard costs at most 10 kernels, 2 allocations and no sync per step, Anderson(5) 25, 3 and none. On a
symmetric map of contraction .95, Anderson(5) needs at most 0.3 of Picard's steps; on a rotation of many angles no
combination of iterates beats Picard. Settings: counts are differences of two depths; steps at n = 512, float64,
RMS residual 1e-8, mean over 16 samples. Result: results/overhead.json, results/steps.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import maps
from benchmarks.counting import Calls
from benchmarks.libraries import BANACH, Method, methods, notes
from benchmarks.results import Benchmark, Figure, Report, Row, Target


@dataclass(frozen=True)
class Counts:
    # Both depths are past the filling of every memory, and before TorchDEQ's Broyden looks back 30 steps.
    # Their difference is a multiple of Broyden's memory, which restarts when it is full.
    shallow: int = 12
    deep: int = 22
    batch: int = 8
    width: int = 64


BOUNDS = {"Picard": (10, 2, 0), "Picard, rtol": (12, 2, 0), "Anderson(5)": (25, 3, 0)}
COLUMNS = ("kernels", "allocations", "syncs")


def overhead(settings: Counts) -> Report:
    ours = {name: replace(method, check_every=0) for name, method in BANACH.items()}
    for name in ("Picard", "Anderson(5)"):
        ours[f"{name}, checked each step"] = replace(BANACH[name], check_every=1)
    found = {("banach", name): _counted(method, settings) for name, method in ours.items()}
    found["banach", "Picard, rtol"] = _counted(ours["Picard"], settings, rtol=1e-30)
    theirs = [method for method in methods() if method.library == "TorchDEQ"]
    found |= {("TorchDEQ", method.name): _counted(method, settings) for method in theirs}
    rows: list[Row] = [{"library": library, "method": name, **row} for (library, name), row in found.items()]
    targets = [
        Target(f"{name}, {column} per step", found["banach", name][column], bound)
        for name, bounds in BOUNDS.items()
        for column, bound in zip(COLUMNS, bounds, strict=True)
    ]
    note = "kernels: aten calls except views; TorchDEQ checks at each step and cannot do otherwise"
    return Report(rows, targets, notes(note))


def _counted(method: Method, settings: Counts, rtol: float = 0.0) -> dict[str, float]:
    """Return the counts per step, from two depths."""
    _, shallow, deep = (_count(method, settings, rtol, d) for d in (1, settings.shallow, settings.deep))
    steps = settings.deep - settings.shallow  # depth 1 made what is made once for a kind of latent
    return {column: (b - a) / steps for column, a, b in zip(COLUMNS, shallow, deep, strict=True)}


def _count(method: Method, settings: Counts, rtol: float, depth: int) -> tuple[int, int, int]:
    z0 = torch.zeros(settings.batch, settings.width)
    slopes = torch.linspace(-0.99, 0.99, settings.width)  # no two alike, so that no entry converges early
    calls = Calls(z0.numel())
    T = calls.without(lambda z: slopes * z + 1)
    with torch.no_grad(), calls:
        method(T, z0, rms=0.0, max_steps=depth, rtol=rtol)
    return calls.totals()


@dataclass(frozen=True)
class Depths:
    n: int = 512
    batch: int = 16
    tolerance: float = 1e-8  # RMS
    max_steps: int = 2000


def steps(settings: Depths) -> Report:
    size = settings.n, settings.batch
    problems = [maps.symmetric(*size), maps.rotation(*size), maps.rotation(*size, planes=2)]
    rows = [row for problem in problems for row in _rows(problem, settings)]
    gained = next(row for row in rows if row["method"] == "Anderson(5)")["against Picard"]  # the symmetric map's
    about = [
        "rotation of many angles: no combination of iterates beats Picard on a circle",
        "steps: evaluations of T until a sample's own residual meets the tolerance, watched from outside",
        "TorchDEQ's Anderson adds 1e-4 to its Gram matrix, which dominates once residuals are small",
    ]
    return Report(rows, [Target("symmetric, Anderson(5) against Picard", gained, 0.3)], notes(*about))


def _rows(problem: maps.Problem, settings: Depths) -> list[Row]:
    found = {method: _evaluations(problem, method, settings) for method in methods()}
    base = next(iter(found.values())).mean()  # banach's Picard
    return [
        {
            "map": problem.name,
            "library": method.library,
            "method": method.name,
            "steps": Figure.of(taken.tolist()) if taken.isfinite().all() else "not reached",
            "against Picard": float(taken.mean() / base),
        }
        for method, taken in found.items()
    ]


def _evaluations(problem: maps.Problem, method: Method, settings: Depths) -> Tensor:
    seen = maps.Recorder(problem.T)
    method(seen, problem.z0, problem.inputs, rms=settings.tolerance, max_steps=settings.max_steps)
    return seen.first_below(settings.tolerance)


FEW = Depths(n=96, batch=2, tolerance=1e-6, max_steps=300)
BENCHMARKS = (
    Benchmark("overhead", "what does one step cost beside T?", overhead, Counts(), Counts(batch=4)),
    Benchmark("steps", "how many evaluations of T does it take?", steps, Depths(), FEW),
)
