"""What one step costs beside T: kernels, latent-sized allocations, host syncs; the difference of two depths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Tolerance, solve
from benchmarks import rival
from benchmarks.counting import Calls
from benchmarks.report import Result, Row, Target

Go = Callable[[Callable[..., Any], Tensor, int], object]


@dataclass(frozen=True)
class Settings:
    # Both depths are past the filling of every memory, and before TorchDEQ's Broyden looks back 30 steps.
    # Their difference is a multiple of Broyden's memory, which starts afresh every so many steps.
    shallow: int = 12
    deep: int = 22
    batch: int = 8
    width: int = 64


QUICK = Settings()


def run(settings: Settings = Settings()) -> Result:
    rows = [
        _row("banach", "Picard", settings, _banach(Picard())),
        _row("banach", "Picard, rtol", settings, _banach(Picard(), rtol=1e-30)),
        _row("banach", "Picard, checked each step", settings, _banach(Picard(), check_every=1)),
        _row("banach", "Anderson(5)", settings, _banach(Anderson(5))),
        _row("banach", "Anderson(5), checked each step", settings, _banach(Anderson(5), check_every=1)),
        _row("banach", "Broyden(10)", settings, _banach(Broyden(10))),
    ]
    if rival.available():
        rows += [_row("TorchDEQ", name, settings, _torchdeq(key)) for key, name in rival.NAMES.items()]
    notes = [] if rival.available() else [rival.ABSENT]
    return Result(
        "overhead",
        "what does one step cost beside T?",
        rows,
        _targets({row["method"]: row for row in rows if row["library"] == "banach"}),
        [*notes, "kernels: aten calls that are no views; TorchDEQ checks at each step and cannot do otherwise"],
        settings,
    )


def _targets(by_method: dict[str, Row]) -> list[Target]:
    bounds = {"Picard": (10, 2, 0), "Picard, rtol": (12, 2, 0), "Anderson(5)": (25, 3, 0)}
    columns = ("kernels", "allocations", "syncs")
    return [
        Target(f"{method}, {column} per step", by_method[method][column], bound)
        for method, three in bounds.items()
        for column, bound in zip(columns, three, strict=True)
    ]


def _row(library: str, method: str, settings: Settings, go: Go) -> Row:
    _count(go, 1, settings)  # what is made once for a kind of latent
    shallow, deep = _count(go, settings.shallow, settings), _count(go, settings.deep, settings)
    per_step = [(b - a) / (settings.deep - settings.shallow) for a, b in zip(shallow, deep, strict=True)]
    kernels, allocations, syncs = per_step
    return {"library": library, "method": method, "kernels": kernels, "allocations": allocations, "syncs": syncs}


def _count(go: Go, depth: int, settings: Settings) -> tuple[int, int, int]:
    z0 = torch.zeros(settings.batch, settings.width)
    slopes = torch.linspace(-0.99, 0.99, settings.width)  # no two alike, so that nobody is done early
    calls = Calls(z0.numel())
    T = calls.beside(lambda z: slopes * z + 1)
    with torch.no_grad(), calls:
        go(T, z0, depth)
    return calls.totals()


def _banach(solver: Solver, *, rtol: float = 0.0, check_every: int = 0) -> Go:
    def go(T: Callable[..., Any], z0: Tensor, depth: int) -> object:
        return solve(
            T, z0, solver, tolerance=Tolerance(atol=0, rtol=rtol, max_steps=depth, check_every=check_every)
        )

    return go


def _torchdeq(method: str) -> Go:
    return lambda T, z0, depth: rival.solve(T, z0, method, rms=0.0, max_steps=depth)
