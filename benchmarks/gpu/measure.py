"""Time, memory, depth and residual of every contender at one point, in turn, from one network in training."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import peak
from benchmarks.gpu.clock import quantile, timed
from benchmarks.gpu.peers import Contender, Eager
from benchmarks.gpu.points import Batch, Feed, Point
from benchmarks.gpu.precision import switches
from benchmarks.gpu.step import Seen, Setting, Step, Warm, fresh
from benchmarks.gpu.syncs import host_syncs

ENOUGH = 0.95  # the share of steps that must meet eps for a precision to count as one that can


@dataclass(frozen=True)
class Plan:
    """How much is measured. Every contender has `blocks * block` timed steps, in blocks that take turns."""

    warm_up: int = 60  # real training steps, shared by all
    pilot: int = 5  # timed steps in each precision, to choose one
    blocks: int = 5
    block: int = 10
    settle: int | None = None  # steps before the first timed one; None: what the contender asks for
    seed: int = 0


QUICK = Plan(warm_up=2, pilot=1, blocks=2, block=1, settle=1)


class Start(NamedTuple):
    """Where every contender begins: a network in training, and what it is measured at."""

    warm: Warm
    setting: Setting


@dataclass
class Readings:
    """What timed steps came to: seconds, depths and residuals, one of each per step."""

    seconds: list[float] = field(default_factory=list)
    depths: list[float] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)

    def add(self, seconds: list[float], seen: list[Seen]) -> None:
        self.seconds += seconds
        for depth, residual in (one.read() for one in seen):
            self.depths.append(depth)
            self.residuals.append(residual)

    def met(self, eps: float) -> float | None:
        """The share of steps whose residual is at most eps; None where nothing was solved."""
        if all(math.isnan(residual) for residual in self.residuals):
            return None
        return sum(residual <= eps for residual in self.residuals) / len(self.residuals)


@dataclass(frozen=True)
class Measured:
    """One contender at one point. Times in ms, memory in bytes; `pilots` are the median ms in each precision."""

    contender: str
    role: str
    precision: str
    ms: float
    ms_10: float
    ms_90: float
    steps: int
    images_per_second: float
    peak_bytes: int | None
    setup_peak_bytes: int | None
    depth: float
    residual: float | None
    met: float | None
    host_syncs: int
    products: float  # J-products per step and sample
    passes: tuple[float, float]  # through R: forward, backward
    last_loss: float
    pilots: dict[str, dict[str, float | None]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Running:
    """A contender that is built, in the precision that was chosen for it."""

    contender: Contender
    step: Step
    batches: Iterator[Batch]  # its own: the same ones in the same order for everybody
    precision: str
    peak: int | None
    setup_peak: int | None
    pilots: dict[str, dict[str, float | None]] = field(default_factory=dict)
    readings: Readings = field(default_factory=Readings)


def measure(start: Start, feed: Feed, contenders: list[Contender], plan: Plan) -> tuple[list[Measured], list[str]]:
    """Every contender that can run here, and a sentence for each that cannot."""
    warm, setting = start
    running: list[Running] = []
    notes = [f"a network after {plan.warm_up} training steps, whose solve takes {setting.depth} steps"]
    for contender in contenders:
        reason = contender.missing()
        if reason is not None:
            notes.append(reason)
            continue
        made = attempt(contender.name, notes, partial(_choose, contender, setting, warm, feed, plan))
        running += [] if made is None else [made]
    _take_turns(running, setting.device, plan, notes)
    done = [attempt(one.contender.name, notes, partial(_conclude, one, setting)) for one in running]
    return [one for one in done if one is not None], notes


def trained(point: Point, batches: Iterator[Batch], device: torch.device, plan: Plan) -> Start:
    """A network after some training steps by banach, and the depth that its solve then needs."""
    setting = Setting(point, point.precision, device, seed=plan.seed)
    step, depths = Eager(fresh(setting), setting), []
    with switches(point.precision, device):
        for batch in islice(batches, max(plan.warm_up, 1)):
            step(*batch)
            depths.append(step.depth())
    warm = copy.deepcopy((step.net.state_dict(), step.optimizer.state_dict()))
    return Start(warm, replace(setting, depth=math.ceil(statistics.mean(depths[-10:]))))


def attempt(name: str, notes: list[str], action: Callable[[], Any]) -> Any:
    """The action's result; None and a note if it failed. One contender must not end the run of the others."""
    try:
        return action()
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, ImportError) as error:
        lines = str(error).strip().splitlines() or [""]
        notes.append(f"{name} failed: {type(error).__name__}: {lines[0]}")
        return None


