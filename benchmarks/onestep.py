"""One training step on the CPU, solve and JFB, against TorchDEQ's one-step gradient on the same maps.

Claim: banach is faster in every combination of map, size, solver and tolerance. Settings: 36 combinations, one
thread, processor time, medians of paired ratios; both check for convergence at each step. Result:
results/onestep.json.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from banach import JFB, Tolerance, solve
from benchmarks import maps
from benchmarks.libraries import ABSENT, SOLVERS, Map, euclidean, has_torchdeq, torchdeq_layer
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import interleaved, ratio

Step = Callable[[Map], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Settings:
    repeats: int = 15
    depth: int = 20  # where the tolerance is never met
    max_steps: int = 200  # where it is
    tolerance: float = 1e-4  # RMS
    small: bool = False  # leave out the large latents


def run(settings: Settings) -> Report:
    if not has_torchdeq():
        return Report([], notes=[ABSENT])
    rows = [
        _row(problem, method, met, settings)
        for problem in problems(small=settings.small)
        for method in ("picard", "anderson")
        for met in (False, True)
    ]
    worst = {met: max(row["ratio"] for row in rows if row["tol"] == met) for met in ("never", "met")}
    mean = statistics.geometric_mean(row["ratio"] for row in rows)
    targets = [
        Target("all rows, banach time / TorchDEQ time, geometric mean", mean, 1.0),
        Target("slowest row of equal depth, banach time / TorchDEQ time", worst["never"], 1.0),
        Target("slowest row with the tolerance met, likewise", worst["met"], 1.0),
    ]
    notes = [
        "solve, one recorded evaluation, backward; both check at each step; T evals: banach / TorchDEQ",
        "ratio: median over repetitions of banach's time by TorchDEQ's, in turn, one thread, processor time",
    ]
    return Report(rows, targets, notes)


def problems(*, small: bool) -> Iterator[maps.Problem]:
    """Yield latents from 16 numbers to 64 x 8 x 8, maps from next to nothing to a convolution."""
    yield from (maps.elementwise(1, 16), maps.elementwise(64, 64), maps.dense(8, 64))
    if not small:
        yield from (maps.elementwise(64, 4096), maps.dense(128, 256), maps.linear(1, 512))
        yield from (maps.linear(64, 512), maps.conv(32, 32, 9), maps.conv(16, 64, 8))


def _row(problem: maps.Problem, method: str, met: bool, settings: Settings) -> Row:
    rms, depth = (settings.tolerance, settings.max_steps) if met else (0.0, settings.depth)
    steps = training_steps(problem, method, rms, depth)
    seconds = interleaved({name: partial(step, problem.T) for name, step in steps.items()}, settings.repeats)
    paired = ratio(seconds["banach"], seconds["TorchDEQ"])
    seen = {name: maps.Recorder(problem.T) for name in steps}
    for name, step in steps.items():
        step(seen[name])
    return {
        "map": problem.name,
        "latent": "x".join(map(str, problem.z0.shape)),
        "solver": method,
        "tol": "met" if met else "never",
        "T evals": " / ".join(str(one.evaluations) for one in seen.values()),
        "ms": 1e3 * statistics.median(seconds["banach"]),
        "TorchDEQ ms": 1e3 * statistics.median(seconds["TorchDEQ"]),
        "ratio": paired.median,
        "spread": paired.spread,
    }


def training_steps(problem: maps.Problem, method: str, rms: float, depth: int) -> dict[str, Step]:
    """Return the same step in both libraries: T in, gradients of the weights out."""
    tolerance, z0, inputs = Tolerance(atol=rms, max_steps=depth), problem.z0, problem.inputs
    deq = torchdeq_layer(solver=method, max_steps=depth, tol=euclidean(rms, z0))

    def banach(T: Map) -> tuple[Tensor, ...]:
        # As fixed_point does it, which would warn where the tolerance is never met on purpose.
        found = solve(T, z0, SOLVERS[method], inputs=inputs, tolerance=tolerance)
        z = JFB().attach(T, found.value, inputs)
        return torch.autograd.grad(z.square().mean(), problem.weights)

    def torchdeq(T: Map) -> tuple[Tensor, ...]:
        return torch.autograd.grad(deq(T, z0, *inputs).square().mean(), problem.weights)

    return {"banach": banach, "TorchDEQ": torchdeq}


QUICK = Settings(repeats=1, max_steps=60, small=True)
BENCHMARKS = (Benchmark("onestep", "is a training step faster than TorchDEQ's?", run, Settings(), QUICK),)
