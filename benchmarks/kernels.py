"""The Triton kernels against the modules they replace: stacks of residual blocks, convolutions.

Claim: each kernel gains at least 10% over the modules at some working point; one that does not is to be removed.
(The kernel that iterates R: compare banach-fast and banach-general at the working points.) Settings: captured
calls of single kernels and of the same modules under bf16 autocast. Result: results/gpu/kernels.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.models.cifar10 import CHANNELS, Block
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import Action, milliseconds_of, switches

GAIN = 1.1


@dataclass(frozen=True)
class Settings:
    batch: int = 512
    stacks: tuple[tuple[int, int], ...] = ((16, 40), (16, 20), (5, 10))  # blocks, pixels a side
    repeats: int = 15
    device: str = "cuda"


def run(settings: Settings) -> Report:
    torch.manual_seed(0)
    device = torch.device(settings.device)
    rows: list[Row] = []
    best: dict[str, float] = {}
    with switches("bf16", device):
        for blocks, side in settings.stacks:
            for name, pair in _calls(blocks, side, settings.batch, device).items():
                replays = [_captured(call, device) for call in pair]
                kernel, modules = (milliseconds_of(one, device, settings.repeats).median for one in replays)
                row: Row = {"kernel": name, "pixels": f"{side}x{side}", "batch": settings.batch}
                row |= {"kernel ms": kernel, "modules ms": modules, "gain": modules / kernel}
                best[name] = max(row["gain"], best.get(name, 0.0))
                rows.append(row)
    targets = [Target(f"{name}: largest gain over the modules", gain, GAIN, True) for name, gain in best.items()]
    return Report(rows, targets, ["bf16, CIFAR-10's blocks of 35 channels; on a GPU each call is a CUDA graph"])


def _calls(blocks: int, side: int, batch: int, device: torch.device) -> dict[str, tuple[Action, Action]]:
    """Return, by name, a call of a kernel and the same by modules."""
    from banach.kernels import conv2d, residual_stack

    last = torch.channels_last
    x = torch.randn(batch, CHANNELS, side, side, device=device).bfloat16().contiguous(memory_format=last)
    x.requires_grad_()
    stack = nn.Sequential(*(Block(dropout=0.0) for _ in range(blocks))).to(device).train()
    w = torch.randn(CHANNELS, CHANNELS, 3, 3, device=device).bfloat16().contiguous(memory_format=last)

    def modules(x: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out: Tensor = stack(x)
            return out

    fused, no_grad = partial(residual_stack, stack), torch.no_grad()
    wrt, conv = [x, *stack.parameters()], (x, w, None, 1, 1)  # no bias, stride 1, padding 1
    return {
        "residual_stack, forward": (no_grad(partial(fused, x)), no_grad(partial(modules, x))),
        "residual_stack, both ways": (partial(_both, fused, x, wrt), partial(_both, modules, x, wrt)),
        "conv2d, forward": (no_grad(partial(conv2d, *conv)), no_grad(partial(F.conv2d, *conv))),
    }


def _both(function: Callable[[Tensor], Tensor], x: Tensor, wrt: list[Tensor]) -> object:
    out = function(x)
    return torch.autograd.grad(out, wrt, torch.ones_like(out))


def _captured(call: Action, device: torch.device) -> Action:
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


SMALL = Settings(batch=2, stacks=((2, 4),), repeats=1, device="cpu")
BENCHMARKS = (Benchmark("kernels", "what do the fused kernels gain?", run, Settings(), SMALL, "gpu"),)
