"""A sample solved alone and in a batch: is it the same answer?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Tolerance, solve
from benchmarks import maps, rival
from benchmarks.report import Result, Row, Target

Find = Callable[[slice], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Settings:
    batch: int = 32
    n: int = 64
    tolerance: float = 1e-4  # RMS
    max_steps: int = 1000
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)


QUICK = Settings(batch=8)

_SOLVERS: dict[str, Solver] = {"Picard": Picard(), "Anderson(5)": Anderson(5), "Broyden(10)": Broyden(10)}


def run(settings: Settings = Settings()) -> Result:
    rows = [row for dtype in settings.dtypes for row in _rows(dtype, settings)]
    ours = [row for row in rows if row["library"] == "banach"]
    targets = [
        Target("banach, largest difference in roundings of the dtype", max(row["roundings"] for row in ours), 100),
        Target("banach, samples whose steps differ", sum(row["steps differ"] for row in ours), 0),
    ]
    notes = ["difference: max |alone - in the batch| / max |value|; rates .2 to .95 in one batch"]
    return Result(
        "invariance",
        "is a sample's answer the same alone and in a batch?",
        rows,
        targets,
        notes if rival.available() else [rival.ABSENT, *notes],
        settings,
    )


def _rows(dtype: torch.dtype, settings: Settings) -> list[Row]:
    problem = _problem(dtype, settings)
    found = {("banach", name): _banach(problem, solver, settings) for name, solver in _SOLVERS.items()}
    found["banach", "Picard, compact"] = _banach(problem, Picard(), settings, compact=True)
    if rival.available():
        found |= {("TorchDEQ", name): _torchdeq(problem, key, settings) for key, name in rival.NAMES.items()}
    return [_row(dtype, *name, find, settings) for name, find in found.items()]


def _problem(dtype: torch.dtype, settings: Settings) -> maps.Problem:
    plain = maps.rates(settings.batch, settings.n, (0.2, 0.95))
    Q = maps.orthogonal(settings.n, dtype)
    inputs = tuple(part.to(dtype) for part in plain.inputs)
    return maps.Problem("rates", lambda z, rate, b: torch.tanh(z @ Q) * rate + b, plain.z0.to(dtype), inputs)


def _row(dtype: torch.dtype, library: str, method: str, find: Find, settings: Settings) -> Row:
    value, steps = find(slice(None))
    alone = [find(slice(i, i + 1)) for i in range(settings.batch)]
    difference = (torch.cat([part for part, _ in alone]) - value).abs().max() / value.abs().max()
    row: Row = {
        "dtype": str(dtype).removeprefix("torch."),
        "library": library,
        "method": method,
        "difference": float(difference),
        "roundings": float(difference) / torch.finfo(dtype).eps,
    }
    if steps is not None:
        each = torch.cat([own for _, own in alone if own is not None])
        row["steps differ"] = int((each != steps).sum())
    return row


def _banach(problem: maps.Problem, solver: Solver, settings: Settings, *, compact: bool = False) -> Find:
    tolerance = Tolerance(atol=settings.tolerance, max_steps=settings.max_steps)

    def find(part: slice) -> tuple[Tensor, Tensor | None]:
        inputs = tuple(tensor[part] for tensor in problem.inputs)
        found = solve(problem.T, problem.z0[part], solver, inputs=inputs, tolerance=tolerance, compact=compact)
        return found.value, found.steps

    return find


def _torchdeq(problem: maps.Problem, method: str, settings: Settings) -> Find:
    def find(part: slice) -> tuple[Tensor, Tensor | None]:
        inputs = tuple(tensor[part] for tensor in problem.inputs)
        found = rival.solve(
            lambda z: problem.T(z, *inputs),
            problem.z0[part],
            method,
            rms=settings.tolerance,
            max_steps=settings.max_steps,
        )
        return found, None

    return find
