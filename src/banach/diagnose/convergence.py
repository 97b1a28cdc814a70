"""How fast an iteration converges, and how far from the fixed point it can be: two rules on residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from banach.backward.mode import check_count

LEFT = 10  # so many times its floor is a residual that is not rounding, whatever came before it


def observed_rate(
    trace: Tensor, steps: Tensor | None = None, *, last: int = 10, floor: Tensor | float | None = None
) -> Tensor:
    """(batch,): the geometric mean of the last ratios |r_k| / |r_{k-1}| of a Picard solve.

    `trace` is `Solution.trace`, (steps, batch). Below 1 the iteration converges, above it diverges; NaN: fewer
    than two residuals to compare. From the first residual at or below `floor` on they are rounding, not
    convergence, and are left out, unless a later one rises beyond LEFT times its floor: such an iteration has
    left the point again. `floor` is one number, one per sample, or (steps, batch) (None: a hundred roundings of
    the first residual). `steps` is `Solution.steps`: it says where a sample froze. Without it trailing repeats
    are taken for freezing.
    """
    if trace.dim() != 2:
        raise ValueError(f"trace must be (steps, batch), got shape {tuple(trace.shape)}; give Solution.trace")
    check_count("last", last, 1)
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
    """|u - u*| <= r / (1 - gamma), r = |T(u) - u|; one step on, |T(u) - u*| <= gamma r / (1 - gamma).

    Infinite where gamma is at least 1. A Picard `Solution` holds the value after the step whose residual it
    reports: bound its error with `after_step=True`. gamma is a Lipschitz constant in the norm of r on the way
    from u to u*. The largest singular value at u* is its local value, in the Euclidean norm and so in RMS,
    but not in WorstPixel. (Banach 1922.)
    """
    gamma = torch.as_tensor(gamma, dtype=residual.dtype, device=residual.device)
    if bool((gamma < 0).any()):
        raise ValueError(f"gamma must be at least 0, got {float(gamma.min())}")
    bound = residual * (gamma if after_step else 1.0) / (1 - gamma)
    return torch.where(gamma < 1, bound, torch.where(gamma.isnan(), torch.nan, torch.inf))
