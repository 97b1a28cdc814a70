"""How far the fixed point moves with the data: L = sigma_max(dT/dd), and the bound L / (1 - gamma) on du*/dd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.backward.jacobian import Jacobian
from banach.diagnose.contraction import error_bound
from banach.diagnose.frozen import Frozen, close, undisturbed
from banach.diagnose.jacobian import jacobian, largest_singular_value
from banach.latent import Latent, leaves
from banach.network import as_inputs
from banach.nn.layers import uses_batch_statistics
from banach.solve import Anderson, Tolerance, solve


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Per sample, all in the Euclidean norm, at the fixed point.

    L = sigma_max(dT/dd) and gamma = sigma_max(dT/du); since du*/dd = (I - dT/du)^-1 dT/dd, its norm is at most
    `bound` = L / (1 - gamma), infinite where gamma is at least 1. `measured` is that norm itself, where asked
    for; NaN where the linear solves missed their tolerance.
    """

    L: Tensor
    gamma: Tensor
    bound: Tensor
    measured: Tensor | None
    coupled: bool


def measure_sensitivity(
    net: Any,
    d: Any,
    z0: Latent | None = None,
    *,
    exact: bool = False,
    max_steps: int = 200,
    rtol: float = 1e-4,
    seed: int = 0,
) -> Sensitivity:
    """The Lipschitz constant of `net`'s T in the data d, and of its fixed point.

    `exact=True` also measures |du*/dd| by power iteration with two linear solves per step: for small problems.
    Batch statistics in Q or R couple the samples: then there is one value for the batch.
    """
    _check_data(d)
    with undisturbed(net, d), torch.no_grad():
        frozen = Frozen(net)
        v, _, final = frozen.settle(d, z0)
        u = final.value
        coupled = frozen.coupled or uses_batch_statistics(net.Q)
        J = jacobian(lambda u: frozen.T(u, v), u, coupled=coupled)
        # In the layout of J: the two are multiplied below.
        K = jacobian(lambda x: frozen.T(u, frozen.Q(*as_inputs(x))), d, coupled=coupled, target=J.source)
        options: dict[str, Any] = {"max_steps": max_steps, "rtol": rtol, "seed": seed}
        L, gamma = (largest_singular_value(which, **options) for which in (K, J))
        measured = None
        if exact:
            through = _ThroughSolves(J, K)
            sigma = largest_singular_value(through, **options)
            measured = J.source.spread(torch.where(through.met, sigma, torch.nan))
    bound = error_bound(L, gamma.to(L.dtype))  # the same rule: L / (1 - gamma)
    L, gamma, bound = (J.source.spread(each) for each in (L, gamma, bound))
    return Sensitivity(L, gamma, bound, measured, coupled)


@dataclass
class _ThroughSolves:
    """(I - J)^-1 K, and per sample whether all linear solves met their tolerance."""

    J: Jacobian
    K: Jacobian

    def __post_init__(self) -> None:
        self.source, self.target = self.K.source, self.J.source
        self.met = torch.ones(self.target.samples, dtype=torch.bool, device=self.target.device)

    def forward(self, v: Tensor) -> Tensor:
        return self._inverted(self.J.forward, self.K.forward(v))

    def transposed(self, w: Tensor) -> Tensor:
        return self.K.transposed(self._inverted(self.J.transposed, w))

    def _inverted(self, product: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
        """x = g + J x, as the fixed point it is."""
        tolerance = Tolerance(atol=0.0, rtol=close(self.target), max_steps=1000)
        found = solve(lambda x: g + product(x), g, Anderson(memory=10), tolerance=tolerance)
        self.met.logical_and_(found.converged)
        return found.value


def _check_data(d: Any) -> None:
    for leaf in leaves(d):
        if not leaf.is_floating_point():
            raise TypeError(
                f"the Lipschitz constant in the data needs floating-point data, got {leaf.dtype}; call d.float()"
            )
