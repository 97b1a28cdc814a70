"""The exact gradient, by the implicit function theorem."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from banach.backward.adjoint import Adjoint, units
from banach.backward.jacobian import Jacobian
from banach.backward.krylov import LinearSolver, NormalCG
from banach.backward.mode import carries_tangent
from banach.backward.reads import Reads
from banach.latent import Latent, Space, detach, leaves_like, rebuild
from banach.solve import Map, Solver, Status, Tolerance, solve
from banach.solve.precision import rounding, with_autocast_of

Report = Callable[[int, Tensor, tuple[Status, ...]], None]


@dataclass(frozen=True)
class Implicit:
    """w = (I - J')^-1 g, by a matrix-free linear solve: `NormalCG()` (the paper's), `GMRES()`, or the
    fixed-point iteration w <- J' w + g by `Picard()`, `Anderson()` or `Broyden()`. All start at w = g, which
    is JFB: so that is what `max_steps=0` gives. The tolerance is relative to g.

    `report(products, residual, status)` is called after every backward pass with the true number of
    J-products, and per sample the residual |g - (I - J') w| and its `Status`. An unmet tolerance warns.
    `Tolerance(max_steps=k, check_every=0)` makes k steps whatever they come to, without asking the host, so that a
    training step can be captured: with `Picard()` that is the Neumann series, by k products and one evaluation.
    A nonfinite cotangent stays nonfinite, so that a gradient scaler sees it. A backward pass evaluates T once, and
    is refused where an input, or a weight that T closes over, was changed in place meanwhile. (What cannot be seen
    from here, such as a number that T reads off an object, must not change.)
    Second derivatives are refused: they would need T recorded at a z* that moves with the parameters, which
    doubles the memory of every first derivative. `Unroll` from z0 has them.
    """

    method: LinearSolver | Solver = NormalCG()
    tolerance: Tolerance = Tolerance(atol=0, rtol=1e-6, max_steps=500)
    report: Report | None = None

    def __post_init__(self) -> None:
        if isinstance(self.method, type) or not (hasattr(self.method, "solve") or hasattr(self.method, "step")):
            raise TypeError(f"method must be NormalCG(), GMRES(), Picard() or Anderson(), got {self.method!r}")
        if not isinstance(self.tolerance, Tolerance):
            raise TypeError(f"tolerance must be a Tolerance, got {self.tolerance!r}; write Tolerance(rtol=...)")
        if self.report is not None and not callable(self.report):
            raise TypeError(f"report must be a function of (products, residual, status), got {self.report!r}")

    @property
    def asks_the_host(self) -> bool:
        """Does a backward pass wait for the device?"""
        return bool(self.tolerance.check_every) or self.report is not None

    @property
    def products(self) -> int | None:
        """J-products per sample, where their number is fixed; None where it hangs on the residuals, or a linear
        solver does not tell."""
        if self.asks_the_host:
            return None
        steps, count = self.tolerance.max_steps, getattr(self.method, "products", None)
        if hasattr(self.method, "solve"):
            return None if count is None else int(count(steps))
        return steps  # a fixed-point solver: one each

    def attach(self, T: Map, z_star: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Latent:
        z_star = detach(z_star)
        space = Space.of(z_star, coupled=coupled)
        reads = Reads(T, inputs)
        value = T(z_star, *inputs)
        reads.leave_out_changed()
        with torch.no_grad():
            space.rows(value)  # refuses another shape or dtype now, rather than in the backward pass
        parts: Any = leaves_like(z_star, value, "T")
        if _differentiated(parts):
            T = with_autocast_of(space, T)
            problem = _Problem(self, T, z_star, tuple(inputs), space, rounding(space), _type_of(space), reads)
            parts = _Backward.apply(problem, *parts)
        return rebuild(z_star, parts)


@dataclass(frozen=True)
class _Problem:
    """Everything the backward pass needs: it solves for w at z*, whatever the cotangent."""

    mode: Implicit
    T: Map
    z_star: Latent
    inputs: tuple[Any, ...]
    space: Space
    eps: float  # the rounding of T's arithmetic, and the type it is in: autocast may be gone by now
    computed_in: torch.dtype
    reads: Reads

    def solve(self, g: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """w for the cotangent g."""
        with torch.no_grad(), _without_autocast(self.space.device.type):
            cotangent = [part.detach().to(self.space.dtype) for part in g]
            w = self._rows(self.space.rows(rebuild(self.z_star, cotangent), "the cotangent"))
            found = [a.to(b.dtype) for a, b in zip(self.space.parts(w), g, strict=True)]
        if torch.is_grad_enabled():  # a graph of this backward pass is being recorded
            return _Refuse.apply(len(found), *found, *g, *parts)
        return tuple(found)

    def _rows(self, g: Tensor) -> Tensor:
        mode = self.mode
        if not mode.tolerance.max_steps and not mode.asks_the_host:
            return g  # nothing is asked for: w = g, which is JFB
        self.reads.check()
        finite = g.isfinite().all(1)
        right = torch.where(finite[:, None], g, 0.0)
        unit = units(right)
        common = unit.amax() if len(unit) else 1.0
        jacobian = Jacobian(self.T, self.z_star, self.inputs, self.space, unit / common)
        equation = Adjoint(jacobian, mode.tolerance, self.eps, right / unit[:, None], unit)
        w = mode.method.solve(equation) if hasattr(mode.method, "solve") else self._iterate(equation)
        if mode.asks_the_host:
            self._tell(equation, w, finite)
        return torch.where(finite[:, None], w * unit[:, None], g)

    def _iterate(self, equation: Adjoint) -> Tensor:
        """w <- J' w + g by a fixed-point solver."""
        limits, kind, method = self.mode.tolerance, self.space.device.type, cast(Solver, self.mode.method)
        norm = _InThresholds.of(equation)
        tolerance = Tolerance(atol=1.0, max_steps=limits.max_steps, norm=norm, check_every=limits.check_every)

        def step(w: Tensor) -> Tensor:
            with _without_autocast(kind):
                return equation.g + equation.jacobian.transposed(w)

        # The loop calls a sample stalled by the rounding of T, and autocast is how it is told of a short type.
        short = self.computed_in in (torch.bfloat16, torch.float16)
        with torch.autocast(kind, dtype=self.computed_in) if short else nullcontext():
            return solve(step, equation.g, method, tolerance=tolerance).value

    def _tell(self, equation: Adjoint, w: Tensor, finite: Tensor) -> None:
        """Report how the equation was solved, and warn where that is short of the tolerance."""
        residual, space, report = equation.size(equation.residual(w)), self.space, self.mode.report
        ends = list(zip(finite.tolist(), equation.ends(w), strict=True))
        if report is not None:
            status = tuple(end if sound else Status.NONFINITE for sound, end in ends)
            status = status * space.batch if space.coupled else status
            true = torch.where(finite, residual * equation.unit, torch.nan)
            report(equation.jacobian.products, space.spread(true), status)
        missed = [end for sound, end in ends if sound and end is not Status.CONVERGED]
        if missed:
            worst = (residual / equation.size(equation.g)).masked_fill(residual <= equation.threshold, 0.0).max()
            warnings.warn(_complaint(self.mode.method, missed, len(ends), float(worst)), stacklevel=2)


@dataclass(frozen=True)
class _InThresholds:
    """The norm of every row in units of its own threshold, since the loop has one tolerance for all rows.

    A threshold of zero becomes one that rounding cannot reach, except by an exact hit.
    """

    equation: Adjoint
    unit: Tensor

    @staticmethod
    def of(equation: Adjoint) -> _InThresholds:
        least = torch.finfo(equation.g.dtype).eps ** 2 * equation.size(equation.g)
        unit = torch.maximum(equation.threshold, least)
        return _InThresholds(equation, torch.where(unit > 0, unit, 1.0))

    def measure(self, rows: Tensor, space: Space) -> Tensor:
        return self.equation.size(rows) / self.unit

    def scale(self, space: Space) -> float:
        return 1.0


def _complaint(method: Any, missed: Sequence[Status], samples: int, worst: float) -> str:
    if Status.NONFINITE in missed:
        advice = "check that T and its derivative are finite at z*"
    elif Status.MAX_STEPS in missed:
        advice = "allow more max_steps, loosen rtol, or check that T contracts (banach.contraction_factor)"
    else:
        advice = "the rounding of T allows no better, so loosen rtol or compute T in higher precision"
    return (
        f"the adjoint equation missed its tolerance for {len(missed)} of {samples} samples "
        f"(worst residual {worst:.1e} of |g|) by {method}: {advice}"
    )


def _differentiated(parts: list[Tensor]) -> bool:
    """Is a gradient recorded here, or a tangent carried along? Forward mode asks for no grad mode."""
    recorded = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    return recorded or carries_tangent(parts)


def _type_of(space: Space) -> torch.dtype:
    """The type of T's arithmetic."""
    return torch.get_autocast_dtype(space.device.type) if space.autocast else space.dtype


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """The backward pass may run under an autocast that the forward pass did not: T keeps that of its own."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _Backward(torch.autograd.Function):
    """The identity, whose backward pass puts w in place of the cotangent."""

    @staticmethod
    def forward(problem: _Problem, *parts: Tensor) -> tuple[Tensor, ...]:
        # A copy, not a view: S may begin with an in-place activation.
        return tuple(part.clone() for part in parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.problem = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.problem.solve(g, ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        # Passed by, the tangent would be that of one evaluation: JFB's, which is not what was asked for.
        raise RuntimeError("Implicit has no forward-mode derivative: use torch.func.vjp or grad, or Unroll(steps)")


class _Refuse(torch.autograd.Function):
    """w, tied to all that it depends on, so that a second derivative cannot pass it by unnoticed.

    `once_differentiable` would not do: where the cotangent is a constant it takes w for one too.
    """

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "Implicit gives no second derivatives: differentiate once, or use Unroll(steps) from z0 "
            "(max_steps=0), whose second derivatives are exact for those steps. (NormalCG around an R that holds "
            "an Implicit network needs them; GMRES() and Anderson() do not.)"
        )
