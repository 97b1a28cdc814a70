"""How weights lie in memory: channels side by side where that is faster."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from banach.fast.fixed import is_bare
from banach.fast.windows import wants_windows

Net = TypeVar("Net", bound=nn.Module)


def prefers_channels_last(net: nn.Module, precision: str) -> bool:
    """On a GPU tensor cores like channels side by side, and so do the kernels that `FixedDepth` puts in."""
    return precision != "fp32" or (is_bare(net) and wants_windows(net))


def channels_side_by_side(net: Net) -> Net:
    """The network itself, the weights of its convolutions in the order that oneDNN likes: the same numbers.

    The images that it makes follow them, so that nothing need be turned round; but an image cannot be viewed as if
    its channels were apart.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net
