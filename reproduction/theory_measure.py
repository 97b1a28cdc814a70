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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from banach import Implicit, Tolerance, contraction_factor, diagnose

TIGHT = Tolerance(atol=0.0, rtol=1e-10, max_steps=1000)
OTHERS = 64  # columns of M besides those of one channel
CHUNK = 256  # rows of J at a time
DISTANCES = (1e-3, 1e-2, 3e-2, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)  # |u - u*| / |u*|
LEFT = 0.1  # share of the descent that is left at the largest distance that counts
ASCENTS = 5
ROUNDING = 1e-10  # slack for comparing float64 sums with their bounds
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Cases:
    """The cases of one statement: their values without NaN, and for those that can be judged whether they hold."""

    values: tuple[float, ...] = ()
    held: tuple[bool, ...] = ()

    @staticmethod
    def of(values: Iterable[float], holds: Callable[[float], bool] | None = None) -> Cases:
        """Return the cases of values; `holds` judges one of them."""
        known = tuple(x for x in values if not math.isnan(x))
        return Cases(known, () if holds is None else tuple(map(holds, known)))

    @staticmethod
    def joined(parts: Iterable[Cases]) -> Cases:
        """Return all cases of the parts as one."""
        some = list(parts)
        return Cases(tuple(chain(*(one.values for one in some))), tuple(chain(*(one.held for one in some))))


def below(values: Iterable[float], limit: float) -> Cases:
    """Return the cases of the statement that values are below a limit."""
    return Cases.of(values, lambda x: x < limit)


def positive(values: Iterable[float]) -> Cases:
    """Return the cases of the statement that values are positive."""
    return Cases.of(values, lambda x: x > 0)


def measure(net: Any, d: Tensor, labels: Tensor, *, dense: int, smoothing: float = 0.0) -> dict[str, Cases]:
    """Return the cases of every statement (`theory.STATEMENTS`) for a network, which stays as it is.

    Args:
        net: the network.
        d: images in float64. Those without a fixed point count against the rate only.
        labels: of the images.
        dense: so many of the first images are measured with dense matrices.
        smoothing: of the labels, in the cross entropy.
    """
    net = copy.deepcopy(net).double().eval()
    training, loss = copy.deepcopy(net).train(), partial(cross_entropy, label_smoothing=smoothing)
    with torch.random.fork_rng([]), warnings.catch_warnings():
        torch.manual_seed(0)  # dropout in training mode: the same masks at every epoch
        warnings.simplefilter("ignore")  # missing fixed points are counted
        here, there = (diagnose.measure_contraction(tight(one), d) for one in (net, training))
        found = here.solution.converged
        per_image = here.sigma, here.rate, _lipschitz(net, d)
        sigma, rate, lipschitz = (x.where(found, math.nan).tolist() for x in per_image)
        own, train = (_cosines(one, d, partial(loss, target=labels)) for one in (net, training))
        chosen = [slice(i, i + 1) for i in range(dense) if bool(found[i])]
        locals_ = [local(net, d[one], partial(loss, target=labels[one])) for one in chosen]
    rates = below(rate, 1)
    measured = {
        "sigma": below(sigma, 1),
        "rate": replace(rates, held=(*rates.held, *([False] * int((~found).sum())))),
        "training.sigma": below([float(there.sigma.max())], 1),
        "training.rate": below([float(there.rate.max())], 1),
        "L": below(lipschitz, math.inf),
        "cosine": positive(own[:1]),
        "exact.cosine": positive(own[1:]),
        "training.cosine": positive(train[:1]),
    }
    for key, cases in chain(*(one.items() for one in locals_)):
        measured[key] = Cases.joined((measured.get(key, Cases()), cases))
    return measured


def tight(net: Any) -> Any:
    """Return the same network with a solver that goes to the fixed point, in the network's own norm."""
    other = copy.copy(net)
    other.tolerance = replace(TIGHT, norm=net.tolerance.norm)
    return other


def _cosines(net: Any, d: Tensor, loss: Loss) -> tuple[float, float]:
    """Return the cosine of JFB where the solver stops and at u*, NaN unless every image has a fixed point."""
    own, exact = diagnose.descent_check(net, d, loss), diagnose.descent_check(tight(net), d, loss)
    known = bool(exact.solution.converged.all())
    return (own.cosine, exact.cosine) if known else (math.nan, math.nan)


def _lipschitz(net: Any, d: Tensor) -> Tensor:
    """(images,): sigma_max(dT/dd) at u*, as that of (d, u) -> (0, T(u*; d)), which keeps its shape."""
    at = diagnose.network_map(tight(net), d)
    return contraction_factor(lambda z: (torch.zeros_like(z[0]), at.T(at.u, net.Q(z[0]))), (d, at.u))


