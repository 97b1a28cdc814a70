"""Small implicit networks that several tests share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import banach


class ConvR(nn.Module):
    """R(u, v) = gamma * norm(x + drop(leaky(conv(x)))), x = u + v."""

    def __init__(self, channels: int = 4, *, batch_norm: bool = False, dropout: float = 0.0, gamma: float = 0.4):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        self.drop = banach.nn.Dropout2d(dropout)
        self.gamma = gamma

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = u + v
        return self.gamma * self.norm(x + self.drop(F.leaky_relu(self.conv(x), 0.1)))


class LinearR(nn.Module):
    """R(u, v) = tanh(W u + v) with |W| = gamma."""

    def __init__(self, width: int = 6, *, gamma: float = 0.7, dtype: torch.dtype = torch.float64):
        super().__init__()
        weight = torch.randn(width, width, dtype=dtype)
        self.weight = nn.Parameter(gamma * weight / torch.linalg.matrix_norm(weight, 2))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(u @ self.weight.T + v)


def conv_network(seed: int = 0, **options: object) -> banach.ImplicitNetwork:
    """A network for 1x6x6 images with ten outputs; options go to ConvR."""
    torch.manual_seed(seed)
    Q = nn.Conv2d(1, 4, 3, padding=1)
    S = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 10))
    return banach.ImplicitNetwork(Q, ConvR(**options), S)  # type: ignore[arg-type]


def linear_network(seed: int = 0, gamma: float = 0.7) -> banach.ImplicitNetwork:
    """A float64 network from 5 inputs to 3 outputs, latent of width 6, solved to rounding."""
    torch.manual_seed(seed)
    Q, S = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
    tight = banach.Tolerance(atol=1e-14, max_steps=500)
    return banach.ImplicitNetwork(Q, LinearR(gamma=gamma), S, tolerance=tight)


def by_hand(net: Any, *d: Tensor, steps: int = 150) -> Tensor:
    """The output of a plain loop, which autograd records whole."""
    v = net.Q(*d)
    u = torch.zeros_like(v)
    for _ in range(steps):
        u = net.R(u, v)
    return net.S(u)


class OnceSine(torch.autograd.Function):
    """The sine, with a derivative that cannot be differentiated; without setup_context, which torch.func needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


def images(batch: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(batch, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    """The gradient of a loss in every parameter; zeros where it does not reach."""
    found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(module.parameters(), found, strict=True)]
