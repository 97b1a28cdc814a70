"""The loop's own cost per step, beside T: kernels, latent-sized allocations, host syncs, and microseconds.

Claim: Picard costs at most 10 kernels, 2 allocations and no sync per step, Anderson(5) 25, 3 and none, and each
takes less time than TorchDEQ's. Settings: counts are differences of two depths; times are medians of runs in turn,
one thread, less a bare loop of the same map. Result: results/overhead.json, results/looptime.json.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.counting import Calls
from benchmarks.libraries import BANACH, NAMES, Map, Method, has_torchdeq, methods, notes
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import Action, interleaved


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
    never = {name: replace(method, check_every=0) for name, method in BANACH.items()}
    each = {f"{name}, checked each step": replace(BANACH[name], check_every=1) for name in list(BANACH)[:2]}
    found = {name: _counted(method, settings) for name, method in (never | each).items()}
    found["Picard, rtol"] = _counted(never["Picard"], settings, rtol=1e-30)
    rows: list[Row] = [{"library": "banach", "method": name, **row} for name, row in found.items()]
    rows += [
        {"library": "TorchDEQ", "method": method.name, **_counted(method, settings)}
        for method in methods()
        if method.library == "TorchDEQ"
    ]
    targets = [
        Target(f"{name}, {column} per step", found[name][column], bound)
        for name, bounds in BOUNDS.items()
        for column, bound in zip(COLUMNS, bounds, strict=True)
    ]
    note = "kernels: aten calls except views; TorchDEQ checks at each step and cannot do otherwise"
    return Report(rows, targets, notes(note))


def _counted(method: Method, settings: Counts, *, rtol: float = 0.0) -> dict[str, float]:
    count = partial(_count, method, settings, rtol)
    count(1)  # what is made once for a kind of latent
    steps = settings.deep - settings.shallow
    pairs = zip(COLUMNS, count(settings.shallow), count(settings.deep), strict=True)
    return {column: (deep - shallow) / steps for column, shallow, deep in pairs}


def _count(method: Method, settings: Counts, rtol: float, depth: int) -> tuple[int, int, int]:
    z0 = torch.zeros(settings.batch, settings.width)
    slopes = torch.linspace(-0.99, 0.99, settings.width)  # no two alike, so that no entry converges early
    calls = Calls(z0.numel())
    T = calls.without(lambda z: slopes * z + 1)
    with torch.no_grad(), calls:
        method(T, z0, rms=0.0, max_steps=depth, rtol=rtol)
    return calls.totals()


@dataclass(frozen=True)
class Times:
    shapes: tuple[tuple[int, ...], ...] = ((1, 16), (8, 64), (64, 512), (32, 32, 9, 9), (16, 64, 8, 8))
    depth: int = 40
    repeats: int = 11


def looptime(settings: Times) -> Report:
    rows = [row for shape in settings.shapes for row in _shape(shape, settings)]
    return Report(
        rows,
        notes=notes(
            "microseconds per step beyond a bare loop of the same map, one thread, medians of runs taken in turn",
            "checked: a host check at each step, as TorchDEQ always has; free: none (check_every=0)",
        ),
    )


def _shape(shape: tuple[int, ...], settings: Times) -> list[Row]:
    T, z0 = _map(shape), torch.zeros(shape)
    actions: dict[str, Action] = {"bare": partial(_bare, T, z0, settings.depth)}
    for key in NAMES:
        ways = {"free us": Method("banach", key, key, check_every=0)}
        ways["checked us"] = replace(ways["free us"], check_every=1)
        if has_torchdeq():
            ways["TorchDEQ us"] = Method("TorchDEQ", key, key, same_memory=True)
        for way, method in ways.items():
            actions[f"{key} {way}"] = partial(method, T, z0, rms=0.0, max_steps=settings.depth)
    medians = {name: statistics.median(s) for name, s in interleaved(actions, settings.repeats).items()}
    bare, each = medians.pop("bare"), 1e6 / settings.depth
    rows: dict[str, Row] = {
        key: {"latent": "x".join(map(str, shape)), "solver": key, "T us": bare * each} for key in NAMES
    }
    for name, median in medians.items():
        key, way = name.split(" ", 1)
        rows[key][way] = (median - bare) * each
    for row in rows.values():
        if "TorchDEQ us" in row:
            row["checked / TorchDEQ"] = row["checked us"] / row["TorchDEQ us"]
    return list(rows.values())


def _map(shape: tuple[int, ...]) -> Map:
    """Return a map with next to nothing to compute and slopes all different, so that none converges early."""
    b = torch.ones(shape)
    slopes = torch.linspace(-0.99, 0.99, b[0].numel()).view(shape[1:])
    return lambda z: torch.addcmul(b, z, slopes)


@torch.no_grad()
def _bare(T: Map, z: Tensor, depth: int) -> Tensor:
    for _ in range(depth):
        z = T(z)
    return z


SHORT = Times(((2, 8),), depth=12, repeats=1)
BENCHMARKS = (
    Benchmark("overhead", "what does one step cost beside T?", overhead, Counts(), Counts(batch=4)),
    Benchmark("looptime", "how long does a step take beside T?", looptime, Times(), SHORT),
)
