"""A whole training step of banach and its peers at one working point, each contender in its own processes.

Claim: at the paper's points the captured and compiled step is 8 to 18 times faster than the best peer, takes at
most 1.1 to 3 times as long as the explicit twin, and meets eps in at least 95% of the steps (PROMISED lists the
figures). Settings: one H200, a network after 60 training steps, 50 timed steps per process, 3 processes
per contender in turn; median of the processes' medians, and their range. Result: results/gpu/POINT.json.
"""

from __future__ import annotations

import math
import operator
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import CONTENDERS, Contender, Setting, Step
from benchmarks.counting import host_syncs
from benchmarks.points import POINTS, Batch, Point, feed
from benchmarks.results import Benchmark, Figure, Report, Row, Target, cell
from benchmarks.timer import PRECISIONS, switches, timed_steps

ENOUGH = 0.95  # the share of steps that must meet eps for a precision to count
FAST, TWIN, GENERAL = "banach-fast", "explicit-fast", "banach-general"
MEMORY = 1.05  # times the memory of the explicit twin, at most
PROMISED = {  # on one H200: ms, times faster than the best peer, times as long as the explicit twin
    "mnist100": (0.5, 18, 2.0),
    "svhn100": (1.5, 11, 3.0),
    "cifar100": (7.0, 9, 1.15),
    "cifar512": (22.0, 8, 1.1),
    "svhn100-relative": (1.5, 0, 1.6),
}


@dataclass(frozen=True)
class Settings:
    point: Point
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    processes: int = 3  # per contender; 0: all in this process, once
    warm_up: int = 60  # training steps, shared by all contenders
    pilot: int = 5  # timed steps in each precision, to choose one
    steps: int = 50
    precisions: tuple[str, ...] = PRECISIONS
    settle: int | None = None  # steps before the first timed one; None: the contender's
    device: str = "cuda"
    data_dir: Path | None = None


def run(settings: Settings) -> Report:
    """Measure every contender that can run here at the point of the settings."""
    for name in settings.contenders:
        if name not in CONTENDERS:
            raise SystemExit(f"no contender is called {name}; expected one of {', '.join(CONTENDERS)}")
    call, device = alone if settings.processes else operator.call, torch.device(settings.device)
    chosen = {name: CONTENDERS[name] for name in settings.contenders}
    absent = {name: one.missing(settings.point, device) for name, one in chosen.items()}
    reasons = dict.fromkeys(reason for reason in absent.values() if reason is not None)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.pt"
        depth, title = call(train, settings, start)
        jobs: Any = {name: partial(_job, call, name, settings, start) for name in chosen if absent[name] is None}
        found, failed = in_rounds(jobs, max(settings.processes, 1))
    records = {name: _record(chosen[name], runs, settings.point) for name, runs in found.items()}
    notes = [
        f"{title}, batch {settings.point.batch}, eps {settings.point.eps:g}",
        f"a network after {settings.warm_up} training steps, whose solve takes {depth} steps",
        *(f"{', '.join(name for name in chosen if absent[name] == reason)}: {reason}" for reason in reasons),
        *failed,
        "ms: median of the processes' medians, and their range",
    ]
    rows = [_row(name, one) for name, one in records.items()]
    return Report(rows, targets(records, settings), notes, {"measured": records})


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), called in a fresh process, which finds no other's caches or memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def in_rounds(jobs: dict[str, Callable[[list[Row]], Row]], rounds: int) -> tuple[dict[str, list[Row]], list[str]]:
    """Run every job once per round, the order turned around each time; a job that failed is not called again.

    Args:
        jobs: each is called with its own results so far.
        rounds: how often each job runs.
    Returns:
        the results of each job that never failed, and one sentence for each that did.
    """
    found: dict[str, list[Row]] = {name: [] for name in jobs}
    notes: list[str] = []
    for number in range(rounds):
        for name in list(found) if number % 2 == 0 else list(found)[::-1]:
            try:
                found[name].append(jobs[name](found[name]))
            except Exception as error:  # a contender that fails must not end the run of the others
                lines = str(error).strip().splitlines() or [""]
                notes.append(f"{name} failed: {type(error).__name__}: {lines[0]}")
                del found[name]
    return found, notes


def train(settings: Settings, path: Path) -> tuple[int, str]:
    """Train by banach for some steps and save the state, from which every contender starts.

    Returns:
        the depth that a solve then takes, and the title of the data.
    """
    point, device = settings.point, torch.device(settings.device)
    batches, title = feed(point, device, settings.data_dir)
    precision = point.precision or "fp32"
    step, depths = CONTENDERS["banach-eager"].build(Setting(point, precision, device)), []
    with switches(precision, device):
        for batch in islice(batches, max(settings.warm_up, 1)):
            step(*batch)
            depths.append(step.seen.read()[0])
    depth = math.ceil(statistics.mean(depths[-10:]))
    torch.save((step.net.state_dict(), step.optimizer.state_dict(), depth), path)
    return depth, title


def _job(call: Any, name: str, settings: Settings, start: Path, before: list[Row]) -> Any:
    """Measure once more; the first process of a contender chooses the precision for the others."""
    return call(measure, name, settings, start, before[0]["precision"] if before else None)


