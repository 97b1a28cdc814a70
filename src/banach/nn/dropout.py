"""Dropout that keeps one mask per pass, so that the map that is iterated stays the same map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from banach.nn.passes import running_pass


class _OneMask:
    """x * m / (1 - p), with m drawn once per pass; outside a pass like PyTorch's own."""

    one_mask_per_pass = True
    p: float
    training: bool
    inplace: bool

    def forward(self, x: Tensor) -> Tensor:
        now = running_pass()
        if not self.training or self.p == 0 or now is None:
            return super().forward(x)  # type: ignore[misc]
        mask = now.mask(self, self.shape(x), 1 - self.p, x.device)  # type: ignore[arg-type]
        # At p = 1 nothing is kept and the scale would be infinite.
        return torch.where(mask, x / (1 - self.p) if self.p < 1 else x, x.new_zeros(()))

    def shape(self, x: Tensor) -> torch.Size:
        return x.shape


class _OneMaskPerChannel(_OneMask):
    spatial: int

    def shape(self, x: Tensor) -> torch.Size:
        if x.dim() != self.spatial + 2:
            name, expected = type(self).__name__, self.spatial + 2
            raise ValueError(f"{name} inside R takes a batch of {expected} axes, got shape {tuple(x.shape)}")
        return torch.Size([*x.shape[:2], *[1] * self.spatial])


class Dropout(_OneMask, nn.Dropout):
    """`torch.nn.Dropout` with one mask per pass."""


class Dropout1d(_OneMaskPerChannel, nn.Dropout1d):
    """`torch.nn.Dropout1d` with one mask per pass."""

    spatial = 1


class Dropout2d(_OneMaskPerChannel, nn.Dropout2d):
    """`torch.nn.Dropout2d` with one mask per pass."""

    spatial = 2


class Dropout3d(_OneMaskPerChannel, nn.Dropout3d):
    """`torch.nn.Dropout3d` with one mask per pass."""

    spatial = 3


_TWINS: dict[type, type] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
    nn.Dropout3d: Dropout3d,
}


def convert_dropout(module: nn.Module) -> nn.Module:
    """The module with every plain dropout in it replaced by its one-mask-per-pass twin (in place)."""
    if type(module) in _TWINS:
        twin = _TWINS[type(module)](module.p, module.inplace)
        return twin.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, convert_dropout(child))
    return module


def check_dropout(R: Any) -> None:
    """Refuse a train-mode dropout in R that would draw a new mask at every evaluation."""
    if not isinstance(R, nn.Module) or not R.training:
        return
    for name, module in R.named_modules():
        plain = isinstance(module, nn.modules.dropout._DropoutNd) and not isinstance(module, _OneMask)
        hidden = isinstance(module, nn.MultiheadAttention) and module.dropout > 0
        if module.training and ((plain and module.p > 0) or hidden):
            advice = (
                "set its dropout to 0 and use banach.nn.Dropout outside it"
                if hidden
                else "use banach.nn.Dropout, or banach.nn.convert_dropout(R)"
            )
            raise RuntimeError(
                f"R.{name} is {type(module).__name__}, which draws a new mask at every evaluation, so there is "
                f"no fixed point to find: {advice}"
            )
