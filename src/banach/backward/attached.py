"""The autograd Functions of `Implicit`: the derivative (I - J)^-1, forwards and backwards, under vmap too."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from banach.backward.adjoint import Problem
from banach.backward.mode import is_differentiated

Parts = tuple[Tensor, ...]
MAPPED = -1  # in place of a depth: outside of a vmap, where what T closes over is no longer mapped over


def attached(problem: Problem, parts: Sequence[Tensor]) -> Parts:
    """Return copies of the parts, whose derivative is (I - J)^-1: S may begin with an in-place activation."""
    found: Parts = Inverse.apply(problem, True, 0, *parts, *parts, *parts)
    return found


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
