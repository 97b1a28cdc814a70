"""Does T contract? The largest singular value of J, the observed rate, and the error bound that follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from banach import checks
from banach.backward.jacobian import Jacobian
from banach.diagnose.frozen import NetworkMap, network_map, undisturbed
from banach.diagnose.jacobian import jacobian, largest_singular_value, random_rows
from banach.latent import Latent, Space
from banach.solve import Map, Norm, Picard, Solution, Tolerance, solve
from banach.solve.context import rounding
from banach.solve.tolerance import residual_of

LEFT = 10  # so many times its floor is a residual that is not rounding, whatever came before it
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
    """Return sigma_max(J), J = dT/dz at z, by accelerated power iteration on J'J. Below 1 at every z, T contracts.

    T is evaluated once, a module T on copies of its buffers; for a network see `measure_contraction`.

    Args:
        T: the map; called as T(z, *inputs), must keep z's shape.
        z: the point, a latent.
        inputs: further arguments of T, one row per sample.
        coupled: samples share statistics: then there is one J, and one value for all.
        max_steps: at most so many steps, each one product with J and one with J'.
        rtol: relative accuracy. The estimate is from below.
        seed: of the first vector, which comes from a generator of its own.

    Returns:
        (batch,): one value per sample; NaN where J is not finite.
    """
    with undisturbed(T, z, inputs):
        J = jacobian(T, z, inputs, coupled=coupled)
        return J.source.spread(largest_singular_value(J, max_steps=max_steps, rtol=rtol, seed=seed))


def is_coupled(T: Map, z: Latent, inputs: tuple[Any, ...] = (), *, seed: int = 0) -> bool:
    """Return True if one sample's T(z) depends on another's z, by the derivative at z.

    One probe per binary digit of a sample's number, since any two samples differ in one; each costs a product
    with J and one with J'.

    Args:
        T, z, inputs, seed: as in `contraction_factor`.
    """
    with undisturbed(T, z, inputs), torch.no_grad():
        J = jacobian(T, z, inputs)
        probe = random_rows(J.source, seed).abs() + 0.5
        number = torch.arange(len(probe), device=probe.device)
        digits = max(len(probe) - 1, 0).bit_length()
        return any(_crosses(J, probe, number >> digit & 1 == 1) for digit in range(digits))


def _crosses(J: Jacobian, probe: Tensor, group: Tensor) -> bool:
    """Return True if the derivative leads from these samples to the others, or back."""
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
        """(batch,): True where sigma is at least 1, or the residuals do not shrink.

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


def worst(values: Tensor) -> float:
    """Return the largest value that is not NaN; NaN if there is none."""
    known = values[~values.isnan()]
    return float(known.max()) if len(known) else float("nan")


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
    """Measure sigma_max(dT/du) and the observed rate of a network on data, batch norm in R or not.

    Args:
        net: the ImplicitNetwork. sigma is measured where its own solver stops.
        d: data; a tuple holds several inputs of Q.
        z0: where the solves start; None: at `net.start`.
        steps: the rate is that of at most so many undamped Picard steps.
        max_steps, rtol, seed: as in `contraction_factor`.
    Returns:
        Contraction, with one entry per sample.
    """
    with undisturbed(net, d), torch.no_grad():
        held = network_map(net, d, z0)
        sigma = contraction_factor(
            held.T, held.u, held.inputs, coupled=held.coupled, max_steps=max_steps, rtol=rtol, seed=seed
        )
        space = Space.of(held.u, coupled=held.coupled)
        moved = held.T(held.u, *held.inputs)
        residual = space.spread(residual_of(space, net.tolerance, held.u, moved))
        rate = _rate(held, space, net.tolerance.norm, steps)
    return Contraction(sigma, rate, residual, error_bound(residual, sigma), held.coupled, held.solution)


