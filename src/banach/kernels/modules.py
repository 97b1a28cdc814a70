"""Residual blocks given as modules: their parameters, masks and running statistics, through the fused stack."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from banach.kernels.block import Stack, apply, prepare, repeat
from banach.kernels.layout import LARGEST, Layout
from banach.kernels.operations import Operations
from banach.kernels.plain import Plain


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def operations_for(x: Tensor, slope: float = 0.1) -> Operations:
    """Kernels on a GPU that has Triton; else, and in float64, the same steps in plain torch in the type of x."""
    layout = Layout(x.shape[1])
    if x.is_cuda and has_triton() and x.dtype != torch.float64:
        from banach.kernels.fused import Fused

        return Fused(layout, slope=slope)
    return Plain(layout, x.dtype, slope)


def residual_stack(
    blocks: Sequence[nn.Module] | nn.Sequential,
    x: Tensor,
    *,
    masks: Tensor | None = None,
    slope: float = 0.1,
    operations: Operations | None = None,
) -> Tensor:
    """All blocks, one after the other, as the modules would compute them, running statistics included.

    A block has conv1, conv2 (3x3 with bias), drop (Dropout2d or Identity) and norm (BatchNorm2d without affine).
    masks: (blocks, batch, channels), zero where dropped; drawn here where dropout is on and none are given.
    """
    given = list(blocks)
    refuse_unfit(given)
    rate, norms = dropout_rate(given), norms_of(given)
    if masks is None and rate:
        masks = torch.rand((len(given), *x.shape[:2]), device=x.device) >= rate
    stack = stack_of(given, x, 1.0 if masks is None else 1 / (1 - rate), operations or operations_for(x, slope))
    out, stats = apply(stack, x, masks, parameters_of(given))
    if norms[0].training:
        update_running_(norms, stats[1:, :, : x.shape[1]], x.numel() // x.shape[1])
    return out


def repeated_stack(
    blocks: Sequence[nn.Module] | nn.Sequential,
    like: Tensor,
    *,
    slope: float = 0.1,
    operations: Operations | None = None,
) -> Callable[[Tensor], Tensor]:
    """The same map for an iteration without gradient: weights are packed once, running statistics stay.

    Valid until the weights change, for inputs of the device, type and channels of `like`.
    """
    given = list(blocks)
    refuse_unfit(given)
    if rate := dropout_rate(given):
        raise ValueError(f"a repeated stack has no dropout, got a rate of {rate}; call residual_stack with masks")
    stack = stack_of(given, like, 1.0, operations or operations_for(like, slope))
    packed = prepare(stack, parameters_of(given))
    return lambda x: repeat(stack, x, None, packed)[0]


def norms_of(blocks: Iterable[Any]) -> list[Any]:
    return [block.norm for block in blocks]


def parameters_of(blocks: Sequence[Any]) -> list[Tensor]:
    """In the order of `Packed`: second convolutions, first convolutions; weights, then biases."""
    layers = [block.conv2 for block in blocks] + [block.conv1 for block in blocks]
    return [layer.weight for layer in layers] + [layer.bias for layer in layers]


def stack_of(blocks: Sequence[Any], x: Tensor, scale: float, operations: Operations) -> Stack:
    """What the blocks are as a `Stack`, in the mode they are in."""
    norms, layout = norms_of(blocks), Layout(x.shape[1])
    known = None if norms[0].training else known_statistics(norms, layout)
    return Stack(operations, layout.width, norms[0].eps, scale, known)


def refuse_unfit(blocks: Sequence[Any]) -> None:
    """A block that the kernels would compute wrongly."""
    for block in blocks:
        norm, layers = block.norm, (block.conv1, block.conv2)
        if (
            not isinstance(norm, nn.BatchNorm2d)
            or norm.affine
            or not norm.track_running_stats
            or norm.momentum is None
        ):
            raise ValueError(
                f"fused blocks end in BatchNorm2d(affine=False) with running statistics, got {norm}; use modules"
            )
        for layer in layers:
            plain = layer.kernel_size == (3, 3) and layer.stride == (1, 1) and layer.padding == (1, 1)
            if not plain or layer.bias is None or layer.groups != 1 or layer.in_channels != layer.out_channels:
                raise ValueError(
                    f"fused blocks have 3x3 convolutions, padding 1, with bias, got {layer}; use the modules"
                )
        if layers[0].in_channels > LARGEST:
            raise ValueError(
                f"fused blocks have at most {LARGEST} channels, got {layers[0].in_channels}; use the modules"
            )
    if len({(block.norm.training, block.norm.eps) for block in blocks}) != 1:
        raise ValueError(
            "the blocks of a stack are all in training or all in evaluation, with one eps; call them apart"
        )


def dropout_rate(blocks: Sequence[Any]) -> float:
    """The rate at which all blocks drop channels now."""
    layers = [block.drop for block in blocks]
    rates = {float(layer.p) if isinstance(layer, nn.Dropout2d) and layer.training else 0.0 for layer in layers}
    if len(rates) > 1 or 1.0 in rates:
        raise ValueError(f"the blocks of a stack drop at one rate below 1, got {sorted(rates)}; call them apart")
    return rates.pop()


def known_statistics(norms: Sequence[Any], layout: Layout) -> Tensor:
    """Running statistics as `Stack.known`."""
    mean = torch.stack([norm.running_mean for norm in norms])
    variance = torch.stack([norm.running_var for norm in norms])
    return layout.wide(torch.stack([mean, (variance + norms[0].eps).rsqrt(), variance], 1))


@torch.no_grad()
def update_running_(norms: Sequence[Any], stats: Tensor, count: int) -> None:
    """What nn.BatchNorm2d does in training: momentum, the unbiased variance, the number of batches."""
    stats = stats.to(norms[0].running_mean.dtype)
    means, variances = list(stats[:, 0].unbind()), list((stats[:, 2] * (count / max(count - 1, 1))).unbind())
    torch._foreach_lerp_([norm.running_mean for norm in norms], means, norms[0].momentum)
    torch._foreach_lerp_([norm.running_var for norm in norms], variances, norms[0].momentum)
    torch._foreach_add_([norm.num_batches_tracked for norm in norms], 1)
