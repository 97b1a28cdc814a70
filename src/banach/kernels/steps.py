"""A step of Picard in one kernel per tensor, a step of Anderson in three: residual, test, next iterate.

The references are `banach.Picard` and `banach.Anderson`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.kernels.host import ceil_div, multiprocessors, power_of_two
from banach.solve import RMS, Anderson, Tolerance

# Numbers that a program reads at a time. `products` reads as many of every difference, so that it has fewer.
_BLOCK, _PRODUCTS, _MIX = 4096, 512, 2048


def picard_step(
    samples: Any, parts: Sequence[tuple[Tensor, Tensor]], tolerance: Tolerance, damping: float
) -> None:
    """Move every active sample from z to d z + (1 - d) T(z), and test it. `samples` and z are written in place.

    Args:
        samples: the numbers of every sample, see `banach.fast.iteration.Samples`.
        parts: (z, T(z)), one pair per tensor of the latent. Every sample of z is one piece of memory.
        tolerance: in the norm RMS or Euclidean.
        damping: d.
    """
    from banach.kernels.steps_kernel import picard

    count, sizes = len(parts[0][0]), [z[:1].numel() for z, _ in parts]
    numbers = samples.active, samples.residual, samples.least, samples.allowed, samples.steps, samples.arrived
    most = max(1, 2 * multiprocessors(samples.active.device) // max(count, 1))
    splits = [min(ceil_div(size, _BLOCK) or 1, most) for size in sizes]  # programs per sample, for each tensor
    total = sum(splits)
    sums = None if total == 1 else samples.residual.new_empty(len(samples.active), total, 2)
    for number, ((z, value), size, split) in enumerate(zip(parts, sizes, splits, strict=True)):
        picard[(count, split)](
            *(z, _in_layout_of(z, value), samples.index, *numbers, sums),
            *(size, tolerance.atol, tolerance.rtol, _scale(tolerance, sum(sizes)), damping),
            FIRST=sum(splits[:number]),
            SPLIT=split,
            TOTAL=total,
            PADDED=power_of_two(total),
            **_block(size, _BLOCK),
        )


@dataclass(frozen=True)
class AndersonMemory:
    """What Anderson remembers of every sample, see `banach.Anderson`. All are written in place.

    Where R computes in bf16 its values are exact to that, and so are the differences: half of what a step reads.
    """

    before: Tensor  # (2, samples, width): z and r = T(z) - z of the step before
    dR: Tensor  # (memory, samples, width): differences of r
    dG: Tensor  # (memory, samples, width): differences of z + (1 - damping) r
    gram: Tensor  # (samples, memory, memory)
    c: Tensor  # (samples, memory): the coefficients
    least_at: Tensor  # (samples,): the step that gave the least residual
    moves: Tensor  # (samples,) of bool: whether the sample moves in this step

    @staticmethod
    def start(z: Tensor, residual: Tensor, memory: int) -> "AndersonMemory":
        count, width, like, kind = len(z), z[:1].numel(), residual, z.device.type
        in_bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
        differs = torch.bfloat16 if in_bf16 and like.dtype == torch.float32 else like.dtype
        return AndersonMemory(
            like.new_empty(2, count, width),
            like.new_zeros(memory, count, width, dtype=differs),
            like.new_empty(memory, count, width, dtype=differs),
            like.new_empty(count, memory, memory),
            like.new_empty(count, memory),
            like.new_empty(count),
            torch.empty(count, dtype=torch.bool, device=like.device),
        )


def anderson_step(samples: Any, z: Tensor, Tz: Tensor, solver: Anderson, tolerance: Tolerance) -> None:
    """Move every active sample by a step of Anderson acceleration from z, and test it: see `picard_step`."""
    from banach.kernels.steps_kernel import fit, mix, products

    memory: AndersonMemory = samples.memory
    Tz = _in_layout_of(z, Tz)
    count, width, m = max(len(z), 1), max(z[:1].numel(), 1), solver.memory
    split = min(ceil_div(width, _MIX), max(1, 4 * multiprocessors(z.device) // count))
    sums = memory.c.new_empty(count, split, 2 * m + 2)
    sizes = {"M": m, "SPLIT": split}
    products[(count, split)](
        *(z, Tz, samples.active, samples.steps, memory.before, memory.dR, memory.dG, sums),
        *(width, 1 - solver.damping),
        PADDED=power_of_two(m),
        **sizes,
        **_block(width, _PRODUCTS, numbers_per_thread=4),
    )
    ridge = 10 * torch.finfo(sums.dtype).eps if solver.ridge is None else solver.ridge
    bounded = not math.isinf(solver.bound)
    fit[(count,)](
        *(samples.active, samples.residual, samples.least, samples.allowed, samples.steps, memory.least_at),
        *(memory.moves, memory.gram, memory.c, sums, tolerance.atol, tolerance.rtol, _scale(tolerance, width)),
        *(ridge, solver.bound if bounded else 1.0, solver.growth, solver.patience),
        BOUNDED=bounded,
        PADDED=power_of_two(m),
        **sizes,
        PADDED_SPLIT=power_of_two(split),
        num_warps=1,
    )
    mix[(count, split)](
        *(z, Tz, memory.moves, memory.c, memory.dG, width, solver.damping),
        DAMPED=solver.damping > 0,
        **sizes,
        **_block(width, _MIX),
    )


def _block(width: int, most: int, numbers_per_thread: int = 8) -> dict[str, int]:
    block = min(power_of_two(max(width, 1)), most)
    return {"BLOCK": block, "num_warps": max(1, block // (32 * numbers_per_thread))}


def _scale(tolerance: Tolerance, width: int) -> float:
    return 1 / math.sqrt(max(width, 1)) if type(tolerance.norm) is RMS else 1.0


def _in_layout_of(z: Tensor, Tz: Tensor) -> Tensor:
    return Tz if z.stride() == Tz.stride() else torch.empty_like(z, dtype=Tz.dtype).copy_(Tz)
