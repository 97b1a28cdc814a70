"""One training step, solve and JFB, against TorchDEQ's one-step gradient on the same maps: time, by ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from banach import JFB, Anderson, Picard, Solver, Tolerance, solve
from banach.provenance import Summary
from benchmarks import maps, rival
from benchmarks.report import Result, Row, Target
from benchmarks.timing import interleaved, ratio

Step = Callable[[Callable[..., Tensor]], tuple[Tensor, ...]]

_SOLVERS: dict[str, Solver] = {"picard": Picard(), "anderson": Anderson(5)}


@dataclass(frozen=True)
class Settings:
    repeats: int = 15
    depth: int = 20  # where the tolerance is never met
    max_steps: int = 200  # where it is
    tolerance: float = 1e-4  # RMS
    small: bool = False  # leave out the large latents


QUICK = Settings(repeats=5)


def run(settings: Settings = Settings()) -> Result:
    if not rival.available():
        return Result("onestep", "is a training step faster than TorchDEQ's?", [], [], [rival.ABSENT], settings)
    rows = [
        _row(problem, method, met, settings)
        for problem in problems(small=settings.small)
        for method in _SOLVERS
        for met in (False, True)
    ]
    worst = {met: max(row["ratio"] for row in rows if (row["tol"] == "met") == met) for met in (False, True)}
    return Result(
        "onestep",
        "is a training step faster than TorchDEQ's?",
        rows,
        [
            Target("slowest row of equal depth, banach time / TorchDEQ time", worst[False], 1.0),
            Target("slowest row with the tolerance met, likewise", worst[True], 1.0),
        ],
        [
            "solve, one recorded evaluation, backward; both check at each step; T evals: banach / TorchDEQ",
            "ratio: median over repetitions of banach's time by TorchDEQ's, in turn, one thread, processor time",
        ],
        settings,
    )


def problems(*, small: bool) -> Iterator[maps.Problem]:
    """Latents from 16 numbers to 64 x 8 x 8, maps from next to nothing to a convolution."""
    yield maps.elementwise(1, 16)
    yield maps.elementwise(64, 64)
    yield maps.dense(8, 64)
    if not small:
        yield maps.elementwise(64, 4096)
        yield maps.dense(128, 256)
        yield maps.linear(1, 512)
        yield maps.linear(64, 512)
        yield maps.conv(32, 32, 9)
        yield maps.conv(16, 64, 8)


def _row(problem: maps.Problem, method: str, met: bool, settings: Settings) -> Row:
    rms, depth = (settings.tolerance, settings.max_steps) if met else (0.0, settings.depth)
    steps = training_steps(problem, method, rms, depth)
    seconds = interleaved({name: partial(step, problem.T) for name, step in steps.items()}, settings.repeats)
    paired = ratio(seconds["banach"], seconds["TorchDEQ"])
    counts = [_evaluations(problem, step) for step in steps.values()]
    return {
        "map": problem.name,
        "latent": "x".join(map(str, problem.shape)),
        "solver": method,
        "tol": "met" if met else "never",
        "T evals": f"{counts[0]} / {counts[1]}",
        "ms": Summary.of(seconds["banach"]).median * 1e3,
        "TorchDEQ ms": Summary.of(seconds["TorchDEQ"]).median * 1e3,
        "ratio": paired.median,
        "spread": paired.spread,
    }


def training_steps(problem: maps.Problem, method: str, rms: float, depth: int) -> dict[str, Step]:
    """The same step in both libraries: T in, gradients of the weights out."""
    solver, tolerance = _SOLVERS[method], Tolerance(atol=rms, max_steps=depth)
    deq = rival.layer(problem.z0, method, rms=rms, max_steps=depth)

    def banach(T: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        # As fixed_point does it, which would warn where the tolerance is never met on purpose.
        found = solve(T, problem.z0, solver, inputs=problem.inputs, tolerance=tolerance)
        z = JFB().attach(T, found.value, problem.inputs)
        return torch.autograd.grad(z.square().mean(), problem.weights)

    def torchdeq(T: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        z = deq(lambda z: T(z, *problem.inputs), problem.z0)
        return torch.autograd.grad(z.square().mean(), problem.weights)

    return {"banach": banach, "TorchDEQ": torchdeq}


def _evaluations(problem: maps.Problem, step: Step) -> int:
    seen = maps.Recorder(problem.T)
    step(seen)
    return seen.evaluations
