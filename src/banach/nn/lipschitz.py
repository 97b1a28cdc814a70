"""A linear layer or convolution held to a Lipschitz constant."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from banach.nn.affine import (
    AffineLayer,
    at_least_float32,
    first_direction,
    leading,
    operator_of,
    power,
    stretch,
    without_autocast,
)
from banach.nn.passes import once_per_pass


class Lipschitz(nn.Module):
    """x -> A x / max(1, |A| / bound) + b, A and b those of `layer`: at most `bound`-Lipschitz.

    |A| is the norm of the operator itself: of a convolution on a grid of `size` pixels, with its padding,
    stride, dilation and groups; another size is refused. A layer below its bound is left alone. |A| = |A x|
    at a direction x kept in a buffer: found to high accuracy when the layer is made, followed by `steps` power
    steps at every call in train mode (inside R: once per pass), left as it is in eval mode. It approaches
    from below, so weights that move fast may exceed the bound by a little until x catches up; `refine()` finds x
    anew. The gradient takes x as constant, which is exact for first derivatives once x is found.
    (Miyato et al. 2018; for convolutions Gouk et al. 2021.)
    """

    direction: Tensor
    layer: AffineLayer

    def __init__(
        self,
        layer: AffineLayer,
        bound: float = 1.0,
        *,
        size: int | Sequence[int] | None = None,
        steps: int = 1,
    ) -> None:
        super().__init__()
        if not 0 < bound < float("inf"):
            raise ValueError(f"bound must be above 0 and finite, got {bound}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps must be a whole number of at least 0, got {steps!r}")
        self.operator = operator_of(layer, size)
        self.layer, self.bound, self.steps = layer, float(bound), steps
        self.register_buffer("direction", first_direction(self.operator, self.layer.weight))
        self.refine()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != self.operator.shape[2:] and not isinstance(self.layer, nn.Linear):
            seen, given = tuple(x.shape[2:]), tuple(self.operator.shape[2:])
            raise ValueError(f"this convolution is bounded on a grid of size={given}, got one of {seen}")
        weight = self.bounded_weight()
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        return self.layer._conv_forward(x, weight, self.layer.bias)

    def bounded_weight(self) -> Tensor:
        """The layer's weight, scaled down where its norm is above the bound. In train mode x takes its steps."""
        weight = self.layer.weight
        scaled, direction = once_per_pass(self, weight, lambda: self._scaled(weight))
        if self.training and self.steps:
            with torch.no_grad():
                self.direction.copy_(direction)
        return scaled

    def norm(self) -> Tensor:
        """|A| before scaling, as far as it is known."""
        return self._norm(self.layer.weight, self.direction.clone())

    def refine(self, rounds: int = 5) -> Lipschitz:
        """Find the leading direction anew to high accuracy, each round at the price of twenty power steps."""
        with without_autocast(self.direction):
            weight = at_least_float32(self.layer.weight.detach())
            self.direction.copy_(leading(self.operator, weight, self.direction.to(weight.dtype), rounds))
        return self

    def extra_repr(self) -> str:
        size = self.operator.shape[2:]
        return f"bound={self.bound}" + (f", size={tuple(size)}" if size else "") + f", steps={self.steps}"

    def _scaled(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        # A copy: the graph keeps this direction, and the buffer is written at the next call.
        x = self.direction.clone()
        if self.training and self.steps:
            x = self._follow(weight, x)
        excess = (self._norm(weight, x) / self.bound).clamp(min=1)
        return weight / excess.to(weight.dtype), x

    def _follow(self, weight: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad(), without_autocast(weight):
            weight = at_least_float32(weight)
            return power(self.operator, weight, x.to(weight.dtype), self.steps)

    def _norm(self, weight: Tensor, x: Tensor) -> Tensor:
        with without_autocast(weight):
            weight = at_least_float32(weight)
            return stretch(self.operator, weight, x.to(weight.dtype))
