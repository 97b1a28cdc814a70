"""Maps R and stacks of the paper's networks, small or in full size, and what modules compute from them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.fast.weights import frozen_copy
from banach.models.blocks import LatentResNet
from banach.models.paper import Block, CIFARLatent, mnist, svhn
from banach.nn.layers import uses_batch_statistics
from banach.solve import RMS, Norm, Solution, Tolerance, WorstPixel, solve

NETWORKS = {"mnist": (32, 9, 9), "svhn": (64, 8, 8), "cifar10": (35, 10, 10)}


def network(
    name: str, *, train: bool, batch: int = 4, seed: int = 0, device: str = "cpu"
) -> tuple[nn.Module, Tensor]:
    """Return R with statistics of a few batches, and v. In eval mode weights are small, so that R contracts."""
    torch.manual_seed(seed)
    made = {"mnist": lambda: mnist().R, "svhn": lambda: svhn().R, "cifar10": lambda: CIFARLatent()}
    return _prepared(made[name](), NETWORKS[name], train=train, batch=batch, device=device)


def tiny(late: bool, *, train: bool, batch: int = 3, channels: int = 16) -> tuple[nn.Module, Tensor]:
    """Return two blocks for images of odd sizes: 35 channels if `late`."""
    torch.manual_seed(1)
    R: Any = CIFARLatent() if late else LatentResNet(channels, 2, 0.5)
    R.blocks = R.blocks[:2]
    return _prepared(R, (35 if late else channels, 4, 3), train=train, batch=batch)


def _prepared(
    R: Any, shape: tuple[int, int, int], *, train: bool, batch: int, device: str = "cpu"
) -> tuple[nn.Module, Tensor]:
    v = torch.randn(batch, *shape).to(device)
    R.to(device).train()
    with torch.no_grad():
        for block in R.blocks:
            block.conv2.weight.mul_(1.0 if train else 0.2)
        z = torch.zeros_like(v)
        for _ in range(40):
            z = R(z, v)
    return R.train(train), v


def solve_by_modules(R: Any, v: Tensor, z0: Tensor | None = None, *, tolerance: Tolerance) -> Solution:
    """What `latent_solve` computes, by the modules of R, whose running statistics stay."""
    z0 = torch.zeros_like(v) if z0 is None else z0
    return solve(frozen_copy(R), z0, inputs=(v,), tolerance=tolerance, coupled=uses_batch_statistics(R))


def plain_picard_step(samples: Any, parts: Any, tolerance: Tolerance, damping: float) -> None:
    """What `picard_step` computes, in plain torch."""
    index = torch.arange(len(samples.active)) if samples.index is None else samples.index
    was = samples.active[index]
    z, Tz = (torch.cat([part[which].flatten(1) for part in parts], 1) for which in (0, 1))
    scale = z.shape[1] ** -0.5 if type(tolerance.norm) is RMS else 1.0
    residual = torch.linalg.vector_norm(Tz - z, dim=1) * scale
    allowed = tolerance.atol + tolerance.rtol * torch.linalg.vector_norm(Tz, dim=1) * scale
    goes_on = residual.isfinite() & allowed.isfinite() & (residual > allowed)
    least = torch.fmin(samples.least[index], residual)
    for name, new in {"residual": residual, "allowed": allowed, "least": least, "active": goes_on}.items():
        numbers = getattr(samples, name)
        numbers[index] = torch.where(was, new, numbers[index])
    samples.steps[index] += was.int()
    for old, new in parts:
        moves = was.view(-1, *(1,) * (old.dim() - 1))
        old.copy_(torch.where(moves, torch.lerp(new.to(old.dtype), old, damping), old))


def tolerance(norm: Norm = WorstPixel(), **settings: Any) -> Tolerance:
    return Tolerance(**{"atol": 1e-3, "max_steps": 60, "norm": norm, **settings})


def stack_of(count: int, *, dropout: float = 0.0, train: bool = True) -> nn.Sequential:
    """Blocks whose running statistics are not the ones they begin with."""
    torch.manual_seed(0)
    blocks: list[Any] = [Block(dropout=dropout) for _ in range(count)]
    for block in blocks:
        block.norm.running_mean.normal_()
        block.norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(*blocks).train(train)


@dataclass(frozen=True)
class Answer:
    """What a stack gives: output, gradient of the input, of each parameter, and the buffers it leaves."""

    out: Tensor
    dx: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def modules(blocks: nn.Sequential, x: Tensor, masks: Tensor | None, scale: float) -> Tensor:
    """The modules one after the other, with dropout's masks given."""
    of: Any = blocks
    for number, block in enumerate(of):
        hidden = F.leaky_relu(block.conv1(x), 0.1)
        if masks is not None:
            hidden = hidden * masks[number, :, :, None, None] * scale
        x = block.norm(F.leaky_relu(x + block.conv2(hidden), 0.1))
    return x


def answer(blocks: nn.Sequential, x: Tensor, run: Callable[..., Tensor], cotangent: Tensor) -> Answer:
    """Run a copy of the blocks forward and back."""
    copied, leaf = copy.deepcopy(blocks), x.detach().clone().requires_grad_()
    out = run(copied, leaf)
    out.backward(cotangent.to(out.dtype))
    assert leaf.grad is not None
    gradients = {name: p.grad for name, p in copied.named_parameters() if p.grad is not None}
    return Answer(out.detach(), leaf.grad, gradients, dict(copied.named_buffers()))


def distance(got: Tensor, wanted: Tensor) -> float:
    """Relative error; a NaN stays one."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-300))


def worst(got: Answer, wanted: Answer) -> dict[str, float]:
    """The largest relative error of each kind."""
    assert got.gradients.keys() == wanted.gradients.keys()
    return {
        "output": distance(got.out, wanted.out),
        "input's gradient": distance(got.dx, wanted.dx),
        "parameters' gradients": max(distance(got.gradients[n], wanted.gradients[n]) for n in wanted.gradients),
        "buffers": max(distance(got.buffers[n], wanted.buffers[n]) for n in wanted.buffers),
    }
