"""Time per step beside T, in microseconds: the loop against a bare `z = T(z)` and against TorchDEQ's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Tolerance, solve
from banach.provenance import Summary
from benchmarks import rival
from benchmarks.report import Result, Row
from benchmarks.timing import Action, interleaved


@dataclass(frozen=True)
class Settings:
    shapes: tuple[tuple[int, ...], ...] = ((1, 16), (8, 64), (64, 512), (32, 32, 9, 9), (16, 64, 8, 8))
    depth: int = 40
    repeats: int = 11


QUICK = Settings(shapes=((1, 16), (64, 512)), repeats=5)

_SOLVERS: dict[str, Solver] = {"picard": Picard(), "anderson": Anderson(5), "broyden": Broyden(10)}
_MEMORY = {"picard": None, "anderson": 5, "broyden": 10}


def run(settings: Settings = Settings()) -> Result:
    rows = [row for shape in settings.shapes for row in _shape(shape, settings)]
    notes = [
        "microseconds per step beyond a bare loop of the same map, one thread, medians of runs taken in turn",
        "checked: the host asks at each step, as TorchDEQ always does; free: never (check_every=0)",
    ]
    return Result(
        "looptime",
        "how long does a step take beside T?",
        rows,
        [],
        notes if rival.available() else [rival.ABSENT, *notes],
        settings,
    )


def _shape(shape: tuple[int, ...], settings: Settings) -> list[Row]:
    T, z0 = _map(shape), torch.zeros(shape)
    actions: dict[str, Action] = {"bare": lambda: _bare(T, z0, settings.depth)}
    for name, solver in _SOLVERS.items():
        for check in (0, 1):
            actions[f"{name} {check}"] = _banach(T, z0, solver, settings.depth, check)
        if rival.available():
            actions[f"{name} TorchDEQ"] = _torchdeq(T, z0, name, settings.depth)
    seconds = interleaved(actions, settings.repeats)
    bare = Summary.of(seconds["bare"]).median

    beyond = {name: (Summary.of(times).median - bare) / settings.depth * 1e6 for name, times in seconds.items()}
    return [_row(shape, name, bare / settings.depth * 1e6, beyond) for name in _SOLVERS]


def _row(shape: tuple[int, ...], solver: str, bare: float, beyond: dict[str, float]) -> Row:
    row: Row = {
        "latent": "x".join(map(str, shape)),
        "solver": solver,
        "T us": bare,
        "free us": beyond[f"{solver} 0"],
        "checked us": beyond[f"{solver} 1"],
    }
    theirs = beyond.get(f"{solver} TorchDEQ")
    return (
        row if theirs is None else {**row, "TorchDEQ us": theirs, "checked / TorchDEQ": row["checked us"] / theirs}
    )


def _map(shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Next to nothing to compute, and slopes all different, so that nobody arrives early."""
    b = torch.ones(shape)
    slopes = torch.linspace(-0.99, 0.99, b[0].numel()).view(shape[1:])
    return lambda z: torch.addcmul(b, z, slopes)


@torch.no_grad()
def _bare(T: Callable[[Tensor], Tensor], z: Tensor, depth: int) -> Tensor:
    for _ in range(depth):
        z = T(z)
    return z


def _banach(T: Callable[[Tensor], Tensor], z0: Tensor, solver: Solver, depth: int, check_every: int) -> Action:
    tolerance = Tolerance(atol=0, max_steps=depth, check_every=check_every)
    return lambda: solve(T, z0, solver, tolerance=tolerance)


def _torchdeq(T: Callable[[Tensor], Tensor], z0: Tensor, method: str, depth: int) -> Action:
    return lambda: rival.solve(T, z0, method, rms=0.0, max_steps=depth, memory=_MEMORY[method])
