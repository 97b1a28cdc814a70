"""Solves on known maps: the cost of a step beside T, how many steps it takes, samples that stop one by one.

overhead: at most 10 kernels, 2 allocations and no sync per step of Picard, 25, 3 and none of Anderson(5), counted
as differences of two depths. steps: on a symmetric map of contraction .95 Anderson(5) needs at most 0.3 of
Picard's; on a rotation of many angles no combination of iterates beats Picard (n = 512, float64, RMS 1e-8, 16
samples). compaction: with rates from .2 to .95 in one batch at least 90% of the evaluated rows are useful (RMS
1e-4, 128 samples of 256 numbers, T of four layers). invariance: a sample's answer alone and in a batch differs by
at most 100 roundings, its steps by none (RMS 1e-4, 32 samples of 64). Results: a file of each name in results/.
"""

import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import maps
from benchmarks.counting import Calls
from benchmarks.libraries import BANACH, Method, has_torchdeq, methods, notes
from benchmarks.results import Benchmark, Figure, Report, Row, Target
from benchmarks.timer import interleaved, ratio

PICARD = BANACH["Picard"]
COMPACT = replace(PICARD, name="Picard, compact", compact=True)
PROMISED = (0.2, 0.95)  # the rates of one batch
HOW: dict[str, Any] = {"rms": 1e-4, "max_steps": 3000}
BOUNDS = {"Picard": (10, 2, 0), "Picard, rtol": (12, 2, 0), "Anderson(5)": (25, 3, 0)}
COLUMNS = ("kernels", "allocations", "syncs")


@dataclass(frozen=True)
class Counts:
    # Both depths are past the filling of every memory, and before TorchDEQ's Broyden looks back 30 steps.
    # Their difference is a multiple of Broyden's memory, which restarts when it is full.
    shallow: int = 12
    deep: int = 22
    batch: int = 8
    width: int = 64


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
    z0 = torch.zeros(settings.batch, settings.width)
    slopes = torch.linspace(-0.99, 0.99, settings.width)  # no two alike, so that no entry converges early
    totals = []
    for depth in (1, settings.shallow, settings.deep):  # depth 1 makes what is made once for a kind of latent
        calls = Calls(z0.numel())
        with torch.no_grad(), calls:
            method(calls.without(lambda z: slopes * z + 1), z0, rms=0.0, max_steps=depth, rtol=rtol)
        totals.append(calls.totals())
    steps = settings.deep - settings.shallow
    return {column: (b - a) / steps for column, a, b in zip(COLUMNS, *totals[1:], strict=True)}


@dataclass(frozen=True)
class Depths:
    n: int = 512
    batch: int = 16
    tolerance: float = 1e-8  # RMS
    max_steps: int = 2000


def steps(settings: Depths) -> Report:
    size = settings.n, settings.batch
    problems = [maps.symmetric(*size), maps.rotation(*size), maps.rotation(*size, planes=2)]
    rows = [row for problem in problems for row in _steps_of(problem, settings)]
    gained = next(row for row in rows if row["method"] == "Anderson(5)")["against Picard"]  # the symmetric map's
    about = [
        "rotation of many angles: no combination of iterates beats Picard on a circle",
        "steps: evaluations of T until a sample's own residual meets the tolerance, watched from outside",
        "TorchDEQ's Anderson adds 1e-4 to its Gram matrix, which dominates once residuals are small",
    ]
    return Report(rows, [Target("symmetric, Anderson(5) against Picard", gained, 0.3)], notes(*about))


def _steps_of(problem: maps.Problem, settings: Depths) -> list[Row]:
    found = {}
    for method in methods():
        seen = maps.Recorder(problem.T)
        method(seen, problem.z0, problem.inputs, rms=settings.tolerance, max_steps=settings.max_steps)
        found[method] = seen.first_below(settings.tolerance)
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
    rows = [_answer(dtype, method, settings) for dtype in dtypes for method in (*methods(), COMPACT)]
    ours = [row for row in rows if row["library"] == "banach"]
    targets = [
        Target("banach, largest difference in roundings of the dtype", max(row["roundings"] for row in ours), 100),
        Target("banach, samples whose steps differ", sum(row["steps differ"] for row in ours), 0),
    ]
    note = "difference: max |alone - in the batch| / max |value|; rates .2 to .95 in one batch"
    return Report(rows, targets, notes(note))


def _answer(dtype: torch.dtype, method: Method, settings: Answers) -> Row:
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


FEW_STEPS = Depths(n=96, batch=2, tolerance=1e-6, max_steps=300)
FEW_ROWS = Work((PROMISED,), batch=96, n=32, layers=1, repeats=1)
SAME = "is a sample's answer the same alone and in a batch?"
BENCHMARKS = (
    Benchmark("overhead", "what does one step cost beside T?", overhead, Counts(), Counts(batch=4)),
    Benchmark("steps", "how many evaluations of T does it take?", steps, Depths(), FEW_STEPS),
    Benchmark("compaction", "how much of the work is useful when rates differ?", compaction, Work(), FEW_ROWS),
    Benchmark("invariance", SAME, invariance, Answers(), Answers(batch=5, n=16)),
)
