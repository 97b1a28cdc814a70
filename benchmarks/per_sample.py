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
PROMISED = (0.2, 0.95)  # the rates of one batch
HOW: dict[str, Any] = {"rms": 1e-4, "max_steps": 3000}


@dataclass(frozen=True)
class Work:
    spans: tuple[tuple[float, float], ...] = ((0.2, 0.5), PROMISED, (0.2, 0.99))
    batch: int = 128
    n: int = 256
    layers: int = 4  # of the map, so that evaluating it is most of the work
    repeats: int = 3


def compaction(settings: Work) -> Report:
    found = {span: _span(span, settings) for span in settings.spans}
    useful = found[PROMISED][0]["useful %"]
    target = Target(f"rates {PROMISED[0]} to {PROMISED[1]}, compact, % useful", useful, 90.0, at_least=True)
    note = "useful %: steps that samples needed (each alone, plain iteration) / rows that T was given"
    return Report([row for rows in found.values() for row in rows], [target], notes(note))


def _span(span: tuple[float, float], settings: Work) -> list[Row]:
    """Return one row per method, for a batch whose rates fill the span."""
    problem = maps.rates(settings.batch, settings.n, span, layers=settings.layers)
    needed = int(needed_steps(problem).sum())
    ways = {"banach, compact": COMPACT, "banach, freeze": PICARD}
    if has_torchdeq():
        ways["TorchDEQ"] = Method("TorchDEQ", "TorchDEQ", "picard")
    rest = problem.z0, problem.inputs
    actions = {name: partial(way, problem.T, *rest, **HOW) for name, way in ways.items()}
    seconds = interleaved(actions, settings.repeats, warm_up=1)
    *_, last = ways
    rows = []
    for name, way in ways.items():
        seen = maps.Recorder(problem.T)
        way(seen, *rest, **HOW)
        row: Row = {"rates": f"{span[0]} to {span[1]}", "method": name, "needed": needed, "evaluated": seen.rows}
        row |= {"useful %": 100 * needed / seen.rows, "ms": 1e3 * statistics.median(seconds[name])}
        relative = ratio(seconds[name], seconds[last]).median
        rows.append(row | {f"time / {last.removeprefix('banach, ')}": relative})
    return rows


def needed_steps(problem: maps.Problem) -> Tensor:
    """Return, per sample, the evaluations of a bare loop until it met the tolerance."""
    seen, z = maps.Recorder(problem.T), problem.z0
    with torch.no_grad():
        while not seen.residuals or bool((seen.residuals[-1] > HOW["rms"]).any()):
            z = seen(z, *problem.inputs)
    return seen.first_below(HOW["rms"])


@dataclass(frozen=True)
class Answers:
    batch: int = 32
    n: int = 64


def invariance(settings: Answers) -> Report:
    dtypes = (torch.float64, torch.float32)
    rows = [_row(dtype, method, settings) for dtype in dtypes for method in (*methods(), COMPACT)]
    ours = [row for row in rows if row["library"] == "banach"]
    targets = [
        Target("banach, largest difference in roundings of the dtype", max(row["roundings"] for row in ours), 100),
        Target("banach, samples whose steps differ", sum(row["steps differ"] for row in ours), 0),
    ]
    note = "difference: max |alone - in the batch| / max |value|; rates .2 to .95 in one batch"
    return Report(rows, targets, notes(note))


def _row(dtype: torch.dtype, method: Method, settings: Answers) -> Row:
    plain, Q = maps.rates(settings.batch, settings.n, PROMISED), maps.orthogonal(settings.n, dtype)
    z0, inputs = plain.z0.to(dtype), tuple(part.to(dtype) for part in plain.inputs)

    def find(part: slice) -> tuple[Tensor, Tensor | None]:
        T = lambda z, rate, b: torch.tanh(z @ Q) * rate + b  # noqa: E731
        return method(T, z0[part], tuple(tensor[part] for tensor in inputs), **HOW)

    value, steps = find(slice(None))
    alone = [find(slice(i, i + 1)) for i in range(settings.batch)]
    difference = float((torch.cat([part for part, _ in alone]) - value).abs().max() / value.abs().max())
    row: Row = {"dtype": str(dtype).removeprefix("torch."), "library": method.library, "method": method.name}
    row |= {"difference": difference, "roundings": difference / torch.finfo(dtype).eps}
    if steps is not None:
        each = torch.cat([own for _, own in alone if own is not None])
        row["steps differ"] = int((each != steps).sum())
    return row


FEW = Work((PROMISED,), batch=96, n=32, layers=1, repeats=1)
SAME = "is a sample's answer the same alone and in a batch?"
BENCHMARKS = (
    Benchmark("compaction", "how much of the work is useful when rates differ?", compaction, Work(), FEW),
    Benchmark("invariance", SAME, invariance, Answers(), Answers(batch=5, n=16)),
)
