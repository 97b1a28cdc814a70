"""Convolutions of few channels through kernels of their own: the same function and the same weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from banach.kernels import conv2d, has_triton
from banach.nn.hooks import is_hooked

WIDEST = 64  # channels, from which on cuDNN's kernels are good


class WindowConv2d(nn.Conv2d):
    """A Conv2d by `banach.kernels.conv2d`: in the type of its weights or, where it is on, of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        kind, dtype = x.device.type, self.weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        bias = None if self.bias is None else self.bias.to(dtype)
        out: Tensor = conv2d(x.to(dtype), self.weight.to(dtype), bias, self.stride[0], int(self.padding[0]))
        return out


def with_windows(part: Any) -> Any:
    """The module with a `WindowConv2d` for each convolution that fits; all else is the module's own."""
    if not isinstance(part, nn.Module):
        return part
    instead: dict[int, Any] = {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers())}
    for layer in part.modules():
        if _fits(layer):
            instead[id(layer)] = _window(layer)
    return copy.deepcopy(part, instead)


def wants_windows(part: Any) -> bool:
    """Are there such convolutions, in a type and on a device that the kernels are for?"""
    if not isinstance(part, nn.Module) or not has_triton():
        return False
    layers = [layer for layer in part.modules() if _fits(layer)]
    return bool(layers) and all(layer.weight.is_cuda and layer.weight.dtype == torch.float32 for layer in layers)


def products_in_tf32() -> bool:
    """Does cuDNN convolve float32 in TF32? Asked in the words of PyTorch today, or in those before."""
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return bool(backends.cudnn.allow_tf32)
    said = (backends.cudnn.conv.fp32_precision, backends.cudnn.fp32_precision, backends.fp32_precision)
    return next((word for word in said if word != "none"), "ieee") == "tf32"


def _fits(layer: Any) -> bool:
    return (
        type(layer) is nn.Conv2d
        and max(layer.in_channels, layer.out_channels) <= WIDEST
        and layer.kernel_size[0] == layer.kernel_size[1]
        and layer.stride[0] == layer.stride[1]
        and not isinstance(layer.padding, str)
        and layer.padding[0] == layer.padding[1]
        and layer.padding_mode == "zeros"
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and not is_hooked(layer)
    )


def _window(layer: Any) -> Any:
    """With the layer's own parameters."""
    made = copy.copy(layer)
    made.__class__ = WindowConv2d
    return made
