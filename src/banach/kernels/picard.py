"""A step of Picard's iteration in one kernel per tensor: residual, stopping test and the next iterate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from banach.kernels.device import power_of_two
from banach.solve import RMS, Tolerance

_BLOCK = 4096  # numbers that a program reads at a time


def picard_step(
    samples: Any, parts: Sequence[tuple[Tensor, Tensor]], tolerance: Tolerance, damping: float
) -> None:
    """Move every active sample from z to d z + (1 - d) T(z), and test it.

    Args:
        samples: the numbers of every sample, written in place; see `banach.fast.picard.Samples`.
        parts: (z, T(z)), one pair per tensor of the latent. Every sample of z is one piece of memory.
        tolerance: in the norm RMS or Euclidean.
        damping: d.
    """
    from banach.kernels.picard_kernel import step

    count, sizes = len(parts[0][0]), [z[:1].numel() for z, _ in parts]
    scale = 1 / math.sqrt(max(sum(sizes), 1)) if type(tolerance.norm) is RMS else 1.0
    residual, index = samples.residual, samples.index
    sums = residual if len(parts) == 1 else residual.new_empty(2, count)  # over the tensors before the last one
    for number, ((z, value), size) in enumerate(zip(parts, sizes, strict=True)):
        if z.stride() != value.stride():
            value = torch.empty_like(z, dtype=value.dtype).copy_(value)
        block = min(power_of_two(max(size, 1)), _BLOCK)
        step[(count,)](
            *(z, value, samples.active if index is None else index),
            *(samples.active, residual, samples.allowed, samples.steps, sums),
            *(size, tolerance.atol, tolerance.rtol, scale, damping),
            ALL=index is None,
            FIRST=number == 0,
            LAST=number == len(parts) - 1,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
        )
