"""How far from the fixed point may JFB be taken before it is no descent direction?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.diagnose import Linearised, corollary, network_map

DISTANCES = (1e-3, 1e-2, 3e-2, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)  # |u - u*| / |u*|
DIRECTIONS = 8
ASCENTS = 5
STEPS = 8  # iterates from the start that are looked at
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Perturbed:
    """<gradient, p(u)> / |<gradient, p(u*)>|, the gradient at u*: below 0 JFB taken at u descends.

    `random` is the largest over random directions, `worst` that of the direction found by ascent on it: a bound
    from below on what the worst direction does. `iterates` are Picard's u_0 = 0, u_1, ... as (distance, value).
    `allowed` and `moved` are the Corollary's: descent is certain at a distance while moved is below allowed.
    """

    distance: tuple[float, ...]
    random: tuple[float, ...]
    worst: tuple[float, ...]
    moved: tuple[float, ...]
    allowed: float
    iterates: tuple[tuple[float, float], ...]
    own: float  # where the network's own solver stops

    @property
    def random_radius(self) -> float:
        return radius(self.distance, self.random)

    @property
    def worst_radius(self) -> float:
        return radius(self.distance, self.worst)

    @property
    def weak_radius(self) -> float:
        """Up to there a tenth of what p(u*) has is left in the worst direction found: beyond it p(u) may vanish
        long before its sign is wrong."""
        return radius(self.distance, self.worst, below=-0.1)

    @property
    def first_step(self) -> int | None:
        """The least k from which on every iterate that was looked at descends."""
        ascending = [k for k, (_, value) in enumerate(self.iterates) if not value < 0]
        first = ascending[-1] + 1 if ascending else 0
        return first if first < len(self.iterates) else None


def radius(distances: Sequence[float], values: Sequence[float], below: float = 0.0) -> float:
    """The largest distance up to which all values are below that; 0 if there is none."""
    reached = 0.0
    for distance, value in zip(distances, values, strict=True):
        if not value < below:
            break
        reached = distance
    return reached


def perturb(inner: Inner, at: Linearised) -> Perturbed:
    """Both of the same image, `inner` with the gradient at its u*."""
    assert at.u is not None
    u, size = at.u, float(at.u.norm())
    unit = abs(float(at.gradient @ at.direction))
    near = corollary(at, [size * part for part in DISTANCES], directions=DIRECTIONS)
    return Perturbed(
        distance=DISTANCES,
        random=tuple(value / unit for value in near.inner),
        worst=tuple(inner.highest(u, size * part) / unit for part in DISTANCES),
        moved=near.moved,
        allowed=near.allowed,
        iterates=tuple((float((x - u).norm()) / size, inner(x) / unit) for x in inner.iterates(STEPS)),
        own=float((inner.own() - u).norm()) / size,
    )


class Inner:
    """u -> <gradient, p(u)>, p(u) = -d/dtheta loss(S(R(u, Q(d)))), of a network in eval mode at one image d."""

    def __init__(self, net: Any, d: Tensor, loss: Loss, gradient: Tensor) -> None:
        self.net, self.d, self.loss = net, d, loss
        self.weights = [*net.S.parameters(), *net.Q.parameters(), *net.R.parameters()]  # as `linearise` has them
        self.gradient = [
            part.view_as(w)
            for part, w in zip(gradient.split([w.numel() for w in self.weights]), self.weights, strict=True)
        ]
        with torch.no_grad():
            self.shape = net.Q(d).shape

    def __call__(self, u: Tensor) -> float:
        return float(self._value(u).detach())

    def slope(self, u: Tensor) -> Tensor:
        """By differentiating twice: where it points, <gradient, p> grows fastest."""
        leaf = u.detach().clone().requires_grad_()
        return torch.autograd.grad(self._value(leaf, twice=True), leaf)[0]

    def highest(self, u: Tensor, distance: float) -> float:
        """The largest value found at this distance: the sphere is climbed from the slope at u."""
        near, best = u, -float("inf")
        for _ in range(ASCENTS):
            x = self.slope(near)
            near = u + distance * x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
            best = max(best, self(near))
        return best

    @torch.no_grad()
    def iterates(self, steps: int) -> list[Tensor]:
        v = self.net.Q(self.d)
        found = [torch.zeros_like(v)]
        for _ in range(steps):
            found.append(self.net.R(found[-1], v))
        return [x.flatten() for x in found]

    @torch.no_grad()
    def own(self) -> Tensor:
        """Where the network's own solver stops: the latent that JFB attaches at."""
        latent: Tensor = network_map(self.net, self.d).u
        return latent.flatten()

    def _value(self, u: Tensor, *, twice: bool = False) -> Tensor:
        with torch.enable_grad():
            value = self.loss(self.net.S(self.net.R(u.view(self.shape), self.net.Q(self.d))))
            found = torch.autograd.grad(value, self.weights, create_graph=twice)
        return -torch.stack([(a * b).sum() for a, b in zip(self.gradient, found, strict=True)]).sum()
