"""The convolution kernels: sizes of tiles, and their launches. Nothing here asks the device anything."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from banach.kernels import window_kernel

ADD = {"BLOCK": 64, "CHUNK": 64}  # numbers of a gradient, and parts of it, that one program adds at a time


@dataclass(frozen=True)
class WindowTile:
    """`rows` pixels at a time by `warps` warps, `stages` products' loads in flight."""

    rows: int = 64
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class WindowTiles:
    """For few pixels and for many, forwards and back; for the gradient of weights, by about `parts` programs.

    `fewest`: for so few pixels that with float32, whose products take long, all multiprocessors should have some.
    """

    fewest: WindowTile = WindowTile(rows=32)
    few: WindowTile = WindowTile()
    many: WindowTile = WindowTile(rows=128)
    weights: WindowTile = WindowTile()
    parts: int = 264

    def of(self, pixels: int, dtype: torch.dtype) -> WindowTile:
        if dtype == torch.float32 and pixels < 8192:
            return self.fewest
        return self.many if pixels >= 32768 else self.few


TILES = WindowTiles()


@dataclass(frozen=True)
class Sizes:
    """A convolution: channels summed over and made, sizes in and out, its window, the depth of a chunk."""

    summed: int
    made: int
    inside: tuple[int, int]
    outside: tuple[int, int]
    side: int
    stride: int
    padding: int
    depth: int

    @staticmethod
    def of(x: Tensor, weight: Tensor, stride: int, padding: int) -> Sizes:
        inside, side = (x.shape[2], x.shape[3]), weight.shape[2]
        outside = ((inside[0] + 2 * padding - side) // stride + 1, (inside[1] + 2 * padding - side) // stride + 1)
        made, summed = weight.shape[:2]
        return Sizes(summed, made, inside, outside, side, stride, padding, _depth(summed, side))

    @property
    def back(self) -> Sizes:
        """The gradient of the input, as a convolution."""
        depth = _depth(self.made, self.side)
        return Sizes(
            self.made, self.summed, self.outside, self.inside, self.side, self.stride, self.padding, depth
        )

    @property
    def whole(self) -> Sizes:
        """The same with chunks of at most one place each, if channels come in powers of two."""
        even = self.summed & -self.summed
        return replace(self, depth=min(even, 64)) if even >= 16 else self

    @property
    def width(self) -> int:
        return max(16, _power_of_two(self.made))

    @property
    def chunks(self) -> int:
        return -(-self.summed * self.side**2 // self.depth)

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "C": self.summed, "MADE": self.made, "H": self.inside[0], "W": self.inside[1],
            "ROWS_OUT": self.outside[0], "COLUMNS_OUT": self.outside[1], "SIDE": self.side,
            "STRIDE": self.stride, "PAD": self.padding, "DEPTH": self.depth, "CHUNKS": self.chunks,
            "WIDTH": self.width, "WHOLE": self.summed % self.depth == 0,
            "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
        }  # fmt: skip


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    """conv2d of a channels_last x."""
    weight = _lying(weight)
    return _look(x, weight, bias, sizes, _strides(weight), back=False)


def input_gradient(g: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """`sizes` are those of the convolution."""
    weight, back = _lying(weight), sizes.back
    strides = _strides(weight.transpose(0, 1))
    if back.stride > 1 and back.whole.summed % back.whole.depth == 0:
        return _look_back(g, weight, back.whole, strides)
    return _look(g, weight, None, back, strides, back=True)


def _look_back(g: Tensor, weight: Tensor, sizes: Sizes, strides: dict[str, int]) -> Tensor:
    g = _lying(g)
    shape = len(g), sizes.made, *sizes.outside
    out = torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    pixels = len(g) * math.prod(-(-size // sizes.stride) for size in sizes.outside)  # of one kind
    tile = TILES.of(pixels * sizes.stride**2, g.dtype)
    constants = {
        name: value for name, value in sizes.constants(g.dtype).items() if name not in ("CHUNKS", "WHOLE")
    }
    window_kernel.look_back[(-(-pixels // tile.rows), sizes.stride**2)](
        g, weight, out, len(g), **strides, **constants, ROWS=tile.rows, STAGES=tile.stages, num_warps=tile.warps
    )
    return out


def _look(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes, strides: dict[str, int], *, back: bool
) -> Tensor:
    x, sizes = _lying(x), sizes.whole
    shape = len(x), sizes.made, *sizes.outside
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    pixels = len(x) * sizes.outside[0] * sizes.outside[1]
    tile, added = TILES.of(pixels, x.dtype), weight if bias is None else bias.contiguous()
    window_kernel.look[(-(-pixels // tile.rows),)](
        x, weight, added, out, pixels, **strides, **sizes.constants(x.dtype),
        BACK=back, BIAS=bias is not None, ROWS=tile.rows, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


def weight_gradient(
    g: Tensor, x: Tensor, weight: Tensor, sizes: Sizes, *, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Of the weights and of the bias, as the weights lie."""
    x, g, tile = _lying(x), _lying(g), TILES.weights
    pixels = len(x) * sizes.outside[0] * sizes.outside[1]
    tiles = -(-pixels // tile.rows)
    share = -(-tiles // max(1, min(tiles, TILES.parts // sizes.chunks)))
    count, total = -(-tiles // share), sizes.chunks * sizes.depth
    parts = torch.empty((count, sizes.width, total), device=x.device)
    bias_parts = torch.empty((count if bias else 0, sizes.width), device=x.device)
    dw = torch.empty_like(weight)
    db = torch.empty(sizes.made, dtype=weight.dtype, device=x.device) if bias else None
    window_kernel.correlate[(count, sizes.chunks)](
        x, g, parts, bias_parts if bias else parts, pixels, share, **sizes.constants(x.dtype),
        BIAS=bias, ROWS=tile.rows, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    window_kernel.add[(-(-sizes.summed * sizes.side**2 // ADD["BLOCK"]), sizes.made)](
        parts, bias_parts if bias else parts, dw, dw if db is None else db, count, **_strides(dw),
        C=sizes.summed, SIDE=sizes.side, BIAS=bias, TOTAL=total, WIDTH=sizes.width, **ADD,
    )  # fmt: skip
    return dw, db


def _strides(weight: Tensor) -> dict[str, int]:
    names = ("FROM_MADE", "FROM_SUMMED", "FROM_ROW", "FROM_COLUMN")
    return dict(zip(names, weight.stride(), strict=True))


def _lying(x: Tensor) -> Tensor:
    """Channels side by side: costs nothing where they lie so."""
    return x.contiguous(memory_format=torch.channels_last)


def _depth(summed: int, side: int) -> int:
    return min(64, max(16, _power_of_two(summed * side**2)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
