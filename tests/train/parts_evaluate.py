"""A network in float64 for images in float32, and the figures of a network by a loop of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import Tolerance
from banach.data import Images
from banach.train import Totals
from train.parts_train import network

FINE = Tolerance(atol=1e-9, max_steps=200)


def digits(tolerance: Tolerance = FINE) -> Any:
    return network(tolerance=tolerance).double()


class Double(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.double())
        return y


def in_double(tolerance: Tolerance = FINE) -> Any:
    """The digits network in float64, for images in float32."""
    net = digits(tolerance)
    net.Q = Double(net.Q)
    return net


def by_hand(net: Any, split: Images, tolerance: Tolerance) -> Totals:
    """All images at once, T iterated in a loop that looks at every sample after every step."""
    net.eval()
    with torch.no_grad():
        v = net.Q(split.normalise(split.pixels))
        u, steps = torch.zeros_like(v), torch.zeros(len(v), dtype=torch.int64)
        residual, active = torch.zeros(len(v), dtype=v.dtype), torch.ones(len(v), dtype=torch.bool)
        for _ in range(tolerance.max_steps):
            after = net.R(u, v)
            gap = (after - u).flatten(1).square().mean(1).sqrt()
            u = torch.where(active.view(-1, *[1] * (v.dim() - 1)), after, u)
            residual, steps = torch.where(active, gap, residual), steps + active
            active &= gap > tolerance.atol
        output = net.S(net.R(u, v))
    return Totals(
        loss=float(F.cross_entropy(output, split.labels)),
        accuracy=float((output.argmax(1) == split.labels).double().mean()),
        depth=float(steps.double().mean()),
        max_depth=int(steps.max()),
        residual=float(residual.mean()),
        max_residual=float(residual.max()),
        converged=float((~active).double().mean()),
    )


def assert_near(got: Totals, wanted: Totals, rel: float = 1e-6) -> None:
    assert vars(got) == pytest.approx(vars(wanted), rel=rel)
