"""What the tests of this room share: the matrix of an operator, the backward modes, small maps in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from banach import JFB, Implicit, ImplicitNetwork, Mode, Neumann, Tolerance, Unroll
from banach.nn import Dropout
from problems import normal  # noqa: F401  the tests of this room take it from here

TIGHT = Tolerance(atol=1e-13, max_steps=300)
EXACT = Implicit(tolerance=Tolerance(atol=0, rtol=1e-12, max_steps=200))
MODES: dict[str, Mode] = {
    "jfb": JFB(),
    "neumann": Neumann(3),
    "unroll": Unroll(3),
    "damped": Unroll(3, damping=0.4),
    "checkpoint": Unroll(3, checkpoint=True),
    "implicit": EXACT,
}


def matrix(function: Callable[[Tensor], Tensor], *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The matrix of the linear part of a map of one sample, one column per unit vector."""
    n = torch.Size(shape).numel()
    units = torch.eye(n, dtype=dtype).view(n, *shape)
    origin = function(torch.zeros(1, *shape, dtype=dtype))
    return (function(units) - origin).flatten(1).T


def largest(A: Tensor) -> float:
    return float(torch.linalg.svdvals(A.detach())[0])


def network(R: Any, width: int = 6, inputs: int = 4, **options: Any) -> Any:
    """Q and S linear, around an R on vectors; solved to rounding by default."""
    torch.manual_seed(11)
    Q, S = nn.Linear(inputs, width).double(), nn.Linear(width, 2).double()
    return ImplicitNetwork(Q, R, S, **{"tolerance": TIGHT, **options})


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every buffer."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0, atol=atol) for k in a)


class NormR(nn.Module):
    """R(u, v) = 0.4 tanh(norm(A u)) + v."""

    linear: Any
    norm: Any

    def __init__(self, norm: nn.Module | None = None, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(width, width).double()
        self.norm = (nn.BatchNorm1d(width) if norm is None else norm).double()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.4 * torch.tanh(self.norm(self.linear(u))) + v


class Dropped(nn.Module):
    """R(u, v) = 0.3 drop(u) + v."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = Dropout(0.5)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.3 * self.drop(u) + v


class Everything(nn.Module):
    """R(u, v) = 0.5 tanh(drop(norm(affine(u)))) + v: a bounded weight, batch norm and dropout in one R."""

    affine: nn.Module
    norm: nn.Module

    def __init__(self, affine: nn.Module, norm: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.affine, self.norm, self.drop = affine, norm, drop

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.drop(self.norm(self.affine(u)))) + v
