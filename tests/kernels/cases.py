"""Maps R, stacks and convolutions of the paper's networks, and what plain PyTorch computes from them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.fast.network import frozen_copy
from banach.kernels import conv2d, invert
from banach.models.blocks import LatentBlock, LatentResNet
from banach.models.paper import mnist, svhn
from banach.nn.layers import uses_batch_statistics
from banach.solve import RMS, Norm, Solution, Tolerance, WorstPixel, solve

Block = partial(LatentBlock, 35, late=True)  # of the CIFAR-10 network, and its R
CIFARLatent = partial(LatentResNet, 35, blocks=5, gamma=0.5, late=True)
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
    z, Tz = (torch.cat([part[which].reshape(len(was), -1) for part in parts], 1) for which in (0, 1))
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


class Case(NamedTuple):
    """A convolution of small images of odd sizes."""

    inputs: int
    outputs: int
    side: int = 3
    stride: int = 1
    padding: int = 1
    bias: bool = True
    channels_last: bool = True  # the weights

    def __str__(self) -> str:
        return f"{self.inputs} to {self.outputs}, side {self.side}, stride {self.stride}, padding {self.padding}"


CASES = (
    Case(16, 32),
    Case(16, 32, stride=2, bias=False, channels_last=False),
    Case(1, 16, channels_last=False),
    Case(3, 35, side=7, padding=0),
    Case(35, 35, stride=2),
    Case(64, 16, padding=0),
    Case(48, 20, stride=2),
    Case(64, 64, side=1, padding=0),
    Case(48, 48, side=5, stride=3, padding=2),
    Case(32, 16, side=2, stride=3, padding=0, channels_last=False),
)


def convolution(case: Case, dtype: torch.dtype, images: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias, the weights of such a size that outputs are near 1."""
    torch.manual_seed(0)
    x = torch.randn(images, case.inputs, 9, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(case.outputs, case.inputs, case.side, case.side, dtype=dtype)
    weight /= (case.inputs * case.side**2) ** 0.5
    if case.channels_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    return x, weight, torch.randn(2 * case.outputs, dtype=dtype)[::2]


def worst_error(case: Case, dtype: torch.dtype, images: int = 3, device: str = "cpu") -> float:
    """Return the largest relative error of the value and of all gradients, against F.conv2d in float64."""
    inputs = [part.to(device) for part in convolution(case, dtype, images)][: 3 if case.bias else 2]
    exact = [part.detach().double().requires_grad_() for part in inputs]
    leaves = [part.detach().requires_grad_() for part in inputs]
    layers: list[tuple[Any, list[Tensor]]] = [(conv2d, leaves), (F.conv2d, exact)]
    y, wanted = (
        layer(*parts[:2], parts[2] if case.bias else None, case.stride, case.padding) for layer, parts in layers
    )
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    y.backward(g)
    wanted.backward(g.double())
    pairs: list[Any] = [(y, wanted), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    return float(torch.tensor([distance(a, b) for a, b in pairs]).max())  # NaN if one is


def inverse_error(n: int, device: torch.device) -> float:
    """Return the relative error of the inverses of random matrices with a positive definite Hermitian part."""
    draw = torch.Generator().manual_seed(n)
    A = torch.randn(3, 2, n, n, generator=draw, dtype=torch.complex128)
    M = torch.eye(n) + A @ A.mH / n + 2 * (A - A.mH)
    got = invert(M.to(torch.complex64).to(device)).to(M)
    return distance(torch.view_as_real(got), torch.view_as_real(torch.linalg.inv(M)))
