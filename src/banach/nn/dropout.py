"""Dropout that keeps one mask per pass, so that the map that is iterated stays the same map."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from banach.nn.passes import draws_masks, running_pass


class _OneMask:
    """x * m / (1 - p), with m drawn once per pass; outside a pass like PyTorch's own.

    The mask belongs to the layer: called at two places in R, it drops the same entries at both, so give each
    place a layer of its own.
    """

    one_mask_per_pass = True
    p: float
    training: bool
    inplace: bool

    def forward(self, x: Tensor) -> Tensor:
        now = running_pass()
        if now is None:
            _refuse_recomputation(self)
        if now is None or not self.training or self.p == 0:
            return super().forward(x)  # type: ignore[misc]
        _remember(self)
        mask = now.mask(self, self.shape(x), 1 - self.p, x.device)  # type: ignore[arg-type]
        # At p = 1 nothing is kept and the scale would be infinite.
        return torch.where(mask, x / (1 - self.p) if self.p < 1 else x, x.new_zeros(()))

    def shape(self, x: Tensor) -> torch.Size:
        return x.shape


# Layers that were evaluated inside a pass.
_inside: weakref.WeakSet[Any] = weakref.WeakSet()


def _remember(layer: Any) -> None:
    if not torch.compiler.is_compiling():
        _inside.add(layer)


def _refuse_recomputation(layer: Any) -> None:
    """A checkpoint inside R recomputes in the backward pass, where the mask is not known."""
    if torch.compiler.is_compiling() or not draws_masks(layer) or layer not in _inside:
        return
    if torch._C._current_graph_task_id() != -1:  # the backward pass is running
        raise RuntimeError(
            "dropout in R was recomputed outside its pass, by a checkpoint inside R, and has lost its mask: "
            "use Unroll(checkpoint=True) instead"
        )


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
    for name, child in module._modules.items():  # not named_children(), which names a shared layer only once
        if child is not None:
            module._modules[name] = convert_dropout(child)
    return module


def check_dropout(R: Any, modules: list[nn.Module] | None = None) -> None:
    """Refuse a train-mode layer in R that draws at random at every evaluation. `modules`: those of R, if known."""
    if not isinstance(R, nn.Module):
        return
    if not any(module.training and draws_anew(module) for module in modules or R.modules()):
        return
    for name, module in R.named_modules():
        advice = _advice(module) if module.training else None
        if advice is not None:
            place = f"R.{name}" if name else "R"
            raise RuntimeError(
                f"{place} is {type(module).__name__}, which draws at random anew at every evaluation, so there is "
                f"no fixed point to find: {advice}"
            )


def draws_anew(module: nn.Module) -> bool:
    """Would this module draw at random at every evaluation, were it in train mode?"""
    return _advice(module) is not None


def _advice(module: nn.Module) -> str | None:
    """What to use instead of a module that draws at random, or None if it does not."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and not isinstance(module, _OneMask) and module.p > 0:
        return "use banach.nn.Dropout, or banach.nn.convert_dropout(R)"
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0:
        return "set its dropout to 0 and use banach.nn.Dropout outside it"
    if isinstance(module, nn.RReLU) and module.lower < module.upper:
        return "use nn.LeakyReLU"
    return None
