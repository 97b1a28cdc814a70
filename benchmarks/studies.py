"""What one process of the training-step benchmark measures: a study takes a job and returns its record.

Timed studies have three phases. cuDNN searches for algorithms, one process after the other, since it times them.
Everything is compiled and captured while other processes do the same. Steps are timed in turns. Batches are on the
device before the time begins, augmented where the paper augments: for all contenders alike.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import banach
from banach import Anderson, ImplicitNetwork, Picard
from banach.fast.plan import arithmetic
from benchmarks.contenders import CONTENDERS, Captured, Change, Eager, Setting, Step
from benchmarks.counting import host_syncs
from benchmarks.jobs import Job, Settings
from benchmarks.points import Batch, feed
from benchmarks.processes import Gate, Record
from benchmarks.results import Figure
from benchmarks.timer import milliseconds_of, timed_steps

PARTS = ("Q", "R", "S")
TURNS, LOOKS = 2, 3  # timed blocks; steps after each, whose depth is read
MANY = 1000  # batches of a start that trains for longer than that
Batches = Iterator[Batch]


def start(job: Job, settings: Settings, gate: Gate, batches: Batches) -> Record:
    """Train by banach for some steps and save weights and moments, from which all contenders go on."""
    setting = job.setting(settings)
    point = setting.point
    way = "banach-captured" if point.warm_up > MANY else job.contender
    one = CONTENDERS[way].build(setting)
    for taken, batch in enumerate(islice(batches, point.warm_up), 1):  # noqa: B007
        one(*batch)
        if point.mean_steps is not None and one.reached()[1] >= point.mean_steps:
            break
    path = settings.start(job.point)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save((one.net.state_dict(), one.optimizer.state_dict()), path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    depth, mean_depth, _ = one.reached()
    return {"steps": taken, "depth": depth, "mean_depth": mean_depth}


def step(job: Job, settings: Settings, gate: Gate, batches: Batches) -> Record:
    """Measure a whole training step: ms, memory, depth, host syncs."""
    device = torch.device(settings.device)
    _search(job, settings, gate, lambda plain: _settled(job, plain, batches))
    one, peak = _settled(job, settings, batches)
    gate.meet(2)
    with gate.turn():
        affordable = int(1e3 * settings.most / statistics.median(_times(one, batches, 3, device)))
        count = min(settings.steps, max(affordable, 6))
        syncs = host_syncs(partial(one if device.type == "cuda" else one.gradients, *next(batches)), device)
    ms: list[float] = []
    reached: list[tuple[float, float, float]] = []
    for _ in range(TURNS):
        with gate.turn():
            one(*next(batches))
            ms += _times(one, batches, max(count // TURNS, 1), device)
            for batch in islice(batches, LOOKS):
                one(*batch)
                reached.append(one.reached())
    record = {"ms": statistics.median(ms), "each_step": vars(Figure.of(ms)), "peak_bytes": peak}
    return record | {"host_syncs": syncs, "eps": one.setting.point.eps} | _depths(reached) | _plan_of(one)


def _settled(job: Job, settings: Settings, batches: Batches) -> tuple[Step, int | None]:
    """Return the step after a few calls, and the peak of its memory."""
    device = torch.device(settings.device)
    cuda = device.type == "cuda"
    base = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    one = _from_start(job, settings)
    for batch in islice(batches, settings.settle):
        one(*batch)
    lost = [name for name, p in one.net.named_parameters() if p.requires_grad and p.grad is None]
    if lost and not one.captured:  # it would be fast for the wrong reason; captured ones: see gradients()
        raise RuntimeError(f"no gradient reached {len(lost)} parameters, the first is {lost[0]}")
    if cuda and not one.captured:  # the search for algorithms does not count
        torch.cuda.reset_peak_memory_stats(device)
    one(*next(batches))
    return one, torch.cuda.max_memory_allocated(device) - base if cuda else None


def _from_start(job: Job, settings: Settings, change: Change = lambda net: None) -> Step:
    """Return a contender's step, with the weights and moments of the start."""
    setting = job.setting(settings)
    weights, moments = torch.load(settings.start(job.point), setting.device, weights_only=False)
    one = CONTENDERS[job.contender].build(setting, change)
    one.load(weights, moments)
    if setting.point.own:  # the depth changes fast: with the same weights all contenders have the same one
        for group in one.optimizer.param_groups:
            group["lr"] = 0.0
    return one


