"""What a stack of residual blocks asks of a machine. `Plain` and `Fused` answer alike."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Operations(Protocol):
    """Pixels are (N, H, W, P) as `layout` says; packed weights (layers, 3, depth, width).

    Statistics are (3, width): mean, 1 / sqrt(variance + eps), variance; normalised y is (y - mean) * the second.
    Sums are (programs, 2, width), to be added over programs: of g and of g times y, or of y and of y^2.
    """

    def enter(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) as pixels, with the ones."""
        ...

    def enter_gradient(self, g: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """A gradient as pixels, without the ones, and its sums with y."""
        ...

    def leave(self, x: Tensor, stats: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Pixels as images, normalised where there are statistics."""
        ...

    def fold(self, w: Tensor, b: Tensor, stats: Tensor) -> Tensor:
        """Packed weights of layers (layers, C, C, 3, 3) whose inputs have statistics (known, 3, width).

        Layers beyond the known ones are left zero, for `measure_and_fold`.
        """
        ...

    def turn(self, w: Tensor) -> Tensor:
        """Packed weights of the gradients of the layers' inputs."""
        ...

    def measure(self, sums: Tensor, count: int, eps: float, stats: Tensor) -> None:
        """Statistics from the sums of y and y^2 over `count` pixels, written to `stats`."""
        ...

    def measure_and_fold(
        self, sums: Tensor, count: int, eps: float, stats: Tensor, layer: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        """The same, and the weight and bias of the layer that comes next packed into `out` (3, depth, width)."""
        ...

    def masks(self, kept: Tensor) -> Tensor:
        """Masks (layers, N, C), zero where a channel is dropped, as (layers, N, P)."""
        ...

    def hidden(self, x: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
        """LReLU(conv(x)) where the mask (N, P) is not zero: it drops and does not scale."""
        ...

    def join(self, h: Tensor, w: Tensor, x: Tensor, stats: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
        """y = LReLU(normalised x + conv(h)), and its sums if asked for."""
        ...

    def unnormalise(self, g: Tensor, y: Tensor, stats: Tensor, sums: Tensor | None, count: int) -> Tensor:
        """From the gradient of normalised y to that of the sum inside `join`; no sums: constant statistics."""
        ...

    def gate(self, g: Tensor, w: Tensor, h: Tensor, dropped: bool) -> Tensor:
        """From the gradient of conv(h) to that of the convolution inside `hidden`, with turned weights.

        dropped: there was a mask, so what is zero in h was dropped.
        """
        ...

    def add(self, g: Tensor, w: Tensor, s: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """conv(g) + s, with turned weights, and its sums with y where there is one."""
        ...

    def weights(
        self, x: Tensor, g: Tensor, stats: Tensor | None, *, channels_last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Gradients of a layer's weight and bias, from its input, not normalised, and its output's gradient.

        channels_last: that of the weight lies in memory so. Autograd copies it if the weight itself does not.
        """
        ...
