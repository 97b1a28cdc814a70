"""Jacobian-Free Backpropagation: the gradient of one evaluation at the fixed point."""

from dataclasses import dataclass
from typing import Any

from banach.latent import Latent, detach
from banach.solve import Map


@dataclass(frozen=True)
class JFB:
    """Backpropagation through one evaluation of T at z*: w = g, the zeroth term of the Neumann series.

    A descent direction when T contracts and dT/dtheta is well conditioned (the paper's Theorem; measure
    it with `banach.descent_check`). Costs one backward pass through T, whatever the depth.
    (Fung et al., AAAI 2022.)
    """

    def attach(self, T: Map, z_star: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Latent:
        return T(detach(z_star), *inputs)
