"""Does T contract? The largest singular value of J at the fixed point, and the rate that is observed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from banach.diagnose.convergence import error_bound, observed_rate
from banach.diagnose.jacobian import Jacobian, largest_singular_value
from banach.diagnose.still import NetworkMap, check_network, network_map, unchanging, undisturbed
from banach.latent import Latent, Space
from banach.solve import Map, Norm, Picard, Solution, Tolerance, solve
from banach.solve.context import rounding

STILL = 0.9999  # an observed rate from which on an iteration is not said to converge


def contraction_factor(
    T: Map,
    z: Latent,
    inputs: tuple[Any, ...] = (),
    *,
    coupled: bool = False,
    max_steps: int = 200,
    rtol: float = 1e-4,
    seed: int = 0,
) -> Tensor:
    """(batch,): sigma_max(J), J = dT/dz at z, by accelerated power iteration on J'J, to within `rtol`.

    Below 1 at every z, T contracts. The estimate is from below. Coupled samples have one J, and so one value.
    T is evaluated once, a module T on copies of its buffers; for a network see `measure_contraction`. Each of
    at most `max_steps` costs one product with J and one with J'.
    """
    with undisturbed(T, z, inputs):
        held = unchanging(T) if isinstance(T, nn.Module) else T
        J = Jacobian.of_map(held, z, tuple(inputs), coupled=coupled)
        return J.source.spread(largest_singular_value(J, max_steps=max_steps, rtol=rtol, seed=seed))


def is_coupled(T: Map, z: Latent, inputs: tuple[Any, ...] = (), *, seed: int = 0) -> bool:
    """Does one sample's T(z) depend on another's z? Asked of the derivative at z.

    One probe per binary digit of a sample's number, since any two samples differ in one; each costs a product
    with J and one with J'.
    """
    with undisturbed(T, z, inputs), torch.no_grad():
        held = unchanging(T) if isinstance(T, nn.Module) else T
        J = Jacobian.of_map(held, z, tuple(inputs))
        generator = torch.Generator().manual_seed(seed)
        probe = torch.rand(J.source.samples, sum(J.source.sizes), generator=generator, dtype=torch.float64)
        probe = probe.to(J.source.device, J.source.rows_dtype) + 0.5
        number = torch.arange(len(probe), device=probe.device)
        digits = max(len(probe) - 1, 0).bit_length()
        return any(_crosses(J, probe, number >> digit & 1 == 1) for digit in range(digits))


def _crosses(J: Jacobian, probe: Tensor, group: Tensor) -> bool:
    """Does the derivative lead from these samples to the others, or from the others to these?"""
    inside = torch.where(group[:, None], probe, 0.0)
    return any(bool((product(inside)[~group] != 0).any()) for product in (J.forward, J.transposed))


@dataclass(frozen=True, eq=False)
class Contraction:
    """Both answers, per sample, since sigma can exceed 1 while the iteration converges.

    `sigma` < 1 everywhere is the paper's Assumption. `rate` is that of undamped Picard from the network's own
    start; NaN where too few residuals were above rounding. `residual` is |T(u) - u| at the u the network uses,
    in its own norm, and `error` Banach's bound on |u - u*| from it (infinite where sigma is at least 1).
    """

    sigma: Tensor
    rate: Tensor
    residual: Tensor
    error: Tensor
    coupled: bool
    solution: Solution = field(repr=False)

    @property
    def violates(self) -> Tensor:
        """(batch,): is T no contraction here? Either sigma is at least 1, or the residuals do not shrink.

        Both are needed: an iteration that goes round in a circle may pass points where sigma is small.
        """
        return ~(self.sigma < 1) | (self.rate >= STILL)

    @property
    def violations(self) -> int:
        """How many samples violate the contraction; of coupled samples all or none."""
        return int(self.violates.sum())

    @property
    def contracts(self) -> bool:
        return self.violations == 0


def measure_contraction(
    net: Any,
    d: Any,
    z0: Latent | None = None,
    *,
    steps: int = 100,
    max_steps: int = 200,
    rtol: float = 1e-4,
    seed: int = 0,
) -> Contraction:
    """sigma_max(dT/du) and the observed rate of `net` on the data d, batch norm in R or not.

    sigma is measured where the network's own solver stops; the rate over at most `steps` undamped Picard steps.
    """
    check_network(net)
    with undisturbed(net, d), torch.no_grad():
        held = network_map(net, d, z0)
        sigma = contraction_factor(
            held.T, held.u, held.inputs, coupled=held.coupled, max_steps=max_steps, rtol=rtol, seed=seed
        )
        residual = _residual(held, net.tolerance.norm)
        rate = _rate(held, net.tolerance.norm, steps)
    return Contraction(sigma, rate, residual, error_bound(residual, sigma), held.coupled, held.solution)


def _residual(held: NetworkMap, norm: Norm) -> Tensor:
    """(batch,): the norm of T(u) - u."""
    space = Space.of(held.u, coupled=held.coupled)
    return _size(space.rows(held.T(held.u, *held.inputs)) - space.rows(held.u), space, norm)


def _rate(held: NetworkMap, norm: Norm, steps: int) -> Tensor:
    """The rate of undamped Picard from z0; residuals near the rounding of T(u) at their own u do not count."""
    tolerance = Tolerance(atol=0.0, max_steps=steps, norm=norm)
    space = Space.of(held.u, coupled=held.coupled)
    sizes: list[Tensor] = []

    def note(k: int, u: Latent) -> None:  # of undamped Picard the next u is T(u)
        sizes.append(_size(space.rows(u), space, norm))

    found = solve(
        held.T,
        held.z0,
        Picard(),
        inputs=held.inputs,
        tolerance=tolerance,
        coupled=held.coupled,
        record=True,
        on_step=note,
    )
    assert found.trace is not None
    if not len(found.trace):
        return observed_rate(found.trace)
    # A size that overflows tells of no rounding.
    floor = 8 * rounding(space) * torch.stack(sizes[: len(found.trace)]).nan_to_num(posinf=0.0)
    return observed_rate(found.trace, found.steps, floor=floor)


def _size(rows: Tensor, space: Space, norm: Norm) -> Tensor:
    """(batch,): the norm of every sample."""
    return space.spread(norm.measure(rows, space) * norm.scale(space))
