"""Measure the theory on one network: contraction and gradients on a batch, dense matrices at single images.

Everything is in float64, so that the network is measured and not the rounding. For one image, with theta_S the
weights of S, theta_T those of Q and R, and ' for transposed, the paper's matrices are

    J = dT/du,   J~ = diag(I, I - J),   M = diag((dS/dtheta_S)', (dT/dtheta_T)'),   v = (dl/dy, (dS/du)' dl/dy)
    gradient = M J~'^-1 v,   JFB's direction p = -M v

J is complete. M has the columns of one channel and some others: the eigenvalues of a principal part of M'M are
between those of M'M (Cauchy), so its kappa is a lower bound on kappa(M'M). That is enough to show where the
Assumption fails.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from banach import Implicit, Tolerance, contraction_factor, diagnose

TIGHT = Tolerance(atol=0.0, rtol=1e-10, max_steps=1000)
OTHERS = 64  # columns of M besides those of one channel
CHUNK = 256  # rows of J at a time
DISTANCES = (1e-3, 1e-2, 3e-2, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)  # |u - u*| / |u*|
DIRECTIONS, ASCENTS = 8, 5
ROUNDING = 1e-10  # slack for comparing float64 sums with their bounds
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Lemma:
    """<x, (I - J) x> >= (1 - gamma) |x|^2 and <x, (I - J)^-1 x> >= (1 - gamma) / (1 + gamma)^2 |x|^2.

    `coercivity` and `inverse` are the least such quotients: the least eigenvalues of the symmetric parts.
    Supposes gamma < 1; beyond it the bounds say nothing, and the inverse may not exist (NaN).
    """

    gamma: float
    coercivity: float
    inverse: float

    @staticmethod
    def of(J: Tensor) -> Lemma:
        """Return the lemma of J = dT/du."""
        A = torch.eye(len(J), dtype=J.dtype) - J
        inverse, info = torch.linalg.inv_ex(A)
        # Not by singular values, which take minutes at n = 4,096.
        gamma = float(torch.linalg.eigvalsh(J.mT @ J)[-1].clamp(min=0).sqrt())
        return Lemma(gamma, _least_quotient(A), math.nan if int(info) else _least_quotient(inverse))

    @property
    def holds(self) -> bool:
        near = self.coercivity >= 1 - self.gamma - ROUNDING
        return near and self.inverse >= (1 - self.gamma) / (1 + self.gamma) ** 2 - ROUNDING


@dataclass(frozen=True)
class Conditioning:
    """The Assumption: M has full column rank, and kappa(M'M) <= 1 / gamma, the `limit`.

    Batch norm that ends R in train mode rules full rank out: it holds the mean of T fixed, one direction per
    channel (and its variance, but for eps: a second one that is nearly lost).
    """

    kappa: float
    limit: float
    rank: int
    columns: int

    @staticmethod
    def of(M: Tensor, gamma: float) -> Conditioning:
        """Return that of M, by its singular values: the small ones of M'M are lost in rounding."""
        s, columns = torch.linalg.svdvals(M), M.shape[1]
        rank = int((s > s.max() * max(M.shape) * torch.finfo(M.dtype).eps).sum())
        kappa = float((s.max() / s.min()) ** 2) if rank == columns else math.inf
        return Conditioning(kappa, 1 / gamma if gamma else math.inf, rank, columns)

    @property
    def holds(self) -> bool:
        return self.rank == self.columns and self.kappa <= self.limit


def descent_bound(M: Tensor, gamma: float, gradient: Tensor) -> float:
    """Return (lambda_- - gamma lambda_+) |M' gradient|^2, lambda those of (M'M)^-1; M has full column rank.

    The Theorem: -<gradient, p> is at least that. The paper prints it with a factor 2, by a slip in the last
    equality of its proof.
    """
    s = torch.linalg.svdvals(M)
    return float((s.max() ** -2 - gamma * s.min() ** -2) * (M.mT @ gradient).square().sum())


@dataclass(frozen=True)
class Local:
    """The paper's statements at one image. `conditioning` is that of the chosen columns of M.

    `statistics` is their rank when R normalises by the statistics of this image. `random` and `worst` are
    <gradient, p(u)> / |<gradient, p(u*)>| at DISTANCES from u*; below 0, JFB taken at u descends: the largest over
    random directions, and that of the direction found by gradient ascent. The network's solver stops at distance
    `own`. The Corollary certifies descent where |p(u) - p(u*)| < `allowed`.
    """

    lemma: Lemma
    conditioning: Conditioning
    statistics: int
    cosine: float
    random: tuple[float, ...]
    worst: tuple[float, ...]
    allowed: float
    own: float

    def radius(self, left: float) -> float:
        """Return the distance up to which more than `left` of the descent remains in the worst direction."""
        kept = takewhile(lambda pair: pair[1] < -left, zip(DISTANCES, self.worst, strict=True))
        return max((distance for distance, _ in kept), default=0.0)


@dataclass(frozen=True, eq=False)
class Numbers:
    """What is measured on one snapshot. Tuples have one entry per image; NaN where no fixed point was found.

    `lipschitz` is sigma_max(dT/dd). Cosines are those of JFB with the exact gradient of the mean loss, where the
    solver stops (`exact_cosine`: at u*). In training mode batch statistics couple the images: one number for all.
    """

    found: tuple[bool, ...]
    sigma: tuple[float, ...]
    rate: tuple[float, ...]
    lipschitz: tuple[float, ...]
    cosine: float
    exact_cosine: float
    training_sigma: float
    training_rate: float
    training_cosine: float
    locals: tuple[Local, ...]


def measure(net: Any, d: Tensor, labels: Tensor, *, dense: int, smoothing: float = 0.0) -> Numbers:
    """Measure a network, which stays as it is, on images d in float64, and the first `dense` of them densely.

    The loss is the cross entropy with label `smoothing`. Images without a fixed point have no dense part.
    """
    net = copy.deepcopy(net).double().eval()
    training, loss = copy.deepcopy(net).train(), partial(cross_entropy, label_smoothing=smoothing)
    with torch.random.fork_rng([]), warnings.catch_warnings():
        torch.manual_seed(0)  # dropout in training mode: the same masks at every epoch
        warnings.simplefilter("ignore")  # `found` says where there is no fixed point
        here, there = (diagnose.measure_contraction(tight(one), d) for one in (net, training))
        found, lipschitz = here.solution.converged, _lipschitz(net, d)
        cosines = [_cosines(one, d, partial(loss, target=labels)) for one in (net, training)]
        chosen = [slice(i, i + 1) for i in range(dense) if bool(found[i])]
        locals_ = tuple(local(net, d[one], partial(loss, target=labels[one])) for one in chosen)

    def per_image(values: Tensor) -> tuple[float, ...]:
        return tuple(values.where(found, math.nan).tolist())

    return Numbers(
        found=tuple(found.tolist()),
        sigma=per_image(here.sigma),
        rate=per_image(here.rate),
        lipschitz=per_image(lipschitz),
        cosine=cosines[0][0],
        exact_cosine=cosines[0][1],
        training_sigma=float(there.sigma.max()),
        training_rate=float(there.rate.max()),
        training_cosine=cosines[1][0],
        locals=locals_,
    )


def tight(net: Any) -> Any:
    """Return the same network with a solver that goes to the fixed point, in the network's own norm."""
    other = copy.copy(net)
    other.tolerance = replace(TIGHT, norm=net.tolerance.norm)
    return other


def _cosines(net: Any, d: Tensor, loss: Loss) -> tuple[float, float]:
    """Return the cosine where the solver stops and at u*, NaN unless every image has a fixed point."""
    own, exact = diagnose.descent_check(net, d, loss), diagnose.descent_check(tight(net), d, loss)
    known = bool(exact.solution.converged.all())
    return (own.cosine, exact.cosine) if known else (math.nan, math.nan)


def _lipschitz(net: Any, d: Tensor) -> Tensor:
    """(images,): sigma_max(dT/dd) at u*, as that of (d, u) -> (0, T(u*; d)), which keeps its shape."""
    at = diagnose.network_map(tight(net), d)
    return contraction_factor(lambda z: (torch.zeros_like(z[0]), at.T(at.u, net.Q(z[0]))), (d, at.u))


def local(net: Any, d: Tensor, loss: Loss) -> Local:
    """Measure one image with dense matrices; `net` is in eval mode and float64."""
    image = Image(net, d, loss)
    u, gradient, p, M = image.u.flatten(), image.gradient, image.p(image.u), image.matrix()
    lemma, size, inner = Lemma.of(image.J()), float(u.norm()), -float(gradient @ p)
    conditioning, lengths = Conditioning.of(M, lemma.gamma), float(gradient.norm() * p.norm())
    full = conditioning.rank == conditioning.columns
    return Local(
        lemma=lemma,
        conditioning=conditioning,
        statistics=image.rank_with_statistics(),
        cosine=inner / lengths if lengths else math.nan,
        random=tuple(image.highest_at_random(size * part) / abs(inner) for part in DISTANCES),
        worst=tuple(image.highest(size * part) / abs(inner) for part in DISTANCES),
        allowed=descent_bound(M, lemma.gamma, gradient) / float(gradient.norm()) if full else -math.inf,
        own=float((diagnose.network_map(net, d).u.flatten() - u).norm()) / size,
    )


class Image:
    """One image d of a network in eval mode: its matrices, and p(u) = -d/dtheta loss(S(R(u, Q(d)))) at any u."""

    def __init__(self, net: Any, d: Tensor, loss: Loss) -> None:
        self.net, self.d, self.loss = net, d, loss
        self.theta_S, self.theta_T = [*net.S.parameters()], [*net.Q.parameters(), *net.R.parameters()]
        self.weights = [*self.theta_S, *self.theta_T]
        self.u = diagnose.network_map(tight(net), d).u
        n, channel = self.u.numel(), self.u.shape[2:].numel()  # batch norm acts on whole channels
        others = torch.randperm(n - channel, generator=torch.Generator().manual_seed(0))[:OTHERS]
        self.columns = torch.cat([torch.arange(channel), channel + others])

    @cached_property
    def gradient(self) -> Tensor:
        """The exact gradient, by Implicit."""
        exact = tight(self.net)
        exact.backward = Implicit(tolerance=TIGHT)
        return _flat(torch.autograd.grad(self.loss(exact(self.d)), self.weights))

    def J(self) -> Tensor:
        """Return dT/du at u*."""
        with torch.no_grad():  # derivatives in u only; torch.func takes them all the same
            v = self.net.Q(self.d)
            return torch.func.jacrev(lambda u: self.net.R(u, v).flatten(), chunk_size=CHUNK)(self.u).flatten(1)

    def matrix(self) -> Tensor:
        """Return M with all columns of S and the chosen ones of T."""
        y, t = self.net.S(self.u).flatten(), self.net.R(self.u, self.net.Q(self.d)).flatten()[self.columns]
        return torch.block_diag(_rows(y, self.theta_S).mT, _rows(t, self.theta_T).mT)

    def rank_with_statistics(self) -> int:
        """Return the rank of the same columns of M with R in training mode."""
        other = copy.deepcopy(self.net)
        other.R.train()
        return Conditioning.of(Image(other, self.d, self.loss).matrix(), 0.0).rank

    def p(self, u: Tensor, *, twice: bool = False) -> Tensor:
        """Return JFB's direction at u, flat; `twice`: with its graph, to be differentiated again."""
        y = self.net.S(self.net.R(u.view_as(self.u), self.net.Q(self.d)))
        return -_flat(torch.autograd.grad(self.loss(y), self.weights, create_graph=twice))

    def inner(self, u: Tensor) -> float:
        """Return <gradient, p(u)>."""
        return float(self.gradient @ self.p(u))

    def highest_at_random(self, distance: float) -> float:
        """Return the largest <gradient, p(u)> over random directions of this length from u*."""
        generator, u = torch.Generator().manual_seed(0), self.u.flatten()
        drawn = torch.randn(DIRECTIONS, len(u), generator=generator, dtype=torch.float64)
        return max(self.inner(u + distance * x / x.norm()) for x in drawn)

    def highest(self, distance: float) -> float:
        """Return the largest <gradient, p(u)> that gradient ascent finds at this distance from u*."""
        centre = near = self.u.flatten()
        best = -math.inf
        for _ in range(ASCENTS):
            leaf = near.detach().clone().requires_grad_()
            slope = torch.autograd.grad(self.gradient @ self.p(leaf, twice=True), leaf)[0]
            near = centre + distance * slope / slope.norm().clamp(min=torch.finfo(slope.dtype).tiny)
            best = max(best, self.inner(near))
        return best


def _least_quotient(A: Tensor) -> float:
    """Return min <x, A x> / |x|^2."""
    return float(torch.linalg.eigvalsh((A + A.mT) / 2)[0])


def _rows(values: Tensor, weights: list[Tensor]) -> Tensor:
    found = [torch.autograd.grad(x, weights, retain_graph=True, materialize_grads=True) for x in values]
    return torch.stack([_flat(row) for row in found])


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
