"""The operations of a block in plain torch: what the kernels are compared with, and what runs without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from banach.kernels.layout import ONES, TAPS, Layout, split


@dataclass(frozen=True)
class Plain:
    """`Operations`, with storage in `dtype` and arithmetic in at least float32."""

    layout: Layout
    dtype: torch.dtype = torch.bfloat16
    slope: float = 0.1

    @property
    def exact(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def enter(self, x: Tensor) -> Tensor:
        pixels = self._pixels(x)
        pixels[..., self.layout.channels : self.layout.channels + ONES] = 1
        return pixels

    def enter_gradient(self, g: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pixels = self._pixels(g)
        return pixels, self._sums(pixels, y)

    def leave(self, x: Tensor, stats: Tensor | None, dtype: torch.dtype) -> Tensor:
        value = x.to(self.exact) if stats is None else self._normal(x, stats)
        return value[..., : self.layout.channels].to(dtype).permute(0, 3, 1, 2)

    def fold(self, w: Tensor, b: Tensor, stats: Tensor) -> Tensor:
        known = [self._fold(*layer) for layer in zip(w, b, stats, strict=False)]
        return torch.stack(known + [torch.zeros_like(known[0])] * (len(w) - len(known)))

    def turn(self, w: Tensor) -> Tensor:
        # (layers, co, ci, ky, kx) becomes (layers, ky, kx, co, ci), with the kernel flipped.
        taps = w.flip(-1, -2).permute(0, 3, 4, 1, 2).to(self.dtype)
        return self._rows(taps.unbind())

    def measure(self, sums: Tensor, count: int, eps: float, stats: Tensor) -> None:
        first, second = sums.to(self.exact).sum(0) / count
        variance = (second - first * first).clamp_min(0)
        stats.copy_(torch.stack([first, (variance + eps).rsqrt(), variance]))

    def measure_and_fold(
        self, sums: Tensor, count: int, eps: float, stats: Tensor, layer: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        self.measure(sums, count, eps, stats)
        out.copy_(self._fold(*layer, stats))

    def masks(self, kept: Tensor) -> Tensor:
        return F.pad(kept.to(self.dtype), (0, self.layout.pitch - self.layout.channels))

    def hidden(self, x: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
        value = F.leaky_relu(self._product(x, w), self.slope)
        if mask is not None:
            # Only what is dropped is stored as zero, so that the way back needs no mask.
            value = torch.where(mask[:, None, None] != 0, torch.where(value == 0, -1e-30, value), 0)
        return self._store(value, ones=True)

    def join(self, h: Tensor, w: Tensor, x: Tensor, stats: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
        value = F.leaky_relu(self._product(h, w) + self._normal(x, stats), self.slope)
        return self._store(value, ones=True), self._sums(value, value) if sums else stats.new_empty(0)

    def unnormalise(self, g: Tensor, y: Tensor, stats: Tensor, sums: Tensor | None, count: int) -> Tensor:
        value = g.to(self.exact)
        if sums is not None:
            mean, rstd = stats[:2, : self.layout.pitch]
            first, second = (sums.sum(0) / count)[:, : self.layout.pitch]
            value = value - first - self._normal(y, stats) * (second - first * mean) * rstd
        value = value * stats[1, : self.layout.pitch]
        return self._store(torch.where(y > 0, value, self.slope * value), ones=False)

    def gate(self, g: Tensor, w: Tensor, h: Tensor, dropped: bool) -> Tensor:
        value = self._product(g, w)
        value = torch.where(h > 0, value, self.slope * value)
        return self._store(torch.where(h == 0, 0, value) if dropped else value, ones=False)

    def add(self, g: Tensor, w: Tensor, s: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        total = self._product(g, w) + s
        return self._store(total, ones=False), self._sums(total, y) if y is not None else total.new_empty(0)

    def weights(
        self, x: Tensor, g: Tensor, stats: Tensor | None, *, channels_last: bool = False
    ) -> tuple[Tensor, Tensor]:
        C = self.layout.channels
        whole = g.to(self.exact)[..., :C].flatten(0, 2)
        taps = torch.stack([tap.flatten(0, 2).T @ whole for tap in self._taps(x.to(self.exact))])
        raw, ones = taps[:, :C], taps[:, C]
        if stats is not None:
            raw = (raw - stats[0, :C, None] * ones[:, None]) * stats[1, :C, None]
        # (ky kx, ci, co) becomes torch's (co, ci, ky, kx).
        dw = raw.reshape(TAPS, TAPS, C, C).permute(3, 2, 0, 1)
        lying = torch.channels_last if channels_last else torch.contiguous_format
        return dw.contiguous(memory_format=lying), ones[TAPS * TAPS // 2].clone()

    def _pixels(self, x: Tensor) -> Tensor:
        return F.pad(x.permute(0, 2, 3, 1), (0, self.layout.pitch - self.layout.channels)).to(self.dtype)

    def _normal(self, y: Tensor, stats: Tensor) -> Tensor:
        mean, rstd = stats[:2, : self.layout.pitch]
        return (y.to(self.exact) - mean) * rstd

    def _store(self, value: Tensor, *, ones: bool) -> Tensor:
        C = self.layout.channels
        spare = torch.zeros_like(value[..., C:])
        spare[..., :ONES] = 1 if ones else 0
        return torch.cat([value[..., :C], spare], -1).to(self.dtype)

    def _sums(self, value: Tensor, other: Tensor) -> Tensor:
        value, other = value.to(self.exact), other.to(self.exact)
        return self.layout.wide(torch.stack([value.sum((0, 1, 2)), (value * other).sum((0, 1, 2))]))[None]

    def _fold(self, w: Tensor, b: Tensor, stats: Tensor) -> Tensor:
        C = self.layout.channels
        mean, rstd = stats[:2, :C, None]
        taps = (w.permute(2, 3, 1, 0).to(self.exact) * rstd).to(self.dtype)
        shift = -(taps.to(self.exact) * mean).sum(2)
        shift[1, 1] += b
        return self._rows([torch.cat([taps, torch.stack(split(shift, self.dtype), 2)], 2)])[0]

    def _rows(self, layers: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        """Taps (3, 3, inputs, C) of each layer as rows of the matrix products."""
        C, P = self.layout.channels, self.layout.pitch
        packed = []
        for taps in layers:
            rows = F.pad(taps, (0, self.layout.width - C, 0, P - taps.shape[2])).flatten(1, 2)
            packed.append(F.pad(rows, (0, 0, 0, self.layout.depth - TAPS * P)))
        return torch.stack(packed)

    def _taps(self, x: Tensor) -> list[Tensor]:
        """The input as each of the nine weights of a kernel sees it."""
        _, H, W, _ = x.shape
        padded = F.pad(x, (0, 0, 1, 1, 1, 1))
        return [padded[:, ky : ky + H, kx : kx + W] for ky in range(TAPS) for kx in range(TAPS)]

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        P = self.layout.pitch
        taps = w.to(self.exact)[:, : TAPS * P, :P].reshape(TAPS, TAPS, P, P).permute(3, 2, 0, 1)
        return F.conv2d(x.to(self.exact).permute(0, 3, 1, 2), taps, padding=1).permute(0, 2, 3, 1)