def _search(job: Job, settings: Settings, gate: Gate, build: Callable[[Settings], object]) -> None:
    """Let cuDNN find its algorithms while no other process uses the device: by a step that is not compiled."""
    if settings.point(job.point).model not in ("transformer", "mlp"):
        with gate.turn():
            build(replace(settings, compile=False, settle=1))
            gc.collect()
            if settings.device != "cpu":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
    gate.meet(1)


def _times(one: Step, batches: Batches, count: int, device: torch.device) -> list[float]:
    return timed_steps(lambda batch: one(*batch), islice(batches, count), device)


def _depths(reached: list[tuple[float, float, float]]) -> Record:
    """Return the depth of the slowest and of the mean sample, and the share of steps that met eps."""
    slowest, mean, excess = zip(*reached, strict=True)
    met = None if all(map(math.isnan, excess)) else sum(one <= 1 for one in excess) / len(excess)
    return {"depth": statistics.fmean(slowest), "mean_depth": statistics.fmean(mean), "met": met}


def _plan_of(one: Any) -> Record:
    return {"plan": one.step.plan.to_dict()} if isinstance(one, Captured) else {}


def per_step(job: Job, settings: Settings, gate: Gate, batches: Batches) -> Record:
    """Measure what a step of Picard and of Anderson costs in a captured training step, from two depths."""
    depths = (3, 6) if settings.quick else (5, 15)  # deeper, an iterate in bf16 may repeat itself exactly
    cases = {(solver, depth): None for solver in (Picard(), Anderson(5)) for depth in depths}
    steps = {key: _from_start(job, settings, partial(_fix_depth, *key)) for key in cases}
    gate.meet(1)
    for one in steps.values():
        for batch in islice(batches, settings.settle):
            one(*batch)
    gate.meet(2)
    ms = {}
    with gate.turn():
        for key, one in steps.items():
            ms[key] = statistics.median(_times(one, batches, settings.steps, one.setting.device))
            if one.reached()[0] != key[1]:
                raise RuntimeError(f"expected {key[1]} steps of {key[0]}, got {one.reached()[0]:.0f}")
    less, more = depths
    cost = {type(solver).__name__: (ms[solver, more] - ms[solver, less]) / (more - less) for solver, _ in cases}
    both = {f"{type(solver).__name__}, depth {depth}": value for (solver, depth), value in ms.items()}
    return {"ms": ms[Picard(), more], "met": None, "per_step": cost, "each": both} | _plan_of(one)


def _fix_depth(solver: Any, depth: int, net: ImplicitNetwork) -> None:
    net.solver, net.tolerance = solver, replace(net.tolerance, atol=0.0, rtol=0.0, max_steps=depth)


