"""The exact gradient, by the implicit function theorem, and the autograd Function that it is made of."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from banach import checks
from banach.backward.adjoint import Parts, Problem, Report
from banach.backward.jacobian import plain_attention
from banach.backward.krylov import LinearSolver, NormalCG
from banach.backward.mode import as_of_now, is_differentiated, unchanged
from banach.backward.neumann import carrying
from banach.latent import Latent, Space, detach, leaves, leaves_like, rebuild
from banach.solve import Map, Solver, Tolerance
from banach.solve.context import rounding, with_autocast_of

MAPPED = -1  # in place of a depth: outside of a vmap, where what T closes over is no longer mapped over


@dataclass(frozen=True)
class Implicit:
    """w = (I - J')^-1 g by a matrix-free linear solve, in forward mode t = (I - J)^-1 dT.

    All methods start at w = g, which is JFB. With host checks on, w is never worse than g: a sample that misses
    the tolerance gets the best w seen, by the Euclidean norm of its true residual; if any sample of the result is
    worse than g, as it can be where T mixes samples, all get g. An unmet tolerance issues an `AdjointWarning`.
    In a captured training step the loop runs on the device. There all get g if any row of w is worse than g, and
    nothing warns.

    A backward pass evaluates T again, so what T reads must not change before it. A change in place of an input,
    of `Solution.value`, or of a parameter of a network's R, is refused. A plain function is evaluated with the
    variables around it as they were. Products with J come from torch.func. Where T holds what that refuses (an
    LSTM, a full backward hook, a CSR matrix) they come from plain autograd, and a hook is called once per product.
    A nonfinite cotangent stays nonfinite, so that a gradient scaler sees it.

    Args:
        method: `NormalCG()` (the paper's, two products per step), `GMRES()`, or the iteration w <- J' w + g by
            `Picard()`, `Anderson()` or `Broyden()`.
        tolerance: of the residual g - (I - J') w, rtol relative to g: write `Tolerance(atol=0, rtol=...)`, since
            the default atol counts too. None: max_steps=500, atol=0, and rtol by the arithmetic of T: 1e-8 in
            float64, 1e-5 in float32, 1e-2 in TF32, bfloat16 and float16. `check_every=0` makes exactly
            `max_steps` steps, without a host sync, a safeguard or a warning.
        report: called after every linear solve as report(products, residual, status): the true number of
            J-products, and per sample |g - (I - J') w|, by the tolerance's norm (RMS), and its `Status`.
        order: derivatives up to this order are exact, in every mixture of forward and reverse mode; higher ones
            are refused. Each order above 1 costs the memory of one more evaluation of T and one more linear
            solve in every derivative.
        count: an integer tensor on the device, to which J-products are added without a host sync, also in a
            captured training step.
    """

    method: LinearSolver | Solver = NormalCG()
    tolerance: Tolerance | None = None
    report: Report | None = None
    order: int = 1
    count: Tensor | None = field(default=None, repr=False)  # a run stores the repr, and may be older

    def __post_init__(self) -> None:
        checks.whole("order", self.order, 1)
        if isinstance(self.method, type) or not (hasattr(self.method, "solve") or hasattr(self.method, "step")):
            raise TypeError(f"method must be NormalCG(), GMRES(), Picard() or another solver, got {self.method!r}")
        if self.tolerance is not None and not isinstance(self.tolerance, Tolerance):
            raise TypeError(f"tolerance must be a Tolerance(atol=0, rtol=...), got {self.tolerance!r}")
        if self.report is not None and not callable(self.report):
            raise TypeError(f"report must be a function of (products, residual, status), got {self.report!r}")

    @property
    def syncs_with_host(self) -> bool:
        """Would a captured backward pass sync with the host? NormalCG and solvers loop on the device."""
        own = hasattr(self.method, "solve") and not isinstance(self.method, NormalCG)
        checked = self.tolerance is None or self.tolerance.steps_per_check > 0
        return (checked and own) or self.report is not None

    def tolerance_for(self, space: Space) -> Tolerance:
        """Return the tolerance; by default one that the arithmetic of T in this space, as it is now, can meet."""
        if self.tolerance is not None:
            return self.tolerance
        eps = rounding(space)
        rtol = 1e-8 if eps <= 2.0**-52 else 1e-5 if eps <= 2.0**-23 else 1e-2
        return Tolerance(atol=0, rtol=rtol, max_steps=500)

    def attach(self, T: Map, z_star: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Latent:
        z_star = detach(z_star)
        space = Space.of(z_star, coupled=coupled)
        with plain_attention() if self.order > 1 else nullcontext():
            value = T(z_star, *inputs)
        parts: Any = space.check(value)  # refuses another shape or dtype now, rather than in the backward pass
        if is_differentiated(parts):
            problem = Problem(
                mode=self,
                T=with_autocast_of(space, as_of_now(T)),
                z_star=z_star,
                value=detach(value),
                inputs=tuple(inputs),
                space=space,
                tolerance=self.tolerance_for(space),
                eps=rounding(space),
                computed_in=torch.get_autocast_dtype(space.device.type) if space.autocast else space.dtype,
                unchanged=unchanged(T, z_star, inputs),
            )
            parts = self._corrected(T, problem, parts)
        return rebuild(z_star, parts)

    def _corrected(self, T: Map, problem: Problem, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the parts of T(z*) as u, with `order` exact derivatives.

        The first one is by `attached`. Then u <- z + A^-1 (T(z) - z) at z = u, the chord method, with A = I - J at
        z* a constant. Values stay what they are, at the solution; every such step makes one derivative more exact.
        """
        z_star = problem.z_star
        # A backward pass meets the last correction first: those before it may only improve on that.
        inner = replace(problem, zero=True)
        u: Sequence[Tensor] = attached(problem if self.order == 1 else inner, parts)
        for exact in range(2, self.order + 1):
            z = carrying(z_star, rebuild(z_star, u))
            with plain_attention():
                pairs = list(zip(leaves(z), leaves_like(z_star, T(z, *problem.inputs), "T"), strict=True))
            steps = [_derivative(b.to(a.dtype) - a) for a, b in pairs]
            solved = attached(problem if exact == self.order else inner, steps)
            moves = [_derivative(a) + step for (a, _), step in zip(pairs, solved, strict=True)]
            u = [old.detach() + move.to(old.dtype) for old, move in zip(u, moves, strict=True)]
        return u


def _derivative(part: Tensor) -> Tensor:
    """Zero, with the derivative of the part."""
    return part - part.detach()


def attached(problem: Problem, parts: Sequence[Tensor]) -> Parts:
    """Return copies of the parts, whose derivative is (I - J)^-1: S may begin with an in-place activation."""
    return Inverse.apply(problem, True, 0, *parts, *parts, *parts)


class Inverse(torch.autograd.Function):
    """Return w, the known solution of (I - J) w = g or of (I - J') w = g, and differentiate it in g.

    Called as apply(problem, tangent, depth, *w, *g, *parts); w and g have as many tensors as T(z*) has parts. w is
    linear in g: a tangent of g needs a solve with the same matrix, and a cotangent of w one with the transpose.
    `tangent` says which matrix is that of w: True for I - J.

    `depth` is the order of the derivative that w belongs to, 0 for the value. A derivative beyond `Implicit.order`
    is refused. It would not be exact, because J depends on z* too. w is tied to the parts, so that every request
    for such a derivative is noticed. (`once_differentiable` returns a wrong result where the cotangent is a
    constant.)
    """

    @staticmethod
    def forward(problem: Problem, tangent: bool, depth: int, *tensors: Tensor) -> Parts:
        return tuple(tensor.clone() for tensor in tensors[: len(tensors) // 3])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Parts) -> None:
        ctx.problem, ctx.tangent, ctx.depth, *tensors = inputs
        parts = tensors[2 * len(output) :]
        ctx.save_for_backward(*parts)
        ctx.save_for_forward(*parts)

    @staticmethod
    def backward(ctx: Any, *c: Tensor) -> tuple[Tensor | None, ...]:
        _check_order(ctx)
        problem, parts, n = ctx.problem, ctx.saved_tensors, len(c)
        g: Any = (None,) * n
        if any(ctx.needs_input_grad[3 + n : 3 + 2 * n]):
            g = _solved(problem, c, parts, tangent=not ctx.tangent, depth=ctx.depth + 1)
        tied: Any = (None,) * n
        if is_differentiated(parts):
            zeros = tuple(torch.zeros_like(part) for part in parts)
            tied = Inverse.apply(problem, ctx.tangent, ctx.depth + 1, *zeros, *zeros, *parts)
        return (None, None, None, *(None,) * n, *g, *tied)

    @staticmethod
    def jvp(ctx: Any, *t: Any) -> Parts:
        _check_order(ctx)
        parts = tuple(unpack_dual(part).primal for part in ctx.saved_tensors)  # without the tangent computed here
        n = len(parts)
        given = zip(t[3 + n : 3 + 2 * n], parts, strict=True)
        g = tuple(torch.zeros_like(part) if tangent is None else tangent for tangent, part in given)
        return _solved(ctx.problem, g, parts, tangent=ctx.tangent, depth=ctx.depth + 1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """One after the other, each with a derivative of its own; with none where T itself is mapped over."""
        n = len(inputs) // 3 - 1
        if any(dim is not None for dim in in_dims[3 + 2 * n :]):
            return Inverse.apply(*inputs[:2], MAPPED, *inputs[3:]), in_dims[3 : 3 + n]
        columns = [
            [given] * info.batch_size if dim is None else given.unbind(dim)
            for given, dim in zip(inputs, in_dims, strict=True)
        ]
        rows = [Inverse.apply(*row) for row in zip(*columns, strict=True)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * n


def _solved(problem: Problem, g: Parts, parts: Parts, *, tangent: bool, depth: int) -> Parts:
    """Return (I - J)^-1 g, which depends on g and on the parts where that is recorded."""
    found = problem.solve(g, parts, tangent=tangent)
    if is_differentiated((*g, *parts)):
        found = Inverse.apply(problem, tangent, depth, *found, *g, *parts)
    return found


def _check_order(ctx: Any) -> None:
    order = ctx.problem.mode.order
    if ctx.depth == MAPPED:
        raise RuntimeError(
            "Implicit cannot be differentiated from outside of a vmap: differentiate inside, as vmap(grad(f)), or "
            "put what is mapped over on the first (batch) axis"
        )
    if ctx.depth >= order:
        kind = "second" if order == 1 else "higher"
        raise RuntimeError(
            f"Implicit(order={order}) gives no {kind} derivatives: write Implicit(order={order + 1}), or use "
            "Unroll(steps) from z0 (max_steps=0). (NormalCG around an R that holds an Implicit network needs "
            "second derivatives; GMRES() and Anderson() do not.)"
        )
