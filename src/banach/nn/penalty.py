"""Penalties on the size of J = dT/du, estimated by one random vector: they keep T a contraction in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from banach.latent import Latent, Space, detach, leaves
from banach.solve import Map
from banach.solve.context import rounding


def jacobian_penalty(T: Map, z: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Tensor:
    """Estimate |J|_F^2 / n, the mean squared singular value of J = dT/dz at z, without bias.

        |J' e|^2 / n,   E e e' = I,   n the entries of a sample's latent (coupled: of the batch's)

    The scale does not depend on the size of the latent or of the batch: J = c I has the penalty c^2. Entries of e
    are +1 or -1 (Rademacher), drawn from the global generator: of all vectors with independent entries these have
    the least variance, 2 sum_{i != j} (J J')_ij^2 / n^2. Costs one evaluation of T and one product with J'. The
    gradient goes through that product (double backward). If T does not support that, as fused attention kernels
    do not, use `finite_difference_penalty`.

    Args:
        T: the map; called as T(z, *inputs). To penalise a network with the dropout masks and batch-norm buffers of
            its own forward pass, see `observe`.
        z: where J is taken, usually the fixed point. No gradient reaches it.
        inputs: further arguments of T, such as (Q(d),). The gradient reaches them, and the parameters of T.
        coupled: True if T mixes samples: then J is that of the whole batch.

    Returns:
        (batch,): one value per sample. Coupled samples share one value. Add `weight * penalty.mean()` to a loss.
    """
    z = detach(z)
    space, recorded = Space.of(z, coupled=coupled), torch.is_grad_enabled()
    with torch.enable_grad():
        parts = [leaf.requires_grad_() for leaf in leaves(z)]
        value = space.rows(T(z, *inputs))
        if not value.requires_grad:  # T does not read z: J = 0
            return space.spread(value.new_zeros(len(value)))
        # The vector asks for a gradient too: else `once_differentiable` would be silently wrong, not refuse.
        e = _signs(value.detach()).requires_grad_(recorded)
        products = torch.autograd.grad(
            value, parts, e, create_graph=recorded, allow_unused=True, materialize_grads=True
        )
    joined = torch.cat([part.reshape(space.samples, -1).to(value.dtype) for part in products], 1)
    return space.spread(joined.square().mean(1))


def finite_difference_penalty(
    T: Map, z: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False, h: float | None = None
) -> Tensor:
    """Estimate |J|_F^2 / n as `jacobian_penalty` does, by a difference that needs no double backward.

        |(T(z + h e) - T(z)) / h|^2 / n

    Costs two evaluations of T. One draw differs from |J e|^2 / n by O(h). The mean over draws differs from
    |J|_F^2 / n by O(h^2) only, since terms that are odd in e cancel. Rounding adds about (eps |T(z)| / h)^2.

    Args:
        T, z, inputs, coupled: as in `jacobian_penalty`.
        h: the step; None is sqrt(eps) * max(1, RMS(z)) for each sample, eps the rounding of the arithmetic that T
            is computed in: 3e-4 in float32, 0.09 under bfloat16 autocast.

    Returns:
        (batch,): one value per sample. Coupled samples share one value.
    """
    if h is not None and not 0 < h < float("inf"):
        raise ValueError(f"h must be above 0 and finite, got {h}")
    z = detach(z)
    space = Space.of(z, coupled=coupled)
    rows = space.rows(z, "z")
    if h is None:
        step = rounding(space) ** 0.5 * rows.square().mean(1, keepdim=True).sqrt().clamp(min=1)
    else:
        step = rows.new_full((len(rows), 1), h)
    moved = space.rows(T(space.nest(rows + step * _signs(rows)), *inputs))
    return space.spread(((moved - space.rows(T(z, *inputs))) / step).square().mean(1))


def _signs(like: Tensor) -> Tensor:
    """A vector of independent signs, which needs no host sync, so that it can be captured."""
    return torch.empty_like(like).bernoulli_(0.5).mul_(2).sub_(1)
