"""The machine's limit for a training step: bytes and FLOPs counted, over copy and matmul rates measured in the
run.

Bytes: every convolution and linear map reads its input and weights and writes its output once forward, and moves
twice that backward. Batch norm and pooling read and write once forward, twice that backward. Additions,
activations, dropout and the loss count as fused, for nothing. Adam reads weight, gradient and two moments and
writes three, in fp32. Entries have 2 bytes in bf16, else 4. FLOPs: those of convolutions and matrix products, as
PyTorch counts them. The floor is the larger of bytes / copy rate and FLOPs / matmul rate. Where a step's tensors
fit into the cache (MNIST at batch 100 on an H200) bytes can move faster than the copy rate, and the floor is a
yardstick only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from banach import models
from benchmarks.counting import tensors
from benchmarks.points import Point
from benchmarks.timer import milliseconds_of, switches

_MAPS = ("aten.convolution", "aten.addmm", "aten.mm")
_PASSES = ("batch_norm", "aten.max_pool2d", "aten.avg_pool2d")
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2}


@dataclass(frozen=True)
class Work:
    """What a part of the network moves (in entries, not bytes) and computes, forward and backward."""

    entries: float
    flops: float
    backward_flops: float

    def times(self, forward: float, backward: float) -> tuple[float, float]:
        """Return entries and FLOPs of that many passes each way."""
        return self.entries * (forward + 2 * backward), self.flops * forward + self.backward_flops * backward


@dataclass(frozen=True)
class Rates:
    """Measured on the device: bytes per second, read plus written, and FLOPs per second by precision."""

    copy: float
    matmul: dict[str, float]


@dataclass(frozen=True)
class Floor:
    """The least time of a step by the rule above, in ms, and what it was counted from."""

    ms: float
    bytes: float
    flops: float
    bound: str  # "bytes" or "flops"


def floor(point: Point, rates: Rates, precision: str, passes: tuple[float, float]) -> Floor:
    """Return the floor of a step in a precision, with `passes` (forward, backward) through R."""
    parts, parameters = count(point)
    work = [part.times(*(passes if name == "R" else (1, 1))) for name, part in parts.items()]
    moved = sum(entries for entries, _ in work) * ITEMSIZE[precision] + 7 * 4 * parameters
    flops = sum(one for _, one in work)
    seconds = {"bytes": moved / rates.copy, "flops": flops / rates.matmul[precision]}
    bound = max(seconds, key=lambda name: seconds[name])
    return Floor(1e3 * seconds[bound], moved, flops, bound)


def count(point: Point, batch: int | None = None) -> tuple[dict[str, Work], int]:
    """Return the work of Q, R and S and the number of parameters, from shapes alone (PyTorch's meta device)."""
    net: Any = models.build(point.model).to("meta").train()
    with torch.no_grad():
        images = torch.empty(batch or point.batch, *models.get(point.model).image, device="meta")
        v = net.Q(images)
        u = net.R(torch.zeros_like(v), v)
    u, v = u.requires_grad_(), v.requires_grad_()  # the images need no gradient: their layer computes none
    parts = {"Q": _count(net.Q, images), "R": _count(net.R, u, v), "S": _count(net.S, u)}
    return parts, sum(p.numel() for p in net.parameters())


def _count(part: nn.Module, *inputs: Tensor) -> Work:
    with FlopCounterMode(display=False) as ahead, _Moved() as moved:
        output = part(*inputs)
    with FlopCounterMode(display=False) as back:
        output.sum().backward()
    return Work(moved.entries, ahead.get_total_flops(), back.get_total_flops())


class _Moved(TorchDispatchMode):
    """Entries read and written by convolutions, linear maps, batch norm and pooling."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(_MAPS):
            self.entries += sum(t.numel() for t in (*tensors((args, kwargs)), *tensors(out)))
        elif any(word in name for word in _PASSES):
            # The first argument and the first result; the others are statistics and indices.
            self.entries += args[0].numel() + next(iter(tensors(out))).numel()
        return out


def measure_rates(device: torch.device) -> Rates:
    """Copy a large tensor, and multiply large random matrices in each precision; medians."""
    numel, side = (2**30, 8192) if device.type == "cuda" else (2**22, 256)
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    copy = 8e3 * numel / milliseconds_of(lambda: target.copy_(source), device).median
    return Rates(copy, {name: _matmul_rate(name, side, device) for name in ITEMSIZE})


def _matmul_rate(precision: str, side: int, device: torch.device) -> float:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    with switches(precision, device):
        return 2e3 * side**3 / milliseconds_of(lambda: a @ b, device).median
