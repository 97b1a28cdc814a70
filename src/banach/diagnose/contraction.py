"""Does T contract? The largest singular value of J, the observed rate, and the error bound that follows."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from banach import checks
from banach.backward.adjoint import CUT
from banach.backward.jacobian import Jacobian
from banach.diagnose.frozen import NetworkMap, network_map, plain, unchanging, undisturbed
from banach.latent import Latent, Space
from banach.solve import RMS, Euclidean, Map, Norm, Picard, Solution, Tolerance, solve
from banach.solve.context import rounding, with_autocast_of, without_autocast
from banach.solve.tolerance import measure
from banach.solve.warning import AdjointWarning, warn_user

VECTORS = 24  # kept per sample; then the iteration restarts at their best combination
QUIET = 5  # steps in a row without growth after which sigma is known
LEFT = 10  # a residual above LEFT times the rounding floor is never rounding alone
STILL = 0.9999  # from this observed rate on, an iteration does not count as convergent


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
    """Return sigma_max(J), J = dT/dz at z, by accelerated power iteration on J'J. T contracts if all are <= c < 1.

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
        (batch,): one value per sample; NaN where J is not finite. All 0 with an `AdjointWarning`: T detaches z.
    """
    with undisturbed():
        z, fixed = plain(z), plain(inputs)
        space = Space.of(z, coupled=coupled)
        under = with_autocast_of(space, unchanging(T) if isinstance(T, nn.Module) else T)
        with without_autocast(space.device):
            J = Jacobian(lambda x: under(x, *fixed), z, space)
            sigma = _largest_singular_value(J, max_steps=max_steps, rtol=rtol, seed=seed)
            if sum(space.sizes) and not sigma.any() and J.is_cut(rounding(space)):
                warn_user(CUT, AdjointWarning)
            return space.spread(sigma)


@torch.no_grad()
def _largest_singular_value(J: Jacobian, *, max_steps: int, rtol: float, seed: int) -> Tensor:
    """(samples,): sigma_max of every row's Jacobian: power iteration on J'J, accelerated by Lanczos.

    A step is one product with J and one with J'. Plain power iteration was measured to need five to ten times as
    many, and recurrences that keep no vectors to drift upwards with bfloat16 products. The estimate is |J v| of a
    unit vector v, so it grows from below. A sample is done when its growth, continued as a geometric series, added
    less than rtol for QUIET steps in a row: from an unlucky start it rests at the second value for a while.
    """
    checks.whole("max_steps", max_steps, 1)
    rtol = max(rtol, rounding(J.space))
    draw = torch.Generator().manual_seed(seed)  # on the CPU: a seed draws the same numbers for every device
    start = torch.randn(J.space.samples, sum(J.space.sizes), generator=draw, dtype=torch.float64, device="cpu")
    krylov = _Krylov(J, _unit(start.to(J.space.device, J.space.rows_dtype)))
    history = [torch.zeros(J.space.samples, dtype=torch.float64, device="cpu")] * 2
    quiet = torch.zeros_like(history[0], dtype=torch.long)
    for step in range(1, max_steps + 1):
        history.append(krylov.sigma())
        before, change = history[-2] - history[-3], history[-1] - history[-2]
        ratio = (change / before).nan_to_num(nan=0.0).clamp(0.0, 0.999)
        grew = torch.maximum(change, change * ratio / (1 - ratio)) > rtol * history[-1]
        quiet = torch.where(grew & (quiet < QUIET), 0, quiet + 1)
        if bool((quiet >= QUIET).all()):
            break
        if step % VECTORS:
            krylov.extend()
        else:
            krylov = _Krylov(J, krylov.best())
    return history[-1].to(J.space.device, J.space.rows_dtype)


class _Krylov:
    """Orthonormal vectors V, their images W = J V, and the Gram matrix of those, one set per sample."""

    def __init__(self, J: Jacobian, v: Tensor) -> None:
        self.J, self.V = J, v[:, None]
        self.W = v.new_empty(len(v), 0, sum(J.space.sizes))
        self.gram = torch.empty(len(v), 0, 0, dtype=torch.float64, device="cpu")  # it is small

    def sigma(self) -> Tensor:
        """(samples,): the largest |J v| over unit vectors v in the span of V."""
        self.W = torch.cat([self.W, self.J.forward(self.V[:, -1].contiguous())[:, None]], 1)
        # Sums of products, here and below, not matrix products: those may be rounded to TF32.
        row = torch.linalg.vecdot(self.W, self.W[:, -1:]).cpu().double()  # Apple's GPUs have no float64
        self.gram = torch.cat([torch.cat([self.gram, row[:, :-1, None]], 2), row[:, None]], 1)
        finite = self.gram.isfinite().all(2).all(1)
        values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], self.gram, 0.0))
        self.weights = vectors[:, :, -1].to(self.W)
        return torch.where(finite, values[:, -1].clamp(min=0).sqrt(), torch.nan)

    def best(self) -> Tensor:
        """The unit vector at which that largest value is reached."""
        return _unit((self.weights[:, :, None] * self.V).sum(1))

    def extend(self) -> None:
        """One more vector: J'J of the last, without its parts along the others; zero if only rounding is left."""
        v = self.J.transposed(_unit(self.W[:, -1]))
        least = 100 * torch.finfo(v.dtype).eps * torch.linalg.vector_norm(v, dim=1, keepdim=True)
        for _ in range(2):  # one pass is not orthogonal enough
            v = v - (torch.linalg.vecdot(self.V, v[:, None])[:, :, None] * self.V).sum(1)
        left = torch.linalg.vector_norm(v, dim=1, keepdim=True) > least
        self.V = torch.cat([self.V, _unit(torch.where(left, v, 0.0))[:, None]], 1)


