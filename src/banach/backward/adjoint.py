"""The adjoint equation (I - J') w = g, one system per row: its residual, its stopping test, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from banach.backward.jacobian import Jacobian
from banach.solve import Status, Tolerance

_ENDS = (Status.CONVERGED, Status.STALLED, Status.MAX_STEPS, Status.NONFINITE)


@dataclass
class Adjoint:
    """A w = g with A = I - J', every row in units of its own cotangent."""

    jacobian: Jacobian
    tolerance: Tolerance
    eps: float  # the rounding of the arithmetic that T is computed in
    g: Tensor  # (samples, width), in units
    unit: Tensor  # (samples,)
    known: tuple[Tensor, Tensor] | None = None  # a w, and its residual

    @cached_property
    def threshold(self) -> Tensor:
        """(samples,): what the residual must come down to; the relative part is relative to g."""
        return self.tolerance.atol / self.unit + self.tolerance.rtol * self.size(self.g)

    def A(self, w: Tensor) -> Tensor:
        return w - self.jacobian.transposed(w)

    def At(self, v: Tensor) -> Tensor:
        return v - self.jacobian.forward(v)

    def residual(self, w: Tensor, *, record: bool = False) -> Tensor:
        """g - A w, from a product and not from a recursion. The same w again costs nothing."""
        if self.known is None or self.known[0] is not w:
            self.known = w, self.g - w + self.jacobian.transposed(w, record=record)
        return self.known[1]

    def size(self, rows: Tensor) -> Tensor:
        """(samples,): the norm of the tolerance."""
        norm, space = self.tolerance.norm, self.jacobian.space
        return norm.measure(rows, space) * norm.scale(space)

    def rounding(self, w: Tensor) -> Tensor:
        """(samples,): a residual of this size may be rounding and nothing else.

        0 where the norm of w overflows, as in a divergence: a residual that is still finite is no rounding of it.
        """
        return torch.nan_to_num(10 * self.eps * self.size(w), posinf=0.0)

    def idle(self, active: Tensor, step: int = 0) -> bool:
        """Ask the host, at checks only, whether nobody is active any more."""
        every = self.tolerance.check_every
        return bool(every) and step % every == 0 and not bool(active.any())

    def ends(self, w: Tensor) -> tuple[Status, ...]:
        """How every row ended, by its true residual. Asks the host."""
        size = self.size(self.residual(w))
        highest = torch.maximum(self.threshold, self.rounding(w))
        code = (size > self.threshold).long() + (size > highest).long()
        return tuple(_ENDS[i] for i in torch.where(size < torch.inf, code, 3).tolist())


def units(cotangent: Tensor) -> Tensor:
    """(samples,): about the largest entry of every row, so that the square of a small one does not vanish.

    (That of a confident sample can be 1e-25, and float32 ends at 1e-38.) Powers of two change no digit. No
    unit is below 2^-60 of the largest: what is smaller still may vanish beside it.
    """
    if not cotangent.numel():
        return cotangent.new_ones(len(cotangent))
    largest = cotangent.abs().amax(1)
    largest = torch.maximum(largest, largest.amax() * 2.0**-60)
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    return torch.where(largest > 0, power, 1.0)
