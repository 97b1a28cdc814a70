"""conv2d of few channels: a custom operation, so that compilers and graphs take it as one call.

The device code is in `window_kernel.py`; the reference is `F.conv2d`. No host sync happens here.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from banach.kernels import host

ADD = {"BLOCK": 64, "CHUNK": 64}  # numbers of a gradient, and parts of it, that one program adds at a time
# Pixels that a program takes at a time, by the pixels of the batch and for the gradient of weights, which about
# "parts" programs compute. "fewest": float32 products take long, so that even of few pixels every multiprocessor
# should have some.
TILES = {"fewest": 32, "few": 64, "many": 128, "weights": 64, "parts": 264}


@dataclass(frozen=True)
class Window:
    """A convolution as the kernels' K: channels and sizes in and out, its window, and a tile."""

    channels_in: int
    channels_out: int
    height: int
    width: int
    rows_out: int
    columns_out: int
    side: int
    stride: int
    padding: int
    depth: int  # of a chunk of places of the window and their channels
    precision: str
    w_stride_out: int = 0  # elements between two weights: of output channels, input channels, rows, columns
    w_stride_in: int = 0
    w_stride_row: int = 0
    w_stride_column: int = 0
    rows: int = 64  # pixels of a tile
    stages: int = 3
    chunks: int = 0
    columns: int = 0
    one_place: bool = False  # a chunk holds channels of one place of the window

    def sized(self, rows: int) -> "Window":
        """Return the constants of a launch with tiles of `rows` pixels."""
        return replace(
            self,
            rows=rows,
            chunks=host.ceil_div(self.channels_in * self.side**2, self.depth),
            columns=max(16, host.power_of_two(self.channels_out)),
            one_place=self.channels_in % self.depth == 0,
        )

    def reading(self, weight: Tensor) -> "Window":
        """Return the same for weights with the strides of `weight`."""
        out, into, row, column = weight.stride()
        return replace(self, w_stride_out=out, w_stride_in=into, w_stride_row=row, w_stride_column=column)

    @property
    def back(self) -> "Window":
        """The gradient of the input, as a convolution."""
        return replace(
            self, channels_in=self.channels_out, channels_out=self.channels_in, height=self.rows_out,
            width=self.columns_out, rows_out=self.height, columns_out=self.width, w_stride_out=self.w_stride_in,
            w_stride_in=self.w_stride_out, depth=_depth(self.channels_out, self.side),
        )  # fmt: skip

    @property
    def even(self) -> "Window":
        """The same with chunks of at most one place each, if the channels allow it."""
        even = self.channels_in & -self.channels_in
        return replace(self, depth=min(even, 64)) if even >= 16 else self


def _depth(channels: int, side: int) -> int:
    return min(64, max(16, host.power_of_two(channels * side**2)))


def window_of(x: Tensor, weight: Tensor, stride: int, padding: int) -> Window:
    """Return the sizes of a convolution; `weight` as the kernels read it."""
    (channels_out, channels_in, side, _), (H, W) = weight.shape, x.shape[2:]
    rows, columns = ((size + 2 * padding - side) // stride + 1 for size in (H, W))
    precision = "tf32x3" if x.dtype == torch.float32 else "ieee"
    sizes = Window(
        channels_in, channels_out, H, W, rows, columns, side, stride, padding, _depth(channels_in, side), precision
    )
    return sizes.reading(weight)


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return True if the kernels can compute this. They count pixels and channels in 32 bits."""
    known = x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) and x.shape[1] == weight.shape[1]
    return known and 0 < x.shape[0] * x.shape[2] * x.shape[3] * max(weight.shape[:2]) < 2**31


@torch.library.custom_op("banach::conv2d", mutates_args=())
def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Compute F.conv2d of a batch with a square window, channels_last, with about the precision of float32.

    The kernels use tensor cores, which multiply float32 numbers as sums of TF32 ones. There are first derivatives
    by backward passes, no others.

    Args:
        x: (N, C, H, W), on a GPU, for which `has_kernel` is True.
        weight: (outputs, C, side, side).
        bias: (outputs,) or None.
        stride: in both directions.
        padding: zeros on each side.
    """
    weight = _channels_last(weight)
    return _convolve(x, weight, bias, window_of(x, weight, stride, padding), back=False)


@conv2d.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    rows, columns = ((size + 2 * padding - weight.shape[2]) // stride + 1 for size in x.shape[2:])
    return _empty(x, weight.shape[0], rows, columns)


@torch.library.custom_op("banach::conv2d_backward", mutates_args=())
def conv2d_backward(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, wants_x: bool, wants_w: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of x, weight and bias, empty if not wanted. Those of the weight run on a second stream."""
    g, read, side = _channels_last(g), _channels_last(weight), host.SideStream(x.device)
    window = window_of(x, read, stride, padding)
    dw, db, dx = weight.new_empty(0), weight.new_empty(0), x.new_empty(0)
    if wants_w:
        dw, db = side.run(lambda g, x: _weight_gradient(g, x, weight, window, bias=has_bias), g, x)
    if wants_x:
        dx = _convolve(g, read, None, window.back, back=True)
    side.join()
    return dx, dw, db


@conv2d_backward.register_fake
def _(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, wants_x: bool, wants_w: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.channels_last) if wants_x else x.new_empty(0)
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


def _tile(pixels: int, dtype: torch.dtype) -> int:
    if dtype == torch.float32 and pixels < 8192:
        return TILES["fewest"]
    return TILES["many" if pixels >= 32768 else "few"]


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, *, back: bool) -> Tensor:
    from banach.kernels.window_kernel import convolve

    out = _empty(x, window.channels_out, window.rows_out, window.columns_out)
    pixels = len(x) * window.rows_out * window.columns_out
    K = window.even.sized(_tile(pixels, x.dtype))
    convolve[(host.ceil_div(pixels, K.rows),)](
        _channels_last(x), weight, weight if bias is None else bias.contiguous(), out, pixels, BACK=back,
        BIAS=bias is not None, K=host.constants(K), num_warps=4,
    )  # fmt: skip
    return out


def _weight_gradient(g: Tensor, x: Tensor, weight: Tensor, window: Window, *, bias: bool) -> tuple[Tensor, Tensor]:
    """Return gradients of the weight, with its strides, and of the bias."""
    from banach.kernels.window_kernel import add, correlate

    dw = torch.empty_like(weight)
    K = window.sized(TILES["weights"]).reading(dw)
    pixels = len(x) * K.rows_out * K.columns_out
    tiles = host.ceil_div(pixels, K.rows)
    share = host.ceil_div(tiles, max(1, min(tiles, TILES["parts"] // K.chunks)))
    count = host.ceil_div(tiles, share)
    parts = torch.empty((count, K.columns, K.chunks * K.depth), device=x.device)
    bias_parts = torch.empty((count, K.columns), device=x.device) if bias else parts
    db = torch.empty(K.channels_out if bias else 0, dtype=weight.dtype, device=x.device)
    correlate[(count, K.chunks)](
        _channels_last(x), g, parts, bias_parts, pixels, share, BIAS=bias, K=host.constants(K), num_warps=4
    )
    add[(host.ceil_div(K.channels_in * K.side**2, ADD["BLOCK"]), K.channels_out)](
        parts, bias_parts, dw, db if bias else dw, count, BIAS=bias, K=host.constants(K), **ADD
    )
    return dw, db


def _empty(x: Tensor, *shape: int) -> Tensor:
    """Return as many images as x has, of this shape."""
    return torch.empty((x.shape[0], *shape), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
