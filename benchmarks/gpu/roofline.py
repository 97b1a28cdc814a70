"""The machine's limit: bytes and FLOPs of a step, counted, over copy and matmul rates, measured in the same run.

The rule for bytes. Every convolution and linear map reads its input and its weights and writes its output once
forward, and moves twice that backward (it reads the gradient of its output, its input and its weights, and writes
two gradients). Batch norm and pooling each read once and write once forward, and twice that backward. Additions,
activations, dropout and the loss are taken as fused into their neighbours, for nothing. Adam reads weight,
gradient and two moments and writes three of them, in fp32. Activations and weights have the size of the
precision: 2 bytes in bf16, 4 otherwise. `fused_bytes` leaves out batch norm and pooling too: that is what the
convolutions alone must move.

The rule for FLOPs: those of convolutions and matrix products, two per multiply and add, as PyTorch counts them.

The floor is the larger of bytes / copy rate and FLOPs / matmul rate. Where a whole step's tensors fit into the
cache (MNIST at batch 100 on an H200) bytes can move faster than the copy rate, and the floor is a yardstick.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from banach import ImplicitNetwork, models
from benchmarks.counting import tensors
from benchmarks.gpu.clock import seconds_of
from benchmarks.gpu.points import Point
from benchmarks.gpu.precision import switches

_MAPS = ("aten.convolution", "aten.addmm", "aten.mm")
_PASSES = ("batch_norm", "aten.max_pool2d", "aten.avg_pool2d")
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2}


@dataclass(frozen=True)
class Work:
    """What some part of a step moves (in entries, not bytes) and computes."""

    entries: float = 0.0
    fused_entries: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * getattr(self, f.name) for f in fields(Work)))


@dataclass(frozen=True)
class Pass:
    """A part of the network, forward and backward."""

    forward: Work
    backward: Work

    def times(self, forward: float, backward: float) -> Work:
        return self.forward * forward + self.backward * backward


@dataclass(frozen=True)
class Counted:
    """The three parts of a network at one batch size, and the number of its parameters."""

    Q: Pass
    R: Pass
    S: Pass
    parameters: int

    def step(self, forward: float, backward: float) -> Work:
        """A training step with so many passes through R; Q and S are gone through once each way."""
        return self.Q.times(1, 1) + self.R.times(forward, backward) + self.S.times(1, 1)


@dataclass(frozen=True)
class Rates:
    """Measured on the device: bytes per second, read plus written, and FLOPs per second by precision."""

    copy: float
    matmul: dict[str, float]


@dataclass(frozen=True)
class Floor:
    """The least time a step can take by the rule above, in ms, and what it was counted from."""

    ms: float
    fused_ms: float
    bytes: float
    fused_bytes: float
    flops: float
    bound: str  # "bytes" or "flops"


def floor(counted: Counted, rates: Rates, precision: str, passes: tuple[float, float]) -> Floor:
    """The floor of a step in a precision, with `passes` (forward, backward) through R."""
    work, size = counted.step(*passes), ITEMSIZE[precision]
    adam = 7 * 4 * counted.parameters
    moved, fused = work.entries * size + adam, work.fused_entries * size + adam
    by_bytes, by_flops = moved / rates.copy, work.flops / rates.matmul[precision]
    return Floor(
        ms=1e3 * max(by_bytes, by_flops),
        fused_ms=1e3 * max(fused / rates.copy, by_flops),
        bytes=moved,
        fused_bytes=fused,
        flops=work.flops,
        bound="bytes" if by_bytes >= by_flops else "flops",
    )


def count(point: Point, batch: int | None = None) -> Counted:
    """Count the point's network on shapes alone (PyTorch's meta device): no time, no memory."""
    net = models.build(point.model)
    assert isinstance(net, ImplicitNetwork)
    net = net.to("meta").train()
    with torch.no_grad():
        images = torch.empty(batch or point.batch, *point.image, device="meta")
        v = net.Q(images)
        u = net.R(torch.zeros_like(v), v)
    u, v = u.requires_grad_(), v.requires_grad_()  # the images need no gradient: their layer computes none
    parameters = sum(p.numel() for p in net.parameters())
    return Counted(_count(net.Q, images), _count(net.R, u, v), _count(net.S, u), parameters)


def _count(part: nn.Module, *inputs: Tensor) -> Pass:
    moved = _Moved()
    with FlopCounterMode(display=False) as ahead, moved:
        output = part(*inputs)
    with FlopCounterMode(display=False) as back:
        output.sum().backward()
    forward = Work(moved.maps + moved.passes, moved.maps, ahead.get_total_flops())
    backward = Work(2 * forward.entries, 2 * forward.fused_entries, back.get_total_flops())
    return Pass(forward, backward)


class _Moved(TorchDispatchMode):
    """Entries read and written: `maps` by convolutions and linear maps, `passes` by batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = self.passes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(_MAPS):
            self.maps += sum(t.numel() for t in (*tensors((args, kwargs)), *tensors(out)))
        elif any(word in name for word in _PASSES):
            # The first argument and the first result; the others are statistics and indices.
            self.passes += args[0].numel() + next(iter(tensors(out))).numel()
        return out


def measure_rates(device: torch.device, *, quick: bool = False) -> Rates:
    """Copy a large tensor, and multiply large random matrices in each precision; medians."""
    large = device.type == "cuda" and not quick
    numel, side = (2**30, 8192) if large else (2**22, 256)
    return Rates(_copy_rate(numel, device), {name: _matmul_rate(name, side, device) for name in ITEMSIZE})


def _copy_rate(numel: int, device: torch.device) -> float:
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / seconds_of(lambda: target.copy_(source), device)


def _matmul_rate(precision: str, side: int, device: torch.device) -> float:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    with switches(precision, device):
        return 2 * side**3 / seconds_of(lambda: a @ b, device)
