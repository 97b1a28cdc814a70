"""How far the fixed point moves with the data: L = sigma_max(dT/dd), and the bound L / (1 - gamma) on du*/dd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.diagnose.contraction import error_bound
from banach.diagnose.frozen import Frozen, close, plain, undisturbed
from banach.diagnose.jacobian import LinearMap, largest_singular_value, shaped_like
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
        d = plain(d)
        v = frozen.Q(*as_inputs(d))
        z0, found = frozen.find(v, z0)
        u = frozen.find(v, found.value, tolerance=frozen.tight(z0))[1].value
        frozen.T(u, v)  # draws the masks, had the solves evaluated nothing
        coupled = frozen.coupled or uses_batch_statistics(net.Q)
        J = LinearMap.of_map(frozen.T, u, (v,), coupled=coupled)
        # In the layout of J: the two are multiplied below.
        K = LinearMap.of(
            lambda x: shaped_like(u, frozen.T(u, frozen.Q(*as_inputs(x))), J.source),
            d,
            coupled=coupled,
            target=J.source,
        )
        options: dict[str, Any] = {"max_steps": max_steps, "rtol": rtol, "seed": seed}
        L, gamma = (largest_singular_value(which, **options) for which in (K, J))
        measured = _through_solves(J, K, options) if exact else None
    spread = J.source.spread
    bound = error_bound(L, gamma.to(L.dtype))  # the same rule: L / (1 - gamma)
    return Sensitivity(
        spread(L), spread(gamma), spread(bound), None if measured is None else spread(measured), coupled
    )


def _through_solves(J: LinearMap, K: LinearMap, options: dict[str, Any]) -> Tensor:
    """sigma_max of (I - J)^-1 K."""
    met = torch.ones(J.source.samples, dtype=torch.bool, device=J.source.device)

    def inverted(product: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
        """x = g + J x, as the fixed point it is."""
        tolerance = Tolerance(atol=0.0, rtol=close(J.source), max_steps=1000)
        found = solve(lambda x: g + product(x), g, Anderson(memory=10), tolerance=tolerance)
        met.logical_and_(found.converged)
        return found.value

    through = LinearMap(
        forward=lambda v: inverted(J.forward, K.forward(v)),
        transposed=lambda w: K.transposed(inverted(J.transposed, w)),
        source=K.source,
        target=J.source,
    )
    sigma = largest_singular_value(through, **options)
    return torch.where(met, sigma, torch.nan)


def _check_data(d: Any) -> None:
    for leaf in leaves(d):
        if not leaf.is_floating_point():
            raise TypeError(
                f"the Lipschitz constant in the data needs floating-point data, got {leaf.dtype}; call d.float()"
            )
