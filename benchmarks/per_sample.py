"""Samples that stop one by one: how much of the work is useful, and is an answer the same alone and in a batch?

Claims: with rates from .2 to .95 in one batch, compaction makes at least 90% of the evaluated rows useful. A
sample's answer alone and in a batch differs by at most 100 roundings, its steps by none. Settings: RMS 1e-4; 128
samples of 256 numbers, T of four layers; 32 samples of 64. Result: results/compaction.json,
results/invariance.json.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import maps
from benchmarks.libraries import BANACH, Method, has_torchdeq, methods, notes
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import interleaved, ratio

PICARD = BANACH["Picard"]
COMPACT = replace(PICARD, name="Picard, compact", compact=True)


@dataclass(frozen=True)
class Work:
    spans: tuple[tuple[float, float], ...] = ((0.2, 0.5), (0.2, 0.95), (0.2, 0.99))
    promised: tuple[float, float] = (0.2, 0.95)
    batch: int = 128
    n: int = 256
    layers: int = 4  # of the map, so that evaluating it is most of the work
    tolerance: float = 1e-4  # RMS
    max_steps: int = 3000
    repeats: int = 3


def compaction(settings: Work) -> Report:
    rows = [row for span in settings.spans for row in _span(span, settings)]
    useful = {(row["rates"], row["method"]): row["useful %"] for row in rows}
    name = _name(settings.promised)
    target = Target(f"rates {name}, compact, % useful", useful[name, "banach, compact"], 90.0, at_least=True)
    note = "useful %: steps that samples needed (each alone, plain iteration) / rows that T was given"
    return Report(rows, [target], notes(note))


def _span(span: tuple[float, float], settings: Work) -> list[Row]:
    problem = maps.rates(settings.batch, settings.n, span, layers=settings.layers)
    needed = needed_steps(problem, settings.tolerance, settings.max_steps)
    ways = {"banach, compact": COMPACT, "banach, freeze": PICARD}
    if has_torchdeq():
        ways["TorchDEQ"] = Method("TorchDEQ", "TorchDEQ", "picard")
    how: Any = {"rms": settings.tolerance, "max_steps": settings.max_steps}
    actions = {name: partial(way, problem.T, problem.z0, problem.inputs, **how) for name, way in ways.items()}
    seconds = interleaved(actions, settings.repeats, warm_up=1)
    *_, last = ways
    rows = []
    for name, way in ways.items():
        seen = maps.Recorder(problem.T)
        way(seen, problem.z0, problem.inputs, **how)
        rows.append(
            {
                "rates": _name(span),
                "method": name,
                "needed": int(needed.sum()),
                "evaluated": seen.rows,
                "useful %": 100 * float(needed.sum()) / seen.rows,
                "ms": 1e3 * statistics.median(seconds[name]),
                f"time / {last.removeprefix('banach, ')}": ratio(seconds[name], seconds[last]).median,
            }
        )
    return rows


def needed_steps(problem: maps.Problem, tolerance: float, max_steps: int) -> Tensor:
    """Return, per sample, the evaluations of a bare loop until it met the tolerance."""
    seen, z = maps.Recorder(problem.T), problem.z0
    with torch.no_grad():
        for _ in range(max_steps):
            z = seen(z, *problem.inputs)
            if bool((seen.residuals[-1] <= tolerance).all()):
                break
    return seen.first_below(tolerance)


def _name(span: tuple[float, float]) -> str:
    return f"{span[0]} to {span[1]}"


@dataclass(frozen=True)
class Answers:
    batch: int = 32
    n: int = 64
    tolerance: float = 1e-4  # RMS
    max_steps: int = 1000
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)


def invariance(settings: Answers) -> Report:
    rows = [_row(dtype, method, settings) for dtype in settings.dtypes for method in (*methods(), COMPACT)]
    ours = [row for row in rows if row["library"] == "banach"]
    targets = [
        Target("banach, largest difference in roundings of the dtype", max(row["roundings"] for row in ours), 100),
        Target("banach, samples whose steps differ", sum(row["steps differ"] for row in ours), 0),
    ]
    note = "difference: max |alone - in the batch| / max |value|; rates .2 to .95 in one batch"
    return Report(rows, targets, notes(note))


def _row(dtype: torch.dtype, method: Method, settings: Answers) -> Row:
    plain, Q = maps.rates(settings.batch, settings.n, (0.2, 0.95)), maps.orthogonal(settings.n, dtype)
    z0, inputs = plain.z0.to(dtype), tuple(part.to(dtype) for part in plain.inputs)

    def find(part: slice) -> tuple[Tensor, Tensor | None]:
        T = lambda z, rate, b: torch.tanh(z @ Q) * rate + b  # noqa: E731
        mine = tuple(tensor[part] for tensor in inputs)
        return method(T, z0[part], mine, rms=settings.tolerance, max_steps=settings.max_steps)

    value, steps = find(slice(None))
    alone = [find(slice(i, i + 1)) for i in range(settings.batch)]
    difference = float((torch.cat([part for part, _ in alone]) - value).abs().max() / value.abs().max())
    row: Row = {
        "dtype": str(dtype).removeprefix("torch."),
        "library": method.library,
        "method": method.name,
        "difference": difference,
        "roundings": difference / torch.finfo(dtype).eps,
    }
    if steps is not None:
        each = torch.cat([own for _, own in alone if own is not None])
        row["steps differ"] = int((each != steps).sum())
    return row


FEW = Work(((0.2, 0.95),), batch=96, n=32, layers=1, repeats=1)
SAME = "is a sample's answer the same alone and in a batch?"
BENCHMARKS = (
    Benchmark("compaction", "how much of the work is useful when rates differ?", compaction, Work(), FEW),
    Benchmark("invariance", SAME, invariance, Answers(), Answers(batch=5, n=16)),
)