def _choose(contender: Contender, setting: Setting, warm: Warm, feed: Feed, plan: Plan) -> Running:
    """The contender in its best precision: the fastest that meets eps, or the fastest if none does."""
    candidates = []
    pilots: dict[str, dict[str, float | None]] = {}
    for name in contender.tried(setting):
        made = _pilot(contender, replace(setting, precision=name), warm, feed, plan)
        ms, met = 1e3 * statistics.median(made.readings.seconds), made.readings.met(setting.point.eps)
        pilots[name] = {"ms": ms, "met": met, "depth": statistics.mean(made.readings.depths)}
        candidates.append(((met is not None and met < ENOUGH, ms), made))
    best = min(candidates, key=lambda one: one[0])[1]
    best.pilots, best.readings = pilots, Readings()
    return best


def _pilot(contender: Contender, setting: Setting, warm: Warm, feed: Feed, plan: Plan) -> Running:
    device, batches = setting.device, iter(feed)
    before = peak.base(device)
    with switches(setting.precision, device):
        step = contender.build(setting, warm)
        settle = contender.settle if plan.settle is None else plan.settle
        for batch in islice(batches, max(settle, 1)):
            step(*batch)
        _check_gradients(step)
        setup = peak.above(device, before)
        peak.forget(device)  # what the search for algorithms took does not count
        step(*next(batches))
        most = setup if step.captured else peak.above(device, before)
        made = Running(contender, step, batches, setting.precision, most, setup)
        made.readings.add(*timed(step, islice(batches, plan.pilot), device))
    return made


def _check_gradients(step: Step) -> None:
    """A step that trains a part of the network only would be fast for the wrong reason."""
    lost = [name for name, p in step.net.named_parameters() if p.requires_grad and p.grad is None]
    if lost and not step.captured:
        raise RuntimeError(f"no gradient reached {len(lost)} parameters, the first is {lost[0]}")


def _take_turns(running: list[Running], device: torch.device, plan: Plan, notes: list[str]) -> None:
    """Blocks of steps in turn, the order turned around each time, so that the clock's drift hits all alike."""
    for block in range(plan.blocks):
        for one in list(running if block % 2 == 0 else running[::-1]):
            with switches(one.precision, device):
                got = attempt(one.contender.name, notes, partial(_block, one, device, plan.block))
            if got is None:
                running.remove(one)
            else:
                one.readings.add(*got)


def _block(one: Running, device: torch.device, size: int) -> tuple[list[float], list[Seen]]:
    one.step(*next(one.batches))  # not timed: the allocator and the caches are as the one before left them
    return timed(one.step, islice(one.batches, size), device)


def _conclude(one: Running, setting: Setting) -> Measured:
    readings, step, batch = one.readings, one.step, setting.point.batch
    with switches(one.precision, setting.device):
        loss = float(step(*next(one.batches)))
        syncs = host_syncs(step, next(one.batches), setting.device)
    ms = sorted(1e3 * second for second in readings.seconds)
    depth = statistics.mean(readings.depths)
    met = readings.met(setting.point.eps)
    return Measured(
        contender=one.contender.name,
        role=one.contender.role,
        precision=one.precision,
        ms=statistics.median(ms),
        ms_10=quantile(ms, 0.1),
        ms_90=quantile(ms, 0.9),
        steps=len(ms),
        images_per_second=1e3 * batch / statistics.median(ms),
        peak_bytes=one.peak,
        setup_peak_bytes=one.setup_peak,
        depth=depth,
        residual=None if met is None else statistics.median(readings.residuals),
        met=met,
        host_syncs=syncs,
        products=step.products(depth),
        passes=step.passes(depth),
        last_loss=loss,
        pilots=one.pilots,
    )