def measure(name: str, settings: Settings, start: Path, precision: str | None = None) -> Row:
    """Measure one contender in this process, in its best precision unless one is given.

    The best is the fastest that meets eps, or the fastest if none does.
    """
    contender = CONTENDERS[name]
    tried = tuple(one for one in contender.precisions(settings.point) if one in settings.precisions)
    tried = (tried or settings.precisions[:1]) if precision is None else (precision,)
    short = replace(settings, steps=settings.pilot)
    pilots = {one: _measure(contender, one, short, start) for one in (tried if len(tried) > 1 else ())}
    best = min(pilots, key=lambda one: _rank(pilots[one])) if pilots else tried[0]
    return _measure(contender, best, settings, start) | {"pilots": pilots}


def _rank(pilot: Row) -> tuple[bool, float]:
    return pilot["met"] is not None and pilot["met"] < ENOUGH, pilot["ms"]


def _measure(contender: Contender, precision: str, settings: Settings, start: Path) -> Row:
    point, device = settings.point, torch.device(settings.device)
    weights, moments, depth = torch.load(start, map_location=device, weights_only=False)
    batches = feed(point, device, settings.data_dir)[0]
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device) if cuda else 0
    with switches(precision, device):
        step = contender.build(Setting(point, precision, device, depth))
        step.load(weights, moments)
        for batch in islice(batches, max(contender.settle if settings.settle is None else settings.settle, 1)):
            step(*batch)
        _check_gradients(step)
        if cuda and not step.captured:  # the search for algorithms does not count
            torch.cuda.reset_peak_memory_stats(device)
        step(*next(batches))
        peak = torch.cuda.max_memory_allocated(device) - base if cuda else None
        ms, seen = timed_steps(partial(_take, step), islice(batches, settings.steps), device)
        one_more = step if cuda else step.gradients  # on a CPU Adam reads its step numbers, which are there anyway
        syncs = host_syncs(partial(one_more, *next(batches)), device)
    depths, excess = zip(*(one.read() for one in seen), strict=True)
    solved = not all(math.isnan(one) for one in excess)
    return {
        "precision": precision,
        "ms": statistics.median(ms),
        "each_step": Figure.of(ms),
        "peak_bytes": peak,
        "depth": statistics.mean(depths),
        "residual": statistics.median(excess) * point.eps if solved and not point.relative else None,
        "met": sum(one <= 1 for one in excess) / len(excess) if solved else None,
        "host_syncs": syncs,
    }


def _take(step: Step, batch: Batch) -> Any:
    step(*batch)
    return step.seen


def _check_gradients(step: Step) -> None:
    """Refuse a step that trains only a part of the network: it would be fast for the wrong reason."""
    lost = [name for name, p in step.net.named_parameters() if p.requires_grad and p.grad is None]
    if lost and not step.captured:
        raise RuntimeError(f"no gradient reached {len(lost)} parameters, the first is {lost[0]}")


def _record(contender: Contender, runs: list[Row], point: Point) -> Row:
    """Return one contender's figures: ms over the processes, the rest of the process with the median ms."""
    ms = Figure.of(one["ms"] for one in runs)
    middle = sorted(runs, key=lambda one: one["ms"])[len(runs) // 2]
    return {
        "contender": contender.name,
        "role": contender.role,
        **middle,
        "ms": ms.median,
        "processes": ms,
        "images_per_second": 1e3 * point.batch / ms.median,
        "pilots": runs[0]["pilots"],
    }


def _row(name: str, one: Row) -> Row:
    return {
        "contender": name,
        "in": one["precision"],
        "ms": one["ms"],
        "range": f"{cell(one['processes'].least)}-{cell(one['processes'].most)}",
        "img/s": one["images_per_second"],
        "MB": None if one["peak_bytes"] is None else round(one["peak_bytes"] / 2**20),
        "depth": round(one["depth"], 1),
        "resid": one["residual"],
        "met %": None if one["met"] is None else round(100 * one["met"]),
        "syncs": one["host_syncs"],
    }


def targets(records: dict[str, Row], settings: Settings) -> list[Target]:
    """Return the promised figures, where the fast path and a GPU are there to be measured."""
    promised, fast, twin = PROMISED.get(settings.point.name), records.get(FAST), records.get(TWIN)
    if promised is None or fast is None or torch.device(settings.device).type != "cuda":
        return []
    ms, against_peer, against_twin = promised
    made = [Target(f"{FAST}, ms", fast["ms"], ms)]
    peers = [one for one in records.values() if one["role"] == "peer"]
    if peers:
        best = min(peers, key=lambda one: one["ms"])
        title = f"times faster than the best peer, {best['contender']}"
        made.append(Target(title, best["ms"] / fast["ms"], against_peer, True))
    if twin is not None:
        memory = fast["peak_bytes"] / twin["peak_bytes"]
        made.append(Target(f"times as long as {TWIN}", fast["ms"] / twin["ms"], against_twin))
        made.append(Target(f"peak memory, times that of {TWIN}", memory, MEMORY))
    shares = {name: records[name]["met"] for name in (FAST, GENERAL) if name in records}
    return made + [
        Target(f"{name}, share of steps that meet eps", met, ENOUGH, True) for name, met in shares.items()
    ]


def _quick(point: Point) -> Settings:
    sizes = {"processes": 0, "warm_up": 2, "pilot": 1, "steps": 2, "settle": 1, "precisions": ("fp32",)}
    return Settings(point.tiny(), device="cpu", **sizes)  # type: ignore[arg-type]


QUESTION = "ms per training step, against peers"
BENCHMARKS = tuple(
    Benchmark(point.name, QUESTION, run, Settings(point), _quick(point), "gpu") for point in POINTS.values()
)
