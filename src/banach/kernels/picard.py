"""A step of Picard's iteration in one kernel per tensor: residual, stopping test and the next iterate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from banach.kernels.device import power_of_two
from banach.latent import leaves
from banach.solve import RMS, Tolerance


def picard_step(samples: Any, Tz: Sequence[Tensor], tolerance: Tolerance, damping: float) -> None:
    """Move every active sample from z to d z + (1 - d) T(z), and test it.

    Args:
        samples: z and the numbers of every sample, written in place; see `banach.fast.picard.Samples`.
        Tz: T(z), one tensor per leaf of z.
        tolerance: in the norm RMS or Euclidean.
        damping: d.
    """
    from banach.kernels.picard_kernel import step

    parts = leaves(samples.z)
    count, width = len(samples.active), sum(part[0].numel() for part in parts)
    scale = 1 / math.sqrt(max(width, 1)) if type(tolerance.norm) is RMS else 1.0
    sums = torch.empty(2, count, dtype=samples.residual.dtype, device=samples.residual.device)
    for number, (z, value) in enumerate(zip(parts, Tz, strict=True)):
        if z.stride() != value.stride():
            value = torch.empty_like(z, dtype=value.dtype).copy_(value)
        size = z[0].numel()
        block = min(power_of_two(max(size, 1)), 4096)
        step[(count,)](
            z, value, samples.active, samples.residual, samples.allowed, samples.steps, sums,
            count, size, tolerance.atol, tolerance.rtol, scale, damping,
            FIRST=number == 0, LAST=number == len(parts) - 1, BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
        )
