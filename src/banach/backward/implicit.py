"""The exact gradient, by the implicit function theorem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.backward.krylov import LinearSolver, NormalCG
from banach.backward.mode import carries_tangent
from banach.backward.problem import Problem, Report
from banach.backward.reads import Reads
from banach.latent import Latent, Space, detach, leaves_like, rebuild
from banach.solve import Map, Solver, Tolerance
from banach.solve.precision import rounding, with_autocast_of


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
    tolerance: Tolerance | None = None
    report: Report | None = None

    def __post_init__(self) -> None:
        if isinstance(self.method, type) or not (hasattr(self.method, "solve") or hasattr(self.method, "step")):
            raise TypeError(f"method must be NormalCG(), GMRES(), Picard() or Anderson(), got {self.method!r}")
        if self.tolerance is not None and not isinstance(self.tolerance, Tolerance):
            raise TypeError(f"tolerance must be a Tolerance, got {self.tolerance!r}; write Tolerance(rtol=...)")
        if self.report is not None and not callable(self.report):
            raise TypeError(f"report must be a function of (products, residual, status), got {self.report!r}")

    @property
    def checked(self) -> bool:
        """Are host checks on? Then w is safeguarded, and an unmet tolerance warns."""
        return self.tolerance is None or self.tolerance.check_every != 0

    @property
    def asks_the_host(self) -> bool:
        """Does a backward pass wait for the device?"""
        return self.checked or self.report is not None

    @property
    def products(self) -> int | None:
        """J-products per sample, where their number is fixed; None where it hangs on the residuals, or a linear
        solver does not tell."""
        if self.asks_the_host or self.tolerance is None:
            return None
        steps, count = self.tolerance.max_steps, getattr(self.method, "products", None)
        if hasattr(self.method, "solve"):
            return None if count is None else int(count(steps))
        return steps  # a fixed-point solver: one each

    def tolerance_for(self, space: Space) -> Tolerance:
        """Return the tolerance; by default one that the arithmetic of T in this space, as it is now, can meet."""
        if self.tolerance is not None:
            return self.tolerance
        eps = rounding(space)
        rtol = next((rtol for least, rtol in _RTOL if eps <= least), _SHORT_RTOL)
        return Tolerance(atol=0, rtol=rtol, max_steps=500)

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
            problem = Problem(
                T=with_autocast_of(space, T),
                z_star=z_star,
                inputs=tuple(inputs),
                space=space,
                method=self.method,
                tolerance=self.tolerance_for(space),
                report=self.report,
                eps=rounding(space),
                computed_in=_type_of(space),
                reads=reads,
            )
            parts = _Backward.apply(problem, *parts)
        return rebuild(z_star, parts)


# By the rounding of T's arithmetic: float64, float32; then TF32, bfloat16 and float16.
_RTOL = ((2.0**-52, 1e-8), (2.0**-23, 1e-5))
_SHORT_RTOL = 1e-2


def _differentiated(parts: list[Tensor]) -> bool:
    """Is a gradient recorded here, or a tangent carried along? Forward mode asks for no grad mode."""
    recorded = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    return recorded or carries_tangent(parts)


def _type_of(space: Space) -> torch.dtype:
    """The type of T's arithmetic."""
    return torch.get_autocast_dtype(space.device.type) if space.autocast else space.dtype


class _Backward(torch.autograd.Function):
    """The identity, whose backward pass puts w in place of the cotangent."""

    @staticmethod
    def forward(problem: Problem, *parts: Tensor) -> tuple[Tensor, ...]:
        # A copy, not a view: S may begin with an in-place activation.
        return tuple(part.clone() for part in parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.problem = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.problem.solve(g)
        if torch.is_grad_enabled():  # a graph of this backward pass is being recorded
            found = _Refuse.apply(len(found), *found, *g, *ctx.saved_tensors)
        return (None, *found)

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
