"""The linear problem of `Implicit` at z*: w = (I - J')^-1 g by the chosen method, safeguarded and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from banach.backward.adjoint import Adjoint, units
from banach.backward.jacobian import Jacobian
from banach.backward.mode import Unchanged
from banach.backward.transforms import Axes, present
from banach.latent import Latent, Space, leaves, map_leaves, rebuild
from banach.solve import Map, Norm, Solver, Status, Tolerance, solve
from banach.solve.context import to_list, without_autocast
from banach.solve.mixing import mixes_samples
from banach.solve.warning import AdjointWarning, warn_user

if TYPE_CHECKING:
    from banach.backward.implicit import Implicit

Report = Callable[[int, Tensor, tuple[Status, ...]], None]
_SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """Everything the backward pass needs: it solves for w at z*, whatever the cotangent."""

    mode: Implicit
    T: Map
    z_star: Latent
    inputs: tuple[Any, ...]
    space: Space
    tolerance: Tolerance
    eps: float  # the rounding of T's arithmetic, and the type it is in: autocast may be gone by now
    computed_in: torch.dtype
    unchanged: Unchanged
    zero: bool = False  # w must not be worse than zero, instead of g

    def solve(
        self, g: tuple[Tensor, ...], parts: tuple[Tensor, ...], *, tangent: bool = False
    ) -> tuple[Tensor, ...]:
        """Return w = (I - J')^-1 g for the cotangent g of the parts T(z*), or (I - J)^-1 g for a tangent g."""
        # The backward pass may run under an autocast that the forward pass did not have: T keeps its own.
        autocast, no_tangents = without_autocast(self.space.device), _set_fwd_grad_enabled(False)
        with torch.no_grad(), no_tangents, autocast, present(leaves(self.z_star)) as now:
            axes = Axes.of((*g, *parts))
            given = [part.detach().to(self.space.dtype) for part in g]
            rows = self.space.rows(rebuild(self.z_star, given), "the cotangent")
            here = replace(self, T=now.seen_by(self.T), z_star=map_leaves(now.see, self.z_star))
            w = axes.mapped(here._rows(axes.plain(rows), axes, tangent))
            found = [a.to(b.dtype) for a, b in zip(self.space.parts(w), g, strict=True)]
        return tuple(map(now.see, found))

    def _rows(self, g: Tensor, axes: Axes, tangent: bool) -> Tensor:
        if not (self.tolerance.max_steps or self.tolerance.checks(g.device) or self.mode.report):
            return torch.zeros_like(g) if self.zero else g  # no step, no product: w = g, which is JFB
        self.unchanged.check()
        finite = g.isfinite().all(1)
        right = torch.where(finite[:, None], g, 0.0)
        unit = units(right)
        scale = (unit / (unit.amax() if len(unit) else 1.0))[:, None]
        how: dict[str, Any] = {"unit": scale, "axes": axes, "count": self.mode.count}
        jacobian = Jacobian(lambda z: self.T(z, *self.inputs), self.z_star, self.space, **how)
        given = jacobian, self.tolerance, self.eps, right / unit[:, None], unit
        equation = Adjoint(*given, tangent=tangent, zero=self.zero)
        method = self.mode.method
        w = method.solve(equation) if hasattr(method, "solve") else self._iterate(equation, method)
        w = equation.safeguarded(w)
        if equation.every or self.mode.report is not None:
            self._tell(equation, w, finite)
        return torch.where(finite[:, None], w * unit[:, None], g)

    def _iterate(self, equation: Adjoint, method: Solver) -> Tensor:
        """Iterate w <- J' w + g by a fixed-point solver."""
        limits, kind = self.tolerance, self.space.device.type
        # The loop has one tolerance for all rows, so every row is measured in units of its own threshold. One of
        # zero becomes one that rounding cannot reach, except by an exact hit.
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

        # The loop calls a sample stalled by the rounding of T, and sees a short type by autocast alone.
        short = self.computed_in in _SHORT
        with torch.autocast(kind, dtype=self.computed_in) if short else nullcontext():
            return solve(step, equation.g, method, tolerance=tolerance).value

    def _tell(self, equation: Adjoint, w: Tensor, finite: Tensor) -> None:
        """Report how the equation was solved, and warn where that is short of the tolerance."""
        ends = list(zip(to_list(finite), equation.ends(w), strict=True))
        if self.mode.report is not None:
            space = self.space
            status = tuple(end if sound else Status.NONFINITE for sound, end in ends)
            true = torch.where(finite, equation.size(equation.residual(w)) * equation.unit, torch.nan)
            if space.coupled:
                status = tuple(end for end in status for _ in range(space.batch))
                true = true.repeat_interleave(space.batch)
            self.mode.report(equation.jacobian.products, true, status)
        missed = [end for sound, end in ends if sound and end is not Status.CONVERGED]
        if missed:
            text = f"the adjoint equation missed its tolerance: {self._advice(missed, equation)}"
            warn_user(text, AdjointWarning)

    def _advice(self, missed: Sequence[Status], equation: Adjoint) -> str:
        """Constant for every cause, so that Python shows each warning once."""
        if set(missed) == {Status.STALLED}:
            return "the rounding of T allows no better, so loosen rtol or compute T in higher precision"
        single = self.space.coupled or equation.jacobian.axes.levels  # what vmap maps over cannot be looked at
        if not single and self._mixes_samples():
            return "T mixes samples: pass coupled=True"
        if Status.NONFINITE in missed:
            return "check that T and its derivative are finite at z*"
        if hasattr(self.mode.method, "solve"):
            return "allow more max_steps, loosen rtol, or check that T contracts (banach.contraction_factor)"
        return "allow more max_steps, or use GMRES() or NormalCG(), which do not need a T that contracts"

    def _mixes_samples(self) -> bool:
        """Probe T. Under autocast its value may be of a shorter type than z*, which the probe takes there only."""
        short = self.space.autocast and self.computed_in in _SHORT
        with torch.autocast(self.space.device.type, self.computed_in) if short else nullcontext():
            return mixes_samples(self.T, self.z_star, self.inputs)
