"""Useful work when samples contract at different rates: evaluations that were needed, of those that were made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from banach import Tolerance, solve
from banach.provenance import Summary
from benchmarks import maps, rival
from benchmarks.report import Result, Row, Target
from benchmarks.timing import interleaved, ratio


@dataclass(frozen=True)
class Settings:
    spans: tuple[tuple[float, float], ...] = ((0.2, 0.5), (0.2, 0.95), (0.2, 0.99))
    promised: tuple[float, float] = (0.2, 0.95)
    batch: int = 128
    n: int = 256
    layers: int = 4  # of the map, so that evaluating it is most of the work
    tolerance: float = 1e-4  # RMS
    max_steps: int = 3000
    repeats: int = 3


QUICK = Settings(spans=((0.2, 0.95),), batch=64, n=128)


def run(settings: Settings = Settings()) -> Result:
    rows = [row for span in settings.spans for row in _span(span, settings)]
    useful = {(row["rates"], row["method"]): row["useful %"] for row in rows}
    name = _name(settings.promised)
    targets = [Target(f"rates {name}, compact, % useful", useful[name, "banach, compact"], 90.0, at_least=True)]
    notes = ["useful %: steps that samples needed (each alone, plain iteration) / rows that T was given"]
    return Result(
        "compaction",
        "how much of the work is useful when rates differ?",
        rows,
        targets,
        notes if rival.available() else [rival.ABSENT, *notes],
        settings,
    )


def _span(span: tuple[float, float], settings: Settings) -> list[Row]:
    problem = maps.rates(settings.batch, settings.n, span, layers=settings.layers)
    needed = needed_steps(problem, settings.tolerance, settings.max_steps)
    methods = _methods(problem, settings)
    actions = {name: partial(go, problem.T) for name, go in methods.items()}
    seconds = interleaved(actions, settings.repeats, warm_up=1)
    base = seconds["TorchDEQ"] if "TorchDEQ" in seconds else seconds["banach, freeze"]
    against = "time / TorchDEQ" if "TorchDEQ" in seconds else "time / freeze"
    rows = []
    for name, go in methods.items():
        seen = maps.Recorder(problem.T)
        go(seen)
        rows.append(
            {
                "rates": _name(span),
                "method": name,
                "needed": int(needed.sum()),
                "evaluated": seen.rows,
                "useful %": 100 * float(needed.sum()) / seen.rows,
                "ms": Summary.of(seconds[name]).median * 1e3,
                against: ratio(seconds[name], base).median,
            }
        )
    return rows


def _methods(problem: maps.Problem, settings: Settings) -> dict[str, Callable[[Callable[..., Tensor]], object]]:
    tolerance = Tolerance(atol=settings.tolerance, max_steps=settings.max_steps)

    def banach(compact: bool) -> Callable[[Callable[..., Tensor]], object]:
        return lambda T: solve(T, problem.z0, inputs=problem.inputs, tolerance=tolerance, compact=compact)

    def torchdeq(T: Callable[..., Tensor]) -> object:
        return rival.solve(
            lambda z: T(z, *problem.inputs),
            problem.z0,
            "picard",
            rms=settings.tolerance,
            max_steps=settings.max_steps,
        )

    methods = {"banach, compact": banach(True), "banach, freeze": banach(False)}
    return {**methods, "TorchDEQ": torchdeq} if rival.available() else methods


def needed_steps(problem: maps.Problem, tolerance: float, max_steps: int) -> Tensor:
    """(batch,): evaluations of a bare loop until each sample met the tolerance."""
    seen, z = maps.Recorder(problem.T), problem.z0
    with torch.no_grad():
        for _ in range(max_steps):
            z = seen(z, *problem.inputs)
            if bool((seen.residuals[-1] <= tolerance).all()):
                break
    return seen.first_below(tolerance)


def _name(span: tuple[float, float]) -> str:
    return f"{span[0]} to {span[1]}"
