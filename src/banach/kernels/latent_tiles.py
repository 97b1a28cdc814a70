"""Tiles that a solve for a latent is computed in, and the sizes that follow from the shape of a latent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class LatentTile:
    """`rows` pixels at a time by `warps` warps, `stages` products' loads in flight, `places` programs on a
    multiprocessor, which must have room for as many: `registers` limits those of a thread, if not zero.

    split: float32 numbers are multiplied as sums of two of 16 bits, on tensor cores; else as they are, far more
    slowly. near: pixels are loaded in pieces so small that they pass through the first cache. keep: weights of a
    convolution are loaded once, and all that a tile is made of at once, if there are three groups of them.
    """

    rows: int = 128
    warps: int = 8
    stages: int = 3
    places: int = 1
    split: bool = True
    near: bool = True
    registers: int = 0
    keep: bool = False


@dataclass(frozen=True)
class Sizes:
    """Shapes that follow from the channels, rows and columns of a latent."""

    channels: int
    height: int
    width: int

    @property
    def pitch(self) -> int:
        """Elements from one pixel to the next: it begins on 16 bytes."""
        return -(-self.channels // 8) * 8

    @property
    def columns(self) -> int:
        return max(16, power_of_two(self.channels))

    @property
    def groups(self) -> int:
        """Rows of the kernel as three products, or its taps as nine, where three channels' worth is too deep."""
        return 3 if 3 * self.pitch <= 128 else 9

    @property
    def depth(self) -> int:
        return max(16, power_of_two(self.pitch * (9 // self.groups)))

    @property
    def area(self) -> int:
        """Elements of an image in its frame, and of what a product reads beyond the last pixel."""
        beyond = self.depth - self.pitch * (9 // self.groups)
        return -(-((self.height + 2) * (self.width + 2) * self.pitch + beyond) // 64) * 64

    def shared(self, tile: LatentTile, dtype: torch.dtype) -> int:
        """Bytes of shared memory that a program needs: operands of the products in flight, or of all."""
        halves = 2 if dtype == torch.float32 and tile.split else 1
        products = self.groups if tile.keep else tile.stages
        return products * (tile.rows + self.columns) * self.depth * halves * stored(tile, dtype).itemsize

    def constants(self) -> dict[str, int]:
        return {
            "C": self.channels, "P": self.pitch, "WIDTH": self.columns, "DEPTH": self.depth,
            "GROUPS": self.groups, "H": self.height, "W": self.width, "AREA": self.area,
        }  # fmt: skip


def tile_for(
    sizes: Sizes, pixels: int, dtype: torch.dtype, shared: int, *, coupled: bool = True, many: bool = False
) -> LatentTile:
    """The tile in use where a program has so many pixels at a time, for products of numbers of a type.

    What was found fastest on an H200 or, where `shared` bytes are too few for it, the next smaller one. many: each
    multiprocessor has several images, one after the other.
    """
    near = sizes.pitch & (sizes.pitch - 1) != 0  # pixels on powers of two come as fast in large pieces
    tile = LatentTile(rows=64 if pixels <= 64 else 128, near=near)
    if dtype == torch.float32:
        tile = replace(tile, warps=4) if pixels <= 64 else replace(tile, stages=2)
    elif pixels > 64 and sizes.groups == 3 and (coupled or near):
        one = replace(tile, keep=True)
        for keeping in (replace(one, rows=64, warps=4, places=2), one) if many else (one,):
            if sizes.shared(keeping, dtype) * keeping.places <= shared:
                return keeping
    while sizes.shared(tile, dtype) > shared and tile.rows > 16:
        if tile.stages > 2 or (tile.rows <= 64 and tile.stages > 1):
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, rows=tile.rows // 2, warps=4)
    return tile


def stored(tile: LatentTile, dtype: torch.dtype) -> torch.dtype:
    """The type of what is multiplied, where it stands for numbers of another."""
    return torch.float16 if dtype == torch.float32 and tile.split else dtype


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
