"""The equation (I - J') w = g, one system per row: its residual, its stopping test, the best w so far."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from banach.backward.jacobian import Jacobian
from banach.solve import Status, Tolerance
from banach.solve.context import device_loop, to_list

_ENDS = (Status.CONVERGED, Status.STALLED, Status.MAX_STEPS, Status.NONFINITE)


@dataclass
class Adjoint:
    """A w = g with A = I - J', or for tangents I - J, every row in units of its own cotangent.

    `fallback` is what w must not be worse than: g, which is JFB, or zero.
    """

    jacobian: Jacobian
    tolerance: Tolerance
    eps: float  # the rounding of the arithmetic that T is computed in
    g: Tensor  # (samples, width), in units
    unit: Tensor  # (samples,)
    known: tuple[Tensor, Tensor] | None = None  # a w, and its residual
    tangent: bool = False
    zero: bool = False

    def __post_init__(self) -> None:
        every = self.tolerance.checks(self.g.device)
        self.on_device = device_loop() is not None and every > 0  # in a capture the device ends loops
        self.every = 0 if self.on_device else every  # steps between two host checks; 0: no checks
        self.fallback = torch.zeros_like(self.g) if self.zero else self.g
        self.best = self.fallback  # per row the w of the least Euclidean residual, if host checks are on
        self.least = torch.full_like(self.unit, torch.inf)  # (samples,): that residual
        self.start: Tensor | None = None  # (samples,): the Euclidean residual of the fallback, once it is known
        if self.zero:
            self.start = self.least = _length(self.g)

    @cached_property
    def threshold(self) -> Tensor:
        """(samples,): what the residual must come down to; the relative part is relative to g."""
        return self.tolerance.atol / self.unit + self.tolerance.rtol * self.size(self.g)

    def A(self, w: Tensor) -> Tensor:
        return w - self.product(w)

    def At(self, v: Tensor) -> Tensor:
        return v - (self.jacobian.transposed(v) if self.tangent else self.jacobian.forward(v))

    def product(self, w: Tensor, *, record: bool = False) -> Tensor:
        """J' w, or J w for tangents. `record=True` keeps what a product with J needs."""
        return self.jacobian.forward(w) if self.tangent else self.jacobian.transposed(w, record=record)

    def residual(self, w: Tensor, *, record: bool = False) -> Tensor:
        """g - A w, from a product and not from a recursion. The same w again costs nothing."""
        if self.known is None or self.known[0] is not w:
            self.known = w, self.g - w + self.product(w, record=record)
            self.observe(w, self.known[1], first=w is self.fallback)
        return self.known[1]

    def observe(self, w: Tensor, r: Tensor, *, first: bool = False) -> None:
        """Compare w, whose true residual is r, with the best so far. `first`: w is the fallback."""
        if not self.every:
            return
        length = _length(r)
        if first and self.start is None:
            self.start = length
        self.best = torch.where((length < self.least)[:, None], w, self.best)
        self.least = torch.minimum(length, self.least)

    def safeguarded(self, w: Tensor) -> Tensor:
        """Return w, but the best w in rows that missed the tolerance; the fallback in all rows if any is worse.

        Residuals are true and Euclidean. The last test is for samples that T mixes although `coupled` is False:
        there the residual of a row changes with the other rows. Costs at most one product more than measuring w,
        and another one where the solver never measured the fallback. On the device only the last test is made,
        without a host sync; without checks none.
        """
        if self.on_device:
            return torch.where(self._worse(w, _length(self.residual(self.fallback))).any(), self.fallback, w)
        if not self.every:
            return w
        if self.start is None:
            self.residual(self.fallback)
        assert self.start is not None
        r = self.residual(w)
        met, last = self.size(r) <= self.threshold, _length(r)
        keep = (last < torch.inf) & (last <= torch.where(met, self.start, self.least))
        if bool(keep.all()):
            return w
        w = torch.where(keep[:, None], w, self.best)
        return self.fallback if bool(self._worse(w, self.start).any()) else w

    def _worse(self, w: Tensor, start: Tensor) -> Tensor:
        """(samples,): is w worse than the fallback, whose residual is `start`, by more than rounding?"""
        return _length(self.residual(w)) > start * (1 + 10 * self.eps)

    def size(self, rows: Tensor) -> Tensor:
        """(samples,): the norm of the tolerance."""
        norm, space, axes = self.tolerance.norm, self.jacobian.source, self.jacobian.axes
        return axes.plain(norm.measure(axes.mapped(rows), space)) * norm.scale(space)

    def rounding(self, w: Tensor) -> Tensor:
        """(samples,): a residual of this size may be rounding alone; 0 where the norm of w overflows."""
        return torch.nan_to_num(10 * self.eps * self.size(w), posinf=0.0)

    def idle(self, active: Tensor, step: int = 0) -> bool:
        """Return True if no row is active any more. Syncs with the host, at checks only."""
        return bool(self.every) and step % self.every == 0 and not bool(active.any())

    def ends(self, w: Tensor) -> tuple[Status, ...]:
        """How every row ended, by its true residual. Syncs with the host."""
        size = self.size(self.residual(w))
        highest = torch.maximum(self.threshold, self.rounding(w))
        code = (size > self.threshold).long() + (size > highest).long()
        return tuple(_ENDS[i] for i in to_list(torch.where(size < torch.inf, code, 3)))


def units(cotangent: Tensor) -> Tensor:
    """(samples,): a power of two near the largest entry of every row, so that squares of small rows do not vanish.

    (A confident sample can have 1e-25, and float32 ends at 1e-38.) No unit is below 2^-60 of the largest.
    """
    if not cotangent.numel():
        return cotangent.new_ones(len(cotangent))
    largest = cotangent.abs().amax(1)
    largest = torch.maximum(largest, largest.amax() * 2.0**-60)
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    return torch.where(largest > 0, power, 1.0)


def _length(rows: Tensor) -> Tensor:
    """(samples,): the Euclidean norm, infinity where it is not a number."""
    return torch.linalg.vector_norm(rows, dim=1).nan_to_num(nan=torch.inf, posinf=torch.inf)