def local(net: Any, d: Tensor, loss: Loss) -> dict[str, Cases]:
    """Return the cases of one image with dense matrices; `net` is in eval mode and float64."""
    image = Image(net, d, loss)
    gradient, p, M = image.gradient, image.p(image.u), image.matrix()
    gamma, coercivity, holds = lemma(image.J())
    kappa, dependent = conditioning(M)
    distance = diagnose.network_map(net, d).u - image.u
    return {
        # Beyond its premise the Lemma says nothing.
        **({"lemma": Cases((coercivity,), (holds,))} if gamma < 1 else {"beyond": positive([coercivity])}),
        "kappa": Cases.of([kappa], lambda x: x * gamma <= 1),
        "rank": below([dependent], 1),
        "training.rank": below([image.dependent_with_statistics()], 1),
        "image.cosine": positive([-float(torch.cosine_similarity(gradient, p, dim=0))]),
        "own": Cases((float(distance.norm() / image.u.norm()),)),
        "radius": positive([image.radius()]),
    }


def lemma(J: Tensor) -> tuple[float, float, bool]:
    """Return gamma = |J|, the coercivity of I - J, and whether both bounds of the Lemma hold.

    <x, (I - J) x> >= (1 - gamma) |x|^2 and <x, (I - J)^-1 x> >= (1 - gamma) / (1 + gamma)^2 |x|^2; the least such
    quotients are the least eigenvalues of the symmetric parts. Supposes gamma < 1.
    """
    A = torch.eye(len(J), dtype=J.dtype) - J
    inverse, info = torch.linalg.inv_ex(A)
    # Not by singular values, which take minutes at n = 4,096.
    gamma = float(torch.linalg.eigvalsh(J.mT @ J)[-1].clamp(min=0).sqrt())
    least, other = (float(torch.linalg.eigvalsh((B + B.mT) / 2)[0]) for B in (A, A if int(info) else inverse))
    holds = least >= 1 - gamma - ROUNDING and other >= (1 - gamma) / (1 + gamma) ** 2 - ROUNDING
    return gamma, least, holds and not int(info)


def conditioning(M: Tensor) -> tuple[float, int]:
    """Return kappa(M'M), infinity if columns of M are dependent, and how many are.

    Batch norm that ends R in train mode rules full rank out: it holds the mean of T fixed, one direction per
    channel (and its variance, but for eps: a second one that is nearly lost).
    """
    s = torch.linalg.svdvals(M)  # the small singular values of M'M are lost in rounding
    dependent = M.shape[1] - int((s > s.max() * max(M.shape) * torch.finfo(M.dtype).eps).sum())
    return math.inf if dependent else float((s.max() / s.min()) ** 2), dependent


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

    def dependent_with_statistics(self) -> int:
        """Return how many of the same columns of M are dependent with R in training mode."""
        other = copy.deepcopy(self.net)
        other.R.train()
        return conditioning(Image(other, self.d, self.loss).matrix())[1]

    def p(self, u: Tensor, *, twice: bool = False) -> Tensor:
        """Return JFB's direction at u, flat; `twice`: with its graph, to be differentiated again."""
        y = self.net.S(self.net.R(u.view_as(self.u), self.net.Q(self.d)))
        return -_flat(torch.autograd.grad(self.loss(y), self.weights, create_graph=twice))

    def radius(self) -> float:
        """Return the relative distance from u* up to which more than LEFT of the descent remains at worst."""
        limit, size = -LEFT * abs(float(self.gradient @ self.p(self.u))), float(self.u.norm())
        return max(takewhile(lambda part: self.highest(size * part) < limit, DISTANCES), default=0.0)

    def highest(self, distance: float) -> float:
        """Return the largest <gradient, p(u)> that gradient ascent finds at this distance from u*."""
        centre = near = self.u.flatten()
        best = -math.inf
        for _ in range(ASCENTS):
            leaf = near.detach().clone().requires_grad_()
            slope = torch.autograd.grad(self.gradient @ self.p(leaf, twice=True), leaf)[0]
            near = centre + distance * slope / slope.norm().clamp(min=torch.finfo(slope.dtype).tiny)
            best = max(best, float(self.gradient @ self.p(near)))
        return best


def _rows(values: Tensor, weights: list[Tensor]) -> Tensor:
    found = [torch.autograd.grad(x, weights, retain_graph=True, materialize_grads=True) for x in values]
    return torch.stack([_flat(row) for row in found])


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
