"""The Triton kernels against the modules they replace: a whole solve, stacks of residual blocks, convolutions.

Claim: each kernel gains at least 10% over the modules at some working point; one that does not is to be removed.
Settings: "latent" times TrainStep at two depths, with R as it is and with R hidden from the kernels, and reports
the difference per evaluation. "kernels" times captured calls of single kernels and of the
same modules under bf16 autocast. Result: results/gpu/latent.json, results/gpu/kernels.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.models.cifar10 import CHANNELS, Block
from benchmarks.contenders import Captured, Setting, hide_form
from benchmarks.points import FOUR, POINTS, Point, feed
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import Action, milliseconds_of, switches, timed_steps

GAIN = 1.1


@dataclass(frozen=True)
class Solves:
    points: tuple[Point, ...] = tuple(POINTS[name] for name in FOUR)
    depths: tuple[int, int] = (4, 24)  # evaluations of R, whose difference in time is that of one
    settle: int = 15
    steps: int = 30
    device: str = "cuda"


def latent(settings: Solves) -> Report:
    rows = [_evaluation(point, settings) for point in settings.points]
    target = Target("largest gain over the modules", max(row["gain"] for row in rows), GAIN, at_least=True)
    note = "microseconds per evaluation of R, from two depths; general: R hidden from the kernels; random images"
    return Report(rows, [target], [note])


def _evaluation(point: Point, settings: Solves) -> Row:
    row: Row = {"point": point.name}
    shallow, deep = settings.depths
    for name, change in (("kernel us", lambda net: net), ("general us", hide_form)):
        short, long = (_step_ms(replace(point, max_steps=depth), change, settings) for depth in (shallow, deep))
        row[name] = 1e3 * (long - short) / (deep - shallow)
    return row | {"gain": row["general us"] / row["kernel us"]}


def _step_ms(point: Point, change: Callable[[Any], Any], settings: Solves) -> float:
    """Return the median ms of a captured training step that never meets its tolerance."""
    device, precision = torch.device(settings.device), point.precision or "fp32"
    batches = feed(point, device, many=8)[0]
    with switches(precision, device):
        net = change(point.network(device))
        net.tolerance = replace(net.tolerance, atol=0.0)
        step = Captured(net, Setting(point, precision, device))
        for batch in islice(batches, settings.settle):
            step(*batch)
        return median(timed_steps(lambda batch: step(*batch), islice(batches, settings.steps), device)[0])


@dataclass(frozen=True)
class Calls:
    batch: int = 512
    stacks: tuple[tuple[int, int], ...] = ((16, 40), (16, 20), (5, 10))  # blocks, pixels a side
    repeats: int = 15
    device: str = "cuda"


def kernels(settings: Calls) -> Report:
    torch.manual_seed(0)
    device = torch.device(settings.device)
    rows: list[Row] = []
    with switches("bf16", device):
        for blocks, side in settings.stacks:
            for name, (kernel, modules) in _calls(blocks, side, settings, device).items():
                row: Row = {"kernel": name, "pixels": f"{side}x{side}", "batch": settings.batch}
                row["kernel ms"], row["modules ms"] = (
                    milliseconds_of(captured(call, device), device, settings.repeats).median
                    for call in (kernel, modules)
                )
                rows.append(row | {"gain": row["modules ms"] / row["kernel ms"]})
    names = dict.fromkeys(row["kernel"] for row in rows)
    best = {name: max(row["gain"] for row in rows if row["kernel"] == name) for name in names}
    targets = [Target(f"{name}: largest gain over the modules", gain, GAIN, True) for name, gain in best.items()]
    return Report(rows, targets, ["bf16, CIFAR-10's blocks of 35 channels; on a GPU each call is a CUDA graph"])


def _calls(blocks: int, side: int, settings: Calls, device: torch.device) -> dict[str, tuple[Action, Action]]:
    """Return, by name, a call of a kernel and the same by modules."""
    from banach.kernels import conv2d, residual_stack

    shape = settings.batch, CHANNELS, side, side
    x = torch.randn(shape, device=device).bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_()
    stack = nn.Sequential(*(Block(dropout=0.0) for _ in range(blocks))).to(device).train()
    w = torch.randn(CHANNELS, CHANNELS, 3, 3, device=device).bfloat16()
    w = w.contiguous(memory_format=torch.channels_last)

    def modules(x: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out: Tensor = stack(x)
            return out

    fused = partial(residual_stack, stack)
    wrt = [x, *stack.parameters()]
    return {
        "residual_stack, forward": (torch.no_grad()(partial(fused, x)), torch.no_grad()(partial(modules, x))),
        "residual_stack, both ways": (partial(_both, fused, x, wrt), partial(_both, modules, x, wrt)),
        "conv2d, forward": (
            torch.no_grad()(lambda: conv2d(x, w, None, 1, 1)),
            torch.no_grad()(lambda: F.conv2d(x, w, padding=1)),
        ),
    }


def _both(function: Callable[[Tensor], Tensor], x: Tensor, wrt: list[Tensor]) -> object:
    out = function(x)
    return torch.autograd.grad(out, wrt, torch.ones_like(out))


def captured(call: Action, device: torch.device) -> Action:
    """Return the replay of a CUDA graph of the call, or the call itself on a CPU: launches are not to be timed."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


FEW = Solves((POINTS["mnist100"].tiny(),), depths=(2, 4), settle=1, steps=2, device="cpu")
SMALL = Calls(batch=2, stacks=((2, 4),), repeats=1, device="cpu")
BENCHMARKS = (
    Benchmark("latent", "an evaluation of R by one kernel, or by modules?", latent, Solves(), FEW, "gpu"),
    Benchmark("kernels", "what do the fused kernels gain?", kernels, Calls(), SMALL, "gpu"),
)
