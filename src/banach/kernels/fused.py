"""The operations of a block as Triton kernels: which programs are started, with which tiles.

Nothing here asks the device anything, so a whole step can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from banach.kernels import conv, pack, passes
from banach.kernels.layout import Layout
from banach.kernels.tiles import SMALL, Tile, Tiles

SUM = {"CHUNK": 256, "num_warps": 8}  # programs' sums for batch norm: added so many at a time
COLUMNS = 16  # channels of which one program adds them, where there is nothing else to do
# Rows of a gradient of weights, and parts of it, that one program adds at a time.
REDUCE = {"ROWS": 1, "CHUNK": 128, "num_warps": 4}
POINTWISE = 64  # pixels of a tile between convolutions


@dataclass(frozen=True)
class Fused:
    """`Operations` on a GPU: storage in `dtype`, products in it, sums in float32."""

    layout: Layout
    dtype: torch.dtype = torch.bfloat16
    slope: float = 0.1
    tiles: Tiles = field(default_factory=Tiles)

    def enter(self, x: Tensor) -> Tensor:
        return self._enter(x, None)[0]

    def enter_gradient(self, g: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self._enter(g, y)

    def leave(self, x: Tensor, stats: Tensor | None, dtype: torch.dtype) -> Tensor:
        N, H, W, P = x.shape
        C, M = self.layout.channels, N * H * W
        out = torch.empty((N, H, W, C), dtype=dtype, device=x.device)
        norm = stats is not None
        passes.leave[(-(-M // POINTWISE),)](
            x, out, stats if norm else out, M, C=C, P=P, WIDTH=self.layout.width, NORM=norm, ROWS=POINTWISE
        )
        return out.permute(0, 3, 1, 2)

    def fold(self, w: Tensor, b: Tensor, stats: Tensor) -> Tensor:
        out = self._packed(w.shape[0], w.device)
        self._fold(out, stats, (w, b), layers=stats.shape[0])
        return out

    def turn(self, w: Tensor) -> Tensor:
        out = self._packed(w.shape[0], w.device)
        pack.turn[(9 * w.shape[0],)](w, out, **self._packing())
        return out

    def measure(self, sums: Tensor, count: int, eps: float, stats: Tensor) -> None:
        self._fold(stats, stats, None, sums, (1.0 / count, eps))

    def measure_and_fold(
        self, sums: Tensor, count: int, eps: float, stats: Tensor, layer: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        self._fold(out, stats, layer, sums, (1.0 / count, eps))

    def masks(self, kept: Tensor) -> Tensor:
        return torch.nn.functional.pad(kept.to(self.dtype), (0, self.layout.pitch - self.layout.channels))

    def hidden(self, x: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
        return self._convolve(conv.HIDDEN.value, x, w, mask=mask, drop=mask is not None)[0]

    def join(self, h: Tensor, w: Tensor, x: Tensor, stats: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
        return self._convolve(conv.JOIN.value, h, w, residual=x, stats=stats, sums=sums)

    def unnormalise(self, g: Tensor, y: Tensor, stats: Tensor, sums: Tensor | None, count: int) -> Tensor:
        means = torch.empty((2, self.layout.width), device=g.device)
        if sums is None:
            means.zero_()
        else:
            passes.average[(self.layout.width // COLUMNS,)](
                sums, stats, means, sums.shape[0], 1.0 / count, WIDTH=self.layout.width, COLUMNS=COLUMNS, **SUM
            )
        out, M = torch.empty_like(g), g.shape[:3].numel()
        C, P, WIDTH = self.layout.channels, self.layout.pitch, self.layout.width
        passes.unnormalise[(-(-M // POINTWISE),)](
            g, y, out, stats, means, M, self.slope, C=C, P=P, WIDTH=WIDTH, ROWS=POINTWISE
        )
        return out

    def gate(self, g: Tensor, w: Tensor, h: Tensor, dropped: bool) -> Tensor:
        return self._convolve(conv.GATE.value, g, w, residual=h, drop=dropped)[0]

    def add(self, g: Tensor, w: Tensor, s: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._convolve(conv.ADD.value, g, w, residual=s, before=y, sums=y is not None)

    def weights(
        self, x: Tensor, g: Tensor, stats: Tensor | None, *, channels_last: bool = False
    ) -> tuple[Tensor, Tensor]:
        N, H, W, P = x.shape
        C, M, tile = self.layout.channels, N * H * W, self.tiles.weights
        WIDTH, DEPTH = self.layout.width, self.layout.depth
        programs = _programs(M, tile, x.device)
        parts = torch.empty((programs, 3, DEPTH, WIDTH), device=x.device)
        conv.correlate[(programs,)](
            x, g, parts, N, P=P, H=H, W=W, DEPTH=DEPTH, WIDTH=WIDTH, ROWS=tile.rows, NEAR=tile.near,
            num_stages=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
        lying = torch.channels_last if channels_last else torch.contiguous_format
        dw = torch.empty((C, C, 3, 3), device=x.device, memory_format=lying)
        db = torch.empty(C, device=x.device)
        pack.unfold[(9, -(-C // REDUCE["ROWS"]))](
            parts, parts if stats is None else stats, dw, db, programs, **self._packing(), NORM=stats is not None,
            LAST=channels_last, **REDUCE,
        )  # fmt: skip
        return dw, db

    def _packing(self) -> dict[str, int]:
        of = self.layout
        return {"C": of.channels, "P": of.pitch, "DEPTH": of.depth, "WIDTH": of.width}

    def _packed(self, layers: int, device: torch.device) -> Tensor:
        return torch.zeros((layers, 3, self.layout.depth, self.layout.width), dtype=self.dtype, device=device)

    def _fold(
        self,
        out: Tensor,
        stats: Tensor,
        layer: tuple[Tensor, Tensor] | None,
        sums: Tensor | None = None,
        numbers: tuple[float, float] = (1.0, 0.0),
        layers: int = 1,
    ) -> None:
        w, b = (stats, stats) if layer is None else layer
        pack.fold[(1 if layer is None else 9 * layers,)](
            w, b, stats, stats if sums is None else sums, out, 0 if sums is None else sums.shape[0], *numbers,
            **self._packing(), MEASURE=sums is not None, PACK=layer is not None, **SUM,
        )  # fmt: skip

    def _enter(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        N, C, H, W = x.shape
        M, P, WIDTH = N * H * W, self.layout.pitch, self.layout.width
        if M * P >= 2**31:
            raise ValueError(
                f"a batch of {N} images of {H}x{W} has too many pixels for one launch; use a smaller one"
            )
        x = x.permute(0, 2, 3, 1).contiguous()  # costs nothing where x is channels_last
        out = torch.empty((N, H, W, P), dtype=self.dtype, device=x.device)
        programs = _programs(M, self.tiles.entry, x.device)
        sums = torch.empty((programs if y is not None else 0, 2, WIDTH), device=x.device)
        passes.enter[(programs,)](
            x, out, out if y is None else y, sums if y is not None else x, M,
            C=C, P=P, WIDTH=WIDTH, ONES=y is None, SUMS=y is not None, ROWS=self.tiles.entry.rows,
        )  # fmt: skip
        return out, sums

    def _convolve(
        self,
        what: int,
        x: Tensor,
        w: Tensor,
        *,
        residual: Tensor | None = None,
        before: Tensor | None = None,
        stats: Tensor | None = None,
        mask: Tensor | None = None,
        drop: bool = False,
        sums: bool = False,
    ) -> tuple[Tensor, Tensor]:
        N, H, W, _ = x.shape
        tile = self.tiles.convolution if H * W > SMALL else self.tiles.small
        programs = _programs(N * W, tile, x.device, H) if tile.march else _programs(N * H * W, tile, x.device)
        out = torch.empty_like(x)
        total = torch.empty((programs if sums else 0, 2, self.layout.width), device=x.device)
        # What an epilogue does not read is still an argument: any tensor stands for it.
        conv.convolve[(programs,)](
            x, w, out, x if residual is None else residual, x if before is None else before,
            w if stats is None else stats, w if mask is None else mask, total if sums else w, N, self.slope,
            **self._packing(), H=H, W=W, WHAT=what, DROP=drop, SUMS=sums, ROWS=tile.rows,
            MARCH=tile.march, NEAR=tile.near, num_stages=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
        return out, total


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _programs(pixels: int, tile: Tile, device: torch.device, repeats: int = 1) -> int:
    """As many as there are places, or fewer, so that all have nearly the same number of tiles."""
    tiles = -(-pixels // tile.rows) * repeats
    rounds = -(-tiles // (_processors(device) * tile.places))
    return -(-tiles // rounds)
