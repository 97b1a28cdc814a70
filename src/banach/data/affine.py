"""Affine: a small random rotation, scaling and shift of every image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Affine:
    """The image about its centre: turned by at most `degrees`, scaled, shifted by at most a share of its sides.

    Values between pixels are bilinear; outside the image is `fill`.
    """

    degrees: float = 10.0
    translate: float = 0.1
    scale: tuple[float, float] = (0.9, 1.1)
    fill: float = 0.0
    draws = 4

    def __post_init__(self) -> None:
        for name in ("degrees", "translate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")
        if not 0 < self.scale[0] <= self.scale[1] < math.inf:
            raise ValueError(f"scale must be two positive numbers, the lower first, got {self.scale}")

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        # grid_sample fills with 0, hence the shift and back.
        return F.grid_sample(x - self.fill, self._grid(x, u), align_corners=False) + self.fill

    def _grid(self, x: Tensor, u: Tensor) -> Tensor:
        """Where every pixel comes from, as grid_sample wants it: (n, H, W, 2), each side from -1 to 1.

        Written out, since affine_grid multiplies matrices, which TF32 would round to a tenth of a pixel.
        """
        height, width = x.shape[2:]
        angle, scale, right, down = self._numbers(u.to(x.dtype), height, width)
        column = torch.arange(width, device=x.device, dtype=x.dtype) - (width - 1) / 2 - right[:, None, None]
        row = (torch.arange(height, device=x.device, dtype=x.dtype) - (height - 1) / 2)[:, None] - down[
            :, None, None
        ]
        cos, sin = (angle.cos() / scale)[:, None, None], (angle.sin() / scale)[:, None, None]
        from_column, from_row = cos * column + sin * row, cos * row - sin * column
        return torch.stack([from_column * (2 / width), from_row * (2 / height)], 3)

    def _numbers(self, u: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Angle in radians (from the x axis towards the y axis, which points down), scale, shift in pixels."""
        signed = 2 * u - 1
        angle = signed[:, 0] * math.radians(self.degrees)
        scale = self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, 1]
        return angle, scale, signed[:, 2] * (self.translate * width), signed[:, 3] * (self.translate * height)
