"""Batched matrix-free solvers for the adjoint equation (I - J') w = g, one system per row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from banach import checks
from banach.backward.adjoint import Adjoint, Parts
from banach.solve.context import device_loop

# (equation, residual, active samples, most steps) -> (update of w, steps taken)
Cycle = Callable[[Adjoint, Tensor, Tensor, int], tuple[Tensor, int]]


class LinearSolver(Protocol):
    """Solves the adjoint equation to its tolerance, usually from w = g. It calls `idle` to end early."""

    def solve(self, equation: Adjoint) -> Tensor: ...


def in_cycles(equation: Adjoint, cycle: Cycle, *, record: bool = False) -> Tensor:
    """Start at w = g, which is JFB, and correct w by cycles, each from a true residual.

    A sample ends when it meets the threshold, or is within rounding and a cycle no longer halves its residual.
    """
    w, done = equation.g, 0
    before = torch.full_like(equation.threshold, torch.inf)
    while done < equation.tolerance.max_steps:
        r = equation.residual(w, record=record and not done)
        size = equation.size(r)
        stuck = (size > before / 2) & (size <= equation.rounding(w))
        active = (size > equation.threshold) & ~stuck
        if equation.idle(active):
            break
        update, used = cycle(equation, r, active, equation.tolerance.max_steps - done)
        w, done, before = w + update, done + used, size
    return w


@dataclass(frozen=True)
class NormalCG:
    """Conjugate gradients on the normal equations A' A w = A' g, the paper's Jacobian-based mode.

    Written on the residual g - A w (CGLS), which it therefore never has to form from squares. Needs both J
    and J', two products per step, and converges for every invertible A. (Hestenes and Stiefel 1952.)
    """

    def solve(self, equation: Adjoint) -> Tensor:
        return in_cycles(equation, self._cycle, record=True)

    def _cycle(self, equation: Adjoint, r: Tensor, active: Tensor, room: int) -> tuple[Tensor, int]:
        zero = torch.zeros_like(r)
        now, step = self._step(equation, zero, r, zero, torch.ones_like(equation.threshold), active), 1
        if equation.on_device:  # a loop whose tensors stay in place

            def body() -> None:
                for old, new in zip(now, self._step(equation, *now), strict=True):
                    old.copy_(new)

            steps = torch.ones((), dtype=torch.int32, device=r.device)
            cast(Any, device_loop())(body, now[-1], steps, cycle=1, max_steps=room, stop_at=0)
            return now[0], room
        while step < room and not equation.idle(now[-1], step):
            now, step = self._step(equation, *now), step + 1
        return now[0], step

    def _step(self, equation: Adjoint, w: Tensor, r: Tensor, p: Tensor, power: Tensor, active: Tensor) -> Parts:
        s = equation.At(r)
        power, before = torch.linalg.vecdot(s, s), power
        p = s + ratio(power, before) * p
        q = equation.A(p)
        alpha = ratio(power, torch.linalg.vecdot(q, q))
        w, r = torch.where(active[:, None], w + alpha * p, w), r - alpha * q
        return w, r, p, power, active & (equation.size(r) > equation.threshold)


@dataclass(frozen=True)
class GMRES:
    """The w of least residual in the Krylov space of A and g, restarted every `restart` products.

    Needs J' alone, one product per step, and keeps `restart` latents. Frozen samples get zero basis vectors,
    which change nothing. (Saad and Schultz 1986.)
    """

    restart: int = 20

    def __post_init__(self) -> None:
        checks.whole("restart", self.restart, 1)

    def solve(self, equation: Adjoint) -> Tensor:
        return in_cycles(equation, self._cycle)

    def _cycle(self, equation: Adjoint, r: Tensor, active: Tensor, room: int) -> tuple[Tensor, int]:
        """Arnoldi's basis V and Hessenberg matrix H; the rotations Q make H triangular as it grows."""
        room = min(self.restart, room)
        beta = torch.linalg.vector_norm(r, dim=1)
        goal = equation.threshold * ratio(beta, equation.size(r))[:, 0]  # the threshold, as a Euclidean length
        V = r.new_zeros(room + 1, *r.shape).transpose(0, 1)  # a vector of the basis is one contiguous matrix
        V[:, 0] = torch.where(active[:, None], r * ratio(1.0, beta), 0.0)
        H = r.new_zeros(len(r), room + 1, room)
        Q = torch.eye(room + 1, dtype=r.dtype, device=r.device).repeat(len(r), 1, 1)
        for step in range(room):
            v, basis = equation.A(V[:, step]), V[:, : step + 1]
            for _ in range(2):  # one pass is not orthogonal enough
                along = torch.bmm(basis, v[..., None])
                H[:, : step + 1, step] += along[..., 0]
                v = torch.baddbmm(v[..., None], basis.mT, along, alpha=-1)[..., 0]
            length = torch.linalg.vector_norm(v, dim=1)
            H[:, step + 1, step] = length
            _rotate_(Q, H, step)
            active = active & (beta * Q[:, step + 1, 0].abs() > goal)
            V[:, step + 1] = torch.where(active[:, None], v * ratio(1.0, length), 0.0)
            if equation.idle(active, step + 1):
                break
        used = step + 1
        R, right = H[:, :used, :used], beta[:, None, None] * Q[:, :used, :1]
        # Where R has a 0 on its diagonal, the right side is 0 too: that basis vector contributes nothing.
        ended = (R.diagonal(dim1=1, dim2=2) == 0).to(R.dtype)
        y = torch.linalg.solve_triangular(R + torch.diag_embed(ended), right, upper=True)
        return torch.bmm(y.mT, V[:, :used])[:, 0], used


def _rotate_(Q: Tensor, H: Tensor, step: int) -> None:
    """Apply the rotations so far to the new column, and add the one that clears its last entry."""
    column = torch.bmm(Q, H[:, :, step, None])[..., 0]
    a, b = column[:, step], column[:, step + 1]
    length = torch.hypot(a, b)
    cos, sin = ratio(a, length), ratio(b, length)  # both 0 where the basis has ended: weight 0
    upper, lower = Q[:, step].clone(), Q[:, step + 1].clone()
    Q[:, step] = cos * upper + sin * lower
    Q[:, step + 1] = cos * lower - sin * upper
    column[:, step] = length
    H[:, : step + 1, step] = column[:, : step + 1]


def ratio(a: Tensor | float, b: Tensor) -> Tensor:
    """(samples, 1): a / b, and 0 where b is 0, so that a finished sample stays where it is."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))[:, None]