def _unit(rows: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(length > 0, length, 1.0)


@dataclass(frozen=True, eq=False)
class Contraction:
    """Both answers, per sample, since sigma can exceed 1 while the iteration converges.

    `sigma` <= gamma < 1 everywhere is the paper's Assumption. `rate` is that of undamped Picard from the network's
    own start; NaN where too few residuals were above rounding. `residual` is |T(u) - u| at the u the network uses,
    in its own norm. `error` is Banach's bound on |u - u*| with this sigma, in RMS if that is the network's norm,
    else in the Euclidean norm, which also bounds WorstPixel; infinite where sigma is at least 1.
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
    with undisturbed(), torch.no_grad():
        held = network_map(net, d, z0)
        sigma = contraction_factor(
            held.T, held.u, held.inputs, coupled=held.coupled, max_steps=max_steps, rtol=rtol, seed=seed
        )
        space = Space.of(held.u, coupled=held.coupled)
        moved = held.T(held.u, *held.inputs)
        norms = net.tolerance.norm, net.tolerance.norm if isinstance(net.tolerance.norm, RMS) else Euclidean()
        each = (measure(space, replace(net.tolerance, norm=norm), held.u, moved)[0] for norm in norms)
        residual, bounding = map(space.spread, each)
        rate = _rate(held, space, net.tolerance.norm, steps)
    return Contraction(sigma, rate, residual, error_bound(bounding, sigma), held.coupled, held.solution)


def _rate(held: NetworkMap, space: Space, norm: Norm, steps: int) -> Tensor:
    """Return the rate of undamped Picard from z0, without residuals near the rounding of T(u) at their own u."""
    tolerance = Tolerance(atol=0.0, max_steps=steps, norm=norm)
    sizes: list[Tensor] = []

    def note(k: int, u: Latent) -> None:  # of undamped Picard the next u is T(u)
        sizes.append(space.spread(norm.measure(space.rows(u), space) * norm.scale(space)))

    seen: dict[str, Any] = {"inputs": held.inputs, "coupled": held.coupled, "record": True, "on_step": note}
    found = solve(held.T, held.z0, Picard(), tolerance=tolerance, **seen)
    assert found.trace is not None
    known = sizes[: len(found.trace)]
    floor = 8 * rounding(space) * torch.stack(known) if known else None
    return observed_rate(found.trace, found.steps, floor=floor)


def observed_rate(trace: Tensor, steps: Tensor, *, last: int = 10, floor: Tensor | float | None = None) -> Tensor:
    """Return the geometric mean of the last ratios |r_k| / |r_{k-1}| of a Picard solve, (batch,).

    Below 1 the iteration converges, above it diverges; NaN: fewer than two residuals to compare.

    Args:
        trace: `Solution.trace`, (steps, batch).
        steps: `Solution.steps`, where samples froze.
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
    count = _counted(trace, steps, floor)
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
