"""Convolutions as the paper's networks have them, on small images of odd sizes, and errors against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from banach.kernels import conv2d
from kernels.cases import distance


class Case(NamedTuple):
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


def made(case: Case, dtype: torch.dtype, images: int = 3) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias, the weights of such a size that outputs are near 1."""
    torch.manual_seed(0)
    x = torch.randn(images, case.inputs, 9, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(case.outputs, case.inputs, case.side, case.side, dtype=dtype)
    weight /= (case.inputs * case.side**2) ** 0.5
    if case.channels_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    return x, weight, torch.randn(case.outputs, dtype=dtype) if case.bias else None


def worst_error(case: Case, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Return the largest relative error of the value and of all gradients, against F.conv2d in float64."""
    inputs = [part for part in (x, weight, bias) if part is not None]
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
