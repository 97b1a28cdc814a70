"""One image at its fixed point: the Lemma, the Assumption, the Theorem and the Corollary by dense matrices.

A small network is linearised whole. Of a larger one J is whole, and M has some of its columns: the eigenvalues of
a principal part of M'M lie between those of M'M (Cauchy), so its kappa is a bound on kappa(M'M) from below. Where
that breaks the Assumption, what the Corollary allows is negative, and with all columns it is lower still.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from banach.backward import JFB
from banach.diagnose import (
    Conditioning,
    Identity,
    Lemma,
    Linearised,
    Theorem,
    conditioning,
    identity,
    lemma,
    linearise,
    theorem,
)
from banach.diagnose.dense import LIMIT
from banach.diagnose.descent import gradient, tight_implicit
from banach.diagnose.jacobian import Jacobian
from banach.diagnose.still import Still, undisturbed
from banach.paper.theory_perturb import Inner, Loss, Perturbed, perturb

OTHERS = 64  # columns of M taken of the rest, where not all of them are
CHUNK = 256  # columns of J at once


@dataclass(frozen=True)
class Local:
    """What holds at one image. `whole`: M has all its columns; if not, kappa is at least `conditioning.kappa`.

    `statistics` is the rank of M, or of the same columns of it, where R normalises by this image's statistics.
    """

    lemma: Lemma
    conditioning: Conditioning
    whole: bool
    theorem: Theorem | None
    identity: Identity | None
    statistics: int
    cosine: float  # of JFB with the exact gradient
    perturbed: Perturbed

    @property
    def descends(self) -> bool:
        return self.cosine > 0


def local(net: Any, d: Tensor, loss: Loss) -> Local:
    """`net` in eval mode and float64, d one image."""
    at, columns = _linearised(net, d, loss)
    whole = columns is None
    small = compressed(at) if whole else at
    lengths = float(at.gradient.norm() * at.direction.norm())
    return Local(
        lemma=lemma(at),
        conditioning=conditioning(small),
        whole=whole,
        theorem=theorem(small) if whole else None,
        identity=identity(small) if whole else None,
        statistics=_rank_with_statistics(net, d, at, columns),
        cosine=-float(at.gradient @ at.direction) / lengths if lengths else float("nan"),
        perturbed=perturb(Inner(net, d, loss, at.gradient), small),
    )


def compressed(at: Linearised) -> Linearised:
    """The same statements in coordinates of the range of M, where gradient and p lie: M = U R becomes R.

    Inner products and norms stay, and so do singular values, for a fraction of the cost. What a vector has outside
    of the range is kept as one more coordinate, its length: of gradient and p that is rounding, and not hidden.
    """
    U, R = torch.linalg.qr(at.M)

    def coordinates(x: Tensor) -> Tensor:
        inside = U.mT @ x
        return torch.cat([inside, (x - U @ inside).norm()[None]])

    gradient, direction, away = coordinates(at.gradient), coordinates(at.direction), at.direction_at
    return replace(
        at,
        M=torch.cat([R, R.new_zeros(1, R.shape[1])]),
        gradient=gradient,
        direction=direction,
        direction_at=None if away is None else lambda u: coordinates(away(u)),
    )


class Large(Linearised):
    """gamma asked for once, and by eigenvalues: a singular value decomposition takes minutes at n = 4,096."""

    @cached_property
    def gamma(self) -> float:
        return float(torch.linalg.eigvalsh(self.J.mT @ self.J)[-1].clamp(min=0).sqrt())


def _linearised(net: Any, d: Tensor, loss: Loss) -> tuple[Linearised, Tensor | None]:
    """And the columns of M that it has, None for all."""
    with torch.no_grad():
        v, outputs = net.Q(d), net.S(net.Q(d)).numel()
    n, weights = v.numel(), sum(p.numel() for p in net.parameters())
    if (n + outputs) * (weights + n + outputs) <= LIMIT:
        return linearise(net, d, loss), None
    columns = _some(n, v.shape[2:].numel())
    return large(net, d, loss, columns), columns


def _some(n: int, channel: int) -> Tensor:
    """A whole channel, since batch norm acts on whole ones, and others at random."""
    generator = torch.Generator().manual_seed(0)
    rest = channel + torch.randperm(n - channel, generator=generator)[:OTHERS]
    return torch.cat([torch.arange(channel), rest])


def large(net: Any, d: Tensor, loss: Loss, columns: Tensor) -> Large:
    """As `linearise`, with J whole and of M the columns of S and those of T that `columns` names."""
    weights = [*net.S.parameters(), *net.Q.parameters(), *net.R.parameters()]
    with undisturbed(net, d):
        still, v, u = _at(net, d)
        exact = _flat(gradient(still, v, u, (tight_implicit(u, still.coupled), loss), weights)[1])
        J, M = _J(still, v, u), _M(net, still, v, u, columns)

    def direction_at(near: Tensor) -> Tensor:
        with undisturbed(net, d):
            return -_flat(gradient(still, v, near.view_as(u), (JFB(), loss), weights)[1])

    p = direction_at(u)
    unused = torch.empty(0, dtype=u.dtype, device=u.device)  # v of the paper: nothing here asks for it
    outputs = M.shape[1] - len(columns)
    return Large(J, M, unused, exact, p, outputs, u.flatten(), direction_at)


def _rank_with_statistics(net: Any, d: Tensor, at: Linearised, columns: Tensor | None) -> int:
    """The rank of M, or of those columns, with R alone in training mode."""
    other = copy.deepcopy(net)
    other.R.train()
    with undisturbed(other, d):
        still, v, u = _at(other, d)
        every = torch.arange(u.numel()) if columns is None else columns
        M = _M(other, still, v, u, every)
    return conditioning(replace(at, M=M)).rank


def _at(net: Any, d: Tensor) -> tuple[Still, Tensor, Tensor]:
    """The network held still, Q(d) with its graph, and u* as tightly as `linearise` has it."""
    still = Still(net)
    with torch.enable_grad():
        v = still.Q(d)
    z0, found = still.find(v)
    u: Any = still.find(v, found.value, tolerance=still.tight(z0))[1].value
    return still, v, u


def _J(still: Still, v: Tensor, u: Tensor) -> Tensor:
    """dT/du, many columns at a time: copies of the image, each with a unit vector of its own."""
    n, columns = u.numel(), []
    eye = torch.eye(n, dtype=u.dtype, device=u.device)
    for unit in eye.split(CHUNK):
        copies, inputs = (x.detach().expand(len(unit), *x.shape[1:]).contiguous() for x in (u, v))
        columns.append(Jacobian.of_map(still.T, copies, (inputs,)).forward(unit))
    return torch.cat(columns).mT.contiguous()


def _M(net: Any, still: Still, v: Tensor, u: Tensor, columns: Tensor) -> Tensor:
    """diag((dS/dtheta_S)', (dT/dtheta_T)') with every output of S and the chosen numbers of T."""
    theta_S, theta_T = [*net.S.parameters()], [*net.Q.parameters(), *net.R.parameters()]
    with torch.enable_grad():
        y, t = still.S(u).flatten(), still.T(u, v).flatten()[columns.to(u.device)]
    return torch.block_diag(_rows(y, theta_S).mT, _rows(t, theta_T).mT)


def _rows(values: Tensor, weights: list[Tensor]) -> Tensor:
    found = [torch.autograd.grad(x, weights, retain_graph=True, materialize_grads=True) for x in values]
    return torch.stack([_flat(list(row)) for row in found])


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
