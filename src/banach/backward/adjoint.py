"""The linear problem of `Implicit` at z*: (I - J') w = g by the chosen method, safeguarded and reported."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from banach.backward.jacobian import Jacobian
from banach.backward.mode import CHANGED, Unchanged, is_other
from banach.backward.transforms import Axes, present
from banach.latent import Latent, Space, detach, leaves, map_leaves, rebuild
from banach.solve import Map, Norm, Solver, Status, Tolerance, solve
from banach.solve.context import device_loop, without_autocast
from banach.solve.mixing import mixes_samples
from banach.solve.state import to_numpy
from banach.solve.warning import AdjointWarning, warn_user

if TYPE_CHECKING:
    from banach.backward.implicit import Implicit

Parts = tuple[Tensor, ...]
Report = Callable[[int, Tensor, tuple[Status, ...]], None]
CUT = (
    "T changes with z but its derivative in z is zero, so the gradient is that of JFB and sigma_max is 0: T must "
    "not detach z; where it differentiates an energy E, write torch.func.grad(E)(z)"
)
_ENDS = (Status.CONVERGED, Status.STALLED, Status.MAX_STEPS, Status.NONFINITE)


@dataclass(frozen=True)
class Problem:
    """Everything the backward pass needs: it solves for w at z*, whatever the cotangent."""

    mode: "Implicit"
    T: Map
    z_star: Latent
    value: Latent  # T(z_star) in the forward pass
    inputs: tuple[Any, ...]
    space: Space
    tolerance: Tolerance
    eps: float  # the rounding of T's arithmetic, and the type it is in: autocast may be gone by now
    computed_in: torch.dtype
    unchanged: Unchanged
    zero: bool = False  # the safeguard compares w with zero instead of g

    def solve(self, g: Parts, parts: Parts, *, tangent: bool = False) -> Parts:
        """Return w = (I - J')^-1 g for the cotangent g of the parts T(z*), or (I - J)^-1 g for a tangent g."""
        # The backward pass may run under an autocast that the forward pass did not have: T keeps its own.
        autocast, no_tangents = without_autocast(self.space.device), _set_fwd_grad_enabled(False)
        with torch.no_grad(), no_tangents, autocast, present(leaves(self.z_star)) as now:
            axes = Axes.of((*g, *parts))
            rows = self.space.rows(rebuild(self.z_star, map(Tensor.detach, g)), "the cotangent")
            z_star, value = (map_leaves(now.see, nest) for nest in (self.z_star, self.value))
            here = replace(self, T=now.seen_by(self.T), z_star=z_star, value=value)
            w = axes.mapped(here._rows(axes.plain(rows), axes, tangent))
            found = [a.to(b.dtype) for a, b in zip(self.space.parts(w), g, strict=True)]
        return tuple(map(now.see, found))

    def _rows(self, g: Tensor, axes: Axes, tangent: bool) -> Tensor:
        if not (self.tolerance.max_steps or self.tolerance.steps_per_check or self.mode.report):
            return torch.zeros_like(g) if self.zero else g  # no step, no product: w = g, which is JFB
        self.unchanged.check()
        finite = g.isfinite().all(1)
        right = torch.where(finite[:, None], g, 0.0)
        unit = units(right)
        scale = (unit / (unit.amax() if len(unit) else 1.0))[:, None]
        options: dict[str, Any] = {"unit": scale, "axes": axes, "count": self.mode.count}
        jacobian = Jacobian(lambda z: self.T(z, *self.inputs), self.z_star, self.space, **options)
        equation = Adjoint(self, jacobian, right / unit[:, None], unit, tangent)
        if equation.every and not axes.levels and self._is_other(jacobian.value):
            with torch.enable_grad():  # a part compiled in a shorter type rounds as it did in the forward pass
                if self._is_other(detach(self.T(self.z_star, *self.inputs))):
                    warn_user(CHANGED, AdjointWarning)
        method = self.mode.method
        w = method.solve(equation) if hasattr(method, "solve") else self._iterate(equation, method)
        w = equation.safeguarded(w)
        start = None if self.zero or axes.levels else equation.start  # the test below syncs with the host
        if start is not None and not start.any() and right.any() and jacobian.is_cut(self.eps, equation.g):
            warn_user(CUT, AdjointWarning)
        if equation.every or self.mode.report is not None:
            self._report(equation, w, finite)
        return torch.where(finite[:, None], w * unit[:, None], g)

    def _is_other(self, value: Latent) -> bool:
        return is_other(value, self.value, self.space, self.eps)

    def _iterate(self, equation: "Adjoint", method: Solver) -> Tensor:
        """Iterate w <- J' w + g by a fixed-point solver."""
        limits = self.tolerance
        # The loop has one tolerance for all rows, so every row is measured in units of its own threshold. A
        # threshold of zero becomes one that only an exact hit meets.
        least = torch.finfo(equation.g.dtype).eps ** 2 * equation.size(equation.g)
        unit = torch.maximum(equation.threshold, least)
        unit = torch.where(unit > 0, unit, 1.0)
        norm = cast(Norm, SimpleNamespace(measure=lambda w, _: equation.size(w) / unit, scale=lambda _: 1.0))
        tolerance = Tolerance(atol=1.0, max_steps=limits.max_steps, norm=norm, check_every=limits.check_every)

        def step(w: Tensor) -> Tensor:
            with without_autocast(self.space.device):
                Tw = equation.g + equation.product(w)
                equation.observe(w, Tw - w, first=equation.start is None)
                return Tw

        with self._short_type():  # its rounding decides which samples have stalled
            return solve(step, equation.g, method, tolerance=tolerance).value

    def _report(self, equation: "Adjoint", w: Tensor, finite: Tensor) -> None:
        """Report how the equation was solved, and warn where that is short of the tolerance."""
        ends, sound = equation.ends(w), to_numpy(finite)
        if self.mode.report is not None:
            space = self.space
            status = tuple(_ENDS[end] for end in np.where(sound, ends, _ENDS.index(Status.NONFINITE)))
            true = torch.where(finite, equation.size(equation.residual(w)) * equation.unit, torch.nan)
            if space.coupled:
                status = tuple(end for end in status for _ in range(space.batch))
                true = true.repeat_interleave(space.batch)
            self.mode.report(equation.jacobian.products, true, status)
        missed = {_ENDS[end] for end in np.unique(ends[sound])} - {Status.CONVERGED}
        if missed and self.tolerance.steps_per_check:
            text = f"the adjoint equation missed its tolerance: {self._advice(missed, equation)}"
            warn_user(text, AdjointWarning)

    def _advice(self, missed: set[Status], equation: "Adjoint") -> str:
        """Constant for every cause, so that Python shows each warning once."""
        if missed == {Status.STALLED}:
            return "the rounding of T allows no better, so loosen rtol of `Implicit` or use a higher precision"
        single = self.space.coupled or equation.jacobian.axes.levels  # vmap allows no branch on its tensors
        # Under autocast the value of T may be of a shorter type than z*, which the probe takes there only.
        with self._short_type() if self.space.autocast else nullcontext():
            if not single and mixes_samples(self.T, self.z_star, self.inputs):
                return "T mixes samples: pass coupled=True"
        if Status.NONFINITE in missed:
            return "check that T and its derivative are finite at z*"
        if hasattr(self.mode.method, "restart"):
            return "allow more max_steps, use a larger restart, without which GMRES can stagnate, or NormalCG()"
        if hasattr(self.mode.method, "solve"):
            return "allow more max_steps or a larger rtol in Implicit(tolerance=...), or check that T contracts"
        return "allow more max_steps, or use GMRES() or NormalCG(), which do not need a T that contracts"

    def _short_type(self) -> AbstractContextManager[Any]:
        """Turn autocast on where T computes in a short type: `solve` sees that by autocast alone."""
        short = self.computed_in.itemsize == 2
        return torch.autocast(self.space.device.type, self.computed_in) if short else nullcontext()


@dataclass
class Adjoint:
    """A w = g with A = I - J', or for tangents I - J, every row in units of its own cotangent.

    `fallback` is what w must not be worse than: g, which is JFB, or zero.
    """

    problem: Problem
    jacobian: Jacobian
    g: Tensor  # (samples, width), in units
    unit: Tensor  # (samples,)
    tangent: bool

    def __post_init__(self) -> None:
        self.tolerance, self.eps, zero = self.problem.tolerance, self.problem.eps, self.problem.zero
        every = self.tolerance.steps_per_check
        self.on_device = device_loop() is not None and every > 0  # in a capture the device ends loops
        self.every = 0 if self.on_device else every  # steps between two host checks; 0: no checks
        self.fallback = torch.zeros_like(self.g) if zero else self.g
        self.best = self.fallback  # per row the w of the least Euclidean residual, if host checks are on
        self.least = torch.full_like(self.unit, torch.inf)  # (samples,): that residual
        self.start: Tensor | None = None  # (samples,): the Euclidean residual of the fallback, once it is known
        self.known: tuple[Tensor, Tensor] | None = None  # a w, and its residual
        if zero:
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
        """(samples,): is w worse than the fallback, whose residual is `start`, by more than the rounding at g?"""
        return _length(self.residual(w)) > start + 10 * self.eps * (start + _length(self.g))

    def size(self, rows: Tensor) -> Tensor:
        """(samples,): the norm of the tolerance."""
        norm, space, axes = self.tolerance.norm, self.problem.space, self.jacobian.axes
        return axes.plain(norm.measure(axes.mapped(rows), space)) * norm.scale(space)

    def rounding(self, w: Tensor) -> Tensor:
        """(samples,): a residual of this size may be rounding alone; 0 where the norm of w overflows."""
        return torch.nan_to_num(10 * self.eps * self.size(w), posinf=0.0)

    def idle(self, active: Tensor, step: int = 0) -> bool:
        """Return True if no row is active any more. Syncs with the host, at checks only."""
        return bool(self.every) and step % self.every == 0 and not bool(active.any())

    def ends(self, w: Tensor) -> np.ndarray:
        """How every row ended, by its true residual, as an index of _ENDS. Syncs with the host."""
        size = self.size(self.residual(w))
        highest = torch.maximum(self.threshold, self.rounding(w))
        code = (size > self.threshold).long() + (size > highest).long()
        return to_numpy(torch.where(size < torch.inf, code, _ENDS.index(Status.NONFINITE)))


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
