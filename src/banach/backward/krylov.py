"""Batched matrix-free solvers for the adjoint equation (I - J') w = g, one system per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from banach.latent import Space
from banach.solve import Tolerance


@dataclass
class Adjoint:
    """The equation (I - J') w = g: products with A = I - J' and A' = I - J, counted, and the stopping test."""

    transposed: Callable[[Tensor], Tensor]  # w -> J' w
    forward: Callable[[Tensor], Tensor]  # v -> J v
    g: Tensor  # (samples, width)
    tolerance: Tolerance
    space: Space
    products: int = 0

    def A(self, w: Tensor) -> Tensor:
        self.products += self.space.batch
        return w - self.transposed(w)

    def At(self, v: Tensor) -> Tensor:
        self.products += self.space.batch
        return v - self.forward(v)

    def size(self, rows: Tensor) -> Tensor:
        return self.tolerance.norm.measure(rows, self.space) * self.tolerance.norm.scale(self.space)

    @property
    def threshold(self) -> Tensor:
        """(samples,): what the residual must come down to; the relative part is relative to g."""
        return self.tolerance.atol + self.tolerance.rtol * self.size(self.g)

    def idle(self, active: Tensor, step: int) -> bool:
        """Ask the host, at checks only, whether nobody is active any more."""
        every = self.tolerance.check_every
        return bool(every) and step % every == 0 and not bool(active.any())


@dataclass(frozen=True)
class NormalCG:
    """Conjugate gradients on the normal equations A' A w = A' g, the paper's Jacobian-based mode.

    Written on the residual g - A w (CGLS), which it therefore never has to form from squares. Needs both J
    and J', two products per step, and converges for every invertible A. (Hestenes and Stiefel 1952.)
    """

    def solve(self, equation: Adjoint) -> Tensor:
        w, r = torch.zeros_like(equation.g), equation.g
        s = equation.At(r)
        p, power = s, torch.linalg.vecdot(s, s)
        threshold = equation.threshold
        active = equation.size(r) > threshold
        for step in range(1, equation.tolerance.max_steps + 1):
            if equation.idle(active, step - 1):
                break
            q = equation.A(p)
            alpha = _ratio(power, torch.linalg.vecdot(q, q))
            w = torch.where(active[:, None], w + alpha * p, w)
            r = torch.where(active[:, None], r - alpha * q, r)
            s = equation.At(r)
            power, before = torch.linalg.vecdot(s, s), power
            p = s + _ratio(power, before) * p
            active = active & (equation.size(r) > threshold)
        return w


@dataclass(frozen=True)
class GMRES:
    """The w of least residual in the Krylov space of A and g, restarted every `restart` products.

    Needs J' alone, one product per step, and keeps `restart` latents. Frozen samples get zero basis vectors,
    which change nothing. (Saad and Schultz 1986.)
    """

    restart: int = 20

    def __post_init__(self) -> None:
        if isinstance(self.restart, bool) or not isinstance(self.restart, int) or self.restart < 1:
            raise ValueError(f"restart must be a whole number of at least 1, got {self.restart!r}")

    def solve(self, equation: Adjoint) -> Tensor:
        w, r, done = torch.zeros_like(equation.g), equation.g, 0
        threshold = equation.threshold
        active = equation.size(r) > threshold
        while done < equation.tolerance.max_steps and not equation.idle(active, 0):
            room = min(self.restart, equation.tolerance.max_steps - done)
            update, used = self._cycle(equation, r, active, threshold, room)
            w, done = w + update, done + used
            r = equation.g - equation.A(w)
            active = active & (equation.size(r) > threshold)
        return w

    def _cycle(
        self, equation: Adjoint, r: Tensor, active: Tensor, threshold: Tensor, room: int
    ) -> tuple[Tensor, int]:
        """One Arnoldi cycle from residual r: the update of w, and the number of products spent."""
        beta = torch.linalg.vector_norm(r, dim=1)
        goal = threshold * _ratio(beta, equation.size(r))[:, 0]  # the threshold, as a Euclidean length
        V = [torch.where(active[:, None], r * _inverse(beta), 0.0)]
        columns: list[list[Tensor]] = []
        rotations: list[tuple[Tensor, Tensor]] = []
        right = [beta]
        for step in range(room):
            h, v = _orthogonalise(equation.A(V[step]), V)
            column = _rotate([*h, torch.linalg.vector_norm(v, dim=1)], rotations)
            rotations.append(_rotation(column[step], column[step + 1]))
            column = _rotate(column, rotations[-1:], start=step)
            columns.append(column)
            right[step:] = _rotate([right[step], torch.zeros_like(beta)], rotations[-1:])
            active = active & (right[-1].abs() > goal)
            V.append(torch.where(active[:, None], v * _inverse(torch.linalg.vector_norm(v, dim=1)), 0.0))
            if equation.idle(active, step + 1):
                break
        return _combine(columns, right, V), len(columns)


def _orthogonalise(v: Tensor, basis: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """v without its parts along the basis, and those parts; twice, since once loses orthogonality."""
    V = torch.stack(basis, 1)
    first = torch.bmm(V, v[..., None])
    v = torch.baddbmm(v[..., None], V.mT, first, alpha=-1)[..., 0]
    second = torch.bmm(V, v[..., None])
    v = torch.baddbmm(v[..., None], V.mT, second, alpha=-1)[..., 0]
    return list((first + second)[..., 0].unbind(1)), v


def _rotation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine that turn (a, b) into (length, 0); the identity where both are zero."""
    length = torch.hypot(a, b)
    zero = length == 0
    return torch.where(zero, 1.0, a / length), torch.where(zero, 0.0, b / length)


def _rotate(x: list[Tensor], rotations: list[tuple[Tensor, Tensor]], start: int = 0) -> list[Tensor]:
    x = list(x)
    for i, (cos, sin) in enumerate(rotations, start):
        x[i], x[i + 1] = cos * x[i] + sin * x[i + 1], cos * x[i + 1] - sin * x[i]
    return x


def _combine(columns: list[list[Tensor]], right: list[Tensor], V: list[Tensor]) -> Tensor:
    """Back substitution in the triangular system, then the combination of basis vectors."""
    y: list[Tensor] = [torch.zeros_like(right[0])] * len(columns)
    for i in reversed(range(len(columns))):
        known = [columns[j][i] * y[j] for j in range(i + 1, len(columns))]
        y[i] = _ratio(right[i] - sum(known), columns[i][i])[:, 0]
    return torch.stack([a[:, None] * v for a, v in zip(y, V, strict=False)]).sum(0)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """(samples, 1): a / b, and 0 where b is 0, so that a finished sample stays where it is."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))[:, None]


def _inverse(a: Tensor) -> Tensor:
    return _ratio(torch.ones_like(a), a)
