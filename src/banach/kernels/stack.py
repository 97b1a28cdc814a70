"""residual_stack: blocks x -> BN(LReLU(x + conv(mask * LReLU(conv(x))))), many times, by fused kernels in bf16.

A tensor of N images, H rows, W columns and C channels is stored as (N, H, W, pitch), pitch a multiple of 8: so
a pixel begins at a multiple of 16 bytes. The first three spare channels of an input hold ones. Their weights carry
what is added to a convolution: the bias, and the shift of a batch norm whose scale is in the weights. Zero padding
pads these ones too, so the shift is left out at the border, as it must be. Three, because a number of 24 bits is
three of 8. In a gradient of weights the row of ones is the sum over pixels, which the bias and the mean need.

Between two blocks the value before batch norm is stored with its statistics, and each reader normalises it, so
the normalised tensor is never written. The device code is in `stack_kernel.py`; the reference is the modules. No
host sync happens here, so a whole step can be captured in a CUDA graph.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.kernels import host

SLOPE = 0.1  # of the leaky ReLUs below zero
STORED = torch.bfloat16  # type of what is stored and multiplied; sums are float32
ONES = 3  # spare channels that hold ones
LARGEST = 64 - ONES  # channels
SUM = {"CHUNK": 256, "num_warps": 8}  # sums of programs for batch norm: how many are added at a time
COLUMNS = 16  # channels whose sums one program adds, if it does nothing else
REDUCE = {"ROWS": 1, "CHUNK": 128, "num_warps": 4}  # rows and parts of a weight gradient that are added at a time
POINTWISE = 64  # pixels of a tile between convolutions
HIDDEN, JOIN, GATE, ADD = range(4)  # epilogues of a convolution, see `stack_kernel`


@dataclass(frozen=True)
class Layout:
    """Compile-time constants of the kernels, their K: sizes of images and packed weights, and a tile."""

    channels: int
    pitch: int  # elements from one pixel to the next
    columns: int  # of a matrix product: the power of two that holds the pitch
    depth: int  # rows of packed weights for one row of a kernel: the power of two that holds 3 * pitch
    height: int = 0
    width: int = 0
    rows: int = POINTWISE  # pixels of a tile
    warps: int = 4
    stages: int = 2  # tiles in flight
    per_multiprocessor: int = 1  # programs

    @staticmethod
    def of(channels: int) -> "Layout":
        """Return the sizes that follow from the number of channels."""
        pitch = host.ceil_div(channels + ONES, 8) * 8
        return Layout(channels, pitch, max(16, host.power_of_two(pitch)), host.power_of_two(3 * pitch))

    def tiled(self, name: str, height: int = 0, width: int = 0) -> "Layout":
        """Return the same with a tile of TILES, for images of a size."""
        return replace(self, height=height, width=width, **TILES[name])

    def programs(self, pixels: int, device: torch.device, repeats: int = 1) -> int:
        """Return as many programs as can run at once, or fewer, so that all have nearly as many tiles."""
        tiles = host.ceil_div(pixels, self.rows) * repeats
        rounds = host.ceil_div(tiles, host.multiprocessors(device) * self.per_multiprocessor)
        return host.ceil_div(tiles, rounds)


# The fastest on an H200: convolutions, weight gradients, `enter`.
TILES: dict[str, dict[str, Any]] = {
    "images": {"rows": 64, "stages": 3, "per_multiprocessor": 2},
    "weights": {"rows": 64, "warps": 8, "stages": 4},
    "enter": {"rows": 64, "per_multiprocessor": 8},
}


@dataclass(frozen=True, eq=False)
class Stack:
    """Blocks as tensors: weights (2 layers, C, C, 3, 3) and biases; second convolutions come first."""

    layout: Layout
    weights: Tensor
    biases: Tensor
    known: Tensor | None  # (layers, 3, columns) mean, 1 / deviation and variance; None: those of the batch
    eps: float
    drops: bool
    scale: float  # what dropout multiplies by where it keeps; it goes into the weights, as a batch norm's scale
    channels_last: bool  # gradients of the weights

    @staticmethod
    def of(blocks: Sequence[Any], parameters: Sequence[Tensor], *, drops: bool, scale: float) -> "Stack":
        """Copy the parameters of the blocks, and their running statistics in eval mode."""
        layout, known = Layout.of(blocks[0].conv1.in_channels), host.running_statistics(blocks)
        last = parameters[0].is_contiguous(memory_format=torch.channels_last)
        if known is not None:
            known = host.padded(known.transpose(0, 1), layout.columns)
        weights, biases = host.gather(parameters[: 2 * len(blocks)]), host.gather(parameters[2 * len(blocks) :])
        return Stack(layout, weights, biases, known, blocks[0].norm.eps, drops, scale, last)


def has_kernel(x: Tensor) -> bool:
    return x.is_cuda and not host.lacks(x.device) and x.dtype != torch.float64


def residual_stack(blocks: Sequence[nn.Module] | nn.Sequential, x: Tensor) -> Tensor:
    """Compute all blocks, one after the other, as the modules would, running statistics included.

    Args:
        blocks: modules with conv1, conv2 (3x3 with bias), drop (Dropout2d or Identity) and norm (BatchNorm2d
            without weights). On a GPU they are computed in bf16. Elsewhere, and where the kernels would compute
            blocks wrongly, the modules are called.
        x: images (N, C, H, W).
    """
    given: list[Any] = list(blocks)
    drops = [block.drop for block in given]
    rates = {float(drop.p) if isinstance(drop, nn.Dropout2d) and drop.training else 0.0 for drop in drops}
    known = all(isinstance(drop, nn.Dropout2d | nn.Identity) for drop in drops)
    rate = rates.pop() if known and len(rates) == 1 and max(rates) < 1 else None
    if rate is None or not has_kernel(x) or not host.are_known(given, LARGEST):
        return functools.reduce(lambda value, block: block(value), given, x)
    masks = torch.rand((len(given), *x.shape[:2]), device=x.device) >= rate if rate else None
    return fused_stack(given, x, masks, 1 / (1 - rate))


def fused_stack(blocks: Sequence[Any], x: Tensor, masks: Tensor | None, scale: float) -> Tensor:
    """Compute the blocks by kernels. `masks`: (blocks, N, C), zero where hidden values are dropped."""
    with torch.autocast(x.device.type, enabled=False):
        layers = [block.conv2 for block in blocks] + [block.conv1 for block in blocks]  # in the order of `Stack`
        parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers]
        stack = Stack.of(blocks, parameters, drops=masks is not None, scale=scale)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters)):
            out, stats = Residual.apply(stack, x, masks, *parameters)
        else:
            out, stats = run(stack, x, masks, None)
        if blocks[0].norm.training:
            _update_running_(blocks, stats[1:, :, : x.shape[1]], x.numel() // x.shape[1])
    return out


@torch.no_grad()
def _update_running_(blocks: Sequence[Any], stats: Tensor, count: int) -> None:
    """Update as nn.BatchNorm2d does in training: momentum, the unbiased variance, the number of batches."""
    norms = [block.norm for block in blocks]
    stats = stats.to(norms[0].running_mean.dtype)
    means, variances = list(stats[:, 0].unbind()), list((stats[:, 2] * (count / max(count - 1, 1))).unbind())
    torch._foreach_lerp_([norm.running_mean for norm in norms], means, norms[0].momentum)
    torch._foreach_lerp_([norm.running_var for norm in norms], variances, norms[0].momentum)
    torch._foreach_add_([norm.num_batches_tracked for norm in norms], 1)


class Residual(torch.autograd.Function):
    """`run` and `back` for autograd. Returns the output, and the statistics of each batch norm."""

    @staticmethod
    def forward(ctx: Any, stack: Stack, x: Tensor, masks: Tensor | None, *parameters: Tensor) -> Any:
        record: list[Tensor] = []
        out, stats = run(stack, x, masks, record)
        ctx.stack = stack
        ctx.save_for_backward(stats, *record)
        ctx.mark_non_differentiable(stats)
        return out, stats

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("the fused blocks have first derivatives only; for create_graph use the modules")
        stats, *record = ctx.saved_tensors
        dx, *others = back(ctx.stack, gradients[0], stats, record)
        return None, dx, None, *others


def run(stack: Stack, x: Tensor, masks: Tensor | None, record: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the output and the statistics (layers + 1, 3, columns) of all blocks' inputs and the last output.

    `record` gets the first input, then the hidden values and the output of every block.
    """
    layers, batch, of = len(stack.weights) // 2, stack.known is None, stack.layout
    stats = torch.zeros((layers + 1, 3, of.columns), device=x.device)
    stats[0, 1] = 1  # the first input is used as it is
    if stack.known is not None:
        stats[1:] = stack.known
    ready = torch.cat([(stats[0] * stack.scale).expand(layers, -1, -1), stats[: 1 if batch else layers]])
    folded = _packed(stack)
    _fold(stack, folded, ready, slice(len(ready)))
    kept = None if masks is None else F.pad(masks.to(STORED), (0, of.pitch - x.shape[1]))
    y, _ = _enter(stack, x, None)
    if record is not None:
        record.append(y)
    for layer in range(layers):
        mask, after = None if kept is None else kept[layer], layers + layer + 1
        hidden, _ = _convolve(stack, HIDDEN, y, folded[after - 1], mask)
        y, sums = _convolve(stack, JOIN, hidden, folded[layer], y, stats=stats[layer])
        if batch:  # the last block is followed by no weights to pack
            following = slice(after, after + 1)
            _fold(stack, folded[following], stats[layer + 1], following, sums, x.numel() // x.shape[1])
        if record is not None:
            record += [hidden, y]
    return _leave(stack, y, stats[layers], x.dtype), stats


def back(stack: Stack, g: Tensor, stats: Tensor, record: list[Tensor]) -> list[Tensor]:
    """Return gradients of x, of the weights and of the biases, in the order of `Stack`."""
    layers, batch, inputs, hidden = len(stack.weights) // 2, stack.known is None, record[::2], record[1::2]
    scaled, count, dtype = stats[0] * stack.scale, g.shape[0] * g.shape[2] * g.shape[3], g.dtype
    turned = _packed(stack)
    scales = torch.cat([one.expand(layers, -1, -1) for one in (scaled, stats[0])])
    _fold(stack, turned, scales, slice(2 * layers), turn=True)
    made: list[Any] = [None] * (2 * layers)
    g, sums = _enter(stack, g, inputs[layers])
    side = host.SideStream(g.device)
    for layer in reversed(range(layers)):
        x, y, first = inputs[layer], inputs[layer + 1], layers + layer
        s = _unnormalise(stack, g, y, stats[layer + 1], sums if batch else None, count)
        a, _ = _convolve(stack, GATE, s, turned[layer], hidden[layer])
        made[layer] = side.run(functools.partial(_weights, stack, scaled), hidden[layer], s)
        made[first] = side.run(functools.partial(_weights, stack, stats[layer] if layer else None), x, a)
        g, sums = _convolve(stack, ADD, a, turned[first], s, before=x if batch and layer else None)
    side.join()
    return [_leave(stack, g, None, dtype), *(dw for dw, _ in made), *(db for _, db in made)]


# The rest launches one kernel each. Where an argument is None, Triton compiles a version without it.


def _device() -> Any:
    """Return the device code, imported when it is first needed: it imports Triton."""
    from banach.kernels import stack_kernel

    return stack_kernel


def _enter(stack: Stack, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return images (N, C, H, W) as pixels with ones or, of a gradient, without ones, with its sums with y."""
    N, _, H, W = x.shape
    pixels, of = N * H * W, stack.layout.tiled("enter")
    if pixels * of.pitch >= 2**31:
        raise ValueError(f"a batch of {N} images of {H}x{W} is too large for one launch; use a smaller one")
    out, programs = torch.empty((N, H, W, of.pitch), dtype=STORED, device=x.device), of.programs(pixels, x.device)
    sums = None if y is None else torch.empty((programs, 2, of.columns), device=x.device)
    _device().enter[(programs,)](host.pixel_rows(x), out, y, sums, pixels, K=host.constants(of))
    return out, sums


def _leave(stack: Stack, x: Tensor, stats: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return pixels as images, normalised if there are statistics."""
    N, H, W, _ = x.shape
    out = torch.empty((N, H, W, stack.layout.channels), dtype=dtype, device=x.device)
    grid = (host.ceil_div(N * H * W, POINTWISE),)
    _device().leave[grid](x, out, stats, N * H * W, K=host.constants(stack.layout))
    return out.permute(0, 3, 1, 2)


def _packed(stack: Stack) -> Tensor:
    shape = len(stack.weights), 3, stack.layout.depth, stack.layout.columns
    return torch.zeros(shape, dtype=STORED, device=stack.weights.device)


def _fold(
    stack: Stack, out: Tensor, stats: Tensor, which: slice, sums: Any = None, count: int = 1, *, turn: bool = False
) -> None:
    """Compute `stats` from sums of y and y^2 over pixels, if given; pack some weights; `turn`: for gradients."""
    w, b = stack.weights[which], stack.biases[which]
    _device().fold[(9 * len(w) or 1,)](
        w, b, stats, sums, out, 0 if sums is None else len(sums), 1.0 / count, stack.eps, PACK=len(w) > 0,
        TURN=turn, K=host.constants(stack.layout), **SUM,
    )  # fmt: skip


def _unnormalise(stack: Stack, g: Tensor, y: Tensor, stats: Tensor, sums: Tensor | None, count: int) -> Tensor:
    """Go from the gradient of normalised y to that of the sum inside the block; no sums: known statistics."""
    of, out = stack.layout, torch.empty_like(g)
    K, pixels = host.constants(of), g.shape[:3].numel()
    means = torch.empty((2, of.columns), device=g.device)
    if sums is None:
        means.zero_()
    else:
        grid = (of.columns // COLUMNS,)
        _device().average[grid](sums, stats, means, len(sums), 1.0 / count, COLUMNS=COLUMNS, K=K, **SUM)
    _device().unnormalise[(host.ceil_div(pixels, POINTWISE),)](g, y, out, stats, means, pixels, SLOPE, K=K)
    return out


def _convolve(
    stack: Stack, what: int, x: Tensor, w: Tensor, beside: Tensor | None, *, stats: Any = None, before: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Convolve with packed weights, apply the epilogue `what`, and return the result with its sums, if wanted."""
    N, H, W, _ = x.shape
    of, out = stack.layout.tiled("images", H, W), torch.empty_like(x)
    programs = of.programs(N * W, x.device, H)
    wanted = before is not None or (what == JOIN and stack.known is None)
    sums = torch.empty((programs, 2, of.columns), device=x.device) if wanted else None
    _device().convolve[(programs,)](
        x, w, out, beside, before, stats, sums, N, SLOPE, WHAT=what, DROP=stack.drops and what in (HIDDEN, GATE),
        K=host.constants(of), num_stages=of.stages, num_warps=of.warps,
    )  # fmt: skip
    return out, sums


def _weights(stack: Stack, stats: Tensor | None, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of a layer's weight and bias, from its input, not normalised, and its output's gradient."""
    N, H, W, _ = x.shape
    of = stack.layout.tiled("weights", H, W)
    programs = of.programs(N * H * W, x.device)
    parts = torch.empty((programs, 3, of.depth, of.columns), device=x.device)
    _device().correlate[(programs,)](
        x, g, parts, N, K=host.constants(of), num_stages=of.stages, num_warps=of.warps
    )
    memory_format = torch.channels_last if stack.channels_last else torch.contiguous_format
    dw = torch.empty((of.channels, of.channels, 3, 3), device=x.device, memory_format=memory_format)
    db = torch.empty(of.channels, device=x.device)
    _device().unfold[(9, host.ceil_div(of.channels, REDUCE["ROWS"]))](
        parts, stats, dw, db, programs, LAST=stack.channels_last, K=host.constants(stack.layout), **REDUCE
    )
    return dw, db
