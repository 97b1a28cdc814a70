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
    precision: str
    w_stride_out: int  # elements between two weights: of output channels, input channels, rows, columns
    w_stride_in: int
    w_stride_row: int
    w_stride_column: int
    back: bool = False  # the gradient of the input: pixels see the windows that see them
    rows: int = 64  # pixels of a tile
    stages: int = 3
    depth: int = 0  # of a chunk of places of the window and their channels
    chunks: int = 0
    columns: int = 0
    one_place: bool = False  # a chunk holds channels of one place of the window

    def sized(self, rows: int, *, even: bool = False) -> "Window":
        """Return the constants of a launch with tiles of `rows` pixels.

        `even`: chunks of at most one place each, if the channels allow it.
        """
        deep, factor = self.channels_in * self.side**2, self.channels_in & -self.channels_in
        depth = min(64, factor if even and factor >= 16 else max(16, host.power_of_two(deep)))
        return replace(
            self,
            rows=rows,
            depth=depth,
            chunks=host.ceil_div(deep, depth),
            columns=max(16, host.power_of_two(self.channels_out)),
            one_place=self.channels_in % depth == 0,
        )

    def turned(self) -> "Window":
        """Return the gradient of the input, as a convolution."""
        return replace(
            self, channels_in=self.channels_out, channels_out=self.channels_in, height=self.rows_out,
            width=self.columns_out, rows_out=self.height, columns_out=self.width, w_stride_out=self.w_stride_in,
            w_stride_in=self.w_stride_out, back=True,
        )  # fmt: skip


def window_of(x: Tensor, weight: Tensor, stride: int, padding: int) -> Window:
    """Return the sizes of a convolution; `weight` as the kernels read or write it."""
    (channels_out, channels_in, side, _), (H, W) = weight.shape, x.shape[2:]
    rows, columns = ((size + 2 * padding - side) // stride + 1 for size in (H, W))
    precision = "tf32x3" if x.dtype == torch.float32 else "ieee"
    sizes: Any = channels_in, channels_out, H, W, rows, columns, side, stride, padding, precision, *weight.stride()
    return Window(*sizes)


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
    out, weight = _output(x, weight, bias, stride, padding), _channels_last(weight)
    _convolve(x, weight, bias, out, window_of(x, weight, stride, padding))
    return out


@conv2d.register_fake
def _output(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Return the output without its values."""
    rows, columns = ((size + 2 * padding - weight.shape[2]) // stride + 1 for size in x.shape[2:])
    shape = x.shape[0], weight.shape[0], rows, columns
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@torch.library.custom_op("banach::conv2d_backward", mutates_args=())
def conv2d_backward(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, wants_x: bool, wants_w: bool, wants_b: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of x, weight and bias, empty if not wanted. Those of the weight run on a second stream."""
    dx, dw, db = _gradients(g, x, weight, stride, padding, wants_x, wants_w, wants_b)
    g, weight, side = _channels_last(g), _channels_last(weight), host.SideStream(x.device)
    if wants_w:
        window = window_of(x, dw, stride, padding)
        side.run(lambda g, x: _weight_gradient(g, x, dw, db if wants_b else None, window), g, x)
    if wants_x:
        _convolve(g, weight, None, dx, window_of(x, weight, stride, padding).turned())
    side.join()
    return dx, dw, db


@conv2d_backward.register_fake
def _gradients(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, wants_x: bool, wants_w: bool, wants_b: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients without their values."""
    dx = torch.empty_like(x, memory_format=torch.channels_last) if wants_x else x.new_empty(0)
    dw = torch.empty_like(weight) if wants_w else weight.new_empty(0)
    return dx, dw, weight.new_empty(weight.shape[0] if wants_b else 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
    wanted = wants_x, wants_w or wants_b, wants_b  # the bias is a by-product of the weight
    made = conv2d_backward(g, *ctx.saved_tensors, ctx.stride, ctx.padding, *wanted)
    return *(one if wants else None for one, wants in zip(made, wanted, strict=True)), None, None


conv2d.register_autograd(_backward, setup_context=_setup)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, window: Window) -> None:
    from banach.kernels.window_kernel import convolve

    pixels, bias = len(x) * window.rows_out * window.columns_out, None if bias is None else bias.contiguous()
    size = "fewest" if x.dtype == torch.float32 and pixels < 8192 else "many" if pixels >= 32768 else "few"
    K = window.sized(TILES[size], even=True)
    grid = (host.ceil_div(pixels, K.rows),)
    convolve[grid](_channels_last(x), weight, bias, out, pixels, K=host.constants(K), num_warps=4)


def _weight_gradient(g: Tensor, x: Tensor, dw: Tensor, db: Tensor | None, window: Window) -> None:
    """Compute the gradients of the weight and of the bias, if there is one."""
    from banach.kernels.window_kernel import add, correlate

    K = window.sized(TILES["weights"])
    pixels = len(x) * K.rows_out * K.columns_out
    tiles = host.ceil_div(pixels, K.rows)
    share = host.ceil_div(tiles, max(1, min(tiles, TILES["parts"] // K.chunks)))
    count = host.ceil_div(tiles, share)
    parts = torch.empty((count, K.columns, K.chunks * K.depth), device=x.device)
    bias_parts = None if db is None else torch.empty((count, K.columns), device=x.device)
    correlate[(count, K.chunks)](
        _channels_last(x), g, parts, bias_parts, pixels, share, K=host.constants(K), num_warps=4
    )
    grid = host.ceil_div(K.channels_in * K.side**2, ADD["BLOCK"]), K.channels_out
    add[grid](parts, bias_parts, dw, db, count, K=host.constants(K), **ADD)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
