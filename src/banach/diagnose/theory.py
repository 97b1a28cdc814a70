"""The paper's Lemma, Assumption, Theorem and Corollary, measured: each quantity next to its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banach.diagnose.dense import Linearised

_ROUNDING = 1e-10  # slack for comparing float64 sums with their bounds


@dataclass(frozen=True)
class Lemma:
    """<x, (I - J) x> >= (1 - gamma) |x|^2 and <x, (I - J)^-1 x> >= (1 - gamma) / (1 + gamma)^2 |x|^2.

    `coercivity` and `inverse` are the least such quotients: the least eigenvalues of the symmetric parts.
    Supposes gamma < 1; beyond it the bounds say nothing, and the inverse may not exist (NaN).
    """

    gamma: float
    coercivity: float
    coercivity_bound: float
    inverse: float
    inverse_bound: float

    @property
    def holds(self) -> bool:
        near = self.coercivity >= self.coercivity_bound - _ROUNDING
        return near and self.inverse >= self.inverse_bound - _ROUNDING


@dataclass(frozen=True)
class Conditioning:
    """The Assumption: M has full column rank, and kappa(M'M) <= 1 / gamma.

    At equality the Theorem's bound is 0, so for descent it takes a strict inequality. Batch norm that ends R in
    train mode rules full rank out: it holds the mean of T fixed, one direction per channel (and its variance,
    but for eps: a second one that is nearly lost).
    """

    kappa: float
    limit: float
    rank: int
    columns: int

    @property
    def holds(self) -> bool:
        return self.rank == self.columns and self.kappa <= self.limit


@dataclass(frozen=True)
class Identity:
    """p = -(M J~' M^+) gradient: JFB is a preconditioned gradient where M has full column rank.

    `error` is |difference| / |p|. The paper prints J~, in a layout in which that is transposed already:
    `error_printed` is the error of what it prints, read with Jacobians laid out as usual.
    """

    error: float
    error_printed: float


@dataclass(frozen=True)
class Theorem:
    """<gradient, p> <= -(lambda_- - gamma lambda_+) |w|^2, w = M' gradient, lambda those of (M'M)^-1.

    The paper prints the bound with a factor 2 before the bracket; its last equality is off by that 2, and
    `printed` is violated by real cases. `applies` where the bracket is positive, that is kappa(M'M) < 1 / gamma:
    then p is a descent direction. The inequality itself holds whatever the sign.
    """

    inner: float
    bound: float
    printed: float
    lambda_min: float
    lambda_max: float
    gamma: float
    scale: float  # |gradient| |p|: what rounding of `inner` is relative to

    @property
    def applies(self) -> bool:
        return self.lambda_min > self.gamma * self.lambda_max

    @property
    def holds(self) -> bool:
        return self.inner <= self.bound + _ROUNDING * self.scale

    @property
    def printed_holds(self) -> bool:
        return self.inner <= self.printed + _ROUNDING * self.scale

    @property
    def descends(self) -> bool:
        return self.inner < 0


@dataclass(frozen=True)
class Corollary:
    """<gradient, p(u)> for u at distance eps (Euclidean) from u*: the largest over the directions tried.

    `moved` is the largest |p(u) - p(u*)|. While it is below `allowed`, which is the Theorem's
    (lambda_- - gamma lambda_+) |w|^2 / |gradient|, descent is certain (strictly below: the paper's proof allows
    equality, but leans on the factor 2 for it). `radius` is the largest eps tried up to which every direction
    descends; 0 if none.
    """

    eps: tuple[float, ...]
    inner: tuple[float, ...]
    moved: tuple[float, ...]
    allowed: float

    @property
    def radius(self) -> float:
        reached = 0.0
        for eps, inner in zip(self.eps, self.inner, strict=True):
            if not inner < 0:
                break
            reached = eps
        return reached


def lemma(at: Linearised) -> Lemma:
    """Coercivity of I - J and of its inverse."""
    A = torch.eye(len(at.J), dtype=torch.float64, device=at.J.device) - at.J.double()
    inverse, info = torch.linalg.inv_ex(A)
    gamma = at.gamma
    return Lemma(
        gamma=gamma,
        coercivity=_least_quotient(A),
        coercivity_bound=1 - gamma,
        inverse=_least_quotient(inverse) if not int(info) else math.nan,
        inverse_bound=(1 - gamma) / (1 + gamma) ** 2,
    )


def conditioning(at: Linearised) -> Conditioning:
    """kappa(M'M) from the singular values of M, not of M'M, whose small ones are lost in rounding."""
    s = torch.linalg.svdvals(at.M.double())
    columns = at.M.shape[1]
    rank = int((s > s.max() * _cut(at)).sum()) if len(s) else 0
    kappa = float((s.max() / s.min()) ** 2) if rank == columns else math.inf
    gamma = at.gamma
    return Conditioning(kappa, 1 / gamma if gamma > 0 else math.inf, rank, columns)


def identity(at: Linearised) -> Identity:
    """p from JFB against the preconditioned gradient from Implicit."""
    M, gradient, p = at.M.double(), at.gradient.double(), at.direction.double()
    inside = torch.linalg.pinv(M, rtol=_cut(at)) @ gradient
    J_tilde = at.J_tilde.double()

    def error(middle: Tensor) -> float:
        return float((p + M @ (middle @ inside)).norm() / p.norm())

    return Identity(error(J_tilde.mT), error(J_tilde))


def theorem(at: Linearised) -> Theorem:
    """<gradient, p> against its bound."""
    gradient, p = at.gradient.double(), at.direction.double()
    low, high, descent = _bracket(at)
    return Theorem(
        inner=float(gradient @ p),
        bound=-descent,
        printed=-2 * descent,
        lambda_min=low,
        lambda_max=high,
        gamma=at.gamma,
        scale=float(gradient.norm() * p.norm()),
    )


def corollary(
    at: Linearised, eps: Sequence[float] = (1e-3, 1e-2, 1e-1, 1.0), *, directions: int = 8, seed: int = 0
) -> Corollary:
    """Does JFB still descend when it is taken at an approximate fixed point?"""
    if at.u is None or at.direction_at is None:
        raise ValueError("corollary moves the latent of a network, got bare matrices; use linearise(net, d, loss)")
    gradient, p = at.gradient.double(), at.direction.double()
    distances = tuple(sorted(float(e) for e in eps))
    unit = _unit_vectors(at.u, directions, seed)
    inner, moved = [], []
    for distance in distances:
        near = [at.direction_at(at.u + distance * x).double() for x in unit]
        inner.append(max(float(gradient @ q) for q in near))
        moved.append(max(float((q - p).norm()) for q in near))
    allowed = _bracket(at)[2] / float(gradient.norm())
    return Corollary(distances, tuple(inner), tuple(moved), allowed)


def _bracket(at: Linearised) -> tuple[float, float, float]:
    """lambda_-, lambda_+ of (M'M)^-1 and (lambda_- - gamma lambda_+) |w|^2; minus infinity without full rank."""
    M, gradient = at.M.double(), at.gradient.double()
    s = torch.linalg.svdvals(M)
    full = conditioning(at).rank == M.shape[1]
    low, high = float(s.max() ** -2), float(s.min() ** -2) if full else math.inf
    w = float((M.mT @ gradient).norm())
    if not full:
        return low, high, -math.inf if at.gamma > 0 else low * w**2
    return low, high, (low - at.gamma * high) * w**2


def _cut(at: Linearised) -> float:
    """Singular values of M below this part of the largest are rounding of the type M was computed in."""
    return max(at.M.shape) * torch.finfo(at.M.dtype).eps


def _least_quotient(A: Tensor) -> float:
    """min <x, A x> / |x|^2."""
    return float(torch.linalg.eigvalsh((A + A.mT) / 2)[0])


def _unit_vectors(u: Tensor, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, u.numel(), generator=generator, dtype=torch.float64)
    return list((drawn / drawn.norm(dim=1, keepdim=True)).to(u))
