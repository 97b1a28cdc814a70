"""Measure the theory on one network: contraction and gradients on a batch, dense matrices at single images.

Everything is in float64, so that the network is measured and not the rounding. J is complete. M has the columns of
one channel and some others: the eigenvalues of a principal part of M'M are between those of M'M (Cauchy), so its
kappa is a lower bound on kappa(M'M). That is enough to show where the Assumption fails.
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

from banach import Implicit, Tolerance, diagnose

TIGHT = Tolerance(atol=0.0, rtol=1e-10, max_steps=1000)
OTHERS = 64  # columns of M besides those of one channel
CHUNK = 256  # rows of J at a time
DISTANCES = (1e-3, 1e-2, 3e-2, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)  # |u - u*| / |u*|
DIRECTIONS, ASCENTS = 8, 5
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Local:
    """The paper's statements at one image. `conditioning` is that of the chosen columns of M.

    `statistics` is their rank when R normalises by the statistics of this image. `random` and `worst` are
    <gradient, p(u)> / |<gradient, p(u*)>| at DISTANCES from u*; below 0, JFB taken at u descends: the largest over
    random directions, and that of the direction found by gradient ascent. The network's solver stops at distance
    `own`. The Corollary certifies descent where |p(u) - p(u*)| < `allowed`.
    """

    lemma: diagnose.Lemma
    conditioning: diagnose.Conditioning
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
        found, lipschitz = here.solution.converged, diagnose.measure_sensitivity(tight(net), d).L
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


def local(net: Any, d: Tensor, loss: Loss) -> Local:
    """Measure one image with dense matrices; `net` is in eval mode and float64."""
    image = Image(net, d, loss)
    at, u = image.linearised, image.u.flatten()
    size, inner = float(u.norm()), -float(at.gradient @ at.direction)
    near = diagnose.corollary(at, [size * part for part in DISTANCES], directions=DIRECTIONS)
    lengths = float(at.gradient.norm() * at.direction.norm())
    return Local(
        lemma=diagnose.lemma(at),
        conditioning=diagnose.conditioning(at),
        statistics=image.rank_with_statistics(),
        cosine=inner / lengths if lengths else math.nan,
        random=tuple(value / abs(inner) for value in near.inner),
        worst=tuple(image.highest(size * part) / abs(inner) for part in DISTANCES),
        allowed=near.allowed,
        own=float((diagnose.network_map(net, d).u.flatten() - u).norm()) / size,
    )


class Dense(diagnose.Linearised):
    """Linearised with gamma from eigenvalues, once: a singular value decomposition takes minutes at n = 4,096."""

    @cached_property
    def gamma(self) -> float:
        return float(torch.linalg.eigvalsh(self.J.mT @ self.J)[-1].clamp(min=0).sqrt())


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
    def linearised(self) -> diagnose.Linearised:
        """J, M and both gradients: the exact one by Implicit, JFB's by plain autograd."""
        with torch.no_grad():  # derivatives in u only; torch.func takes them all the same
            v = self.net.Q(self.d)
            J = torch.func.jacrev(lambda u: self.net.R(u, v).flatten(), chunk_size=CHUNK)(self.u).flatten(1)
        exact = tight(self.net)
        exact.backward = Implicit(tolerance=TIGHT)
        gradient = _flat(torch.autograd.grad(self.loss(exact(self.d)), self.weights))
        M, u, unused = self.matrix(), self.u.flatten(), gradient[:0]
        return Dense(J, M, unused, gradient, self.p(u), M.shape[1] - len(self.columns), u, self.p)

    def p(self, u: Tensor, *, twice: bool = False) -> Tensor:
        """Return p(u), flat; `twice`: with its graph, to be differentiated again."""
        y = self.net.S(self.net.R(u.view_as(self.u), self.net.Q(self.d)))
        return -_flat(torch.autograd.grad(self.loss(y), self.weights, create_graph=twice))

    def rank_with_statistics(self) -> int:
        """Return the rank of the same columns of M with R in training mode."""
        other = copy.deepcopy(self.net)
        other.R.train()
        return diagnose.conditioning(replace(self.linearised, M=Image(other, self.d, self.loss).matrix())).rank

    def inner(self, u: Tensor) -> float:
        """Return <gradient, p(u)>."""
        return float(self.linearised.gradient @ self.p(u))

    def highest(self, distance: float) -> float:
        """Return the largest <gradient, p(u)> that gradient ascent finds at this distance from u*."""
        centre = near = self.u.flatten()
        best = -math.inf
        for _ in range(ASCENTS):
            leaf = near.detach().clone().requires_grad_()
            slope = torch.autograd.grad(self.linearised.gradient @ self.p(leaf, twice=True), leaf)[0]
            near = centre + distance * slope / slope.norm().clamp(min=torch.finfo(slope.dtype).tiny)
            best = max(best, self.inner(near))
        return best

    def matrix(self) -> Tensor:
        """Return M = diag((dS/dtheta_S)', (dT/dtheta_T)') with the chosen columns of T."""
        y, t = self.net.S(self.u).flatten(), self.net.R(self.u, self.net.Q(self.d)).flatten()[self.columns]
        return torch.block_diag(_rows(y, self.theta_S).mT, _rows(t, self.theta_T).mT)


def _rows(values: Tensor, weights: list[Tensor]) -> Tensor:
    found = [torch.autograd.grad(x, weights, retain_graph=True, materialize_grads=True) for x in values]
    return torch.stack([_flat(row) for row in found])


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
