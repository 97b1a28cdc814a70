"""Shapes of the tiles that the kernels work in: the ones in use, and the ones worth measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """`rows` pixels at a time by `warps` warps, `stages` tiles in flight, `places` programs on a multiprocessor.

    march: down the columns of the images, fetching each row once. near: copies in flight through the first cache.
    """

    rows: int
    warps: int = 4
    stages: int = 2
    places: int = 1
    march: bool = False
    near: bool = False

    def __str__(self) -> str:
        text = f"{self.rows} rows, {self.warps} warps, {self.stages} stages, {self.places} places"
        return text + (", march" if self.march else "") + (", near" if self.near else "")


SMALL = 256  # pixels of an image: with at most that many, a march is mostly its first and last step


@dataclass(frozen=True)
class Tiles:
    """One tile for each kind of kernel."""

    convolution: Tile = Tile(64, stages=3, places=2, march=True)
    small: Tile = Tile(64, stages=2)
    weights: Tile = Tile(64, warps=8, stages=4)
    entry: Tile = Tile(64, places=8)

    def but(self, **changes: Tile) -> Tiles:
        return replace(self, **changes)


CONVOLUTIONS = (
    Tile(64, stages=3, places=2, march=True),
    Tile(64, stages=2, places=2, march=True),
    Tile(128, warps=8, stages=3, march=True),
    Tile(64, stages=3, places=2, march=True, near=True),
    Tile(128, warps=8, stages=3, march=True, near=True),
    Tile(64, stages=1, places=3),
    Tile(64, stages=2),
)
WEIGHTS = (
    Tile(64, warps=8, stages=4),
    Tile(64, warps=8, stages=2, places=2),
    Tile(32, warps=8, stages=4, places=2),
    Tile(64, warps=8, stages=4, near=True),
    Tile(128, warps=8, stages=2),
)
