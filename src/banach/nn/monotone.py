"""Monotone operator networks: weights for which u = relu(W u + v) has one solution, though W need not contract."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MonotoneLinear(nn.Module):
    """u -> W u,  W = (1 - m) I - A'A + B - B',  so that I - W >= m I in its symmetric part, whatever A and B.

    Then u = relu(W u + v) has exactly one solution for every v. W itself may have any norm: plain Picard can
    diverge, while `Picard(damping=1 - a)` with small a, or `ForwardBackward`, finds the solution.
    (Winston and Kolter 2020.)
    """

    def __init__(self, width: int, m: float = 0.1) -> None:
        super().__init__()
        if not m > 0:
            raise ValueError(f"m must be above 0, got {m}")
        self.m = float(m)
        self.A = nn.Parameter(torch.empty(width, width))
        self.B = nn.Parameter(torch.empty(width, width))
        for part in (self.A, self.B):
            nn.init.xavier_normal_(part)

    @property
    def weight(self) -> Tensor:
        """W, made from A and B."""
        eye = torch.eye(len(self.A), dtype=self.A.dtype, device=self.A.device)
        return (1 - self.m) * eye - self.A.mT @ self.A + self.B - self.B.mT

    def forward(self, u: Tensor) -> Tensor:
        return F.linear(u, self.weight)

    def extra_repr(self) -> str:
        return f"width={len(self.A)}, m={self.m}"


class ForwardBackward(nn.Module):
    """R(u, v) = relu((1 - a) u + a (W u + v)), W monotone and a `alpha`: same fixed point as relu(W u + v).

    A step of forward-backward splitting. It contracts for 0 < a < 2 m / |I - W|^2, by the factor
    sqrt(1 - 2 a m + a^2 |I - W|^2). Damping instead mixes after the relu.
    """

    def __init__(self, layer: MonotoneLinear, alpha: float) -> None:
        super().__init__()
        if not alpha > 0:
            raise ValueError(f"alpha must be above 0, got {alpha}")
        self.layer, self.alpha = layer, float(alpha)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.relu(torch.lerp(u, self.layer(u) + v, self.alpha))

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"
