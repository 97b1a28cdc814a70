"""conv2d of few channels: an operation of its own, so that compilers and graphs take it as it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from banach.kernels.beside import Beside
from banach.kernels.modules import has_triton


@torch.library.custom_op("banach::conv2d", mutates_args=())
def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """As F.conv2d of a batch with a square window, channels_last. float32 products are exact to about float32.

    On a GPU with Triton by kernels that multiply on tensor cores, float32 numbers as sums of parts that those
    take whole; elsewhere F.conv2d. It has first derivatives by backward passes, no others.
    """
    if x.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"conv2d takes (batch, {weight.shape[1]}, height, width), got {tuple(x.shape)}; check the channels"
        )
    if not has_kernel(x, weight):
        with torch.autocast(x.device.type, enabled=False):
            return F.conv2d(x, weight, bias, stride, padding).contiguous(memory_format=torch.channels_last)
    from banach.kernels import window_launch

    return window_launch.forward(x, weight, bias, window_launch.Sizes.of(x, weight, stride, padding))


@conv2d.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    side = weight.shape[2]
    rows, columns = ((size + 2 * padding - side) // stride + 1 for size in x.shape[2:])
    return torch.empty(
        (x.shape[0], weight.shape[0], rows, columns), dtype=x.dtype, device=x.device
    ).contiguous(memory_format=torch.channels_last)  # fmt: skip


@torch.library.custom_op("banach::conv2d_backward", mutates_args=())
def conv2d_backward(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, wants_x: bool, wants_w: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; empty ones where none is wanted. The two kinds of work go side by side."""
    if not has_kernel(x, weight):
        with torch.autocast(x.device.type, enabled=False):
            return _plain_backward(g, x, weight, stride, padding, (wants_x, wants_w, wants_w and has_bias))
    from banach.kernels import window_launch

    g = g.contiguous(memory_format=torch.channels_last)
    sizes, beside = window_launch.Sizes.of(x, weight, stride, padding), Beside(x.device)
    dw, db = weight.new_empty(0), None
    if wants_w:
        dw, db = beside.run(
            lambda g, x: window_launch.weight_gradient(g, x, weight, sizes, bias=has_bias), g, x
        )  # fmt: skip
    dx = window_launch.input_gradient(g, weight, sizes) if wants_x else x.new_empty(0)
    beside.join()
    return dx, dw, weight.new_empty(0) if db is None else db


def _plain_backward(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = torch.ops.aten.convolution_backward(
        g, x, weight, [weight.shape[0]], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, list(wanted)
    )
    dw = torch.empty_like(weight).copy_(dw) if wanted[1] else weight.new_empty(0)
    dx = dx.contiguous(memory_format=torch.channels_last) if wanted[0] else x.new_empty(0)
    return dx, dw, db if wanted[2] else weight.new_empty(0)


@conv2d_backward.register_fake
def _(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, wants_x: bool, wants_w: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(0)
    if wants_x:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device).contiguous(memory_format=torch.channels_last)
    dw = torch.empty_like(weight) if wants_w else weight.new_empty(0)
    return dx, dw, weight.new_empty(weight.shape[0] if wants_w and has_bias else 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.stride, ctx.padding = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    wants_x, *others = ctx.needs_input_grad[:3]
    wants_w, has_bias = any(others), ctx.has_bias
    dx, dw, db = conv2d_backward(g, x, weight, ctx.stride, ctx.padding, wants_x, wants_w, has_bias)
    return dx if wants_x else None, dw if wants_w else None, db if wants_w and has_bias else None, None, None


conv2d.register_autograd(_backward, setup_context=_setup)


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Is there a kernel for these? They count pixels and channels in 32 bits."""
    known = x.is_cuda and has_triton() and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16)
    most = x.shape[0] * x.shape[2] * x.shape[3] * max(weight.shape[:2])
    return known and 0 < most < 2**31
