"""How images lie in memory for the fused blocks: pixels in rows, channels at a pitch, and channels that are one.

A tensor of N images, H rows, W columns and C channels is stored as (N, H, W, P), P a multiple of 8, so that a
pixel begins on 16 bytes. The three pixels under a row of a 3x3 kernel are then 3 P neighbours in memory, and a
convolution is three matrix products of depth 3 P, with no gathering.

The first three spare channels of an input hold ones. Their weights carry what is added to a convolution: the bias,
and the shift of a batch norm whose scale went into the weights. Zero padding pads these ones too, so the shift is
left out where the image ends, as it must be. Three, because a number of 24 bits is three of 8. In a gradient of
the weights the row of ones is the sum over pixels, which the bias and the mean need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ONES = 3  # spare channels that hold ones
TAPS = 3  # rows, and columns, of a kernel
LARGEST = 64 - ONES


@dataclass(frozen=True)
class Layout:
    """C channels of the network, and the sizes that follow from them."""

    channels: int

    def __post_init__(self) -> None:
        if not 1 <= self.channels <= LARGEST:
            raise ValueError(f"fused blocks have 1 to {LARGEST} channels, got {self.channels}; use plain modules")

    @property
    def pitch(self) -> int:
        """P: elements from one pixel to the next."""
        return -(-(self.channels + ONES) // 8) * 8

    @property
    def width(self) -> int:
        """Columns of a matrix product: the power of two that holds P."""
        return max(16, _power_of_two(self.pitch))

    @property
    def depth(self) -> int:
        """Rows of packed weights for one row of a kernel: the power of two that holds 3 P."""
        return _power_of_two(TAPS * self.pitch)

    def wide(self, value: Tensor) -> Tensor:
        """Values per channel, with zeros up to the width."""
        return torch.nn.functional.pad(value, (0, self.width - value.shape[-1]))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def split(value: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of a narrow type that add up to a wide one: the first rounds it, the next what is left."""
    parts = []
    for _ in range(ONES):
        parts.append(value.to(dtype))
        value = value - parts[-1].to(value.dtype)
    return parts
