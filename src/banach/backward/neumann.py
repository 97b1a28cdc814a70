"""The truncated Neumann series."""

from dataclasses import dataclass
from typing import Any

import torch

from banach import checks
from banach.backward.mode import carries_tangent
from banach.latent import Latent, detach, leaves, map_leaves
from banach.solve import Map


@dataclass(frozen=True)
class Neumann:
    """w = g + J' g + ... + (J')^k g, k the order. The error falls like gamma^(k+1). Order 0 is JFB.

    Plain autograd: v_0 = T(z*), v_j = T(z* + (v_{j-1} - v_{j-1} detached)). Every v_j has the value T(z*), and
    its derivative is that of T in the parameters plus J times that of v_{j-1}. So it costs k more evaluations
    and memory for k + 1, but works under torch.func and torch.compile, which a backward pass that calls
    autograd itself does not.
    """

    order: int = 5

    def __post_init__(self) -> None:
        checks.whole("order", self.order, 0)

    def attach(self, T: Map, z_star: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Latent:
        z_star = detach(z_star)
        value = T(z_star, *inputs)
        if torch.is_grad_enabled() or carries_tangent(leaves(value)):
            for _ in range(self.order):
                value = T(carrying(z_star, value), *inputs)
        return value


def carrying(z: Latent, source: Latent) -> Latent:
    """The value of z, with the derivative of `source`."""
    return map_leaves(lambda a, b: a + (b - b.detach()).to(a.dtype), z, source)
