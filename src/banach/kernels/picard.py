"""A step of Picard in one kernel per tensor: residual, test, next iterate. Reference: `banach.Picard`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from banach.kernels.host import multiprocessors, power_of_two
from banach.solve import RMS, Tolerance

_BLOCK = 4096  # numbers that a program reads at a time


def picard_step(
    samples: Any, parts: Sequence[tuple[Tensor, Tensor]], tolerance: Tolerance, damping: float
) -> None:
    """Move every active sample from z to d z + (1 - d) T(z), and test it.

    Args:
        samples: the numbers of every sample, written in place; see `banach.fast.iteration.Samples`.
        parts: (z, T(z)), one pair per tensor of the latent. Every sample of z is one piece of memory.
        tolerance: in the norm RMS or Euclidean.
        damping: d.
    """
    from banach.kernels.picard_kernel import step

    count, sizes = len(parts[0][0]), [z[:1].numel() for z, _ in parts]
    scale = 1 / math.sqrt(max(sum(sizes), 1)) if type(tolerance.norm) is RMS else 1.0
    numbers = samples.active, samples.residual, samples.least, samples.allowed, samples.steps, samples.arrived
    most = max(1, 2 * multiprocessors(samples.active.device) // max(count, 1))
    splits = [min(-(-size // _BLOCK) or 1, most) for size in sizes]  # programs per sample, for each tensor
    total = sum(splits)
    sums = samples.residual if total == 1 else samples.residual.new_empty(len(samples.active), total, 2)
    for number, ((z, value), size, split) in enumerate(zip(parts, sizes, splits, strict=True)):
        if z.stride() != value.stride():
            value = torch.empty_like(z, dtype=value.dtype).copy_(value)
        block = min(power_of_two(max(size, 1)), _BLOCK)
        step[(count, split)](
            *(z, value, samples.active if samples.index is None else samples.index, *numbers, sums),
            *(size, tolerance.atol, tolerance.rtol, scale, damping),
            FIRST=sum(splits[:number]),
            SPLIT=split,
            TOTAL=total,
            PADDED=power_of_two(total),
            ALL=samples.index is None,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
        )
