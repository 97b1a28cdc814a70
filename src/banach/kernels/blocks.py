"""Residual blocks given as modules: may a kernel compute in their place, and their parameters as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def says(part: Any, name: str) -> bool:
    """Return True if the class that defines `forward` also defines attribute `name`, or the instance has it.

    Only then is a module still what its class says: a subclass that changes `forward` must say so again.
    """
    if "forward" in vars(part):
        return False
    owners = [next((c for c in type(part).__mro__ if word in vars(c)), None) for word in ("forward", name)]
    return name in vars(part) or (owners[1] is not None and owners[0] is owners[1])


def check_blocks(blocks: Sequence[Any], most: int) -> None:
    """Raise if a kernel would compute these blocks wrongly.

    Args:
        blocks: modules with conv1, conv2 (3x3, bias, padding 1) and norm (BatchNorm2d without weights).
        most: channels that the kernel can take.
    Raises:
        ValueError: if a layer is of another kind, or the blocks differ in mode, eps or channels.
    """
    for block in blocks:
        norm = getattr(block, "norm", None)
        if type(norm) is not nn.BatchNorm2d or norm.affine or not (norm.training or norm.track_running_stats):
            raise ValueError(f"expected blocks that end in BatchNorm2d(affine=False), got {norm}; use the modules")
        for layer in (block.conv1, block.conv2):
            if not _is_plain(layer, most):
                raise ValueError(
                    f"expected 3x3 convolutions with bias, padding 1 and at most {most} channels, got {layer}; "
                    "use the modules"
                )
    if len({(block.norm.training, block.norm.eps, block.conv1.in_channels) for block in blocks}) != 1:
        raise ValueError("all blocks must have one mode (train or eval), one eps and one number of channels")


def _is_plain(layer: Any, most: int) -> bool:
    if type(layer) is not nn.Conv2d:
        return False
    shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    plain = shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") and layer.bias is not None
    return plain and layer.in_channels == layer.out_channels <= most


def gather(parameters: Sequence[Tensor]) -> Tensor:
    """Stack parameters into one contiguous tensor, in at least float32, without a gradient."""
    together = torch.stack([parameter.detach() for parameter in parameters])
    return together.to(torch.promote_types(together.dtype, torch.float32)).contiguous()


def running_statistics(blocks: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, 1 / deviation and variance of all norms, each (blocks, C)."""
    mean = torch.stack([block.norm.running_mean for block in blocks])
    variance = torch.stack([block.norm.running_var for block in blocks])
    return mean, (variance + blocks[0].norm.eps).rsqrt(), variance
