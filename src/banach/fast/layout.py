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


def laid_out(net: Net, device: torch.device) -> Net:
    """The network on the device; on a CPU with channels side by side, so that oneDNN need not turn images round.

    The same numbers in another order in memory. What it makes of images follows the weights.
    """
    net.to(device)
    if device.type == "cpu":
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net