def prediction(job: Job, settings: Settings, gate: Gate, batches: Batches) -> Record:
    """Measure predictions in eval mode at several batch sizes; ms is that of the middle size."""
    rows = max(settings.batches)
    d = torch.cat([next(batches)[0] for _ in range(-(-rows // settings.point(job.point).batch))])[:rows]
    if d.dim() == 4:
        d = d.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        _search(job, settings, gate, lambda plain: _predictor(job, plain, d))
        call, one = _predictor(job, settings, d)
        gate.meet(2)
        with gate.turn():
            ms = {size: milliseconds_of(partial(call, d[:size]), d.device, 10) for size in settings.batches}
            met = _predicts_to(one, call, d)
    middle = settings.batches[len(settings.batches) // 2]
    by_size = {str(size): vars(figure) for size, figure in ms.items()}
    return {"ms": ms[middle].median, "met": met, "by_batch": by_size}


def _predictor(job: Job, settings: Settings, d: Tensor) -> tuple[Callable[[Tensor], Any], Step]:
    """Return a prediction, called once for each size, and the step that it belongs to."""
    # The step of a captured contender is not called: banach.compile captures the prediction.
    one = _from_start(job, settings)
    one.net.eval()
    call: Callable[[Tensor], Any] = one.forward
    if isinstance(one, Captured):
        call = banach.compile(one.net, bf16=job.precision == "bf16", compile=settings.compile)
    for size in settings.batches:
        for _ in range(2):
            call(d[:size])
    return call, one


def _predicts_to(one: Step, call: Any, d: Tensor) -> float | None:
    """Return the share of samples that met eps; of peers 1 or 0, for the whole batch."""
    if isinstance(one, Captured):
        return float(call(d, solution=True)[1].converged.double().mean()) if one.net.tolerance.max_steps else None
    call(d)
    return float(one.reached()[2] <= 1)


class Counted(nn.Module):
    """R that counts its evaluations on the device, also where a CUDA graph replays them."""

    def __init__(self, R: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.R, self.count = R, torch.zeros((), dtype=torch.int64, device=device)

    def forward(self, u: Any, v: Any) -> Any:
        self.count.add_(1)
        return self.R(u, v)


def depth(job: Job, settings: Settings, gate: Gate, batches: Batches) -> Record:
    """Compare the evaluations of R in captured steps with those that the slowest sample needs, from fresh weights.

    What it needs is found by an eager solve of the same weights and batch, in the same arithmetic.
    """
    setting = job.setting(settings)
    net = setting.point.network(setting.device)
    counted = Counted(net.R, setting.device)
    eager = ImplicitNetwork(net.Q, net.R, net.S, tolerance=net.tolerance)
    one = Captured(ImplicitNetwork(net.Q, counted, net.S, tolerance=net.tolerance).train(), setting)
    more: list[int] = []
    needed: list[int] = []
    one(*next(batches))  # captures
    for batch in islice(batches, settings.depth_steps):
        with torch.no_grad():
            needed.append(int(eager.latent(*batch[:1])[1].steps.max()))
        before = int(counted.count)
        one(*batch)
        more.append(int(counted.count) - before - 1 - needed[-1])  # one evaluation is the differentiated one
    shares = {str(value): more.count(value) / len(more) for value in sorted(set(more))}
    return {"needed": vars(Figure.of(needed)), "more": shares, "most_more": max(more), "least_more": min(more)}


def gradients(job: Job, settings: Settings, gate: Gate, batches: Batches) -> Record:
    """Compare the gradients of Q, R and S with those at the fixed point in float64, without dropout."""
    d, y = next(batches)
    one = _from_start(job, settings, without_dropout)
    exact = _exact_gradients(one, d, y)
    compute = one if one.captured else one.gradients  # a captured step also moves the weights
    compute(d, y)
    found = {part: _gradient(getattr(one.net, part)) for part in PARTS}
    errors = {part: float((found[part] - exact[part]).norm() / exact[part].norm()) for part in PARTS}
    cosines = {part: float(F.cosine_similarity(found[part], exact[part], dim=0)) for part in PARTS}
    return {"errors": errors, "cosines": cosines}


def without_dropout(net: nn.Module) -> None:
    """Set every probability to 0: masks would differ."""
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _exact_gradients(one: Step, d: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return JFB's gradients of the same weights at a fixed point found in float64, to a hundredth of eps."""
    point = one.setting.point
    tight = replace(point, eps=point.eps / 100, max_steps=500)
    setting: Setting = replace(one.setting, point=tight, precision="fp32")
    net = tight.network(setting.device)
    net.load_state_dict(one.net.state_dict())
    without_dropout(net)
    eager = Eager(net.double(), setting)
    eager.gradients(d.double() if d.is_floating_point() else d, y)
    return {part: _gradient(getattr(net, part)) for part in PARTS}


def _gradient(part: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in part.parameters() if p.grad is not None])


def curve(job: Job, settings: Settings, gate: Gate, batches: Batches) -> Record:
    """Train from fresh weights and return the loss, averaged over twentieths of the run."""
    one = CONTENDERS[job.contender].build(job.setting(settings, seed=job.number))
    losses = torch.stack([one(*batch).clone() for batch in islice(batches, settings.curve_steps)])
    means = [float(part.mean()) for part in losses.double().tensor_split(min(20, len(losses)))]
    return {"losses": means, "final": means[-1], "steps": settings.curve_steps} | _plan_of(one)


STUDIES = {one.__name__: one for one in (start, step, per_step, prediction, depth, gradients, curve)}


def measure(job: Job, settings: Settings, gate: Gate) -> Record:
    """Measure one job in this process: return its record, without where and when."""
    point, device = settings.point(job.point), torch.device(settings.device)
    many = MANY if job.study == "start" and point.warm_up > MANY else 64
    batches, title = feed(point, device, settings.data_dir, many=many)
    with arithmetic(job.precision, device, search=True):
        return {"data": title} | STUDIES[job.study.replace("-", "_")](job, settings, gate, batches)
