"""The exact gradient, by the implicit function theorem."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.backward.krylov import GMRES, Adjoint, NormalCG
from banach.latent import Latent, Space, detach, leaves_like, rebuild
from banach.solve import Anderson, Map, Picard, Solver, Status, Tolerance, solve
from banach.solve.precision import with_autocast_of, without_autocast

Report = Callable[[int, Tensor, tuple[Status, ...]], None]


@dataclass(frozen=True)
class Implicit:
    """w = (I - J')^-1 g, by a matrix-free linear solve: `NormalCG()` (the paper's), `GMRES()`, or the
    fixed-point iteration w <- J' w + g by `Picard()` or `Anderson()`.

    `report(products, residual, status)` is called after every backward pass with the true number of
    J-products, and per sample the residual |g - (I - J') w| and its `Status`. An unmet tolerance warns.
    A nonfinite cotangent stays nonfinite, so that a gradient scaler sees it.
    Second derivatives are refused: they would need T recorded at a z* that moves with the parameters, which
    doubles the memory of every first derivative. `Unroll` from z0 has them.
    """

    method: NormalCG | GMRES | Picard | Anderson | Solver = NormalCG()
    tolerance: Tolerance = Tolerance(atol=0, rtol=1e-6, max_steps=500)
    report: Report | None = None

    def __post_init__(self) -> None:
        if isinstance(self.method, type) or not (hasattr(self.method, "solve") or hasattr(self.method, "step")):
            raise TypeError(f"method must be NormalCG(), GMRES(), Picard() or Anderson(), got {self.method!r}")
        if not isinstance(self.tolerance, Tolerance):
            raise TypeError(f"tolerance must be a Tolerance, got {self.tolerance!r}")

    def attach(self, T: Map, z_star: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Latent:
        z_star = detach(z_star)
        value = T(z_star, *inputs)
        parts = leaves_like(z_star, value, "T")
        if not (torch.is_grad_enabled() and any(part.requires_grad for part in parts)):
            return value
        space = Space.of(z_star, coupled=coupled)
        problem = _Problem(self, with_autocast_of(space, T), z_star, tuple(inputs), space)
        return rebuild(z_star, _Backward.apply(problem, *parts))


@dataclass(frozen=True)
class _Problem:
    """Everything the backward pass needs: it solves for w at z*, whatever the cotangent."""

    mode: Implicit
    T: Map
    z_star: Latent
    inputs: tuple[Any, ...]
    space: Space

    def solve(self, g: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """w for the cotangent g."""
        with torch.no_grad(), without_autocast(self.space):
            cotangent = [part.detach().to(self.space.dtype) for part in g]
            w = self.space.nest(self._rows(self.space.rows(rebuild(self.z_star, cotangent), "the cotangent")))
        found = [a.to(b.dtype) for a, b in zip(leaves_like(self.z_star, w, "w"), g, strict=True)]
        if torch.is_grad_enabled():  # a graph of this backward pass is being recorded
            return _Refuse.apply(len(found), *found, *g, *parts)
        return tuple(found)

    def _map(self, z: Latent) -> Latent:
        """T at fixed inputs, in the structure of z*; under autocast in its type too."""
        value = leaves_like(self.z_star, self.T(z, *self.inputs), "T")
        return rebuild(self.z_star, [part.to(self.space.dtype) for part in value])

    def _rows(self, g: Tensor) -> Tensor:
        finite = g.isfinite().all(1)
        equation = self._equation(torch.where(finite[:, None], g, 0.0))
        w = _apply_method(self.mode.method, equation)
        self._tell(equation, w, finite)
        return torch.where(finite[:, None], w, g)

    def _equation(self, g: Tensor) -> Adjoint:
        space = self.space
        with torch.enable_grad():  # torch.func needs it to record J' as a function
            pull = torch.func.vjp(self._map, self.z_star)[1]
            push = torch.func.vjp(pull, self.z_star)[1]  # J' is linear: the pullback of J' is J
        return Adjoint(
            transposed=lambda w: space.rows(detach(pull(space.nest(w))[0]), "J'"),
            forward=lambda v: space.rows(detach(push((space.nest(v),))[0]), "J"),
            g=g,
            tolerance=self.mode.tolerance,
            space=space,
        )

    def _tell(self, equation: Adjoint, w: Tensor, finite: Tensor) -> None:
        """Report and warn from the true residual, not from the one a recursion believes."""
        if not self.mode.tolerance.check_every and self.mode.report is None:
            return
        residual = equation.size(equation.g - equation.A(w))
        met = residual <= equation.threshold
        status = tuple(
            Status.NONFINITE if not f or not r < torch.inf else Status.CONVERGED if m else Status.MAX_STEPS
            for f, r, m in zip(finite.tolist(), residual.tolist(), met.tolist(), strict=True)
        )
        spread = status * self.space.batch if self.space.coupled else status
        if self.mode.report is not None:
            self.mode.report(equation.products, self.space.spread(residual), spread)
        if not bool((met | ~finite).all()):
            warnings.warn(_complaint(self.mode, residual / equation.size(equation.g), status), stacklevel=2)


def _apply_method(method: Any, equation: Adjoint) -> Tensor:
    if hasattr(method, "solve"):
        return method.solve(equation)
    # A fixed-point solver: in units of the threshold, so that "relative to g" becomes an absolute tolerance.
    tolerance = equation.tolerance
    unit = equation.threshold[:, None]
    unit = torch.where(unit > 0, unit, 1.0)
    g = equation.g / unit
    scaled = Tolerance(
        atol=1.0, max_steps=tolerance.max_steps, norm=_Like(equation), check_every=tolerance.check_every
    )
    return solve(lambda w: g + w - equation.A(w), g, method, tolerance=scaled).value * unit


@dataclass(frozen=True)
class _Like:
    """The norm of the equation's tolerance, for rows whose nest the fixed-point loop does not know."""

    equation: Adjoint

    def measure(self, rows: Tensor, space: Space) -> Tensor:
        return self.equation.tolerance.norm.measure(rows, self.equation.space)

    def scale(self, space: Space) -> float:
        return self.equation.tolerance.norm.scale(self.equation.space)


def _complaint(mode: Implicit, relative: Tensor, status: tuple[Status, ...]) -> str:
    count = Counter(status)
    missed = sum(n for kind, n in count.items() if kind is not Status.CONVERGED)
    return (
        f"the adjoint equation missed its tolerance for {missed} of {len(status)} samples "
        f"(worst residual {float(relative.max()):.1e} of |g|) by {mode.method}: "
        "allow more max_steps, loosen rtol, or check that T contracts (banach.contraction_factor)"
    )


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
            "(max_steps=0), whose second derivatives are exact for those steps"
        )