def _rate(held: NetworkMap, space: Space, norm: Norm, steps: int) -> Tensor:
    """Return the rate of undamped Picard from z0, without residuals near the rounding of T(u) at their own u."""
    tolerance = Tolerance(atol=0.0, max_steps=steps, norm=norm)
    sizes: list[Tensor] = []

    def note(k: int, u: Latent) -> None:  # of undamped Picard the next u is T(u)
        sizes.append(space.spread(norm.measure(space.rows(u), space) * norm.scale(space)))

    seen: dict[str, Any] = {"inputs": held.inputs, "coupled": held.coupled, "record": True, "on_step": note}
    found = solve(held.T, held.z0, Picard(), tolerance=tolerance, **seen)
    assert found.trace is not None
    if not len(found.trace):
        return observed_rate(found.trace)
    # A size that overflows tells of no rounding.
    floor = 8 * rounding(space) * torch.stack(sizes[: len(found.trace)]).nan_to_num(posinf=0.0)
    return observed_rate(found.trace, found.steps, floor=floor)


def observed_rate(
    trace: Tensor, steps: Tensor | None = None, *, last: int = 10, floor: Tensor | float | None = None
) -> Tensor:
    """Return the geometric mean of the last ratios |r_k| / |r_{k-1}| of a Picard solve, (batch,).

    Below 1 the iteration converges, above it diverges; NaN: fewer than two residuals to compare.

    Args:
        trace: `Solution.trace`, (steps, batch).
        steps: `Solution.steps`, where samples froze; None: trailing repeats are taken for freezing.
        last: so many ratios.
        floor: from the first residual at or below it on they are rounding, and are left out, unless a later one
            rises beyond LEFT times its floor: such an iteration has left the point again. One number, one per
            sample, or (steps, batch); None: a hundred roundings of the first residual.
    """
    if trace.dim() != 2:
        raise ValueError(f"trace must be (steps, batch), got shape {tuple(trace.shape)}; give Solution.trace")
    checks.whole("last", last, 1)
    if len(trace) < 2:
        return trace.new_full((trace.shape[1],), torch.nan)
    if floor is None:
        floor = 100 * torch.finfo(trace.dtype).eps * trace[0]
    count = _counted(trace, _frozen_at(trace) if steps is None else steps, floor)
    end = (count - 1).clamp(min=0)
    start = (end - last).clamp(min=0)
    ratio = trace.gather(0, end[None])[0] / trace.gather(0, start[None])[0]
    rate = ratio ** (1 / (end - start).clamp(min=1).to(trace.dtype))
    return torch.where(count > 1, rate, torch.nan)


def _counted(trace: Tensor, steps: Tensor, floor: Tensor | float) -> Tensor:
    """(batch,): how many residuals from the first count: finite, before the freeze and the rest at the floor."""
    index = torch.arange(len(trace), device=trace.device)[:, None]
    live = trace.isfinite() & (index < steps)
    # Rounding alone may go above the floor and back, but not far.
    leaves_later = (live & (trace > LEFT * floor)).long().flip(0).cummax(0).values.flip(0).bool()
    count = (live & ((trace > floor) | leaves_later)).long().cumprod(0).sum(0)
    # One step that falls to the floor is still a ratio: an exact hit has rate 0.
    return torch.where((count == 1) & live[1], 2, count)


def _frozen_at(trace: Tensor) -> Tensor:
    """(batch,): the step after which a sample only repeats its last residual."""
    changed = trace[1:] != trace[:-1]
    index = torch.arange(2, len(trace) + 1, device=trace.device)[:, None]
    return torch.where(changed, index, 1).amax(0)


def error_bound(residual: Tensor, gamma: Tensor | float, *, after_step: bool = False) -> Tensor:
    """Return the bound |u - u*| <= r / (1 - gamma), r = |T(u) - u|; one step on it is gamma times that.

    Infinite where gamma is at least 1. A Picard `Solution` holds the value after the step whose residual it
    reports: bound its error with `after_step=True`. gamma is a Lipschitz constant in the norm of r on the way
    from u to u*. The largest singular value at u* is its local value, in the Euclidean norm and so in RMS,
    but not in WorstPixel. (Banach 1922.)

    Args:
        residual: r, any shape.
        gamma: a number, or one per entry of `residual`.
        after_step: bound the error of T(u) instead of that of u.
    """
    gamma = torch.as_tensor(gamma, dtype=residual.dtype, device=residual.device)
    if bool((gamma < 0).any()):
        raise ValueError(f"gamma must be at least 0, got {float(gamma.min())}")
    bound = residual * (gamma if after_step else 1.0) / (1 - gamma)
    return torch.where(gamma < 1, bound, torch.where(gamma.isnan(), torch.nan, torch.inf))
