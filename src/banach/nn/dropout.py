"""Dropout that keeps one mask per pass, so that the map that is iterated stays the same map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from banach.nn.attention import MultiheadAttention
from banach.nn.passes import masked, pass_of


class _OneMask:
    """x * m / (1 - p), with m drawn once per pass; outside a pass like PyTorch's own.

    The mask belongs to the layer: called at two places in R, it drops the same entries at both, so give each
    place its own layer.
    """

    one_mask_per_pass = True
    spatial = 0  # axes of a channel, which is dropped whole; 0: entries are dropped one by one
    p: float
    training: bool
    inplace: bool

    def forward(self, x: Tensor) -> Tensor:
        now = pass_of(self)
        if now is None:
            return super().forward(x)  # type: ignore[misc]
        return masked(x, self, now, self._shape(x) if self.spatial else x.shape)

    def _shape(self, x: Tensor) -> torch.Size:
        if x.dim() != self.spatial + 2:
            name, expected = type(self).__name__, self.spatial + 2
            raise ValueError(f"{name} inside R takes a batch of {expected} axes, got shape {tuple(x.shape)}")
        return torch.Size([*x.shape[:2], *[1] * self.spatial])


class Dropout(_OneMask, nn.Dropout):
    """`torch.nn.Dropout` with one mask per pass."""


class Dropout1d(_OneMask, nn.Dropout1d):
    """`torch.nn.Dropout1d` with one mask per pass."""

    spatial = 1


class Dropout2d(_OneMask, nn.Dropout2d):
    """`torch.nn.Dropout2d` with one mask per pass."""

    spatial = 2


class Dropout3d(_OneMask, nn.Dropout3d):
    """`torch.nn.Dropout3d` with one mask per pass."""

    spatial = 3


_TWINS: dict[type, type] = {getattr(nn, own.__name__): own for own in (Dropout, Dropout1d, Dropout2d, Dropout3d)}


def convert_dropout(module: nn.Module) -> nn.Module:
    """Give every dropout layer and nn.MultiheadAttention in the module one mask per pass, in place.

    Reaches the layers inside nn.TransformerEncoderLayer and other containers. Weights, hooks and state_dict stay
    as they are. Subclasses of the layers are left alone, since their forward is not known.

    Args:
        module: R, or a part of it.
    Returns:
        The module; if it is itself a dropout layer, the layer that replaces it.
    """
    if type(module) is nn.MultiheadAttention:
        module.__class__ = MultiheadAttention  # the same object: its weights may be shared, or in an optimizer
        return module
    if type(module) in _TWINS:
        twin = _TWINS[type(module)](module.p, module.inplace)
        return twin.train(module.training)
    for name, child in module._modules.items():  # not named_children(), which names a shared layer only once
        if child is not None:
            module._modules[name] = convert_dropout(child)
    return module


def check_dropout(R: Any, modules: list[nn.Module] | None = None) -> None:
    """Refuse a train-mode layer in R that draws at random at every evaluation. `modules`: those of R, if known.

    The layers of a plain function cannot be seen from here: see `banach.nn.layers.Watch`.
    """
    if not isinstance(R, nn.Module):
        return
    for layer in modules or R.modules():
        advice = _advice(layer) if layer.training else None
        if advice is not None:
            name = next(f"R.{name}".rstrip(".") for name, module in R.named_modules() if module is layer)
            raise RuntimeError(
                f"{name} is {type(layer).__name__}, which draws new random numbers at every evaluation, so "
                f"there is no fixed point to find: {advice}"
            )


# Layers that draw at random, the attribute that holds their probability, and what to use instead.
_RANDOM: tuple[tuple[type, str, str], ...] = (
    (nn.modules.dropout._DropoutNd, "p", "use banach.nn.Dropout, or banach.nn.convert_dropout(R)"),
    (
        nn.MultiheadAttention,
        "dropout",
        "call banach.nn.convert_dropout(R); if it is a subclass, derive it from banach.nn.MultiheadAttention",
    ),
    (nn.RNNBase, "dropout", "set its dropout to 0, and put banach.nn.Dropout between modules of one layer each"),
)


def _advice(module: nn.Module) -> str | None:
    """Return what to use instead of a module that draws at random, None if it does not."""
    if getattr(module, "one_mask_per_pass", False):
        return None
    if isinstance(module, nn.RReLU) and module.lower < module.upper:
        return "use nn.LeakyReLU"
    for kind, probability, advice in _RANDOM:  # Dynamo of torch 2.6 does not trace next(..., None)
        if isinstance(module, kind) and getattr(module, probability) > 0:
            return advice
    return None
